"""Proofs by the crossing models, for one stage per rank: of single ranks and of the whole chain."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from zbcompile.planner.bounds.bound import Bound
from zbcompile.planner.core.instance import is_chain
from zbcompile.planner.exact.reach import load_solver
from zbcompile.planner.incumbent import Order
from zbcompile.planner.run import Run

__all__ = ["Crossing", "QuickCrossing", "crossing_applies"]

CROSSING_MICROBATCHES = 48
"""Most microbatches for which the crossing model is worth building."""

CROSSING_PLACES = 200_000
"""Most places of one rank's model where a pair of microbatches may pass each other."""


def crossing_applies(run: Run) -> bool:
    """Return whether the crossing models are worth building.

    They are for one stage per rank, not too many microbatches, and at most the memory of p microbatches.
    """
    instance = run.instance
    return (
        not run.holds_rank
        and is_chain(instance)
        and instance.num_microbatches <= CROSSING_MICROBATCHES
        and instance.num_ranks * instance.num_microbatches**2 // 2 <= CROSSING_PLACES
        and min(instance.headroom[r] // max(1, instance.saved[r]) for r in range(instance.num_ranks))
        <= instance.num_ranks
    )


@dataclass(frozen=True, slots=True)
class QuickCrossing:
    """The most likely rank's crossing bound on the coarsest grid: it takes seconds and may end the search."""

    name: str = "quick_crossing"

    def applies(self, run: Run) -> bool:
        """Return whether the crossing models are worth building."""
        return crossing_applies(run)

    def share(self, run: Run) -> float:
        """Return 0: it comes before improving."""
        return 0.0

    def prove(self, run: Run) -> Iterator[Bound | Order]:
        """Yield the bound."""
        if run.value is None:
            return
        load_solver()
        from zbcompile.planner.exact.lanes import Lane

        limit = run.nominal_s / 12
        lane = Lane(run, self.name, min(limit, run.seconds_left))
        yield lane.ask(lane.likely[0], lane.grids[0], limit)[0]


@dataclass(frozen=True, slots=True)
class Crossing:
    """The crossing models for the time that is left: single ranks beside the whole chain.

    Two lanes of questions run in a thread each (CP-SAT releases Python's lock). A lane starts from what is
    known now and builds on its own answers alone, so that what comes out does not depend on which of them is
    faster.
    """

    name: str = "crossing"

    def applies(self, run: Run) -> bool:
        """Return whether the crossing models are worth building."""
        return crossing_applies(run)

    def share(self, run: Run) -> float:
        """Return the share of the time to leave for it: most of it where the whole chain may close.

        It takes 30 to 60 s for p x m = 192 and 10 to 20 s for 64, on one of two cores.
        """
        if not crossing_applies(run):
            return 0.0
        size, seconds = run.instance.num_ranks * run.instance.num_microbatches, run.nominal_s
        return 0.9 if size <= 2.5 * seconds else 0.8 if size <= 3.5 * seconds else 0.4

    def prove(self, run: Run) -> Iterator[Bound | Order]:
        """Yield what the answers say."""
        if run.value is None:
            return
        load_solver()
        from zbcompile.planner.exact.lanes import Lane, side_by_side

        lanes = [Lane(run, self.name, min(run.seconds_left, run.nominal_s)) for _ in range(2)]
        for bound, orders in side_by_side(lanes, [lanes[0].single_ranks(), lanes[1].whole_chain()]):
            yield from orders
            yield bound
            if run.proved:
                return
