"""The CP-SAT models behind the crossing bound: one rank of a chain, or the whole chain.

`OneRank` is a relaxation: rank d alone under the rules of `zbcompile.planner.exact.crossing`. `WholeChain`
has every rank, so that its solutions are orders; the crossing rules of rank 0 follow from the rest, but they
let the solver see early what a late microbatch costs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ortools.sat.python import cp_model

from zbcompile.planner.core.instance import B, Codes, F, Instance, W
from zbcompile.planner.core.paths import Paths
from zbcompile.planner.exact.solver import run

__all__ = ["OneRank", "Solved", "WholeChain"]


@dataclass(frozen=True, slots=True)
class Solved:
    """What the solver reached.

    Attributes
    ----------
    units
        Proved lower bound, one above the greatest value asked for if there is no solution.
    closed
        Whether the solver ended by itself.
    codes
        The order of the solution, of `WholeChain` alone.
    seconds
        Time used.
    """

    units: int
    closed: bool
    codes: Codes | None
    seconds: float


class _Rank:
    """F's, B's and W's of one rank: in turn, one at a time, within the rank's memory."""

    def __init__(self, model: cp_model.CpModel, instance: Instance, rank: int, horizon: int) -> None:
        self.model, self.instance, self.rank = model, instance, rank
        self.times = (instance.forward[rank], instance.backward[rank], instance.weight[rank])
        saved, headroom, m = instance.saved[rank], instance.headroom[rank], instance.num_microbatches
        self.fits = m if saved == 0 else min(m, headroom // saved)
        self.starts = [
            [model.new_int_var(0, horizon, f"{kind}{rank}.{i}") for i in range(m)] for kind in "fbw"
        ]
        self.f, self.b, self.w = self.starts
        self.order: dict[tuple[str, int, int], cp_model.IntVar] = {}
        intervals: list[cp_model.IntervalVar] = []
        for starts, length in zip(self.starts, self.times, strict=True):
            for before, after in zip(starts, starts[1:], strict=False):
                model.add(after >= before + length)
            intervals.extend(model.new_fixed_size_interval_var(x, length, "i") for x in starts)
        model.add_no_overlap(intervals)
        for i in range(m):
            model.add(self.w[i] >= self.b[i] + self.times[1])
        self._memory()

    def before(self, kind: Literal["b", "w"], k: int, i: int) -> cp_model.IntVar:
        """Return a literal: B_k (or W_k) ends before F_i starts; its negation is the other way round."""
        if (kind, k, i) not in self.order:
            literal = self.model.new_bool_var(f"{kind}{self.rank}.{k}<f{i}")
            starts, length = (self.b, self.times[1]) if kind == "b" else (self.w, self.times[2])
            self.model.add(self.f[i] >= starts[k] + length).only_enforce_if(literal)
            self.model.add(starts[k] >= self.f[i] + self.times[0]).only_enforce_if(~literal)
            self.order[kind, k, i] = literal
        return self.order[kind, k, i]

    def _memory(self) -> None:
        instance, d = self.instance, self.rank
        saved, pending, headroom = instance.saved[d], instance.pending[d], instance.headroom[d]
        _, back, weight = self.times
        extra = min(weight, back) if self.fits * saved + pending > headroom else 0
        for i in range(instance.num_microbatches):
            if i >= self.fits:
                self.model.add(self.f[i] >= self.b[i - self.fits] + back + extra)
            held = (i + 1) * saved
            if held <= headroom:
                continue
            freed = [(saved - pending) * self.before("b", k, i) for k in range(i)]
            freed += [pending * self.before("w", k, i) for k in range(i)]
            self.model.add(sum(freed) >= held - headroom)
        for (kind, k, i), literal in list(self.order.items()):
            for other in ((kind, k - 1, i), (kind, k, i + 1), ("b", k, i)):
                if other in self.order and other != (kind, k, i):
                    self.model.add_implication(literal, self.order[other])


class OneRank:
    """Rank d alone on whole-number times.

    Parameters
    ----------
    instance
        A chain with whole-number times.
    rank
        d.
    lower, upper
        The value is asked for between these.
    """

    def __init__(self, instance: Instance, rank: int, lower: int, upper: int) -> None:
        self.instance, self.d, self.m, self.horizon = instance, rank, instance.num_microbatches, upper
        self.model = cp_model.CpModel()
        self.row = _Rank(self.model, instance, rank, upper)
        new = self.model.new_int_var
        self.phi = [new(0, upper, f"phi{i}") for i in range(self.m)]
        self.beta = [new(0, upper, f"beta{i}") for i in range(self.m)]
        self.value = new(max(0, lower), upper, "value")
        self.down, self.up = self._paths()
        trip = Paths.of(instance).f_to_b(rank, rank)
        for i in range(self.m):
            self.model.add(self.row.b[i] - self.row.f[i] >= trip + self.phi[i] + self.beta[i])
        self._crossings()
        self.model.add(self.row.f[0] == 0)
        self._objective()
        self.model.minimize(self.value)

    def _paths(self) -> tuple[dict[int, int], dict[int, int]]:
        """Return dn[j] and up[j] for the ranks j from d on."""
        instance, d = self.instance, self.d
        down, up = {d: 0}, {d: 0}
        for r in range(d, instance.num_stages - 1):
            down[r + 1] = down[r] + instance.forward[r] + instance.forward_from[r + 1][0][1]
            up[r + 1] = up[r] + instance.backward[r + 1] + instance.backward_from[r][0][1]
        return down, up

    def _crossings(self) -> None:
        instance, d, last, row = self.instance, self.d, self.instance.num_stages - 1, self.row
        down, up = self.down, self.up
        for i in range(self.m):
            for k in range(max(0, i - row.fits + 1), i):
                behind = row.before("b", k, i)
                places = []
                away = row.b[k] - row.f[i]
                for j in range(d, last + 1):
                    here = self.model.new_bool_var("x")
                    self.model.add(away >= up[j] + down[j] + instance.forward[j]).only_enforce_if(here)
                    if j < last:
                        most = up[j + 1] + down[j + 1] - instance.backward[j + 1]
                        self.model.add(away <= most + self.phi[i] + self.beta[k]).only_enforce_if(here)
                    places.append(here)
                self.model.add_bool_or([behind, *places])

    def _objective(self) -> None:
        self.model.add(self.value == self.row.w[-1] + self.instance.weight[self.d])

    def _codes(self, solver: cp_model.CpSolver) -> Codes | None:
        return None

    def solve(self, solver: cp_model.CpSolver, time_limit_s: float, seed: int) -> Solved:
        """Minimise with one worker.

        Parameters
        ----------
        solver
            Given, so that another thread can stop it.
        time_limit_s
            Seconds.
        seed
            The solver's seed.
        """
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = seed
        # From below, value by value: what a bound needs. Found to prove more in the same time.
        solver.parameters.use_objective_lb_search = True
        solver.parameters.linearization_level = 2
        solver.parameters.max_time_in_seconds = max(0.05, time_limit_s)
        status = run(solver, self.model, 2 * self.horizon)
        if status == cp_model.INFEASIBLE:
            return Solved(self.horizon + 1, True, None, solver.wall_time)
        found = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
        bound = math.ceil(solver.best_objective_bound - 1e-6)
        codes = self._codes(solver) if found else None
        return Solved(bound, status == cp_model.OPTIMAL, codes, solver.wall_time)


class WholeChain(OneRank):
    """All ranks. Times count from the start of rank 0's first F."""

    def __init__(self, instance: Instance, lower: int, upper: int) -> None:
        super().__init__(instance, 0, lower, upper)

    def _objective(self) -> None:
        """Add the other ranks, what ties them to rank 0 and to each other, and the value over all of them."""
        instance, add = self.instance, self.model.add
        self.rows = [self.row]
        for e in range(1, instance.num_ranks):
            # A rank starts before rank 0's last B and lasts no longer than the value: 2 x upper is enough.
            self.rows.append(_Rank(self.model, instance, e, 2 * self.horizon))
            self._tie(e)
        for e, row in enumerate(self.rows):
            end = row.w[-1] + instance.weight[e]
            add(self.value >= (end if instance.objective == "makespan" else end - row.f[0]))

    def _tie(self, e: int) -> None:
        """Tie neighbours by messages, and rank 0 by what is late on the whole path, less than in all."""
        instance, add, first, above, row = (
            self.instance,
            self.model.add,
            self.row,
            self.rows[e - 1],
            self.rows[e],
        )
        trip, down, up = Paths.of(instance).f_to_b(e, e), self.down[e], self.up[e]
        for i in range(self.m):
            add(row.f[i] >= above.f[i] + instance.forward[e - 1] + instance.forward_from[e][0][1])
            add(above.b[i] >= row.b[i] + instance.backward[e] + instance.backward_from[e - 1][0][1])
            if e == instance.num_ranks - 1:
                add(row.b[i] >= row.f[i] + instance.forward[e])
                add(row.f[i] == first.f[i] + down + self.phi[i])
                add(row.b[i] == first.b[i] - up - self.beta[i])
                continue
            late, early = row.f[i] - first.f[i] - down, first.b[i] - up - row.b[i]
            for part, whole in ((late, self.phi[i]), (early, self.beta[i])):
                add(part >= 0)
                add(part <= whole)
            add(row.b[i] - row.f[i] >= trip + self.phi[i] - late + self.beta[i] - early)

    def _codes(self, solver: cp_model.CpSolver) -> Codes:
        rows = []
        for e, row in enumerate(self.rows):
            actions = [
                (solver.value(start), row.times[kind], i, kind)
                for kind, starts in zip((F, B, W), row.starts, strict=True)
                for i, start in enumerate(starts)
            ]
            rows.append([(kind, e) for _, _, _, kind in sorted(actions)])
        return rows
