"""Proofs by the exact model where the hand-checkable bounds leave a gap."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zbcompile.planner.bounds.bound import Bound
from zbcompile.planner.core.instance import BW, Codes, Fusing
from zbcompile.planner.exact.crossing_proofs import crossing_applies
from zbcompile.planner.exact.reach import MODELS, can_model, load_solver, split_is_exact
from zbcompile.planner.incumbent import Order
from zbcompile.planner.run import Run
from zbcompile.schedule.messages import messages_of

if TYPE_CHECKING:
    from zbcompile.planner.exact.model import ExactResult

__all__ = ["EXACT_ACTIONS", "Exact", "FromBelow"]

EXACT_ACTIONS = 400
"""Most actions for which the exact model is worth building."""

WHOLE_ACTIONS = 200
"""Most actions and messages for which fusing and what sends do to their ranks are in the exact model."""

BELOW_ACTIONS = 6500
"""Most actions about which questions from below are asked."""

BELOW_STEPS = 1000
"""The questions end when the gap is one of so many parts of the value."""

BELOW_PAIRS = 1_000_000
"""Most pairs of an F and another action of its rank about which questions from below are asked."""


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
        load_solver()
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
        from zbcompile.planner.exact.model import solve_exact

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
        load_solver()
        from zbcompile.planner.exact.model import ask_below

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
