"""Questions to the exact model: the shortest order, any order below a value, or the proof that there is none.

The model (`zbcompile.planner.exact.order_model`, with messages `zbcompile.planner.exact.message_model`)
decides the order of F, B, W and BW, what is fused, and with it where sends and receives stand. Every
order that it gives is timed by the planner's clocks, as all others are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ortools.sat.python import cp_model

from zbcompile.planner.core.instance import Codes, Fusing, Instance
from zbcompile.planner.core.paths import NO_PATH, Paths
from zbcompile.planner.core.score import fits, latest_row_starts, value_of
from zbcompile.planner.core.times import Clock
from zbcompile.planner.exact.early_ends import end_early
from zbcompile.planner.exact.memory_model import add_memory
from zbcompile.planner.exact.message_model import add_messages
from zbcompile.planner.exact.order_model import OrderModel
from zbcompile.planner.exact.solver import run
from zbcompile.planner.exact.ticks import Ticks

__all__ = ["ExactResult", "ask_below", "refute", "solve_exact"]


_MOST_TICKS = 1 << 60
"""Longest horizon of a model: the solver adds in 64 bits."""


@dataclass(frozen=True, slots=True)
class ExactResult:
    """What the solver reached.

    Attributes
    ----------
    codes
        The best order found, if any.
    value_ns
        Its value.
    bound_ns
        What is proved: no order is shorter.
    proved
        Whether the question was answered to the end.
    seconds
        Time used.
    """

    codes: Codes | None
    value_ns: int | None
    bound_ns: int
    proved: bool
    seconds: float


@dataclass(frozen=True, slots=True)
class _Question:
    """What is asked about.

    Attributes
    ----------
    instance
        The problem.
    clock
        The clock of its send mode where sends hold their rank, else ``None``.
    fusing
        Which backwards may be, or are, fused.
    seed
        The solver's seed.
    """

    instance: Instance
    clock: Clock | None
    fusing: Fusing
    seed: int

    def value(self, codes: Codes) -> int | None:
        """Return the value of an order in ns, or ``None`` on deadlock."""
        return value_of(self.instance, codes) if self.clock is None else self.clock.value(codes)

    def longest(self) -> int:
        """Return the time of everything in a row in ns: no order takes longer."""
        instance = self.instance
        times = zip(instance.forward, instance.backward, instance.weight, instance.fused, strict=True)
        work = sum(f + max(b + w, fused) for f, b, w, fused in times)
        return instance.num_microbatches * (work + sum(instance.rules.lags)) + instance.steps.all_in_a_row()

    def answer(
        self, lower: int, upper: int, hint: Codes | None, time_limit_s: float, *, any_order: bool = False
    ) -> ExactResult:
        """Ask for an order with a value from ``lower`` to ``upper``, as short as possible.

        The model's span of an order may be less than the order's own (`OrderModel`). Where the answer is such
        an order, it is asked again with ranks that end as early as they can, unless it is short enough.
        Where stages cost something once a step, the question stays open instead.
        """
        first = self._ask(lower, upper, hint, time_limit_s, early=False)
        value = first.value_ns
        if value is None or value <= first.bound_ns or not first.proved:
            return first
        if any_order and value <= upper:
            return first
        if self.instance.steps.any:
            return replace(first, proved=False)
        left = time_limit_s - first.seconds
        again = self._ask(max(lower, first.bound_ns), upper, first.codes, left, early=True)
        again = replace(again, seconds=first.seconds + again.seconds)
        if again.codes is None and not again.proved and value <= upper:
            return replace(again, codes=first.codes, value_ns=value)
        return again

    def _ask(
        self, lower: int, upper: int, hint: Codes | None, time_limit_s: float, *, early: bool
    ) -> ExactResult:
        ticks = Ticks.of(self.instance, self.clock, early=early)
        horizon = self._horizon(ticks, upper)
        if horizon > _MOST_TICKS:
            return ExactResult(None, None, lower, False, 0.0)
        orders = OrderModel(ticks, horizon, ticks.least(lower), self.fusing)
        if not orders.in_reach:
            return ExactResult(None, None, upper + 1, True, 0.0)
        orders.model.add(orders.value <= ticks.most(upper))
        add_memory(orders)
        add_messages(orders)
        orders.chain()
        if early:
            end_early(orders)
        if hint is not None:
            orders.hint(hint, self._starts(ticks, hint))
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = self.seed
        solver.parameters.max_time_in_seconds = max(0.01, time_limit_s)
        if ticks.ways:  # found to close more of these, by sooner trying more orders
            solver.parameters.linearization_level = 0
        status = run(solver, orders.model, horizon)
        seconds = solver.wall_time
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            closed = status == cp_model.INFEASIBLE
            return ExactResult(None, None, upper + 1 if closed else lower, closed, seconds)
        codes = orders.codes(solver)
        value = self.value(codes)
        if value is None or not fits(self.instance, codes):
            raise ArithmeticError("the solver's order deadlocks or exceeds a cap: a fault of the model")
        bound = ticks.bound_ns(math.ceil(solver.best_objective_bound - 1e-6))
        return ExactResult(codes, value, max(lower, bound), status == cp_model.OPTIMAL, seconds)

    def _horizon(self, ticks: Ticks, upper: int) -> int:
        """Return a time by which some order no longer than ``upper`` can end, counted from the first start.

        With every B before the last B of the rank that starts first, B's end within ``upper`` and W's may
        follow. Where that is not forced, it is the time of everything in a row.
        """
        instance, most = ticks.instance, ticks.most(upper) + ticks.spare
        if instance.objective == "makespan":
            return most
        paths = Paths.of(instance)
        if all(
            paths.f_to_f(0, s) != NO_PATH and paths.b_to_b(s, 0) != NO_PATH
            for s in range(instance.num_stages)
        ):
            weights = (sum(instance.weight[s] for s in row) for row in instance.stages_of)
            steps, stages_of = instance.steps, instance.stages_of
            beside = steps.lead(stages_of, "span") + steps.longest_tail(stages_of)
            return most + instance.num_microbatches * max(weights) + beside
        return ticks.most(self.longest()) + ticks.spare

    def _starts(self, ticks: Ticks, codes: Codes) -> list[list[int]]:
        """Return when an order's actions start in ticks, rank by rank, for a hint."""
        if self.clock is None:
            return latest_row_starts(ticks.instance, codes)
        starts = self.clock.starts(codes)
        assert starts is not None
        return [[start // ticks.unit * ticks.factor for start in row] for row in starts]


def solve_exact(
    instance: Instance,
    *,
    lower: int,
    incumbent: Codes | None = None,
    time_limit_s: float = 10.0,
    seed: int = 0,
    clock: Clock | None = None,
    fusing: Fusing = Fusing.AUTO,
) -> ExactResult:
    """Minimise span or makespan.

    Asks first for an order that meets ``lower`` (a third of the time), then minimises. One worker and a fixed
    seed.

    Parameters
    ----------
    instance
        The problem.
    lower
        A proved lower bound in ns.
    incumbent
        The best known order, for speed.
    time_limit_s
        Seconds.
    seed
        The solver's seed.
    clock
        The clock of the send mode, where sends hold their rank.
    fusing
        Which backwards may be, or are, fused.
    """
    question = _Question(instance, clock, fusing, seed)
    value = None if incumbent is None else question.value(incumbent)
    upper, spent = question.longest() if value is None else value, 0.0
    if value is None or value > lower:
        at_bound = question.answer(lower, lower, None, time_limit_s / 3)
        spent = at_bound.seconds
        if at_bound.codes is not None:
            return at_bound
        lower = max(lower, at_bound.bound_ns)
    hint = None if value is None else incumbent
    result = question.answer(lower, upper, hint, time_limit_s - spent)
    return ExactResult(result.codes, result.value_ns, result.bound_ns, result.proved, spent + result.seconds)


def refute(
    instance: Instance,
    value_ns: int,
    *,
    time_limit_s: float = 10.0,
    seed: int = 0,
    clock: Clock | None = None,
) -> bool | None:
    """Return True if no order is shorter than ``value_ns``, proved anew, and False if one is.

    ``None`` if the time ran out.
    """
    result = ask_below(instance, value_ns, time_limit_s=time_limit_s, seed=seed, clock=clock)
    if result.value_ns is not None and result.value_ns < value_ns:
        return False
    return True if result.proved else None


def ask_below(
    instance: Instance,
    value_ns: int,
    *,
    time_limit_s: float,
    seed: int = 0,
    clock: Clock | None = None,
) -> ExactResult:
    """Ask for any order shorter than ``value_ns``, or the proof that there is none.

    The proof is ``proved`` without ``codes``. A question far below the optimum is often answered in a second
    on problems that the solver never minimises: a short horizon leaves no choice.
    """
    question = _Question(instance, clock, Fusing.AUTO, seed)
    return question.answer(0, value_ns - 1, None, time_limit_s, any_order=True)
