"""Inner loops that score an order and judge one row of it.

Plain loops over flat arrays that numba compiles where it is installed (`zbcompile.planner.core.tables`).
"""

from __future__ import annotations

from zbcompile.planner.core.compiled import Vector, jit
from zbcompile.planner.core.tables import Tables

__all__ = ["counts_size", "evaluate_line", "gaps_at", "scratch_size", "stays_legal"]

_FAR = 1 << 60


def gaps_at(t: Tables, num_actions: int) -> int:
    """Return the place in the scratch where `evaluate_line` puts its gaps."""
    return 4 * t.num_ranks + 2 * t.num_stages + num_actions


def scratch_size(t: Tables, num_actions: int) -> int:
    """Return the number of elements of scratch that `evaluate_line` needs."""
    return gaps_at(t, num_actions) + num_actions


def counts_size(t: Tables) -> int:
    """Return the number of elements of counts that `stays_legal` needs."""
    marks = t.num_stages * t.num_microbatches if any(t.set_bytes) else 0
    return 5 * t.num_stages + marks


@jit
def evaluate_line(
    t: Tables, offsets: Vector, line: Vector, scratch: Vector, ends: Vector, limits: Vector
) -> int:
    """Return 100 p times the objective plus the sum over the ranks, or -1 on deadlock.

    Parameters
    ----------
    t
        The problem.
    offsets
        Where each rank's row begins in ``line``, and the number of actions.
    line
        All codes in a row.
    scratch
        `scratch_size` elements. Element 3 p gets the objective itself. The part from `gaps_at` on gets how
        long each action's rank waited before it for a message, in ns.
    ends, limits
        2 S m elements each: ends of F's and B's, and the latest starts that those who wait for them allow.
    """
    S, p, m = t.num_stages, t.num_ranks, t.num_microbatches
    total = offsets[p]
    late, clock, place, counts, trail = 0, p, 2 * p, 4 * p, 4 * p + 2 * S
    gaps = trail + total
    for k in range(2 * S * m):
        ends[k] = -1
        limits[k] = _FAR
    for k in range(4 * p + 2 * S):
        scratch[k] = 0
    done = 0
    moved, upward = True, False
    while moved:
        moved = False
        upward = not upward
        for q in range(p):
            r = p - 1 - q if upward else q
            k = scratch[place + r]
            now = scratch[clock + r]
            size = offsets[r + 1] - offsets[r]
            while k < size:
                code = line[offsets[r] + k]
                kind = code // S
                s = code - kind * S
                slot = -1
                before = now
                if kind != 2:
                    side = 0 if kind == 0 else 1
                    slot = (side * S + s) * m + scratch[counts + side * S + s]
                    i = scratch[counts + side * S + s]
                    blocked = False
                    if side == 0:
                        for e in range(t.forward_at[s], t.forward_at[s + 1]):
                            end = ends[t.forward_from[e] * m + i]
                            if end < 0:
                                blocked = True
                                break
                            if end + t.forward_lag[e] > now:
                                now = end + t.forward_lag[e]
                    else:
                        if ends[s * m + i] < 0:
                            blocked = True
                        else:
                            for e in range(t.backward_at[s], t.backward_at[s + 1]):
                                end = ends[(S + t.backward_from[e]) * m + i]
                                if end < 0:
                                    blocked = True
                                    break
                                if end + t.backward_lag[e] > now:
                                    now = end + t.backward_lag[e]
                    if blocked:
                        now = scratch[clock + r]
                        break
                    scratch[gaps + offsets[r] + k] = now - before
                    now += t.length[code]
                    ends[slot] = now
                    scratch[counts + side * S + s] = i + 1
                else:
                    scratch[gaps + offsets[r] + k] = 0
                    now += t.length[code]
                scratch[trail + done] = (offsets[r] + k) * p + r
                done += 1
                k += 1
                scratch[clock + r] = now
                moved = True
            scratch[place + r] = k
    if done < total:
        return -1
    worst = 0
    summed = 0
    if t.is_span == 0:
        for r in range(p):
            summed += scratch[clock + r]
            if scratch[clock + r] > worst:
                worst = scratch[clock + r]
        scratch[3 * p] = worst
        return 100 * p * worst + summed
    for r in range(p):
        scratch[late + r] = scratch[clock + r]
    while done > 0:
        done -= 1
        at = scratch[trail + done]
        r = at % p
        code = line[at // p]
        kind = code // S
        if kind == 2:
            scratch[late + r] -= t.length[code]
            continue
        s = code - kind * S
        side = 0 if kind == 0 else 1
        scratch[counts + side * S + s] -= 1
        i = scratch[counts + side * S + s]
        start = scratch[late + r]
        if limits[(side * S + s) * m + i] < start:
            start = limits[(side * S + s) * m + i]
        start -= t.length[code]
        scratch[late + r] = start
        if side == 0:
            for e in range(t.forward_at[s], t.forward_at[s + 1]):
                slot = t.forward_from[e] * m + i
                if start - t.forward_lag[e] < limits[slot]:
                    limits[slot] = start - t.forward_lag[e]
        else:
            for e in range(t.backward_at[s], t.backward_at[s + 1]):
                slot = (S + t.backward_from[e]) * m + i
                if start - t.backward_lag[e] < limits[slot]:
                    limits[slot] = start - t.backward_lag[e]
    for r in range(p):
        span = scratch[clock + r] - scratch[late + r]
        summed += span
        if span > worst:
            worst = span
    scratch[3 * p] = worst
    return 100 * p * worst + summed


@jit
def stays_legal(t: Tables, offsets: Vector, line: Vector, rank: int, counts: Vector) -> bool:
    """Return whether a rank's row keeps F before B before W for each stage, and its headroom.

    ``counts`` has `counts_size` elements.
    """
    S = t.num_stages
    for e in range(t.own_at[rank], t.own_at[rank + 1]):
        for kind in range(4):
            counts[kind * S + t.own[e]] = 0
    held = 0
    for k in range(offsets[rank], offsets[rank + 1]):
        code = line[k]
        if held + t.peak[code] > t.headroom[rank]:
            return False
        held += t.memory[code]
        counts[code] += 1
        kind = code // S
        s = code - kind * S
        if kind == 2:
            if counts[code] > counts[S + s]:
                return False
        elif kind != 0:
            if counts[S + s] + counts[3 * S + s] > counts[s]:
                return False
            if kind == 3 and t.set_bytes[s] > 0 and counts[S + s] > counts[2 * S + s]:
                return bool(_sets_fit(t, offsets, line, rank, counts))
    return True


@jit
def _sets_fit(t: Tables, offsets: Vector, line: Vector, rank: int, counts: Vector) -> bool:
    """Return what `stays_legal` does, for a row in which gradients wait: a BW stands before an earlier W.

    W's of a stage come in microbatch order. So those that wait are the BW's behind the B whose W is next:
    the marks keep how many BW's stand before each B.
    """
    S, m = t.num_stages, t.num_microbatches
    sets, marks = 4 * S, 5 * S
    for e in range(t.own_at[rank], t.own_at[rank + 1]):
        for kind in range(5):
            counts[kind * S + t.own[e]] = 0
    held = 0
    for k in range(offsets[rank], offsets[rank + 1]):
        code = line[k]
        counts[code] += 1
        kind = code // S
        s = code - kind * S
        change = t.memory[code]
        if kind % 2 == 1 and counts[S + s] + counts[3 * S + s] > counts[s]:
            return False
        if kind == 1:
            counts[marks + s * m + counts[code] - 1] = counts[3 * S + s]
        elif kind != 0:
            done = counts[2 * S + s]
            if done > counts[S + s]:
                return False
            waiting = 0
            if done < counts[S + s]:
                mark = counts[marks + s * m + done]
                waiting = counts[3 * S + s] - mark
                if waiting > 0 and done + mark == 0:
                    waiting -= 1
            change += (waiting - counts[sets + s]) * t.set_bytes[s]
            counts[sets + s] = waiting
        if held + max(t.peak[code], change) > t.headroom[rank]:
            return False
        held += change
    return True
