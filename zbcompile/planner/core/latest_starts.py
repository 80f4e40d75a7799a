"""Latest starts of an order: every rank ends as early as it can, and all else runs as late as that allows."""

from __future__ import annotations

from zbcompile.planner.core.instance import Codes, Instance, Op

__all__ = ["latest_starts"]


def latest_starts(instance: Instance, codes: Codes) -> dict[Op, int]:
    """Return the start in ns of every action.

    Parameters
    ----------
    instance
        The problem.
    codes
        A legal order without BW.

    Returns
    -------
    dict
        Starts by (kind, stage, microbatch), such that the end of every rank's row is as early as possible and
        every start as late as these ends allow.
    """
    times = (instance.forward, instance.backward, instance.weight)
    order = []
    seen: dict[tuple[int, int], int] = {}
    for row in codes:
        ops = []
        for kind, s in row:
            i = seen.get((kind, s), 0)
            seen[kind, s] = i + 1
            ops.append((kind, s, i))
        order.append(ops)
    early: dict[Op, int] = {}
    trail: list[tuple[int, Op]] = []
    position, clock = [0] * len(order), [0] * len(order)
    moved = True
    while moved:
        moved = False
        for rank, ops in enumerate(order):
            while position[rank] < len(ops):
                op = ops[position[rank]]
                waits = _waits(instance, op)
                if any(other not in early for other, _ in waits):
                    break
                begin = max([clock[rank], *(early[o] + times[o[0]][o[1]] + lag for o, lag in waits)])
                early[op], clock[rank] = begin, begin + times[op[0]][op[1]]
                trail.append((rank, op))
                position[rank] += 1
                moved = True
    late = list(clock)
    starts: dict[Op, int] = {}
    limit: dict[Op, int] = {}
    for rank, op in reversed(trail):
        late[rank] = min(late[rank], limit.get(op, late[rank])) - times[op[0]][op[1]]
        starts[op] = late[rank]
        for other, lag in _waits(instance, op):
            limit[other] = min(limit.get(other, starts[op] - lag), starts[op] - lag)
    return starts


def _waits(instance: Instance, op: Op) -> list[tuple[Op, int]]:
    """Return what an action waits for, with the travel times: (action, lag in ns)."""
    kind, s, i = op
    return [((before, other, i), lag) for before, other, lag in instance.rules.waits[kind][s]]
