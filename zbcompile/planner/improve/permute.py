"""Inner loop that orders microbatches which differ in cost: change the permutation, keep or drop the change.

Plain loops over flat arrays that numba compiles where it is installed (`zbcompile.planner.core.unequal`).
"""

from __future__ import annotations

from typing import Any

from zbcompile.planner.core.compiled import Vector, jit
from zbcompile.planner.core.unequal import evaluate_unequal, stays_legal_unequal
from zbcompile.planner.improve.moves import random_bits

__all__ = ["permute"]


@jit
def _turn(order: Vector, a: int, b: int, shift: bool) -> None:
    """Swap places a and b of the permutation, or take what is at a to b."""
    if not shift:
        order[a], order[b] = order[b], order[a]
        return
    moved = order[a]
    step = 1 if b > a else -1
    while a != b:
        order[a] = order[a + step]
        a += step
    order[b] = moved


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
        a = random_bits(state) % m
        b = random_bits(state) % m
        shift = random_bits(state) % 3 == 0
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
        warm = heat * left * left * exponential[random_bits(state) % 4096]
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
