"""Scores of orders, by compiled loops over flat arrays: for searches that try thousands."""

from __future__ import annotations

from zbcompile.planner.core.instance import Codes, Instance
from zbcompile.planner.core.kernel import evaluate_line, gaps_at, scratch_size, stays_legal
from zbcompile.planner.core.tables import Tables, Vector, pack, vector

__all__ = ["Score", "Scored", "Scorer"]

Score = tuple[int, int]
"""(objective in ns, tie-breaking score): less is better."""

Scored = tuple[int, int, Codes]
"""A score and its order."""


class Scorer:
    """Scores orders of one problem. Not for several threads at once: its buffers are its own."""

    def __init__(self, instance: Instance) -> None:
        self.instance, self.tables = instance, Tables.of(instance)
        slots = 2 * instance.num_stages * instance.num_microbatches
        self.ends, self.limits = vector([0] * slots), vector([0] * slots)
        self.counts = vector([0] * (4 * instance.num_stages))

    def score(self, codes: Codes) -> Score | None:
        """(objective, tie-breaking score) of an order; ``None`` if it is not legal or deadlocks."""
        return self.score_line(*pack(self.instance, codes))

    def score_line(self, offsets: Vector, line: Vector) -> Score | None:
        """The same for codes in a row, as `pack` makes them."""
        for rank in range(self.instance.num_ranks):
            if not stays_legal(self.tables, offsets, line, rank, self.counts):
                return None
        score, scratch = self.evaluate(offsets, line)
        return None if score < 0 else (int(scratch[3 * self.instance.num_ranks]), score)

    def gaps(self, codes: Codes) -> list[int]:
        """Per action, rank by rank, how long its rank waits before it for a message, in ns."""
        offsets, line = pack(self.instance, codes)
        return [int(gap) for gap in self.evaluate(offsets, line)[1][gaps_at(self.tables, len(line)) :]]

    def evaluate(self, offsets: Vector, line: Vector) -> tuple[int, Vector]:
        """Tie-breaking score (-1 on deadlock) and the scratch of `evaluate_line`."""
        scratch = vector([0] * scratch_size(self.tables, len(line)))
        return int(evaluate_line(self.tables, offsets, line, scratch, self.ends, self.limits)), scratch
