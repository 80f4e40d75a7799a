"""Proofs by the crossing models, for one stage per rank: of single ranks and of the whole chain."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction

from ortools.sat.python import cp_model

from zbcompile.planner.bounds.bound import Bound
from zbcompile.planner.bounds.once_a_step import least_once_a_step
from zbcompile.planner.core.instance import is_chain
from zbcompile.planner.core.paths import Paths
from zbcompile.planner.core.scorer import Scorer
from zbcompile.planner.exact.crossing import crossing_bound, grids, most_likely_ranks, rounding_loss, shifted
from zbcompile.planner.exact.ticks import exact_unit
from zbcompile.planner.improve.anneal import Annealer
from zbcompile.planner.incumbent import Order
from zbcompile.planner.run import Run

__all__ = ["Crossing", "QuickCrossing", "crossing_applies"]

CROSSING_MICROBATCHES = 48
"""Most microbatches for which the crossing model is worth building."""

CROSSING_PLACES = 200_000
"""Most places of one rank's model where a pair of microbatches may pass each other."""

WHOLE_CHAIN = 300
"""Most ranks times microbatches for which the whole chain is worth asking for."""

FINEST_GRID = 96
"""Units of the longest time on the finest grid."""

CLOSE_LOSS = 0.01
"""Share of the times that a grid may lose to rounding: its bound loses as much, and its orders may."""

TRIES = 20_000
"""Annealing tries from an order of the whole chain, whose times were rounded."""

MOMENT_S = 0.05
"""Less time than this is not worth a question."""


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
        limit = run.nominal_s / 12
        lane = _Lane(run, self.name, min(limit, run.seconds_left))
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
        lanes = [_Lane(run, self.name, min(run.seconds_left, run.nominal_s)) for _ in range(2)]
        for bound, orders in _side_by_side(lanes, [lanes[0].single_ranks(), lanes[1].whole_chain()]):
            yield from orders
            yield bound
            if run.proved:
                return


def _side_by_side(lanes: list[_Lane], asked: list[Iterator[Answer]]) -> Iterator[Answer]:
    """Yield the answers of several lanes as they come; stop the lanes once nobody asks for more."""
    answers: queue.SimpleQueue[Answer | None] = queue.SimpleQueue()

    def work(questions: Iterator[Answer]) -> None:
        try:
            for answer in questions:
                answers.put(answer)
        finally:
            answers.put(None)

    with ThreadPoolExecutor(len(lanes)) as threads:
        running = [threads.submit(work, questions) for questions in asked]
        try:
            open_lanes = len(lanes)
            while open_lanes:
                answer = answers.get()
                if answer is None:
                    open_lanes -= 1
                else:
                    yield answer
        finally:
            while not all(future.done() for future in running):
                for lane in lanes:
                    lane.stop()
                time.sleep(0.02)
    for future in running:
        future.result()


Answer = tuple[Bound, list[Order]]
"""A bound, and orders that were found on the way."""


class _Lane:
    """Questions to the crossing models, one after the other, each with the answers before it as known."""

    def __init__(self, run: Run, name: str, seconds: float) -> None:
        assert run.value is not None
        self.instance, self.real = run.instance.relaxed().without_steps(), run.instance
        self.seed = run.seed
        self.name, self.end = name, time.monotonic() + seconds
        self.value, self.known = run.value, run.bound.value_ns
        self.head = Paths.of(self.instance).head
        self.once = least_once_a_step(self.real)
        self.likely = most_likely_ranks(self.instance)
        self.grids = grids(shifted(self.instance), FINEST_GRID)
        self.exact = Fraction(exact_unit(self.instance))
        self.solver: cp_model.CpSolver | None = None
        self.stopped = False

    @property
    def left(self) -> float:
        """Seconds that this lane may still use."""
        return 0.0 if self.stopped or self.known >= self.value else self.end - time.monotonic()

    def stop(self) -> None:
        """End the question that is being asked, from another thread, and ask no more.

        To be called until the lane ends: a question that is still being written down cannot be stopped.
        """
        self.stopped = True
        solver = self.solver
        if solver is not None:
            solver.stop_search()

    def single_ranks(self) -> Iterator[Answer]:
        """Ask for the most likely rank on the finest grid.

        If that ends before the time does, ask for the whole chain there and on the times themselves, or for
        two other ranks if the chain is too long.
        """
        finest = self.grids[-1]
        questions: list[tuple[int | None, Fraction]] = [(self.likely[0], finest)]
        if self.instance.num_ranks * self.instance.num_microbatches <= WHOLE_CHAIN:
            questions += [(None, finest), (None, self.exact)]
        else:
            questions += [(rank, finest) for rank in self.likely[1:3]]
        return self._answers(questions)

    def whole_chain(self) -> Iterator[Answer]:
        """Ask for the whole chain on grids close enough to the times, at last on the times themselves."""
        if self.instance.num_ranks * self.instance.num_microbatches > WHOLE_CHAIN:
            return iter(())
        close = [g for g in self.grids if rounding_loss(self.instance, g) <= CLOSE_LOSS] or self.grids[-1:]
        return self._answers([(None, grid) for grid in [*(g for g in close if g > self.exact), self.exact]])

    def _answers(self, questions: list[tuple[int | None, Fraction]]) -> Iterator[Answer]:
        for rank, grid in questions:
            if self.left > MOMENT_S:
                yield self.ask(rank, grid, self.left)

    def ask(self, rank: int | None, grid: Fraction, seconds: float) -> Answer:
        """Ask one question; return its bound, and for the whole chain its order, as found and annealed."""
        head = self.head[rank] if rank is not None and self.instance.objective == "makespan" else 0
        beside = head + self.once
        self.solver = cp_model.CpSolver()
        found = crossing_bound(
            self.instance,
            rank,
            grid,
            upper_ns=self.value - beside,
            time_limit_s=seconds,
            seed=self.seed,
            known_ns=max(0, self.known - beside),
            solver=self.solver,
        )
        self.solver = None
        self.known = max(self.known, beside + found.value_ns)
        witness: dict[str, object] = {
            "solver": "CP-SAT",
            "rank": rank,
            "head_ns": head,
            "grid": [grid.numerator, grid.denominator],
            "units": found.units,
        }
        if self.once:
            witness["once_a_step_ns"] = self.once
        orders: list[Order] = []
        if found.codes is not None:
            scorer = Scorer(self.real)
            if scorer.score(found.codes) is not None:
                annealed = Annealer(self.real).run(found.codes, TRIES, seed=self.seed + 1, goal=self.known)
                orders = [Order(codes, (self.name,)) for codes in (found.codes, annealed)]
                scores = [scorer.score(order.codes) for order in orders]
                self.value = min(self.value, *(score[0] for score in scores if score is not None))
        return Bound(beside + found.value_ns, "crossing", self.instance.objective, witness), orders
