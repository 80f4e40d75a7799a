"""Inner loops that score an order and judge one row of it.

Plain loops over flat arrays that numba compiles where it is installed (`zbcompile.planner.core.tables`).
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from zbcompile.planner.core.compiled import Vector, jit
from zbcompile.planner.core.tables import Tables

__all__ = ["begin_steps", "end_steps", "first_gather", "gathered", "reduced", "reduced_by"]
__all__ += ["evaluate_line", "evaluate_unequal", "gaps_at", "next_weight", "note_split", "stays_legal"]

_FAR = 1 << 60


def gaps_at(t: Tables, num_actions: int) -> int:
    """Return the place in the scratch where `evaluate_line` puts its gaps."""
    return 4 * t.num_ranks + 2 * t.num_stages + num_actions


@jit
def begin_steps(t: Tables, scratch: Vector, at: int) -> None:
    """Begin to count what stages cost once a step (`zbcompile.planner.core.step_costs`).

    From ``at`` on the scratch has per rank when its last gather so far ends, per rank when its channel is
    free for reductions, and per stage how many W's and BW's have run.
    """
    for k in range(2 * t.num_ranks + t.num_stages):
        scratch[at + k] = 0
    for s in range(t.num_stages):
        scratch[at + t.num_ranks + t.rank_of[s]] += t.gather[s]


@jit
def gathered(t: Tables, scratch: Vector, at: int, s: int) -> int:
    """Return when the parameters of stage s are there, whose first F is the next of its rank to run."""
    ready: int = scratch[at + t.rank_of[s]]
    return ready + t.gather[s]  # type: ignore[no-any-return]


@jit
def reduced(t: Tables, scratch: Vector, at: int, s: int, now: int) -> None:
    """Note that a W or BW of stage s ends; the last one begins the stage's reduction."""
    done = at + 2 * t.num_ranks + s
    scratch[done] += 1
    if scratch[done] == t.num_microbatches and t.reduce[s] > 0:
        channel = at + t.num_ranks + t.rank_of[s]
        scratch[channel] = max(scratch[channel], now) + t.reduce[s]


@jit
def end_steps(t: Tables, scratch: Vector, at: int, clock: int, late: int) -> None:
    """Let every rank end with its update, and begin the way back.

    Afterwards the scratch has from ``clock`` on the ranks' ends, from ``late`` on the latest ends of their
    last actions, and from ``at`` on the latest ends of their last gathers and of their last reductions.
    """
    for r in range(t.num_ranks):
        end = max(scratch[clock + r], scratch[at + t.num_ranks + r])
        scratch[clock + r] = end + t.update[r]
        scratch[late + r] = end
        scratch[at + r] = end
        scratch[at + t.num_ranks + r] = end
    for s in range(t.num_stages):
        scratch[at + t.rank_of[s]] -= t.reduce[s]


@jit
def reduced_by(t: Tables, scratch: Vector, at: int, s: int, late: int) -> int:
    """Return by when a W or BW of stage s must end, on the way back; its rank allows ``late``."""
    done = at + 2 * t.num_ranks + s
    scratch[done] -= 1
    if scratch[done] == t.num_microbatches - 1 and t.reduce[s] > 0:
        channel = at + t.num_ranks + t.rank_of[s]
        scratch[channel] -= t.reduce[s]
        late = min(late, scratch[channel])
    return late


@jit
def first_gather(t: Tables, scratch: Vector, at: int, s: int, start: int) -> None:
    """Note by when the gather of stage s must end, on the way back: its first F starts at ``start``."""
    scratch[at + t.rank_of[s]] = min(scratch[at + t.rank_of[s]], start) - t.gather[s]


UNEQUAL = False
"""Whether microbatches differ in cost: true in a copy of `evaluate_line`, which is `evaluate_unequal`.

Compiling drops the branches that a constant rules out, so microbatches that are alike cost no time for it.
"""


@jit
def note_split(split: Vector, S: int, m: int, s: int, place: int) -> None:
    """Note the place of a split backward of stage s."""
    split[s * m + split[S * m + s]] = place
    split[S * m + s] += 1


@jit
def next_weight(split: Vector, S: int, m: int, s: int) -> int:
    """Return the place of the next W of stage s: that of its earliest split backward without one."""
    at = S * m + S + s
    split[at] += 1
    place: int = split[s * m + split[at] - 1]
    return place


@jit
def _last_weight(split: Vector, S: int, m: int, s: int) -> int:
    """Return the place of the W of stage s that was next before; it is next again."""
    at = S * m + S + s
    split[at] -= 1
    place: int = split[s * m + split[at]]
    return place


def _evaluate_line(t: Any, offsets: Vector, line: Vector) -> int:
    """Return 100 p times the objective plus the sum over the ranks, or -1 on deadlock.

    Element 3 p of the scratch gets the objective itself. The part from `gaps_at` on gets how long each
    action's rank waited before it for a message, in ns.

    Parameters
    ----------
    t
        The problem: `Tables`, or `zbcompile.planner.core.unequal.UnequalTables`.
    offsets
        Where each rank's row begins in ``line``, and the number of actions.
    line
        All codes in a row.
    """
    S, p, m = t.num_stages, t.num_ranks, t.num_microbatches
    scratch, ends, limits = t.scratch, t.ends, t.limits
    total = offsets[p]
    late, clock, place, counts, trail = 0, p, 2 * p, 4 * p, 4 * p + 2 * S
    gaps = trail + total
    steps = gaps + total
    for k in range(2 * S * m):
        ends[k] = -1
        limits[k] = _FAR
    for k in range(4 * p + 2 * S):
        scratch[k] = 0
    if t.has_steps:
        begin_steps(t, scratch, steps)
    if UNEQUAL:
        for k in range(S * m, S * m + 2 * S):
            t.split[k] = 0
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
                before = now
                if kind != 2:
                    side = 0 if kind == 0 else 1
                    i = scratch[counts + side * S + s]
                    slot = (side * S + s) * m + i
                    blocked = False
                    if side == 0:
                        for e in range(t.forward_at[s], t.forward_at[s + 1]):
                            end = ends[t.forward_from[e] * m + i]
                            if end < 0:
                                blocked = True
                                break
                            end += t.forward_lags[e * m + t.order[i]] if UNEQUAL else t.forward_lag[e]
                            if end > now:
                                now = end
                    else:
                        if ends[s * m + i] < 0:
                            blocked = True
                        else:
                            for e in range(t.backward_at[s], t.backward_at[s + 1]):
                                end = ends[(S + t.backward_from[e]) * m + i]
                                if end < 0:
                                    blocked = True
                                    break
                                end += t.backward_lags[e * m + t.order[i]] if UNEQUAL else t.backward_lag[e]
                                if end > now:
                                    now = end
                    if blocked:
                        now = scratch[clock + r]
                        break
                    if t.has_steps and kind == 0 and i == 0 and t.gather[s] > 0:
                        now = max(now, gathered(t, scratch, steps, s))
                        scratch[steps + r] += t.gather[s]
                    if UNEQUAL and kind == 1:
                        note_split(t.split, S, m, s, i)
                    scratch[gaps + offsets[r] + k] = now - before
                    now += t.lengths[code * m + t.order[i]] if UNEQUAL else t.length[code]
                    ends[slot] = now
                    scratch[counts + side * S + s] = i + 1
                else:
                    scratch[gaps + offsets[r] + k] = 0
                    if UNEQUAL:
                        now += t.lengths[code * m + t.order[next_weight(t.split, S, m, s)]]
                    else:
                        now += t.length[code]
                if t.has_steps and kind >= 2:
                    reduced(t, scratch, steps, s, now)
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
    for r in range(p):
        scratch[late + r] = scratch[clock + r]
    if t.has_steps:
        end_steps(t, scratch, steps, clock, late)
    if t.is_span == 0:
        for r in range(p):
            summed += scratch[clock + r]
            if scratch[clock + r] > worst:
                worst = scratch[clock + r]
        scratch[3 * p] = worst
        return int(100 * p * worst + summed)
    while done > 0:
        done -= 1
        at = scratch[trail + done]
        r = at % p
        code = line[at // p]
        kind = code // S
        s = code - kind * S
        if t.has_steps and kind >= 2:
            scratch[late + r] = reduced_by(t, scratch, steps, s, scratch[late + r])
        if kind == 2:
            if UNEQUAL:
                scratch[late + r] -= t.lengths[code * m + t.order[_last_weight(t.split, S, m, s)]]
            else:
                scratch[late + r] -= t.length[code]
            continue
        side = 0 if kind == 0 else 1
        scratch[counts + side * S + s] -= 1
        i = scratch[counts + side * S + s]
        start = scratch[late + r]
        if limits[(side * S + s) * m + i] < start:
            start = limits[(side * S + s) * m + i]
        start -= t.lengths[code * m + t.order[i]] if UNEQUAL else t.length[code]
        scratch[late + r] = start
        if t.has_steps and kind == 0 and i == 0 and t.gather[s] > 0:
            first_gather(t, scratch, steps, s, start)
        if side == 0:
            for e in range(t.forward_at[s], t.forward_at[s + 1]):
                slot = t.forward_from[e] * m + i
                by = start - (t.forward_lags[e * m + t.order[i]] if UNEQUAL else t.forward_lag[e])
                if by < limits[slot]:
                    limits[slot] = by
        else:
            for e in range(t.backward_at[s], t.backward_at[s + 1]):
                slot = (S + t.backward_from[e]) * m + i
                by = start - (t.backward_lags[e * m + t.order[i]] if UNEQUAL else t.backward_lag[e])
                if by < limits[slot]:
                    limits[slot] = by
    for r in range(p):
        first = scratch[late + r]
        if t.has_steps:
            first = min(first, scratch[steps + r])
        span = scratch[clock + r] - first
        summed += span
        if span > worst:
            worst = span
    scratch[3 * p] = worst
    return int(100 * p * worst + summed)


def _for_unequal(function: Callable[..., int]) -> Callable[..., int]:
    """Return a copy of a function for microbatches that differ in cost."""
    assert isinstance(function, types.FunctionType)
    copy = types.FunctionType(function.__code__, {**globals(), "UNEQUAL": True}, "evaluate_unequal")
    copy.__module__, copy.__qualname__, copy.__doc__ = __name__, "evaluate_unequal", function.__doc__
    return copy


evaluate_line = jit(_evaluate_line)
evaluate_unequal = jit(_for_unequal(_evaluate_line))


@jit
def stays_legal(t: Tables, offsets: Vector, line: Vector, rank: int) -> bool:
    """Return whether a rank's row keeps F before B before W for each stage, and its headroom."""
    S, counts = t.num_stages, t.counts
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
                return bool(_sets_fit(t, offsets, line, rank))
    return True


@jit
def _sets_fit(t: Tables, offsets: Vector, line: Vector, rank: int) -> bool:
    """Return what `stays_legal` does, for a row in which gradients wait: a BW stands before an earlier W.

    W's of a stage come in microbatch order. So those that wait are the BW's behind the B whose W is next:
    the marks keep how many BW's stand before each B.
    """
    S, m, counts = t.num_stages, t.num_microbatches, t.counts
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
