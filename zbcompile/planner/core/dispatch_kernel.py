"""Kernels of dispatch: which action each rank runs next (`zbcompile.planner.core.dispatch` says the rules).

Plain loops over flat arrays that numba compiles where it is installed (`zbcompile.planner.core.compiled`).
"""

from __future__ import annotations

from zbcompile.planner.core.compiled import Vector, jit
from zbcompile.planner.core.tables import Tables

__all__ = ["ALTERNATE", "BY_KEY", "B_FIRST", "FAR", "F_FIRST", "IN_TURN", "place"]

BY_KEY, IN_TURN, ALTERNATE, B_FIRST, F_FIRST = 0, 1, 2, 3, 4

FAR = 1 << 60
"""A time in ns, or a limit, that is never reached."""


@jit
def _arrival(t: Tables, code: int, i: int, ends: Vector) -> int:
    """Return when the messages for an F or B are there, or -1 if one of them has not been sent yet."""
    S, m = t.num_stages, t.num_microbatches
    latest = 0
    if code < S:
        for e in range(t.forward_at[code], t.forward_at[code + 1]):
            end = ends[t.forward_from[e] * m + i]
            if end < 0:
                return -1
            latest = max(latest, end + t.forward_lag[e])
        return latest
    for e in range(t.backward_at[code - S], t.backward_at[code - S + 1]):
        end = ends[(S + t.backward_from[e]) * m + i]
        if end < 0:
            return -1
        latest = max(latest, end + t.backward_lag[e])
    return latest


@jit
def _look_by_key(
    S: int,
    p: int,
    m: int,
    r: int,
    own_at: Vector,
    own: Vector,
    lengths: Vector,
    memory: Vector,
    peak: Vector,
    room: int,
    keys: Vector,
    share: int,
    limits: Vector,
    state: Vector,
    done: Vector,
    arrivals: Vector,
) -> None:
    """Find what a rank could complete first, and when: ``state[p + r]`` and ``state[r]``.

    ``room`` is the headroom that it has left. Two passes over its stages: what could end first, then what has
    the smallest key of all that could start before that.
    """
    free, begin, end = state[2 * p + r], own_at[r], own_at[r + 1]
    soonest, chosen, least = FAR, -1, FAR
    for phase in range(2):
        for kind in range(3):
            for e in range(begin, end):
                s = own[e]
                code, i = kind * S + s, done[kind * S + s]
                if i == m or (kind > 0 and i >= done[code - S]):
                    continue
                if kind == 0 and i - done[S + s] >= limits[s]:
                    continue
                key, ready, most = keys[code * m + i], free, peak[code]
                if kind < 2:
                    if arrivals[code] < 0:
                        continue
                    ready = max(ready, arrivals[code])
                if kind == 0:
                    forwards = memory[code]
                    most = max(most, forwards + peak[S + s])
                    for d in range(e + 1, end):
                        if done[own[d]] < m:
                            forwards += memory[own[d]]
                            most = max(most, forwards + peak[S + own[d]])
                if most > room:
                    continue
                length = lengths[code] * share // 100 if kind == 2 else lengths[code]
                if phase == 0:
                    soonest = min(soonest, ready + length)
                elif (ready < soonest or ready + length == soonest) and key < least:
                    least = key
                    chosen = code
    state[r] = soonest
    state[p + r] = chosen


@jit
def _look_in_order(
    S: int,
    p: int,
    m: int,
    r: int,
    own_at: Vector,
    own: Vector,
    lengths: Vector,
    memory: Vector,
    peak: Vector,
    room: int,
    keys: Vector,
    rule: int,
    share: int,
    limits: Vector,
    state: Vector,
    done: Vector,
    arrivals: Vector,
) -> None:
    """Find what a rank runs next by a rule other than `BY_KEY`, and when it ends.

    As `_look_by_key` does, but the F's keep their order, and W's fill gaps.
    """
    free, begin, end = state[2 * p + r], own_at[r], own_at[r + 1]
    turn, least, reserve, ahead, starved = -1, FAR, 0, 0, False
    weight, first_w = -1, FAR
    for e in range(begin, end):
        s = own[e]
        forwards, backwards, weights = done[s], done[S + s], done[2 * S + s]
        reserve = max(reserve, peak[S + s])
        ahead += forwards - backwards
        if forwards < m and keys[s * m + forwards] < least:
            least = keys[s * m + forwards]
            turn = s
        if rule == IN_TURN and backwards < m and keys[(S + s) * m + backwards] < least:
            least = keys[(S + s) * m + backwards]
            turn = S + s
        if weights < backwards:
            if peak[2 * S + s] > room:
                starved = True
            elif keys[(2 * S + s) * m + weights] < first_w:
                first_w = keys[(2 * S + s) * m + weights]
                weight = 2 * S + s
    forward, soonest = -1, FAR
    if 0 <= turn < S and ahead < limits[S + r] and arrivals[turn] >= 0:
        ready = max(free, arrivals[turn])
        if done[turn] - done[S + turn] < limits[turn]:
            if max(peak[turn], memory[turn] + reserve) <= room:
                forward, soonest = turn, ready
            else:
                starved = starved or ready == free
    backward, arrival, least = -1, FAR, FAR
    for e in range(begin, end):
        code, i = S + own[e], done[S + own[e]]
        if arrivals[code] < 0 or i >= done[own[e]] or i == m or (rule == IN_TURN and code != turn):
            continue
        key, ready = keys[code * m + i], max(free, arrivals[code])
        if peak[code] > room:
            starved = starved or ready == free
        elif ready < arrival or (ready == arrival and key < least):
            arrival, least = ready, key
            backward = code
    turned = rule == ALTERNATE and state[6 * p + r] == 1
    if backward >= 0 and arrival < soonest:
        forward, soonest = -1, arrival
    elif backward >= 0 and arrival > soonest:
        if turned or rule == F_FIRST or arrival > soonest + limits[S + 2 * p + r]:
            backward = -1
        else:
            forward, soonest = -1, arrival
    if weight >= 0:
        gap = soonest - free
        fills = soonest == FAR or gap * 100 >= share * lengths[weight]
        longest = limits[S + p + r]
        if longest < FAR and not fills and state[4 * p + r] > 0:
            for q in range(p):
                longest = max(longest, state[5 * p + q])
            fills = state[5 * p + r] + gap > longest
        if gap > 0 and (starved or fills):
            state[r] = free + lengths[weight]
            state[p + r] = weight
            return
    state[p + r] = backward
    if backward < 0 or (forward >= 0 and (rule == F_FIRST or turned)):
        state[p + r] = forward
    state[r] = soonest
    if soonest < FAR:
        state[r] = soonest + lengths[state[p + r]]


@jit
def place(
    t: Tables,
    keys: Vector,
    rule: int,
    share: int,
    limits: Vector,
    offsets: Vector,
    line: Vector,
    state: Vector,
    done: Vector,
    ends: Vector,
    arrivals: Vector,
    again: Vector,
) -> int:
    """Fill ``line`` rank by rank; return the number of actions placed.

    Parameters
    ----------
    t
        The problem.
    keys, rule, share, limits
        As `Recipe` and `Dispatcher.run_line` say.
    offsets, line
        Where each rank's row begins, and all codes in a row.
    state
        7 p elements. Per rank: when it could complete something first, and which code; when it is free; bytes
        held; actions placed; idle time in ns; whether it ran a B after its last F.
    done, ends, arrivals
        3 S, 2 S m and 2 S elements: actions done of every code, ends of F's and B's, and when the messages
        for the next F or B are there (-1: not known yet).
    again
        S + p elements: the ranks that look for their next action again.
    """
    S, p, m = t.num_stages, t.num_ranks, t.num_microbatches
    for k in range(2 * S * m):
        ends[k] = -1
    for k in range(3 * S):
        done[k] = 0
    for k in range(7 * p):
        state[k] = 0
    for code in range(2 * S):
        arrivals[code] = -1
    for r in range(p):
        again[r] = r
    count = p
    for placed in range(len(line)):
        for k in range(count):
            r = again[k]
            for e in range(t.own_at[r], t.own_at[r + 1]):
                for side in range(2):
                    code = side * S + t.own[e]
                    if arrivals[code] < 0 and done[code] < m:
                        arrivals[code] = _arrival(t, code, done[code], ends)
            room = t.headroom[r] - state[3 * p + r]
            if rule == BY_KEY:
                _look_by_key(
                    S, p, m, r, t.own_at, t.own, t.length, t.memory, t.peak, room,
                    keys, share, limits, state, done, arrivals,
                )  # fmt: skip
            else:
                _look_in_order(
                    S, p, m, r, t.own_at, t.own, t.length, t.memory, t.peak, room,
                    keys, rule, share, limits, state, done, arrivals,
                )  # fmt: skip
        r = 0
        for q in range(1, p):
            if state[q] < state[r]:
                r = q
        if state[r] == FAR:
            return placed
        code = state[p + r]
        side = code // S
        s = code - side * S
        start = state[2 * p + r]
        if side < 2:
            start = max(start, arrivals[side * S + s])
        if state[4 * p + r] > 0:
            state[5 * p + r] += start - state[2 * p + r]
        line[offsets[r] + state[4 * p + r]] = code
        state[2 * p + r] = start + t.length[code]
        state[3 * p + r] += t.memory[code]
        state[4 * p + r] += 1
        count, low, high = 1, 0, 0
        again[0] = r
        if side < 2:
            ends[(side * S + s) * m + done[side * S + s]] = state[2 * p + r]
            state[6 * p + r] = side
            arrivals[side * S + s] = -1
            low, high = t.after_forward_at[s], t.after_forward_at[s + 1]
            if side == 1:
                low, high = t.after_backward_at[s], t.after_backward_at[s + 1]
        done[side * S + s] += 1
        for e in range(low, high):
            again[count] = t.after_forward[e] if side == 0 else t.after_backward[e]
            count += 1
    return len(line)
