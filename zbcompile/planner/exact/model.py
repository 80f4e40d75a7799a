"""The exact model for CP-SAT: starts, one rank at a time, memory as a prefix sum.

Variables: the start of every F, B and W; per rank the booleans "X(j) is before F(i)" that its memory needs.
The k-th of each (kind, stage) is microbatch k. Fusing is not in the model: it is exact where
`Instance.relaxed` equals the problem's own costs; else its orders are valid, and its bound is taken on the
relaxed costs.

Actions without length. Of two actions that start together, one of them without length, starts do not say
which comes first, and memory depends on it. So where one of a problem's Z actions has no length, all times
and lags count K = Z + 1 fold and each action without length takes 1. An order of value v then has a value
from K v to K v + Z: start every action at K times its start, plus one for each action without length before
it in the order. So K v + Z is asked for where v is, and what is found divides by K.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ortools.sat.python import cp_model

from zbcompile.planner.core.instance import B, Codes, F, Instance, Op, W
from zbcompile.planner.core.latest_starts import latest_starts
from zbcompile.planner.core.paths import NO_PATH, Paths
from zbcompile.planner.core.score import fits, value_of
from zbcompile.planner.exact.solver import run

__all__ = ["ExactResult", "ask_below", "exact_unit", "refute", "solve_exact", "split_is_exact"]


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


def split_is_exact(instance: Instance) -> bool:
    """Return whether splitting every backward never loses: then the model's optimum is the problem's."""
    relaxed = instance.relaxed()
    return (relaxed.backward, relaxed.weight, relaxed.pending) == (
        instance.backward,
        instance.weight,
        instance.pending,
    )


def exact_unit(instance: Instance) -> int:
    """Return the largest time in ns that divides all times and lags."""
    return math.gcd(*instance.forward, *instance.backward, *instance.weight, *instance.rules.lags) or 1


@dataclass(frozen=True, slots=True)
class Ticks:
    """A problem in whole ticks in which every action has a length, and what its values say about ns.

    Attributes
    ----------
    instance
        The problem with its times in ticks.
    unit
        The largest time in ns that divides all times.
    factor
        Ticks per unit (K): 1 where every action has a length, else more than ``spare``.
    spare
        Actions without length in a step (Z), each a tick long here.
    """

    instance: Instance
    unit: int
    factor: int
    spare: int

    @staticmethod
    def of(instance: Instance) -> Ticks:
        """Count a problem's times in ticks."""
        times = (*instance.forward, *instance.backward, *instance.weight)
        unit, spare = exact_unit(instance), instance.num_microbatches * times.count(0)
        factor = spare + 1

        def lengths(values: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(value // unit * factor or 1 for value in values)

        ticking = replace(
            instance,
            forward=lengths(instance.forward),
            backward=lengths(instance.backward),
            weight=lengths(instance.weight),
            rules=instance.rules.with_lags(lambda wait: wait.lag_ns // unit * factor),
        )
        return Ticks(ticking, unit, factor, spare)

    def least(self, value_ns: int) -> int:
        """Return the least value in ticks of an order of at least ``value_ns``."""
        return -(-value_ns // self.unit) * self.factor

    def most(self, value_ns: int) -> int:
        """Return the most ticks that the best starts of an order of at most ``value_ns`` take."""
        return value_ns // self.unit * self.factor + self.spare

    def bound_ns(self, ticks: int) -> int:
        """Return a lower bound in ns from one in ticks."""
        return -(-(ticks - self.spare) // self.factor) * self.unit


class _Model:
    """The model of one problem in ticks.

    Attributes
    ----------
    model
        The CP-SAT model.
    start, before
        Its variables: starts, and whether one action comes before another.
    value
        The objective.
    in_reach
        Whether a single microbatch ends within the horizon. If not, the model says nothing: no order does.
    """

    def __init__(self, instance: Instance, horizon: int, lower: int) -> None:
        self.instance, self.paths = instance, Paths.of(instance)
        self.times = (instance.forward, instance.backward, instance.weight)
        self.model = cp_model.CpModel()
        self.horizon, self.in_reach = horizon, True
        self.start = {op: self._start_variable(op) for op in self._ops()}
        self.before: dict[tuple[Op, Op], cp_model.IntVar] = {}
        self._dependencies()
        for rank in range(instance.num_ranks):
            self._one_at_a_time(rank)
            self._memory(rank)
        self.value = self.model.new_int_var(min(lower, horizon), horizon, "value")
        self._objective()

    def _ops(self) -> Iterator[Op]:
        for s in range(self.instance.num_stages):
            for kind in (F, B, W):
                for i in range(self.instance.num_microbatches):
                    yield kind, s, i

    def length(self, op: Op) -> int:
        """Return the duration of an action."""
        return self.times[op[0]][op[1]]

    def end(self, op: Op) -> cp_model.LinearExpr:
        """Return the end of an action."""
        return self.start[op] + self.length(op)

    def _start_variable(self, op: Op) -> cp_model.IntVar:
        kind, s, _ = op
        head = self.paths.head[s if kind == F else self.instance.num_stages + s]
        head += self.instance.backward[s] if kind == W else 0
        latest = self.horizon - self.length(op)
        self.in_reach = self.in_reach and head <= latest
        return self.model.new_int_var(head, max(head, latest), f"{op}")

    def _dependencies(self) -> None:
        instance, add = self.instance, self.model.add
        for s in range(instance.num_stages):
            waits = [(kind, wait) for kind in (F, B, W) for wait in instance.rules.waits[kind][s]]
            for i in range(instance.num_microbatches):
                for kind, (before, other, lag) in waits:
                    if other == s:
                        add(self.start[kind, s, i] >= self.end((before, s, i)) + lag)
                if i:
                    for kind in (F, B, W):
                        add(self.start[kind, s, i] >= self.end((kind, s, i - 1)))
                for kind, (before, other, lag) in waits:
                    if other != s:
                        add(self.start[kind, s, i] >= self.end((before, other, i)) + lag)

    def _rank_ops(self, rank: int, *kinds: int) -> list[Op]:
        return [
            (kind, s, i)
            for s in self.instance.stages_of[rank]
            for kind in kinds
            for i in range(self.instance.num_microbatches)
        ]

    def _one_at_a_time(self, rank: int) -> None:
        self.model.add_no_overlap(
            [
                self.model.new_fixed_size_interval_var(self.start[op], self.length(op), f"i{op}")
                for op in self._rank_ops(rank, F, B, W)
            ]
        )

    def _precedes(self, a: Op, b: Op) -> cp_model.LinearExprT:
        """Return a literal (or 0, 1) that a comes before b on their rank."""
        if a[1] == b[1]:
            if a[0] <= b[0] and a[2] <= b[2]:
                return 1
            if b[0] <= a[0] and b[2] <= a[2]:
                return 0
        if (b, a) in self.before:
            return 1 - self.before[b, a]
        if (a, b) not in self.before:
            literal = self.model.new_bool_var(f"{a}<{b}")
            self.model.add(self.start[b] >= self.end(a)).only_enforce_if(literal)
            self.model.add(self.start[a] >= self.end(b)).only_enforce_if(~literal)
            self.before[a, b] = literal
        return self.before[a, b]

    def _memory(self, rank: int) -> None:
        """Keep the bytes held right after each F within the headroom.

        And right after each B that adds bytes, where M_W > M_B.
        """
        instance, headroom = self.instance, self.instance.headroom[rank]
        everything = sum(
            instance.num_microbatches * max(instance.saved[s], instance.pending[s])
            for s in instance.stages_of[rank]
        )
        if everything <= headroom:
            return
        growing = [op for op in self._rank_ops(rank, B) if instance.pending[op[1]] > instance.saved[op[1]]]
        for here in self._rank_ops(rank, F) + growing:
            held: list[cp_model.LinearExprT] = []
            for op in self._rank_ops(rank, F, B, W):
                kind, s, _ = op
                size = (instance.saved[s], instance.pending[s] - instance.saved[s], -instance.pending[s])[
                    kind
                ]
                if size:
                    held.append(size * (1 if op == here else self._precedes(op, here)))
            self.model.add(sum(held) <= headroom)
        for (a, b), literal in self.before.items():
            later = ((a[0], a[1], a[2] + 1), b)
            if later in self.before:
                self.model.add_implication(self.before[later], literal)

    def _objective(self) -> None:
        last = self.instance.num_microbatches - 1
        for stages in self.instance.stages_of:
            for s in stages:
                if self.instance.objective == "makespan":
                    self.model.add(self.value >= self.end((W, s, last)))
                    continue
                for x in stages:
                    self.model.add(self.value >= self.end((W, s, last)) - self.start[F, x, 0])
        self.model.minimize(self.value)

    def hint(self, codes: Codes) -> None:
        """Give a complete, feasible hint: every start and every boolean of a known order."""
        starts = latest_starts(self.instance, codes)
        for op, variable in self.start.items():
            self.model.add_hint(variable, starts[op])
        for (a, b), literal in self.before.items():
            self.model.add_hint(literal, starts[a] < starts[b])

    def codes(self, solver: cp_model.CpSolver) -> Codes:
        """Return the order of a solution. Every action has a length, so no two of a rank start together."""
        rows = []
        for rank in range(self.instance.num_ranks):
            ops = self._rank_ops(rank, F, B, W)
            ops.sort(key=lambda op: solver.value(self.start[op]))
            rows.append([(kind, s) for kind, s, _ in ops])
        return rows


def safe_horizon(instance: Instance, upper: int) -> int:
    """Return a time by which some order no longer than ``upper`` can end, counted from the first start.

    With every B before the last B of the rank that starts first, B's end within ``upper`` and W's may follow.
    Where that is not forced, it is the time of everything in a row.
    """
    paths = Paths.of(instance)
    chain = all(
        paths.f_to_f(0, s) != NO_PATH and paths.b_to_b(s, 0) != NO_PATH for s in range(instance.num_stages)
    )
    if instance.objective == "makespan":
        return upper
    if chain:
        weights = max(
            instance.num_microbatches * sum(instance.weight[s] for s in row) for row in instance.stages_of
        )
        return upper + weights
    return sum(instance.work(r) for r in range(instance.num_ranks)) + _all_lags(instance)


def solve_exact(
    instance: Instance,
    *,
    lower: int,
    incumbent: Codes | None = None,
    time_limit_s: float = 10.0,
    seed: int = 0,
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
        The best known order without BW, for speed.
    time_limit_s
        Seconds.
    seed
        The solver's seed.
    """
    value = None if incumbent is None else value_of(instance, incumbent)
    upper = (
        value
        if value is not None
        else sum(instance.work(r) for r in range(instance.num_ranks)) + _all_lags(instance)
    )
    spent = 0.0
    if value is None or value > lower:
        at_bound = _run(instance, lower, lower, None, time_limit_s / 3, seed)
        spent = at_bound.seconds
        if at_bound.codes is not None:
            return at_bound
    result = _run(
        instance, lower, upper, incumbent if value is not None else None, time_limit_s - spent, seed
    )
    return ExactResult(result.codes, result.value_ns, result.bound_ns, result.proved, spent + result.seconds)


def refute(instance: Instance, value_ns: int, *, time_limit_s: float = 10.0, seed: int = 0) -> bool | None:
    """Return True if no order is shorter than ``value_ns``, proved anew, and False if one is.

    ``None`` if the time ran out.
    """
    result = ask_below(instance, value_ns, time_limit_s=time_limit_s, seed=seed)
    if result.codes is not None:
        return False
    return True if result.proved else None


def ask_below(instance: Instance, value_ns: int, *, time_limit_s: float, seed: int = 0) -> ExactResult:
    """Ask for any order shorter than ``value_ns``, or the proof that there is none.

    The proof is ``proved`` without ``codes``. A question far below the optimum is often answered in a second
    on problems that the solver never minimises: a short horizon leaves no choice.
    """
    return _run(instance, 0, value_ns - 1, None, time_limit_s, seed)


def _all_lags(instance: Instance) -> int:
    """Return the sum of all travel times of a step."""
    return instance.num_microbatches * sum(instance.rules.lags)


def _run(
    instance: Instance, lower: int, upper: int, hint: Codes | None, time_limit_s: float, seed: int
) -> ExactResult:
    """Ask for an order with a value from ``lower`` to ``upper``, as short as possible.

    The model does not know of gradients that wait: its bounds hold, its orders are offered and may not fit.
    """
    instance = instance.without_sets()
    ticks = Ticks.of(instance)
    horizon = safe_horizon(ticks.instance, ticks.least(upper) + ticks.spare)
    if horizon > _MOST_TICKS:
        return ExactResult(None, None, lower, False, 0.0)
    built = _Model(ticks.instance, horizon, ticks.least(lower))
    if not built.in_reach:
        return ExactResult(None, None, upper + 1, True, 0.0)
    built.model.add(built.value <= ticks.most(upper))
    if hint is not None:
        built.hint(hint)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = seed
    solver.parameters.max_time_in_seconds = max(0.01, time_limit_s)
    status = run(solver, built.model)
    seconds = solver.wall_time
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        codes = built.codes(solver)
        value = value_of(instance, codes)
        if value is None or not fits(instance, codes):
            raise ArithmeticError("the solver's order deadlocks or exceeds a cap: a fault of the model")
        bound = ticks.bound_ns(math.ceil(solver.best_objective_bound - 1e-6))
        return ExactResult(codes, value, max(lower, bound), status == cp_model.OPTIMAL, seconds)
    bound = upper + 1 if status == cp_model.INFEASIBLE else lower
    return ExactResult(None, None, bound, status == cp_model.INFEASIBLE, seconds)
