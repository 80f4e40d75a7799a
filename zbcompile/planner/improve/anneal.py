"""Simulated annealing on full orders, W's and BW's too."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from zbcompile.planner.core.compiled import vector
from zbcompile.planner.core.instance import Codes, Instance
from zbcompile.planner.core.tables import EXPONENTIAL, Tables, pack, unpack
from zbcompile.planner.improve.anneal_kernel import anneal
from zbcompile.planner.improve.cells import lay_out

__all__ = ["JUMPS", "Annealer", "chunks"]

_CHUNK = 300_000
"""Actions that are timed between two questions whether to stop."""

JUMPS = [1 + int(2.5 * x) for x in EXPONENTIAL]
"""Lengths of moves."""


def chunks(tries: int, actions: int, stop: Callable[[], bool]) -> Iterator[tuple[int, int]]:
    """Yield ranges of tries of so many actions each, a moment long, until there is reason to stop."""
    size = max(1, _CHUNK // actions)
    for first in range(0, tries, size):
        if stop():
            return
        yield first, min(tries, first + size)


class Annealer:
    """Anneals orders of one problem. Each thread needs an annealer of its own.

    Attributes
    ----------
    instance
        The problem.
    tables
        The same as flat arrays.
    """

    def __init__(self, instance: Instance) -> None:
        self.instance, self.tables = instance, Tables.of(instance)
        self.jumps, self.exponential = vector(JUMPS), vector(EXPONENTIAL)

    def run(
        self,
        codes: Codes,
        tries: int,
        *,
        seed: int,
        heat: float = 1.5e-4,
        goal: int = 0,
        stop: Callable[[], bool] = lambda: False,
        frozen_blocks: Sequence[tuple[int, int, int]] | None = None,
    ) -> Codes:
        """Return the best order met in a number of tries.

        Parameters
        ----------
        codes
            A legal order to begin with.
        tries
            Number of tries.
        seed
            Decides the changes.
        heat
            First temperature as a share of the value.
        goal
            Value in ns at which to stop.
        stop
            Asked between chunks of tries whether to end early.
        frozen_blocks
            Per rank (low, high, copies): the block at these places of its row stays as it is, or, with more
            than one copy in a row, all copies are changed alike.
        """
        instance, p = self.instance, self.instance.num_ranks
        offsets, best = pack(instance, codes)
        size = int(offsets[p])
        cells = lay_out(instance, codes, (seed * 2_654_435_761 + 88_675_123) % 0xFFFFFFFF + 1)
        scores, frozen = vector([0] * 5), vector([0] * (3 * p))
        for r, (low, high, copies) in enumerate(frozen_blocks or ()):
            begin = int(offsets[r])
            frozen[3 * r], frozen[3 * r + 1], frozen[3 * r + 2] = begin + low, begin + high, copies
        for first, last in chunks(tries, size, stop):
            reached = anneal(
                self.tables, cells, offsets, best, scores, first, last, tries, heat, goal, self.jumps,
                self.exponential, frozen,
            )  # fmt: skip
            if int(reached) < last:
                break
        return unpack(instance, offsets, best)
