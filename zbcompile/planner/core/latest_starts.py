"""Latest starts of an order: every rank ends as early as it can, and all else runs as late as that allows."""

from __future__ import annotations

from zbcompile.planner.core.instance import BW, B, Codes, F, Instance, Op, W, numbered

__all__ = ["latest_row_starts", "latest_starts"]


def latest_starts(instance: Instance, codes: Codes) -> dict[Op, int]:
    """Return the start in ns of every action of a legal order.

    Returns
    -------
    dict
        Starts by (kind, stage, microbatch), such that every rank ends as early as possible, with its
        reductions, and every start is as late as these ends allow.
    """
    rows = zip(numbered(codes), latest_row_starts(instance, codes), strict=True)
    return {op: start for ops, starts in rows for op, start in zip(ops, starts, strict=True)}


def latest_row_starts(instance: Instance, codes: Codes) -> list[list[int]]:
    """Return the same starts action by action, rank by rank."""
    times = (instance.forward, instance.backward, instance.weight, instance.fused)
    order = numbered(codes)
    early: dict[Op, int] = {}
    steps = instance.steps
    gathers = [0] * len(order)
    channel = [sum(steps.gather[s] for s in stages) for stages in instance.stages_of]
    weights_left = [instance.num_microbatches] * instance.num_stages
    trail: list[tuple[int, int]] = []
    position, clock = [0] * len(order), [0] * len(order)
    moved = True
    while moved:
        moved = False
        for rank, ops in enumerate(order):
            while position[rank] < len(ops):
                kind, s, _ = op = ops[position[rank]]
                waits = _waits(instance, op)
                if any(other not in early for other, _ in waits):
                    break
                begin = max([clock[rank], *(early[other] + lag for other, lag in waits)])
                if op == (F, s, 0) and steps.gather[s]:
                    gathers[rank] += steps.gather[s]
                    begin = max(begin, gathers[rank])
                clock[rank] = early[_known_as(op)] = begin + times[kind][s]
                if kind in (W, BW):
                    weights_left[s] -= 1
                    if not weights_left[s] and steps.reduce[s]:
                        channel[rank] = max(channel[rank], clock[rank]) + steps.reduce[s]
                trail.append((rank, position[rank]))
                position[rank] += 1
                moved = True
    late = list(map(max, clock, channel))
    channel = list(late)
    starts = [[0] * len(ops) for ops in order]
    limit: dict[Op, int] = {}
    for rank, k in reversed(trail):
        kind, s, _ = op = order[rank][k]
        if kind in (W, BW):
            weights_left[s] += 1
            if weights_left[s] == 1 and steps.reduce[s]:
                channel[rank] -= steps.reduce[s]
                late[rank] = min(late[rank], channel[rank])
        start = min(late[rank], limit.get(_known_as(op), late[rank])) - times[kind][s]
        late[rank] = starts[rank][k] = start
        for other, lag in _waits(instance, op):
            limit[other] = min(limit.get(other, start - lag), start - lag)
    return starts


def _known_as(op: Op) -> Op:
    """Return the action that others wait for: what waits for a B may as well get a BW."""
    kind, s, i = op
    return (B if kind == BW else kind, s, i)


def _waits(instance: Instance, op: Op) -> list[tuple[Op, int]]:
    """Return the ends that an action waits for, with the travel times: (action, lag in ns)."""
    kind, s, i = _known_as(op)
    return [((before, other, i), lag) for before, other, lag in instance.rules.waits[kind][s]]
