"""Orders in which the W's of one stage of each rank end early, so that its reduction runs behind the others'.

    0B7 1B7 0W6 1W6 0W7 1W7   -->   0B7 1B7 0W6 0W7 1W6 1W7

W's stand where W's stood, so that B's and F's keep their places; which stage's W runs at each of these places
is chosen anew. The W's of a stage keep their order, and with it the order of its sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from zbcompile.planner.core.instance import B, Codes, Instance, W
from zbcompile.planner.core.score import fits

__all__ = ["with_early_reductions"]


def with_early_reductions(
    instance: Instance, codes: Codes, value: int, measure: Callable[[Codes], int | None], goal: int | None
) -> tuple[Codes, int]:
    """Return the shortest of an order and of those in which one stage of each rank has its W's first.

    All ranks are tried at once, lowest or highest stages first. Where that beats ``goal``, the ranks are
    tried one by one.

    Parameters
    ----------
    value
        The order's value in ns.
    measure
        Returns the value of an order in ns, or ``None`` on deadlock.
    goal
        The value to beat in ns; None: any.
    """
    if not any(instance.steps.reduce) or instance.num_stages == instance.num_ranks:
        return codes, value
    first = [[_weights_first(row, stages) for row in codes] for stages in _priorities(instance)]
    best = codes
    for other in first:
        best, value = _shorter(instance, other, best, value, measure)
    if goal is not None and value >= goal:
        return best, value
    for rank in range(instance.num_ranks):
        for rows in (codes, *first):
            other = [*best[:rank], rows[rank], *best[rank + 1 :]]
            best, value = _shorter(instance, other, best, value, measure)
    return best, value


def _priorities(instance: Instance) -> tuple[Sequence[int], Sequence[int]]:
    """Return the stages in the two orders in which their W's are preferred."""
    stages = range(instance.num_stages)
    return stages, stages[::-1]


def _shorter(
    instance: Instance, other: Codes, best: Codes, value: int, measure: Callable[[Codes], int | None]
) -> tuple[Codes, int]:
    if other == best or not fits(instance, other):
        return best, value
    found = measure(other)
    return (best, value) if found is None or found >= value else (other, found)


def _weights_first(row: Sequence[tuple[int, int]], stages: Sequence[int]) -> list[tuple[int, int]]:
    """Return a rank's row with each W that of the first stage in ``stages`` that has one to run."""
    pending = dict.fromkeys(stages, 0)
    result = []
    for kind, s in row:
        if kind == B:
            pending[s] += 1
        elif kind == W:
            s = next(stage for stage in stages if pending[stage])
            pending[s] -= 1
        result.append((kind, s))
    return result
