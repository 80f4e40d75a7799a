"""Inner loops of the search: evaluate an order, change it, keep or drop the change.

Plain loops over flat arrays that numba compiles where it is installed (`zbcompile.planner.tables`).
"""

from __future__ import annotations

from zbcompile.planner.tables import Tables, Vector, jit

__all__ = ["anneal", "evaluate_line", "stays_legal"]

_FAR = 1 << 60


@jit
def evaluate_line(
    t: Tables, offsets: Vector, line: Vector, scratch: Vector, ends: Vector, limits: Vector
) -> int:
    """Score of an order: 100 p times the objective plus the sum over ranks; -1 on deadlock.

    scratch : at least 4 p + 2 S + number of actions; its element 3 p gets the objective itself.
    ends, limits : 2 S m each.
    """
    S, p, m = t.num_stages, t.num_ranks, t.num_microbatches
    total = offsets[p]
    late, clock, place, counts, trail = 0, p, 2 * p, 4 * p, 4 * p + 2 * S
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
                    now += t.length[code]
                    ends[slot] = now
                    scratch[counts + side * S + s] = i + 1
                else:
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
        if held > t.room[rank]:
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
def _random(state: Vector) -> int:
    """Next of a 32-bit xorshift sequence; the state is its only element."""
    x: int = state[0]
    x ^= (x << 13) & 0xFFFFFFFF
    x ^= x >> 17
    x ^= (x << 5) & 0xFFFFFFFF
    state[0] = x
    return x


@jit
def _move_one(offsets: Vector, line: Vector, rank: int, state: Vector, jumps: Vector) -> bool:
    """Take one action of a rank some places forward or back. False if nothing changes."""
    begin, size = offsets[rank], offsets[rank + 1] - offsets[rank]
    a = _random(state) % size
    jump = jumps[_random(state) % 4096]
    b = a - jump if _random(state) & 64 else a + jump
    b = min(max(b, 0), size - 1)
    code = line[begin + a]
    changed = False
    step = 1 if b > a else -1
    while a != b:
        if line[begin + a + step] != code:
            changed = True
        line[begin + a] = line[begin + a + step]
        a += step
    line[begin + b] = code
    return changed


@jit
def _move_many(
    t: Tables, offsets: Vector, line: Vector, rank: int, state: Vector, spare: Vector, width: int
) -> bool:
    """Take a range of microbatches of one (kind, stage) some places forward or back."""
    begin, size = offsets[rank], offsets[rank + 1] - offsets[rank]
    code = line[begin + _random(state) % size]
    m = t.num_microbatches
    low = _random(state) % m
    high = low + 1 + _random(state) % m
    shift = 1 + _random(state) % width
    if _random(state) & 64:
        shift = -shift
    kept, moved, seen = 0, 0, 0
    for k in range(size):
        here = line[begin + k]
        chosen = False
        if here == code:
            chosen = low <= seen < high
            seen += 1
        if chosen:
            spare[size + moved] = k
            moved += 1
        else:
            spare[kept] = k
            kept += 1
    if moved == 0 or kept == 0:
        return False
    for k in range(size):
        spare[2 * size + k] = line[begin + k]
    x, y, changed = 0, 0, False
    for k in range(size):
        take = x == kept
        if not take and y < moved:
            goal = 2 * (spare[size + y] + shift) + (1 if shift > 0 else -1)
            take = goal < 2 * spare[x]
        if take:
            source = spare[size + y]
            y += 1
        else:
            source = spare[x]
            x += 1
        here = spare[2 * size + source]
        if here != line[begin + k]:
            changed = True
        line[begin + k] = here
    return changed


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
) -> int:
    """Tries ``first`` to ``last`` of ``total``; returns the next try.

    scores : current score, best score, try of the last gain, best objective. ``heat`` is the
    temperature of the first try in units of the score; it falls as (1 - try / total) squared. Stops
    when the objective falls to ``goal``. After a sixth of all tries without gain the search returns
    to the best.
    """
    p, size = t.num_ranks, offsets[t.num_ranks]
    for n in range(first, last):
        if scores[3] <= goal:
            return n
        for k in range(size):
            trial[k] = current[k]
        moves = 1 + _random(state) % 4
        changed, legal = False, True
        for _ in range(moves):
            rank = _random(state) % p
            if _random(state) % 4 == 0:
                one = _move_many(t, offsets, trial, rank, state, spare, 7)
            else:
                one = _move_one(offsets, trial, rank, state, jumps)
            if one:
                changed = True
                if not stays_legal(t, offsets, trial, rank, counts):
                    legal = False
                    break
        if not changed or not legal:
            continue
        score = evaluate_line(t, offsets, trial, scratch, ends, limits)
        if score < 0:
            continue
        left = 1.0 - n / total
        if score - scores[0] <= heat * left * left * exponential[_random(state) % 4096]:
            scores[0] = score
            for k in range(size):
                current[k] = trial[k]
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
    return last
