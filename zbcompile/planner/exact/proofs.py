"""Proofs by CP-SAT where the hand-checkable bounds leave a gap: by the exact model and the crossing bound."""

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
from zbcompile.planner.core.instance import BW, Codes, Fusing, is_chain
from zbcompile.planner.core.paths import Paths
from zbcompile.planner.core.scorer import Scorer
from zbcompile.planner.exact.crossing import crossing_bound, grids, most_likely_ranks, rounding_loss, shifted
from zbcompile.planner.exact.message_model import can_model
from zbcompile.planner.exact.model import MODELS, ExactResult, ask_below, solve_exact, split_is_exact
from zbcompile.planner.exact.ticks import exact_unit
from zbcompile.planner.improve.anneal import Annealer
from zbcompile.planner.incumbent import Order
from zbcompile.planner.run import Run
from zbcompile.schedule.messages import messages_of

__all__ = ["EXACT_ACTIONS", "Crossing", "Exact", "FromBelow", "QuickCrossing"]

EXACT_ACTIONS = 400
"""Most actions for which the exact model is worth building."""

WHOLE_ACTIONS = 200
"""Most actions and messages for which fusing and what sends do to their ranks are in the exact model."""

BELOW_ACTIONS = 6500
"""Most actions about which questions from below are asked."""

BELOW_STEPS = 1000
"""The questions end when the gap is one of so many parts of the value."""

CROSSING_MICROBATCHES = 48
"""Most microbatches for which the crossing model is worth building."""

CROSSING_PLACES = 200_000
"""Most places of one rank's model where a pair of microbatches may pass each other."""

BELOW_PAIRS = 1_000_000
"""Most pairs of an F and another action of its rank about which questions from below are asked."""

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


@dataclass(frozen=True, slots=True)
class Exact:
    """CP-SAT on a whole small problem: a better order, a better bound, or both.

    Attributes
    ----------
    actions
        Most actions for which the model is built.
    limit
        Share of the time limit that it may take.
    early
        Whether it is asked before the search, and so only where the crossing models are not.
    """

    name: str = "exact"
    actions: int = EXACT_ACTIONS
    limit: float = 1.0
    early: bool = False

    def applies(self, run: Run) -> bool:
        """Return whether the problem is small enough."""
        return run.actions <= self.actions and not (self.early and crossing_applies(run))

    def share(self, run: Run) -> float:
        """Return 0: it takes what is left."""
        return 0.0

    def prove(self, run: Run) -> Iterator[Bound | Order]:
        """Yield the solver's orders and bound.

        Where the user says what is fused, the best such order is asked for first; bounds are for all choices.
        """
        whole = whole_applies(run)
        end = time.monotonic() + max(0.1, min(self.limit * run.nominal_s, run.seconds_left))
        if whole and run.options.fusing is not Fusing.AUTO:
            result = self._ask(run, run.options.fusing, (end - time.monotonic()) / 2)
            if result.codes is not None:
                yield self._order(run, result.codes)
        result = self._ask(run, Fusing.AUTO, max(0.1, end - time.monotonic()))
        if result.codes is not None:
            yield self._order(run, result.codes)
        if result.bound_ns > run.bound.value_ns:
            yield Bound(result.bound_ns, "cp_sat", run.instance.objective, _witness(run, whole))

    def _ask(self, run: Run, fusing: Fusing, seconds: float) -> ExactResult:
        """Ask the model of the problem, or that of costs that no fusing undercuts."""
        best, whole = run.incumbent.codes, whole_applies(run)
        if best is not None and not whole and any(kind == BW for row in best for kind, _ in row):
            best = None
        return solve_exact(
            run.instance if whole else run.instance.relaxed(),
            lower=run.bound.value_ns,
            incumbent=best,
            time_limit_s=seconds,
            seed=run.seed,
            clock=run.incumbent.clock if whole and run.holds_rank else None,
            fusing=fusing,
        )

    def _order(self, run: Run, codes: Codes) -> Order:
        best = run.incumbent.order
        return best.then(self.name, codes) if best else Order(codes, (self.name,))


def whole_applies(run: Run) -> bool:
    """Return whether the model of the whole problem is small enough, and knows its send mode.

    Else only the model of costs that no fusing undercuts is asked, without what sends do to their ranks.
    """
    messages = sum(1 for _ in messages_of(run.problem)) if run.holds_rank else 0
    if not can_model(run.problem.sends):
        return False
    plain = not messages and split_is_exact(run.instance)
    return plain or run.actions + messages <= WHOLE_ACTIONS


def _witness(run: Run, whole: bool) -> dict[str, object]:
    """Return the witness of a bound by the model of the whole problem, or of costs that undercut it."""
    return {"solver": "CP-SAT", "model": MODELS[0 if whole else 1], "actions": run.actions}


def below_applies(run: Run) -> bool:
    """Return whether questions from below are worth asking.

    They are for several stages per rank and about as many microbatches as ranks: memory then leaves the
    solver free.
    """
    instance = run.instance
    return (
        not run.holds_rank
        and instance.num_stages > instance.num_ranks
        and 2 * instance.num_microbatches <= 3 * instance.num_ranks
        and run.actions <= BELOW_ACTIONS
        and sum(3 * (len(row) * instance.num_microbatches) ** 2 for row in instance.stages_of) <= BELOW_PAIRS
    )


@dataclass(frozen=True, slots=True)
class FromBelow:
    """Halves the gap again and again.

    CP-SAT is asked for an order below the middle, or for the proof that there is none. A question gets a
    quarter of the time that is left; what it does not answer counts as too hard, and the next one is asked
    further down.
    """

    name: str = "from_below"

    def applies(self, run: Run) -> bool:
        """Return whether questions from below are worth asking."""
        return below_applies(run)

    def share(self, run: Run) -> float:
        """Return the share of the time to leave for it."""
        return 0.3 if below_applies(run) else 0.0

    def prove(self, run: Run) -> Iterator[Bound | Order]:
        """Yield what the answers say."""
        if run.value is None:
            return
        instance = run.instance.relaxed()
        witness = _witness(run, split_is_exact(run.instance))
        high = run.value  # the highest question still worth asking
        end = time.monotonic() + min(run.seconds_left, run.nominal_s)
        while not run.proved and high - run.bound.value_ns > run.value // BELOW_STEPS:
            left, middle = end - time.monotonic(), (run.bound.value_ns + high + 1) // 2
            if left <= 0:
                return
            result = ask_below(instance, middle, time_limit_s=left / 4, seed=run.seed)
            if result.codes is not None:
                yield Order(result.codes, (self.name,))
            elif result.proved:
                yield Bound(middle, "cp_sat", instance.objective, witness)
                continue
            high = middle - 1


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
