"""Scores of orders by compiled loops, for searches that try thousands.

Equal to `zbcompile.planner.core.score` by test.
"""

from __future__ import annotations

from collections.abc import Callable

from zbcompile.planner.core.compiled import MakeVector, Vector, can_compile, vector
from zbcompile.planner.core.instance import Codes, Instance
from zbcompile.planner.core.kernel import evaluate_line, gaps_at, stays_legal
from zbcompile.planner.core.score import value_of
from zbcompile.planner.core.tables import Tables, pack
from zbcompile.planner.core.times import Clock
from zbcompile.schedule.problem import Problem

__all__ = ["Score", "Scored", "Scorer", "can_score", "fast_value"]

_MOST_SCORE = 1 << 63

_SHORT = 600
"""Actions up to which hundreds of values take less in plain Python than numba takes to be imported."""

Score = tuple[int, int]
"""(objective in ns, tie-breaking score). The second is 100 p times the first plus the sum over the ranks."""

Scored = tuple[int, int, Codes]
"""(objective in ns, tie-breaking score, order)."""


def fast_value(problem: Problem) -> Callable[[Codes], int | None]:
    """Return the fastest clock for the value of the problem's orders in ns; it says None on deadlock.

    Equal to `zbcompile.schedule.simulate` by test.
    """
    if problem.sends.holds_rank:
        return Clock.of(problem).value
    instance = Instance.of(problem)
    actions = 3 * instance.num_stages * instance.num_microbatches
    if actions <= _SHORT or not can_score(instance):
        return lambda codes: value_of(instance, codes)
    return Scorer(instance).value


def can_score(instance: Instance) -> bool:
    """Return whether kernels are compiled, and no order of the problem is too long for their integers."""
    work = sum(instance.forward) + sum(instance.backward) + sum(instance.weight) + sum(instance.fused)
    longest = instance.num_microbatches * (work + sum(instance.rules.lags)) + instance.steps.all_in_a_row()
    return can_compile() and 101 * instance.num_ranks * longest < _MOST_SCORE


class Scorer:
    """Scores the orders of one problem.

    Its working space is reused from call to call, so each thread needs a scorer of its own.

    Parameters
    ----------
    instance
        The problem.
    vector
        Makes the tables; with ``list`` nothing is compiled.

    Attributes
    ----------
    instance, vector
        The same.
    tables
        The problem as flat arrays.
    """

    def __init__(self, instance: Instance, vector: MakeVector = vector) -> None:
        self.instance, self.tables, self.vector = instance, Tables.of(instance, vector), vector

    def score(self, codes: Codes) -> Score | None:
        """Return the score of an order, or ``None`` if it is not legal, does not fit or deadlocks."""
        return self.score_line(*pack(self.instance, codes, self.vector))

    def value(self, codes: Codes) -> int | None:
        """Return the value of an order in ns, or ``None`` as `score` does."""
        score = self.score(codes)
        return None if score is None else score[0]

    def score_line(self, offsets: Vector, line: Vector) -> Score | None:
        """Return the same for codes in a row, as `pack` makes them."""
        for rank in range(self.instance.num_ranks):
            if not stays_legal(self.tables, offsets, line, rank):
                return None
        score = int(evaluate_line(self.tables, offsets, line))
        return None if score < 0 else (int(self.tables.scratch[3 * self.instance.num_ranks]), score)

    def gaps(self, codes: Codes) -> list[int]:
        """Return per action, rank by rank, how long its rank waits before it for a message, in ns."""
        offsets, line = pack(self.instance, codes, self.vector)
        evaluate_line(self.tables, offsets, line)
        first = gaps_at(self.tables, len(line))
        return [int(gap) for gap in self.tables.scratch[first : first + len(line)]]
