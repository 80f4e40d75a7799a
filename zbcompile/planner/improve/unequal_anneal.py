"""Annealing where microbatches differ in cost: of the permutation, and of the order of the actions."""

from __future__ import annotations

from collections.abc import Callable

from zbcompile.planner.core.compiled import vector
from zbcompile.planner.core.instance import Codes
from zbcompile.planner.core.tables import EXPONENTIAL, pack, unpack
from zbcompile.planner.core.unequal import UnequalScorer
from zbcompile.planner.improve.anneal import JUMPS
from zbcompile.planner.improve.permute import move_actions, permute
from zbcompile.schedule.problem import Problem

__all__ = ["UnequalAnnealer"]

_CHUNK = 300_000
"""Actions that are timed between two questions whether to stop."""


class UnequalAnnealer:
    """Anneals orders of one problem. Each thread needs an annealer of its own.

    Attributes
    ----------
    scorer
        The problem's scorer, whose buffers the kernels use.
    """

    def __init__(self, problem: Problem) -> None:
        self.scorer = UnequalScorer(problem)
        self.jumps, self.exponential = vector(JUMPS), vector(EXPONENTIAL)

    def permute(
        self,
        codes: Codes,
        order: tuple[int, ...],
        tries: int,
        *,
        seed: int,
        heat: float,
        goal: int,
        stop: Callable[[], bool],
    ) -> tuple[tuple[int, ...], int]:
        """Return the best permutation met in a number of tries, and its value in ns.

        Parameters
        ----------
        codes
            The order of the actions, which stays as it is. It fits with the permutation given.
        order
            A permutation to begin with.
        tries, seed, heat, goal, stop
            As for `zbcompile.planner.improve.anneal.Annealer.run`.
        """
        scorer = self.scorer
        scorer.set_order(order)
        offsets, line = pack(scorer.instance, codes)
        score, scratch = scorer.evaluate(offsets, line)
        best, value = vector(list(order)), int(scratch[3 * scorer.problem.num_ranks])
        scores, state = vector([score, score, value]), vector([_seeded(seed)])
        chunk, done = max(1, _CHUNK // len(line)), 0
        while done < tries and not stop():
            last = min(tries, done + chunk)
            reached = permute(
                scorer.tables, offsets, line, best, scores, state, done, last, tries, float(heat * score),
                goal, self.exponential, scratch, scorer.ends, scorer.limits, scorer.counts,
            )  # fmt: skip
            if int(reached) < last:
                break
            done = last
        return tuple(int(microbatch) for microbatch in best), int(scores[2])

    def anneal(
        self,
        codes: Codes,
        order: tuple[int, ...],
        tries: int,
        *,
        seed: int,
        heat: float,
        goal: int,
        stop: Callable[[], bool],
    ) -> tuple[Codes, int]:
        """Return the best order of the actions met in a number of tries, and its value in ns.

        Parameters
        ----------
        codes
            An order to begin with, which fits.
        order
            The permutation, which stays as it is.
        tries, seed, heat, goal, stop
            As for `permute`.
        """
        scorer, p = self.scorer, self.scorer.problem.num_ranks
        scorer.set_order(order)
        offsets, line = pack(scorer.instance, codes)
        best = vector([int(code) for code in line])
        score, scratch = scorer.evaluate(offsets, line)
        scores, state = vector([score, score, int(scratch[3 * p]), 0]), vector([_seeded(seed)])
        chunk, done = max(1, _CHUNK // len(line)), 0
        while done < tries and not stop():
            last = min(tries, done + chunk)
            reached = move_actions(
                scorer.tables, offsets, line, best, scores, state, done, last, tries, float(heat * score),
                goal, self.jumps, self.exponential, scratch, scorer.ends, scorer.limits, scorer.counts,
            )  # fmt: skip
            if int(reached) < last:
                break
            done = last
        return unpack(scorer.instance, offsets, best), int(scores[2])


def _seeded(seed: int) -> int:
    """Return a first state of the random sequence, never 0."""
    return (seed * 2_654_435_761 + 88_675_123) % 0xFFFFFFFF + 1
