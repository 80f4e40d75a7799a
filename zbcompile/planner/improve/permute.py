"""Inner loops for microbatches which differ in cost: change the permutation, or the order of the actions.

Plain loops over flat arrays that numba compiles where it is installed (`zbcompile.planner.core.unequal`).
"""

from __future__ import annotations

from typing import Any

from zbcompile.planner.core.compiled import Vector, jit
from zbcompile.planner.core.unequal import evaluate_unequal, stays_legal_unequal

__all__ = ["move_actions", "permute"]


@jit
def _bits(state: Vector) -> int:
    """Return the next number of a 32-bit xorshift sequence; the state is the first element."""
    x: int = state[0]
    x ^= (x << 13) & 0xFFFFFFFF
    x ^= x >> 17
    x ^= (x << 5) & 0xFFFFFFFF
    state[0] = x
    return x


@jit
def _take(row: Vector, a: int, b: int) -> None:
    """Take what is at place a of a row to place b."""
    moved = row[a]
    step = 1 if b > a else -1
    while a != b:
        row[a] = row[a + step]
        a += step
    row[b] = moved


@jit
def _turn(order: Vector, a: int, b: int, shift: bool) -> None:
    """Swap places a and b of the permutation, or take what is at a to b."""
    if shift:
        _take(order, a, b)
    else:
        order[a], order[b] = order[b], order[a]


@jit
def permute(
    t: Any,
    offsets: Vector,
    line: Vector,
    best: Vector,
    scores: Vector,
    state: Vector,
    first: int,
    last: int,
    total: int,
    heat: float,
    goal: int,
    exponential: Vector,
    scratch: Vector,
    ends: Vector,
    limits: Vector,
    counts: Vector,
) -> int:
    """Do the tries ``first`` to ``last`` of ``total`` on ``t.order``; return the next try.

    Two tries of three swap two microbatches, one takes a microbatch to another place.

    Parameters
    ----------
    t
        The problem, with the permutation at hand.
    offsets, line
        The order of the actions, which stays as it is.
    best
        The best permutation.
    scores
        Current score, best score, best objective.
    state
        The random sequence.
    first, last, total
        The range of tries, and the number of all.
    heat
        Temperature of the first try in units of the score; it falls as (1 - try / total) squared.
    goal
        Objective in ns at which to stop.
    exponential
        Table of exponentially distributed numbers.
    scratch, ends, limits, counts
        Buffers of `evaluate_unequal` and `stays_legal_unequal`.
    """
    p, m = t.num_ranks, t.num_microbatches
    for n in range(first, last):
        if scores[2] <= goal:
            return n
        a = _bits(state) % m
        b = _bits(state) % m
        shift = _bits(state) % 3 == 0
        if a == b:
            continue
        _turn(t.order, a, b, shift)
        legal = True
        for rank in range(p):
            if legal and not stays_legal_unequal(t, offsets, line, rank, counts):
                legal = False
        score = -1
        if legal:
            score = evaluate_unequal(t, offsets, line, scratch, ends, limits)
        left = 1.0 - n / total
        warm = heat * left * left * exponential[_bits(state) % 4096]
        if score < 0 or score - scores[0] > warm:
            _turn(t.order, b, a, shift)
            continue
        scores[0] = score
        if scratch[3 * p] < scores[2] or (scratch[3 * p] == scores[2] and score < scores[1]):
            scores[1] = score
            scores[2] = scratch[3 * p]
            for k in range(m):
                best[k] = t.order[k]
    return last


@jit
def move_actions(
    t: Any,
    offsets: Vector,
    line: Vector,
    best: Vector,
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
    counts: Vector,
) -> int:
    """Do the tries ``first`` to ``last`` of ``total`` on the order of the actions; return the next try.

    A try takes an action some places forward or back on its rank, and half of the tries another one of the
    same rank. Only their sum has to be legal. After a sixth of all tries without gain the search returns to
    the best order.

    Parameters
    ----------
    t
        The problem, with the permutation, which stays as it is.
    offsets, line
        The order at hand.
    best
        The best order.
    scores
        Current score, best score, best objective, try of the last gain.
    jumps
        Table of random lengths of moves.
    state, first, last, total, heat, goal, exponential, scratch, ends, limits, counts
        As for `permute`.
    """
    p = t.num_ranks
    for n in range(first, last):
        if scores[2] <= goal:
            return n
        rank = _bits(state) % p
        begin, size = offsets[rank], offsets[rank + 1] - offsets[rank]
        moves = 1 + _bits(state) % 2
        from_one, to_one, from_two, to_two = begin, begin, begin, begin
        for k in range(moves):
            a = _bits(state) % size
            jump = jumps[_bits(state) % 4096]
            b = min(max(a - jump if _bits(state) & 64 else a + jump, 0), size - 1)
            if k == 0:
                from_one, to_one = begin + a, begin + b
                _take(line, from_one, to_one)
            else:
                from_two, to_two = begin + a, begin + b
                _take(line, from_two, to_two)
        score = -1
        if stays_legal_unequal(t, offsets, line, rank, counts):
            score = evaluate_unequal(t, offsets, line, scratch, ends, limits)
        left = 1.0 - n / total
        warm = heat * left * left * exponential[_bits(state) % 4096]
        if score < 0 or score - scores[0] > warm:
            _take(line, to_two, from_two)
            _take(line, to_one, from_one)
        else:
            scores[0] = score
            if scratch[3 * p] < scores[2] or (scratch[3 * p] == scores[2] and score < scores[1]):
                scores[1] = score
                scores[2] = scratch[3 * p]
                scores[3] = n
                for k in range(offsets[p]):
                    best[k] = line[k]
        if n - scores[3] > total // 6:
            scores[3] = n
            scores[0] = scores[1]
            for k in range(offsets[p]):
                line[k] = best[k]
    return last
