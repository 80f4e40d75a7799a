"""Proofs by CP-SAT where the hand-checkable bounds leave a gap: by the exact model and the crossing bound."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

from ortools.sat.python import cp_model

from zbcompile.planner.bounds.bound import Bound
from zbcompile.planner.core.instance import BW, Codes, is_chain
from zbcompile.planner.core.paths import Paths
from zbcompile.planner.core.scorer import Scorer
from zbcompile.planner.exact.crossing import crossing_bound, grids, most_likely_ranks, rounding_loss, shifted
from zbcompile.planner.exact.model import ask_below, exact_unit, solve_exact, split_is_exact
from zbcompile.planner.improve.anneal import Annealer
from zbcompile.planner.incumbent import Incumbent

__all__ = [
    "EXACT_ACTIONS",
    "below_applies",
    "crossing_applies",
    "proof_share",
    "prove_crossing",
    "prove_exact",
    "prove_from_below",
    "quick_crossing_bound",
]

EXACT_ACTIONS = 400
"""Most actions for which the exact model is worth building."""

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


def prove_exact(incumbent: Incumbent, seed: int, time_limit_s: float) -> None:
    """Let CP-SAT close a small problem: a better order, a better bound, or both."""
    instance = incumbent.instance
    actions = 3 * instance.num_stages * instance.num_microbatches
    if incumbent.done or actions > EXACT_ACTIONS:
        return
    exact = split_is_exact(instance) and not incumbent.problem.sends.holds_rank
    hint = incumbent.codes
    if hint is not None and any(kind == BW for row in hint for kind, _ in row):
        hint = None
    result = solve_exact(
        instance if exact else instance.relaxed(),
        lower=incumbent.bound.value_ns,
        incumbent=hint,
        time_limit_s=max(0.1, min(time_limit_s, incumbent.seconds_left)),
        seed=seed,
    )
    if result.codes is not None:
        incumbent.offer(result.codes, "cp_sat")
    if result.bound_ns > incumbent.bound.value_ns:
        witness = {
            "solver": "CP-SAT",
            "model": "exact" if exact else "exact on costs that no fusing undercuts",
            "actions": actions,
        }
        incumbent.raise_bound(Bound(result.bound_ns, "cp_sat", instance.objective, witness))


def below_applies(incumbent: Incumbent) -> bool:
    """Return whether questions from below are worth asking.

    They are for several stages per rank and about as many microbatches as ranks: memory then leaves the
    solver free.
    """
    instance = incumbent.instance
    return (
        not incumbent.problem.sends.holds_rank
        and instance.num_stages > instance.num_ranks
        and 2 * instance.num_microbatches <= 3 * instance.num_ranks
        and 3 * instance.num_stages * instance.num_microbatches <= BELOW_ACTIONS
        and sum(3 * (len(row) * instance.num_microbatches) ** 2 for row in instance.stages_of) <= BELOW_PAIRS
    )


def prove_from_below(incumbent: Incumbent, seed: int) -> None:
    """Halve the gap again and again.

    CP-SAT is asked for an order below the middle, or for the proof that there is none. A question gets a
    quarter of the time that is left; what it does not answer counts as too hard, and the next one is asked
    further down.
    """
    if incumbent.done or incumbent.value is None or not below_applies(incumbent):
        return
    instance = incumbent.instance.relaxed()
    exact = split_is_exact(incumbent.instance)
    witness = {
        "solver": "CP-SAT",
        "model": "exact" if exact else "exact on costs that no fusing undercuts",
        "actions": 3 * instance.num_stages * instance.num_microbatches,
    }
    high = incumbent.value  # the highest question still worth asking
    while not incumbent.done and high - incumbent.bound.value_ns > incumbent.value // BELOW_STEPS:
        middle = (incumbent.bound.value_ns + high + 1) // 2
        result = ask_below(instance, middle, time_limit_s=incumbent.seconds_left / 4, seed=seed)
        if result.codes is not None:
            incumbent.offer(result.codes, "cp_sat")
        elif result.proved:
            incumbent.raise_bound(Bound(middle, "cp_sat", instance.objective, witness))
            continue
        high = middle - 1


def crossing_applies(incumbent: Incumbent) -> bool:
    """Return whether the crossing models are worth building.

    They are for one stage per rank, not too many microbatches, and at most the memory of p microbatches.
    """
    instance = incumbent.instance
    return (
        not incumbent.problem.sends.holds_rank
        and is_chain(instance)
        and instance.num_microbatches <= CROSSING_MICROBATCHES
        and instance.num_ranks * instance.num_microbatches**2 // 2 <= CROSSING_PLACES
        and min(instance.headroom[r] // max(1, instance.saved[r]) for r in range(instance.num_ranks))
        <= instance.num_ranks
    )


def proof_share(incumbent: Incumbent, time_limit_s: float) -> float:
    """Return the share of the time to leave for the solver: most of it where the whole chain may close.

    It takes 30 to 60 s for p x m = 192 and 10 to 20 s for 64, on one of two cores.
    """
    if not crossing_applies(incumbent):
        return 0.3 if below_applies(incumbent) else 0.0
    size = incumbent.instance.num_ranks * incumbent.instance.num_microbatches
    return 0.9 if size <= 2.5 * time_limit_s else 0.8 if size <= 3.5 * time_limit_s else 0.4


def quick_crossing_bound(incumbent: Incumbent, seed: int, time_limit_s: float) -> None:
    """Raise the bound by the most likely rank's crossing bound on the coarsest grid.

    It takes seconds and may end the search.
    """
    if incumbent.done or incumbent.value is None or not crossing_applies(incumbent):
        return
    lane = _Lane(incumbent, seed, min(time_limit_s, incumbent.seconds_left))
    incumbent.raise_bound(lane.ask(lane.likely[0], lane.grids[0], time_limit_s)[0])


def prove_crossing(incumbent: Incumbent, seed: int) -> None:
    """Use the time that is left for the crossing models: single ranks beside the whole chain.

    Two lanes of questions run in a thread each (CP-SAT releases Python's lock). A lane starts from what is
    known now and builds on its own answers alone, so that what comes out does not depend on which of them is
    faster.
    """
    if incumbent.done or incumbent.value is None or not crossing_applies(incumbent):
        return
    answers: queue.SimpleQueue[Answer | None] = queue.SimpleQueue()
    lanes = [_Lane(incumbent, seed, incumbent.seconds_left) for _ in range(2)]
    asked = [lanes[0].single_ranks(), lanes[1].whole_chain()]

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
                    continue
                bound, orders = answer
                for codes in orders:
                    incumbent.offer(codes, "cp_sat")
                incumbent.raise_bound(bound)
                if incumbent.proved:
                    break
        finally:
            while not all(future.done() for future in running):
                for lane in lanes:
                    lane.stop()
                time.sleep(0.02)
    for future in running:
        future.result()


Answer = tuple[Bound, list[Codes]]
"""A bound, and orders that were found on the way."""


class _Lane:
    """Questions to the crossing models, one after the other, each with the answers before it as known."""

    def __init__(self, incumbent: Incumbent, seed: int, seconds: float) -> None:
        assert incumbent.value is not None
        self.instance, self.real, self.seed = incumbent.instance.relaxed(), incumbent.instance, seed
        self.end = time.monotonic() + seconds
        self.value, self.known = incumbent.value, incumbent.bound.value_ns
        self.head = Paths.of(self.instance).head
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
        self.solver = cp_model.CpSolver()
        found = crossing_bound(
            self.instance,
            rank,
            grid,
            upper_ns=self.value - head,
            time_limit_s=seconds,
            seed=self.seed,
            known_ns=max(0, self.known - head),
            solver=self.solver,
        )
        self.solver = None
        self.known = max(self.known, head + found.value_ns)
        witness = {
            "solver": "CP-SAT",
            "rank": rank,
            "head_ns": head,
            "grid": [grid.numerator, grid.denominator],
            "units": found.units,
        }
        orders: list[Codes] = []
        if found.codes is not None:
            scorer = Scorer(self.real)
            if scorer.score(found.codes) is not None:
                annealed = Annealer(self.real).run(found.codes, TRIES, seed=self.seed + 1, goal=self.known)
                orders = [found.codes, annealed]
                scores = [scorer.score(codes) for codes in orders]
                self.value = min(self.value, *(score[0] for score in scores if score is not None))
        return Bound(head + found.value_ns, "crossing", self.instance.objective, witness), orders
