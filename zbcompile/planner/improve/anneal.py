"""Simulated annealing on full orders, W's and BW's too."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from zbcompile.planner.core.instance import Codes, Instance
from zbcompile.planner.core.kernel import anneal, evaluate_line, gaps_at, scratch_size, stays_legal
from zbcompile.planner.core.tables import EXPONENTIAL, Tables, Vector, pack, unpack, vector

__all__ = ["Annealer"]

_JUMPS = [1 + int(2.5 * x) for x in EXPONENTIAL]


class Annealer:
    """One problem's annealing: `run` improves an order within a number of tries."""

    def __init__(self, instance: Instance) -> None:
        self.instance, self.tables = instance, Tables.of(instance)
        self.jumps, self.exponential = vector(_JUMPS), vector(EXPONENTIAL)
        slots = 2 * instance.num_stages * instance.num_microbatches
        self.ends, self.limits = vector([0] * slots), vector([0] * slots)
        self.counts = vector([0] * (4 * instance.num_stages))

    def score(self, codes: Codes) -> tuple[int, int] | None:
        """(objective, tie-breaking score) of an order; ``None`` if it is not legal or deadlocks."""
        return self.score_line(*pack(self.instance, codes))

    def score_line(self, offsets: Vector, line: Vector) -> tuple[int, int] | None:
        """The same for codes in a row, as `pack` makes them."""
        for rank in range(self.instance.num_ranks):
            if not stays_legal(self.tables, offsets, line, rank, self.counts):
                return None
        score, scratch = self._evaluate(offsets, line)
        return None if score < 0 else (int(scratch[3 * self.instance.num_ranks]), score)

    def gaps(self, codes: Codes) -> list[int]:
        """Per action, rank by rank, how long its rank waits before it for a message, in ns."""
        offsets, line = pack(self.instance, codes)
        return [int(gap) for gap in self._evaluate(offsets, line)[1][gaps_at(self.tables, len(line)) :]]

    def _evaluate(self, offsets: Vector, line: Vector) -> tuple[int, Vector]:
        scratch = vector([0] * scratch_size(self.tables, len(line)))
        return int(evaluate_line(self.tables, offsets, line, scratch, self.ends, self.limits)), scratch

    def run(
        self,
        codes: Codes,
        tries: int,
        *,
        seed: int,
        heat: float = 1.5e-4,
        goal: int = 0,
        stop: Callable[[], bool] = lambda: False,
        chunk: int = 0,
        frozen_blocks: Sequence[tuple[int, int, int]] | None = None,
    ) -> Codes:
        """The best order met in ``tries`` tries from a legal order.

        heat : first temperature as a share of the value. goal : value at which to stop.
        stop : asked between chunks of tries, whether to end early. fences : per rank (low, high, copies):
        the block at these places of its row stays as it is, or, with more than one copy in a row, all
        copies are changed alike.
        """
        instance, p = self.instance, self.instance.num_ranks
        offsets, current = pack(instance, codes)
        size = int(offsets[p])
        best, trial = vector([int(c) for c in current]), vector([0] * size)
        scratch = vector([0] * scratch_size(self.tables, size))
        spare = vector([0] * (3 * max(len(row) for row in codes)))
        score = int(evaluate_line(self.tables, offsets, current, scratch, self.ends, self.limits))
        scores = vector([score, score, 0, int(scratch[3 * p])])
        waits = gaps_at(self.tables, size)
        frozen = vector([0] * (3 * p))
        for r, (low, high, copies) in enumerate(frozen_blocks or ()):
            begin = int(offsets[r])
            frozen[3 * r], frozen[3 * r + 1], frozen[3 * r + 2] = begin + low, begin + high, copies
        gaps = vector([int(gap) for gap in scratch[waits:]])
        state = vector([(seed * 2_654_435_761 + 88_675_123) % 0xFFFFFFFF + 1, 0, 0, 0, 0])
        chunk = chunk or max(50, 3_000_000 // size // 10)
        done = 0
        while done < tries and not stop():
            done_now = int(
                anneal(
                    self.tables,
                    offsets,
                    current,
                    best,
                    trial,
                    scores,
                    state,
                    done,
                    min(tries, done + chunk),
                    tries,
                    float(heat * score),
                    goal,
                    self.jumps,
                    self.exponential,
                    scratch,
                    self.ends,
                    self.limits,
                    spare,
                    self.counts,
                    gaps,
                    frozen,
                )
            )
            if done_now < min(tries, done + chunk):
                break
            done = done_now
        return unpack(instance, offsets, best)
