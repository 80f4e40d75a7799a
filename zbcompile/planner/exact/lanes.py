"""Lanes: questions to the crossing models, one after the other, in a thread each."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

from ortools.sat.python import cp_model

from zbcompile.planner.bounds.bound import Bound
from zbcompile.planner.bounds.once_a_step import least_once_a_step
from zbcompile.planner.core.paths import Paths
from zbcompile.planner.core.scorer import Scorer
from zbcompile.planner.exact.crossing import crossing_bound, grids, most_likely_ranks, rounding_loss, shifted
from zbcompile.planner.exact.ticks import exact_unit
from zbcompile.planner.improve.anneal import Annealer
from zbcompile.planner.incumbent import Order
from zbcompile.planner.run import Run

__all__ = ["Lane", "side_by_side"]

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

Answer = tuple[Bound, list[Order]]
"""A bound, and orders that were found on the way."""


class Lane:
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


def side_by_side(lanes: list[Lane], asked: list[Iterator[Answer]]) -> Iterator[Answer]:
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
