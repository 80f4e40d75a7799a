"""Inner loops of the search: evaluate an order, keep or drop a change.

Plain loops over flat arrays that numba compiles where it is installed (`zbcompile.planner.core.tables`).
"""

from __future__ import annotations

from zbcompile.planner.core.tables import Tables, Vector, jit
from zbcompile.planner.improve.moves import move_cause, move_into_gap, move_many, move_one, random_bits

__all__ = ["anneal", "evaluate_line", "gaps_at", "scratch_size", "stays_legal"]

_FAR = 1 << 60


def gaps_at(t: Tables, num_actions: int) -> int:
    """Where `evaluate_line` puts its gaps."""
    return 4 * t.num_ranks + 2 * t.num_stages + num_actions


def scratch_size(t: Tables, num_actions: int) -> int:
    """Elements that `evaluate_line` needs."""
    return gaps_at(t, num_actions) + num_actions


@jit
def evaluate_line(
    t: Tables, offsets: Vector, line: Vector, scratch: Vector, ends: Vector, limits: Vector
) -> int:
    """Score of an order: 100 p times the objective plus the sum over ranks; -1 on deadlock.

    scratch : `scratch_size` elements; element 3 p gets the objective itself, and the part from `gaps_at`
    how long each action's rank waited before it for a message.
    ends, limits : 2 S m each.
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
    """Whether a rank's row keeps F before B before W for each stage, and its room."""
    S = t.num_stages
    for e in range(t.own_at[rank], t.own_at[rank + 1]):
        for kind in range(4):
            counts[kind * S + t.own[e]] = 0
    held = 0
    for k in range(offsets[rank], offsets[rank + 1]):
        code = line[k]
        held += t.memory[code]
        if held > t.headroom[rank]:
            return False
        counts[code] += 1
        kind = code // S
        s = code - kind * S
        if kind == 2:
            if counts[code] > counts[S + s]:
                return False
        elif kind != 0 and counts[S + s] + counts[3 * S + s] > counts[s]:
            return False
    return True


@jit
def keep_block(low: int, high: int, copies: int, current: Vector, trial: Vector) -> bool:
    """A block in ``copies`` copies, the first from ``low`` to ``high``: what changed in one changes in all.

    False if a block without a second copy changed.
    """
    size = high - low
    for copy in range(copies):
        for k in range(low + copy * size, high + copy * size):
            if trial[k] != current[k]:
                if copies == 1:
                    return False
                for other in range(copies):
                    if other != copy:
                        for i in range(size):
                            trial[low + other * size + i] = trial[low + copy * size + i]
                return True
    return True


@jit
def anneal(
    t: Tables,
    offsets: Vector,
    current: Vector,
    best: Vector,
    trial: Vector,
    scores: Vector,
    state: Vector,
    first: int,
    last: int,
    total: int,
    heat: float,
    goal: int,
    jumps: Vector,
    exponential: Vector,
    scratch: Vector,
    ends: Vector,
    limits: Vector,
    spare: Vector,
    counts: Vector,
    gaps: Vector,
    frozen_blocks: Vector,
) -> int:
    """Tries ``first`` to ``last`` of ``total``; returns the next try.

    scores : current score, best score, try of the last gain, best objective. heat : the temperature
    of the first try in units of the score; it falls as (1 - try / total) squared. state : the random
    sequence, then room for the ranks changed in a try. gaps : waits of the current order. Stops when
    the objective falls to ``goal``. fences : per rank low, high and copies of a block (`keep_block`), no
    copies for none. After a sixth of all tries without gain the search returns to the
    best.

    Four moves of five look at a rank that waits for a message: an action is moved into the gap, or what
    the message depends on is moved up. A try makes up to four moves, and only their sum has to be legal.
    """
    p, S, size = t.num_ranks, t.num_stages, offsets[t.num_ranks]
    waits = 4 * p + 2 * t.num_stages + size
    for n in range(first, last):
        if scores[3] <= goal:
            return n
        for k in range(size):
            trial[k] = current[k]
        changed, rank = 0, -1
        for _ in range(1 + random_bits(state) % 4):
            dice = random_bits(state) % 64
            if rank < 0 or dice & 1:
                rank = random_bits(state) % p
            dice >>= 1
            if dice < 7:
                rank = move_into_gap(t, offsets, trial, rank, state, gaps)
            elif dice < 26:
                rank = move_cause(t, offsets, trial, rank, state, jumps, gaps)
            elif dice < 28:
                rank = move_many(t, offsets, trial, rank, state, spare, 7)
            else:
                rank = move_one(offsets, trial, rank, state, jumps)
            if rank >= 0:
                changed += 1
                state[changed] = rank
        legal = changed > 0
        for k in range(changed):
            r = state[k + 1]
            if legal and frozen_blocks[3 * r + 2] > 0:
                legal = keep_block(
                    frozen_blocks[3 * r], frozen_blocks[3 * r + 1], frozen_blocks[3 * r + 2], current, trial
                )
            if legal and not stays_legal(t, offsets, trial, r, counts):
                legal = False
            if legal and frozen_blocks[3 * r + 2] > 1:
                for e in range(t.own_at[r], t.own_at[r + 1]):
                    s = t.own[e]
                    if counts[s] != t.num_microbatches or counts[2 * S + s] != counts[S + s]:
                        legal = False
                    if counts[S + s] + counts[3 * S + s] != t.num_microbatches:
                        legal = False
        if not legal:
            continue
        score = evaluate_line(t, offsets, trial, scratch, ends, limits)
        if score < 0:
            continue
        left = 1.0 - n / total
        if score - scores[0] <= heat * left * left * exponential[random_bits(state) % 4096]:
            scores[0] = score
            for k in range(size):
                current[k] = trial[k]
                gaps[k] = scratch[waits + k]
            if scratch[3 * p] < scores[3] or (scratch[3 * p] == scores[3] and score < scores[1]):
                scores[1] = score
                scores[3] = scratch[3 * p]
                scores[2] = n
                for k in range(size):
                    best[k] = trial[k]
        if n - scores[2] > total // 6:
            scores[2] = n
            scores[0] = scores[1]
            for k in range(size):
                current[k] = best[k]
            evaluate_line(t, offsets, current, scratch, ends, limits)
            for k in range(size):
                gaps[k] = scratch[waits + k]
    return last
