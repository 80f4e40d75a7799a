"""Orders whose gradients of weights never wait: every W before the BW's of later microbatches.

    0B0 0BW1 0W0   -->   0B0 0W0 0BW1

A W that runs earlier gives back its bytes earlier, so the order fits wherever the one given would fit with no
gradient counted. Where nothing waits on the BW, it takes no longer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from zbcompile.planner.core.instance import BW, B, Codes, Instance, W
from zbcompile.planner.core.score import fits

__all__ = ["fitted", "in_sum_order", "with_fewest_waits"]

_MOST_ACTIONS = 400_000
"""Actions timed in all when stages are tried one by one: about a second."""


def in_sum_order(instance: Instance, codes: Codes, stages: Collection[int] | None = None) -> Codes:
    """Return the order with every pending W of some stages before the next BW of its stage.

    Parameters
    ----------
    stages
        The stages; all whose gradients are counted if left out.
    """
    counted = {s for s, size in enumerate(instance.memory.set_bytes) if size}
    chosen = counted if stages is None else counted & set(stages)
    return [_row_in_sum_order(row, chosen) for row in codes] if chosen else codes


def _row_in_sum_order(row: list[tuple[int, int]], stages: Collection[int]) -> list[tuple[int, int]]:
    pending, early = dict.fromkeys(stages, 0), dict.fromkeys(stages, 0)
    result: list[tuple[int, int]] = []
    for kind, s in row:
        if s in pending:
            if kind == W and early[s]:
                early[s] -= 1
                continue
            if kind == BW:
                result += [(W, s)] * pending[s]
                early[s] += pending[s]
                pending[s] = 0
            pending[s] += (kind == B) - (kind == W)
        result.append((kind, s))
    return result


def fitted(instance: Instance, codes: Codes) -> Codes | None:
    """Return the order if it fits, else the same in the order of the sum if that fits, else ``None``."""
    if fits(instance, codes):
        return codes
    if not any(instance.memory.set_bytes):
        return None
    other = in_sum_order(instance, codes)
    return other if other != codes and fits(instance, other) else None


def with_fewest_waits(instance: Instance, codes: Codes, measure: Callable[[Codes], int | None]) -> Codes:
    """Return an order that is no longer and in which gradients wait on fewer stages, where that is free.

    Parameters
    ----------
    measure
        Returns the value of an order in ns, or ``None`` on deadlock.
    """
    other = in_sum_order(instance, codes)
    if other == codes:
        return codes
    value = measure(codes)
    best, tries = codes, _MOST_ACTIONS // max(1, sum(map(len, codes)))
    mixed = [
        s for s, r in enumerate(instance.rank_of) if in_sum_order(instance, [codes[r]], (s,)) != [codes[r]]
    ]
    for stages in (mixed, *((s,) for s in mixed[:tries])):
        other = in_sum_order(instance, best, stages)
        found = measure(other)
        if value is not None and found is not None and found <= value:
            best, value = other, found
        if stages == mixed and best == other:
            return best
    return best
