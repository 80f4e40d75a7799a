"""Times and memory of an order in plain Python: the oracle of the compiled scorer.

Equal to `zbcompile.schedule.simulate` by test, for sends that never hold up their rank.
"""

from __future__ import annotations

from collections import deque

from zbcompile.planner.core.instance import BW, B, Codes, F, Instance, Op, W, numbered

__all__ = ["evaluate", "fits", "latest_row_starts", "latest_starts", "value_of"]


def fits(instance: Instance, codes: Codes) -> bool:
    """Return whether every rank stays within its headroom."""
    change, peak = instance.memory.change, instance.memory.peak
    counts_sets = any(instance.memory.set_bytes)
    for rank, row in enumerate(codes):
        held, headroom = 0, instance.headroom[rank]
        if counts_sets and any(kind == BW for kind, _ in row):
            if not _fits_with_sets(instance, row, headroom):
                return False
            continue
        for kind, s in row:
            if held + peak[kind][s] > headroom:
                return False
            held += change[kind][s]
    return True


def _fits_with_sets(instance: Instance, row: list[tuple[int, int]], headroom: int) -> bool:
    """Return whether a row stays within its headroom, gradients that wait for an earlier W included."""
    memory, held = instance.memory, 0
    fused = [0] * instance.num_stages
    sets = [0] * instance.num_stages
    open_splits: list[deque[int]] = [deque() for _ in fused]
    begun = [False] * instance.num_stages
    for kind, s in row:
        change = memory.change[kind][s]
        if kind == B:
            open_splits[s].append(fused[s])
        elif kind != F:
            if kind == BW:
                fused[s] += 1
            elif not open_splits[s]:
                return False
            else:
                open_splits[s].popleft()
                begun[s] = True
            begun[s] |= not open_splits[s] or open_splits[s][0] > 0
            waiting = fused[s] - open_splits[s][0] if open_splits[s] else 0
            waiting -= waiting > 0 and not begun[s]
            change += (waiting - sets[s]) * memory.set_bytes[s]
            sets[s] = waiting
        if held + max(memory.peak[kind][s], change) > headroom:
            return False
        held += change
    return True


def evaluate(instance: Instance, codes: Codes) -> tuple[int, int] | None:
    """Return (span, makespan) in ns under asynchronous sends, or ``None`` if the ranks deadlock."""
    timed = _timed(instance, codes)
    if timed is None:
        return None
    _, firsts, ends = timed
    return max(end - first for end, first in zip(ends, firsts, strict=True)), max(ends)


def latest_row_starts(instance: Instance, codes: Codes) -> list[list[int]]:
    """Return the start in ns of every action of an order without deadlock, rank by rank.

    Every rank ends as early as possible, with its reductions, and every start is as late as these ends allow.
    """
    timed = _timed(instance, codes)
    if timed is None:
        raise ArithmeticError("a deadlocked order has no starts")
    return timed[0]


def latest_starts(instance: Instance, codes: Codes) -> dict[Op, int]:
    """Return the same starts by (kind, stage, microbatch)."""
    rows = zip(numbered(codes), latest_row_starts(instance, codes), strict=True)
    return {op: start for ops, starts in rows for op, start in zip(ops, starts, strict=True)}


def _timed(instance: Instance, codes: Codes) -> tuple[list[list[int]], list[int], list[int]] | None:
    """Return latest starts of all actions, and begin and end of every rank; ``None`` on deadlock.

    All ranks run forward as far as their messages are there, until none gets further. Then the trail is
    walked backwards, which starts all as late as the ends allow. What stages cost once a step is counted as
    `zbcompile.planner.core.step_costs` says.
    """
    steps = instance.steps
    gathers = [0] * instance.num_ranks
    channel = [sum(steps.gather[s] for s in stages) for stages in instance.stages_of]
    weights_left = [instance.num_microbatches] * instance.num_stages
    times = (instance.forward, instance.backward, instance.weight, instance.fused)
    m, p, waits = instance.num_microbatches, instance.num_ranks, instance.rules.waits
    ends = [[[-1] * m for _ in range(instance.num_stages)] for _ in (F, B)]
    counts = [[0] * instance.num_stages for _ in (F, B)]
    position, clock = [0] * p, [0] * p
    trail: list[tuple[int, int, int, int]] = []
    moved, ranks = True, list(range(p))
    while moved:
        moved = False
        ranks.reverse()
        for rank in ranks:
            row = codes[rank]
            k, now = position[rank], clock[rank]
            while k < len(row):
                kind, s = row[k]
                i = 0
                if kind != W:
                    side = F if kind == F else B
                    i = counts[side][s]
                    start = now
                    blocked = False
                    for before, other, lag in waits[side][s]:
                        end = ends[before][other][i]
                        if end < 0:
                            blocked = True
                            break
                        start = max(start, end + lag)
                    if blocked:
                        break
                    if kind == F and i == 0 and steps.gather[s]:
                        gathers[rank] += steps.gather[s]
                        start = max(start, gathers[rank])
                    now = start + times[kind][s]
                    ends[side][s][i] = now
                    counts[side][s] = i + 1
                else:
                    now += times[W][s]
                if kind in (W, BW):
                    weights_left[s] -= 1
                    if weights_left[s] == 0 and steps.reduce[s]:
                        channel[rank] = max(channel[rank], now) + steps.reduce[s]
                trail.append((rank, kind, s, i))
                k += 1
                moved = True
            position[rank], clock[rank] = k, now
    if len(trail) != sum(map(len, codes)):
        return None
    ends_of_work = list(map(max, clock, channel))
    late, channel = list(ends_of_work), list(ends_of_work)
    gathers = [
        end - sum(steps.reduce[s] for s in stages)
        for end, stages in zip(ends_of_work, instance.stages_of, strict=True)
    ]
    limit: list[dict[tuple[int, int], int]] = [{}, {}]
    starts: list[list[int]] = [[] for _ in codes]
    for rank, kind, s, i in reversed(trail):
        if kind in (W, BW):
            weights_left[s] += 1
            if weights_left[s] == 1 and steps.reduce[s]:
                channel[rank] -= steps.reduce[s]
                late[rank] = min(late[rank], channel[rank])
        if kind == W:
            late[rank] -= times[W][s]
            starts[rank].append(late[rank])
            continue
        side = F if kind == F else B
        start = min(late[rank], limit[side].get((s, i), late[rank])) - times[kind][s]
        late[rank] = start
        starts[rank].append(start)
        if kind == F and i == 0 and steps.gather[s]:
            gathers[rank] = min(gathers[rank], start) - steps.gather[s]
        for before, other, lag in waits[side][s]:
            key = (other, i)
            limit[before][key] = min(limit[before].get(key, start - lag), start - lag)
    rank_ends = [end + update for end, update in zip(ends_of_work, steps.update, strict=True)]
    return [row[::-1] for row in starts], list(map(min, late, gathers)), rank_ends


def value_of(instance: Instance, codes: Codes) -> int | None:
    """Return the objective's value of an order in ns, or ``None`` if the ranks deadlock."""
    pair = evaluate(instance, codes)
    return None if pair is None else pair[0 if instance.objective == "span" else 1]
