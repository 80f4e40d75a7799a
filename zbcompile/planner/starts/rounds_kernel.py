"""The inner loop of `zbcompile.planner.starts.rounds`: one list schedule in rounds of microbatches.

Plain loops over flat arrays that numba compiles where it is installed (`zbcompile.planner.core.tables`).
"""

from __future__ import annotations

from zbcompile.planner.core.compiled import Vector, jit
from zbcompile.planner.core.dispatch import arrival_of
from zbcompile.planner.core.tables import Tables

__all__ = ["ALTERNATE", "B_FIRST", "F_FIRST", "place_rounds"]

ALTERNATE, B_FIRST, F_FIRST = 0, 1, 2
"""What runs where an F and a B are both ready."""

_FAR = 1 << 60


@jit
def _next_forward(t: Tables, r: int, k: int, first: Vector, size: Vector) -> int:
    """Return the rank's k-th F as stage * m + microbatch: group by group, and in a group stage by stage."""
    m = t.num_microbatches
    begin, own = t.own_at[r], t.own_at[r + 1] - t.own_at[r]
    i = first[k // own]
    place = k - i * own
    pair: int = t.own[begin + place // size[i]] * m + i + place % size[i]
    return pair


@jit
def _choose(
    t: Tables,
    r: int,
    now: int,
    first: Vector,
    size: Vector,
    most: Vector,
    rule: int,
    fill: int,
    most_pending: Vector,
    reserve: Vector,
    state: Vector,
    done: Vector,
    ends: Vector,
    waiting: Vector,
) -> int:
    """Return the code that a rank runs now, or -1; ``state[r]`` then gets when it has to look again."""
    S, p, m = t.num_stages, t.num_ranks, t.num_microbatches
    begin, own = t.own_at[r], t.own_at[r + 1] - t.own_at[r]
    held, forwards, backwards, weights = state[p + r], state[2 * p + r], state[3 * p + r], state[4 * p + r]
    coming, starved = _FAR, False
    forward = -1
    if forwards < own * m:
        pair = _next_forward(t, r, forwards, first, size)
        s = pair // m
        arrival = arrival_of(t, s, pair - s * m, ends)
        if arrival >= 0 and forwards - backwards < most[r]:
            if arrival > now:
                coming = arrival
            elif held + max(t.peak[s], t.memory[s] + reserve[r]) > t.headroom[r]:
                starved = True
            else:
                forward = s
    backward, least = -1, _FAR
    for e in range(own):
        s = t.own[begin + e]
        i = done[S + s]
        if i >= done[s]:
            continue
        arrival = arrival_of(t, S + s, i, ends)
        if arrival < 0:
            continue
        if arrival > now:
            coming = min(coming, arrival)
        elif held + t.peak[S + s] > t.headroom[r]:
            starved = True
        else:
            key = first[i] * (own - 1) + (own - 1 - e) * size[i] + i
            if key < least:
                least = key
                backward = S + s
    pending = backwards - weights
    weight = 2 * S + waiting[state[5 * p + r] + weights] if pending > 0 else -1
    if pending > most_pending[r]:
        return weight
    if forward >= 0 and backward >= 0:
        if rule == 1 or (rule == 0 and state[6 * p + r] == 0):
            return backward
        return forward
    if forward >= 0 or backward >= 0:
        return max(forward, backward)
    if weight >= 0 and (starved or coming == _FAR or (coming - now) * 100 >= fill * t.length[weight]):
        return weight
    state[r] = coming
    return -1


@jit
def place_rounds(
    t: Tables,
    first: Vector,
    size: Vector,
    most: Vector,
    rule: int,
    fill: int,
    most_pending: Vector,
    reserve: Vector,
    offsets: Vector,
    line: Vector,
    state: Vector,
    done: Vector,
    ends: Vector,
    waiting: Vector,
) -> int:
    """Fill ``line`` rank by rank; return the number of actions placed.

    Parameters
    ----------
    t
        The problem.
    first, size
        Per microbatch the first of its group, and how many the group has.
    most
        Most F's in flight per rank.
    rule
        `ALTERNATE`, `B_FIRST` or `F_FIRST`.
    fill
        Hundredths of a W that a gap must last before the W fills it.
    most_pending
        Most W's waiting per rank.
    reserve
        Bytes per rank that an F leaves free, so that the next B fits.
    offsets, line
        Where each rank's row begins, and all codes in a row.
    state
        8 p elements. Per rank: when it looks for its next action, bytes held, numbers of F's, B's and W's,
        where its row of ``waiting`` begins, whether it ran a B after its last F, and when it is free.
    done, ends
        3 S and 2 S m elements: actions done of every code, and ends of F's and B's.
    waiting
        S m elements: the stages of each rank's B's, in their order.
    """
    S, p, m = t.num_stages, t.num_ranks, t.num_microbatches
    for k in range(2 * S * m):
        ends[k] = -1
    for k in range(3 * S):
        done[k] = 0
    for k in range(8 * p):
        state[k] = 0
    for r in range(p):
        state[5 * p + r] = t.own_at[r] * m
    placed = 0
    while placed < 3 * S * m:
        r = 0
        for q in range(1, p):
            if state[q] < state[r]:
                r = q
        now = state[r]
        if now == _FAR:
            return placed
        code = _choose(
            t, r, now, first, size, most, rule, fill, most_pending, reserve, state, done, ends, waiting
        )
        if code < 0:
            continue
        kind = code // S
        s = code - kind * S
        line[offsets[r] + state[2 * p + r] + state[3 * p + r] + state[4 * p + r]] = code
        placed += 1
        end = now + t.length[code]
        if kind == 1:
            waiting[state[5 * p + r] + state[3 * p + r]] = s
        state[r] = end
        state[7 * p + r] = end
        state[p + r] += t.memory[code]
        state[(2 + kind) * p + r] += 1
        if kind < 2:
            ends[code * m + done[code]] = end
            state[6 * p + r] = kind
            low, high = t.after_forward_at[s], t.after_forward_at[s + 1]
            if kind == 1:
                low, high = t.after_backward_at[s], t.after_backward_at[s + 1]
            for e in range(low, high):
                q = t.after_forward[e] if kind == 0 else t.after_backward[e]
                state[q] = min(state[q], max(end, state[7 * p + q]))
        done[code] += 1
    return placed
