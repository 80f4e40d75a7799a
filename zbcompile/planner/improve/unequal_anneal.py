"""Annealing where microbatches differ in cost: of their permutation, or of the order of the actions.

Both are one search over a row of numbers: take an element to another place, once or twice, and keep the
change or drop it by the true times and bytes. The kernels are plain loops over flat arrays that numba
compiles where it is installed (`zbcompile.planner.core.unequal`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zbcompile.planner.core.compiled import Vector, jit, matrix, vector
from zbcompile.planner.core.instance import Codes
from zbcompile.planner.core.kernel import evaluate_unequal
from zbcompile.planner.core.tables import EXPONENTIAL, pack, unpack
from zbcompile.planner.core.unequal import UnequalScorer, stays_legal_unequal
from zbcompile.planner.improve.anneal import JUMPS, chunks
from zbcompile.planner.improve.moves import random_bits
from zbcompile.schedule.problem import Problem

__all__ = ["UnequalAnnealer"]


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
def _permute(order: Vector, state: Vector, taken: Vector) -> bool:
    """Swap two microbatches, or one time in three take one to another place; False if they are the same.

    What is taken is noted in ``state``: its second element says how often, and ``taken`` from where to where.
    """
    m = len(order)
    a = random_bits(state, 0) % m
    b = random_bits(state, 0) % m
    shift = random_bits(state, 0) % 3 == 0
    state[0, 1] = 1 if shift else 2
    taken[0], taken[1] = a, b
    taken[2], taken[3] = (b - 1 if b > a else b + 1), a
    if a == b:
        return False
    for k in range(state[0, 1]):
        _take(order, taken[2 * k], taken[2 * k + 1])
    return True


@jit
def _move(offsets: Vector, line: Vector, state: Vector, jumps: Vector, taken: Vector) -> int:
    """Take one or two actions of a rank some places forward or back; return the rank.

    They are noted as in `_permute`.
    """
    rank = random_bits(state, 0) % (len(offsets) - 1)
    begin, size = offsets[rank], offsets[rank + 1] - offsets[rank]
    state[0, 1] = 1 + random_bits(state, 0) % 2
    for k in range(state[0, 1]):
        a = random_bits(state, 0) % size
        jump = jumps[random_bits(state, 0) % 4096]
        taken[2 * k] = begin + a
        taken[2 * k + 1] = begin + min(max(a - jump if random_bits(state, 0) & 64 else a + jump, 0), size - 1)
        _take(line, taken[2 * k], taken[2 * k + 1])
    return int(rank)


@jit
def _anneal(
    t: Any,
    offsets: Vector,
    line: Vector,
    best: Vector,
    scores: Vector,
    state: Vector,
    permutes: bool,
    first: int,
    last: int,
    total: int,
    heat: float,
    goal: int,
    jumps: Vector,
    exponential: Vector,
    taken: Vector,
) -> int:
    """Do the tries ``first`` to ``last`` of ``total``; return the next try.

    Only the sum of what a try takes has to be legal. The order of the actions returns to the best one after a
    sixth of all tries without gain.

    Parameters
    ----------
    t
        The problem, with the permutation at hand.
    offsets, line
        The order of the actions at hand.
    best
        The best row: of the permutation, or of the actions.
    scores
        Current score, best score, best objective, try of the last gain.
    state
        The random sequence, and how much the try took.
    permutes
        Whether the permutation changes and the order of the actions stays, or the other way about.
    first, last, total
        The range of tries, and the number of all.
    heat
        Temperature of the first try in units of the score; it falls as (1 - try / total) squared.
    goal
        Objective in ns at which to stop.
    jumps, exponential
        Tables of random lengths of moves, and of exponentially distributed numbers.
    taken
        From where to where a try took what, two times.
    """
    p = t.num_ranks
    row = t.order if permutes else line
    for n in range(first, last):
        if scores[2] <= goal:
            return n
        low, high = 0, p
        if permutes:
            if not _permute(row, state, taken):
                continue
        else:
            low = _move(offsets, row, state, jumps, taken)
            high = low + 1
        legal = True
        for rank in range(low, high):
            legal = legal and stays_legal_unequal(t, offsets, line, rank)
        score = evaluate_unequal(t, offsets, line) if legal else -1
        left = 1.0 - n / total
        warm = heat * left * left * exponential[random_bits(state, 0) % 4096]
        if score < 0 or score - scores[0] > warm:
            for k in range(state[0, 1] - 1, -1, -1):
                _take(row, taken[2 * k + 1], taken[2 * k])
        else:
            scores[0] = score
            if t.scratch[3 * p] < scores[2] or (t.scratch[3 * p] == scores[2] and score < scores[1]):
                scores[1] = score
                scores[2] = t.scratch[3 * p]
                scores[3] = n
                for k in range(len(best)):
                    best[k] = row[k]
        if not permutes and n - scores[3] > total // 6:
            scores[3] = n
            scores[0] = scores[1]
            for k in range(len(best)):
                row[k] = best[k]
    return last


class UnequalAnnealer:
    """Anneals orders of one problem. Each thread needs an annealer of its own.

    Attributes
    ----------
    scorer
        The problem's scorer, whose buffers the kernels use.
    """

    def __init__(self, problem: Problem) -> None:
        self.scorer = UnequalScorer(problem)
        self.jumps, self.exponential, self.taken = vector(JUMPS), vector(EXPONENTIAL), vector([0] * 4)

    def run(
        self,
        codes: Codes,
        order: tuple[int, ...],
        tries: int,
        *,
        permutes: bool,
        seed: int,
        heat: float,
        goal: int,
        stop: Callable[[], bool],
    ) -> tuple[Codes, tuple[int, ...], int]:
        """Return the best order met in a number of tries, its permutation, and its value in ns.

        Parameters
        ----------
        codes, order
            An order of the actions and a permutation to begin with, which fit.
        permutes
            Whether the permutation changes and the order of the actions stays, or the other way about.
        tries, seed, heat, goal, stop
            As for `zbcompile.planner.improve.anneal.Annealer.run`.
        """
        scorer = self.scorer
        scorer.set_order(order)
        offsets, line = pack(scorer.instance, codes)
        score = int(evaluate_unequal(scorer.tables, offsets, line))
        best = vector(list(order) if permutes else [int(code) for code in line])
        scores = vector([score, score, int(scorer.tables.scratch[3 * scorer.problem.num_ranks]), 0])
        state = matrix([[(seed * 2_654_435_761 + 88_675_123) % 0xFFFFFFFF + 1, 0]])  # the first is never 0
        for first, last in chunks(tries, len(line), stop):
            reached = _anneal(
                scorer.tables, offsets, line, best, scores, state, permutes, first, last, tries,
                float(heat * score), goal, self.jumps, self.exponential, self.taken,
            )  # fmt: skip
            if int(reached) < last:
                break
        if permutes:
            return codes, tuple(int(microbatch) for microbatch in best), int(scores[2])
        return unpack(scorer.instance, offsets, best), order, int(scores[2])
