"""Where the hand-checkable bounds leave a gap, CP-SAT: the exact model, and the crossing bound."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

from ortools.sat.python import cp_model

from zbcompile.planner.bounds.analytic import Bound
from zbcompile.planner.core.instance import BW, Codes, is_chain
from zbcompile.planner.core.paths import Paths
from zbcompile.planner.exact.crossing import crossing_bound, grids, most_likely_ranks, rounding_loss, shifted
from zbcompile.planner.exact.model import ask_below, exact_unit, solve_exact, split_is_exact
from zbcompile.planner.improve.anneal import Annealer
from zbcompile.planner.incumbent import Best

__all__ = [
    "EXACT_ACTIONS",
    "crossing_applies",
    "glance",
    "proof_share",
    "prove_crossing",
    "prove_exact",
    "prove_from_below",
]

EXACT_ACTIONS = 400
"""Most actions for which the exact model is worth building."""

BELOW_ACTIONS = 6500
"""Most actions about which questions from below are asked."""

BELOW_STEPS = 1000
"""They end when the gap is one of so many parts of the value."""

CROSSING_MICROBATCHES = 48
"""Most microbatches for which the crossing model is worth building."""

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


def prove_exact(best: Best, seed: int, time_limit_s: float) -> None:
    """Let CP-SAT close a small instance: a better order, a better bound, or both."""
    flat = best.flat
    actions = 3 * flat.num_stages * flat.num_microbatches
    if best.done or actions > EXACT_ACTIONS:
        return
    exact = split_is_exact(flat) and best.problem.transport == "async"
    hint = best.codes
    if hint is not None and any(kind == BW for row in hint for kind, _ in row):
        hint = None
    result = solve_exact(
        flat if exact else flat.relaxed(),
        lower=best.bound.value_ns,
        incumbent=hint,
        time_limit_s=max(0.1, min(time_limit_s, best.seconds_left)),
        seed=seed,
    )
    if result.codes is not None:
        best.offer(result.codes, "cp_sat")
    if result.bound_ns > best.bound.value_ns:
        witness = {
            "solver": "CP-SAT",
            "model": "exact" if exact else "exact on costs that no fusing undercuts",
            "actions": actions,
        }
        best.raise_bound(Bound(result.bound_ns, "cp_sat", flat.objective, witness))


def below_applies(best: Best) -> bool:
    """Several stages per rank, about as many microbatches as ranks: memory leaves the solver free."""
    flat = best.flat
    return (
        best.problem.transport == "async"
        and flat.num_stages > flat.num_ranks
        and 2 * flat.num_microbatches <= 3 * flat.num_ranks
        and 3 * flat.num_stages * flat.num_microbatches <= BELOW_ACTIONS
    )


def prove_from_below(best: Best, seed: int) -> None:
    """Halve the gap again and again: CP-SAT is asked for an order below the middle, or the proof of none.

    A question gets a quarter of the time that is left; what it does not answer counts as too hard, and the
    next one is asked further down.
    """
    if best.done or best.value is None or not below_applies(best):
        return
    flat = best.flat.relaxed()
    exact = split_is_exact(best.flat)
    witness = {
        "solver": "CP-SAT",
        "model": "exact" if exact else "exact on costs that no fusing undercuts",
        "actions": 3 * flat.num_stages * flat.num_microbatches,
    }
    high = best.value  # the highest question still worth asking
    while not best.done and high - best.bound.value_ns > best.value // BELOW_STEPS:
        middle = (best.bound.value_ns + high + 1) // 2
        result = ask_below(flat, middle, time_limit_s=best.seconds_left / 4, seed=seed)
        if result.codes is not None:
            best.offer(result.codes, "cp_sat")
        elif result.proved:
            best.raise_bound(Bound(middle, "cp_sat", flat.objective, witness))
            continue
        high = middle - 1


def crossing_applies(best: Best) -> bool:
    """One stage per rank, not too many microbatches, and at most the memory of p microbatches."""
    flat = best.flat
    return (
        best.problem.transport == "async"
        and is_chain(flat)
        and flat.num_microbatches <= CROSSING_MICROBATCHES
        and min(flat.room[r] // max(1, flat.saved[r]) for r in range(flat.num_ranks)) <= flat.num_ranks
    )


def proof_share(best: Best, time_limit_s: float) -> float:
    """Share of the time to leave for the solver: most of it where the whole chain may close.

    It takes 30 to 60 s for p x m = 192 and 10 to 20 s for 64, on one of two cores.
    """
    if not crossing_applies(best):
        return 0.3 if below_applies(best) else 0.0
    size = best.flat.num_ranks * best.flat.num_microbatches
    return 0.9 if size <= 2.5 * time_limit_s else 0.8 if size <= 3.5 * time_limit_s else 0.4


def glance(best: Best, seed: int, time_limit_s: float) -> None:
    """The crossing bound of the most likely rank on the coarsest grid: seconds that may end the search."""
    if best.done or best.value is None or not crossing_applies(best):
        return
    lane = _Lane(best, seed, min(time_limit_s, best.seconds_left))
    best.raise_bound(lane.ask(lane.likely[0], lane.grids[0], time_limit_s)[0])


def prove_crossing(best: Best, seed: int) -> None:
    """Use the time that is left for the crossing models: single ranks beside the whole chain.

    Two lanes of questions, each in a thread of its own (CP-SAT releases Python's lock). A lane starts from
    what is known now and builds on its own answers alone, so that what comes out does not hang on
    which of them is faster.
    """
    if best.done or best.value is None or not crossing_applies(best):
        return
    answers: queue.SimpleQueue[Answer | None] = queue.SimpleQueue()
    lanes = [_Lane(best, seed, best.seconds_left) for _ in range(2)]
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
                    best.offer(codes, "cp_sat")
                best.raise_bound(bound)
                if best.proved:
                    break
        finally:
            while not all(future.done() for future in running):
                for lane in lanes:
                    lane.stop()
                time.sleep(0.02)
    for future in running:
        future.result()


Answer = tuple[Bound, list[Codes]]


class _Lane:
    """Questions to the crossing models, one after the other, each with the answers before it as known."""

    def __init__(self, best: Best, seed: int, seconds: float) -> None:
        assert best.value is not None
        self.flat, self.real, self.seed = best.flat.relaxed(), best.flat, seed
        self.end = time.monotonic() + seconds
        self.value, self.known = best.value, best.bound.value_ns
        self.head = Paths.of(self.flat).head
        self.likely = most_likely_ranks(self.flat)
        self.grids = grids(shifted(self.flat), FINEST_GRID)
        self.exact = Fraction(exact_unit(self.flat))
        self.solver: cp_model.CpSolver | None = None
        self.stopped = False

    @property
    def left(self) -> float:
        """Seconds that this lane may still use."""
        return 0.0 if self.stopped or self.known >= self.value else self.end - time.monotonic()

    def stop(self) -> None:
        """End the question that is being asked, from another thread, and ask no more. To be called until the
        lane ends: a question that is still being written down cannot be stopped."""
        self.stopped = True
        solver = self.solver
        if solver is not None:
            solver.stop_search()

    def single_ranks(self) -> Iterator[Answer]:
        """The most likely rank on the finest grid; if that ends before the time does, the whole chain there
        and on the times themselves, or two other ranks where the chain is too long."""
        finest = self.grids[-1]
        questions: list[tuple[int | None, Fraction]] = [(self.likely[0], finest)]
        if self.flat.num_ranks * self.flat.num_microbatches <= WHOLE_CHAIN:
            questions += [(None, finest), (None, self.exact)]
        else:
            questions += [(rank, finest) for rank in self.likely[1:3]]
        return self._answers(questions)

    def whole_chain(self) -> Iterator[Answer]:
        """The whole chain on grids that are close enough to the times, at last on the times themselves."""
        if self.flat.num_ranks * self.flat.num_microbatches > WHOLE_CHAIN:
            return iter(())
        close = [g for g in self.grids if rounding_loss(self.flat, g) <= CLOSE_LOSS] or self.grids[-1:]
        return self._answers([(None, grid) for grid in [*(g for g in close if g > self.exact), self.exact]])

    def _answers(self, questions: list[tuple[int | None, Fraction]]) -> Iterator[Answer]:
        for rank, grid in questions:
            if self.left > MOMENT_S:
                yield self.ask(rank, grid, self.left)

    def ask(self, rank: int | None, grid: Fraction, seconds: float) -> Answer:
        """One question; its bound, and for the whole chain its order, as found and annealed."""
        head = self.head[rank] if rank is not None and self.flat.objective == "makespan" else 0
        self.solver = cp_model.CpSolver()
        found = crossing_bound(
            self.flat,
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
            annealer = Annealer(self.real)
            if annealer.score(found.codes) is not None:
                orders = [found.codes, annealer.run(found.codes, TRIES, seed=self.seed + 1, goal=self.known)]
                scores = [annealer.score(codes) for codes in orders]
                self.value = min(self.value, *(score[0] for score in scores if score is not None))
        return Bound(head + found.value_ns, "crossing", self.flat.objective, witness), orders
