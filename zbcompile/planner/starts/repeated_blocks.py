"""Orders that repeat one block, decoded from `OffsetKeys`.

After arXiv 2405.15362, section 3: the actions of one microbatch are placed by their offsets and repeated
every T = 3 v slots (v stages on a rank); each W takes the first slot that is free after its B. Times are
forgotten: what counts is the order.
"""

from __future__ import annotations

from zbcompile.planner.core.instance import B, Codes, F, Instance, W
from zbcompile.planner.starts.offset_keys import OffsetKeys, waves_of

__all__ = ["block_order"]


def block_order(instance: Instance, offset_keys: OffsetKeys) -> Codes:
    """Return the order of the keys on every rank. The caller checks memory."""
    forward, backward = offset_keys.offsets(waves_of(instance))
    rows = []
    for stages in instance.stages_of:
        period = 3 * len(stages)
        slots: dict[int, list[tuple[int, int, int]]] = {}
        for s in stages:
            for i in range(instance.num_microbatches):
                slots.setdefault(forward[s] + period * i, []).append((F, s, i))
                slots.setdefault(backward[s] + period * i, []).append((B, s, i))
        timed = [(at, n, kind, s) for at, ops in slots.items() for n, (kind, s, _) in enumerate(ops)]
        timed.extend(_weights(slots, offset_keys.weight))
        timed.sort()
        rows.append([(kind, s) for _, _, kind, s in timed])
    return rows


def _weights(slots: dict[int, list[tuple[int, int, int]]], delay: int) -> list[tuple[int, int, int, int]]:
    """Return W's in the first free slots, ``delay`` or more after their B's, in the order of the B's."""
    taken, result, at = set(slots), [], -1
    backwards = sorted((t, n, op[1]) for t, ops in slots.items() for n, op in enumerate(ops) if op[0] == B)
    for begin, n, s in backwards:
        at = max(at, begin + delay)
        while at in taken:
            at += 1
        taken.add(at)
        result.append((at, n, W, s))
    return result
