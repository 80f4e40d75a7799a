"""The crossing bound: what the forward and the backward wave cost each other when memory is short.

One rank d of a chain with one stage per rank, the stages d..S-1 from it on. With
dn[j] = sum over d <= r < j of (TF_r + c) and up[j] = sum over d < r <= j of (TB_r + c), let
phi_i = F_i(S-1) - F_i(d) - dn[S-1] and beta_i = B_i(d) - up[S-1] - B_i(S-1) be how late
microbatch i is on its way down and up; both are >= 0 and only grow along the way. Then

(W) B_i - F_i >= RT_d + phi_i + beta_i on rank d;
(X) for l < i with F_i before B_l on rank d there is a rank j where they pass each other:
    B_l - F_i >= up[j] + dn[j] + TF_j and, if j < S-1,
    B_l - F_i <= up[j+1] + dn[j+1] - TB_{j+1} + phi_i + beta_l.
    Proof: let j+1 be the first rank where B_l precedes F_i. On j, B_l >= F_i + TF; on j+1,
    F_i >= B_l + TB; put in the way from and to d, and the lateness at j+1, at most the whole.
(M) F_{l+k} >= B_l + TB with k = room // M_B, and min(TW, TB) later when k * M_B + M_W exceeds the room.

The shortest time of rank d alone under these rules is a lower bound of its span; CP-SAT finds it,
or bounds it from below. Times may be replaced by smaller ones: the optimum never grows when a
duration shrinks, so small whole numbers (`scaled`) give valid bounds that the solver can close.
Before that the lags of F's are moved to the B's (`shifted`): every rank's clock runs ahead of the one
before it by the lag, which changes no span, and one lag of twice the size survives a coarser grid.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction

from ortools.sat.python import cp_model

from zbcompile.planner.flat import Flat, is_chain
from zbcompile.planner.paths import Paths
from zbcompile.planner.windows import window_chain

__all__ = ["Crossing", "crossing_bound", "grids", "is_chain", "scaled", "shifted"]


@dataclass(frozen=True, slots=True)
class Crossing:
    """A proved lower bound in ns, with the rank and the grid it was proved on."""

    value_ns: int
    rank: int
    grid: Fraction
    units: int
    closed: bool
    seconds: float


def shifted(flat: Flat) -> Flat:
    """A chain with no lag before F's and both lags before B's: the spans of all orders are the same."""
    down = {s: row[0][1] for s, row in enumerate(flat.forward_from) if row}
    return replace(
        flat,
        forward_from=tuple(tuple((other, 0) for other, _ in row) for row in flat.forward_from),
        backward_from=tuple(
            tuple((other, lag + down[other]) for other, lag in row) for row in flat.backward_from
        ),
    )


def scaled(flat: Flat, grid: Fraction) -> Flat:
    """All times divided by ``grid`` and rounded down."""

    def down(values: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(int(v / grid) for v in values)

    def lags(rows: tuple[tuple[tuple[int, int], ...], ...]) -> tuple[tuple[tuple[int, int], ...], ...]:
        return tuple(tuple((other, int(lag / grid)) for other, lag in row) for row in rows)

    return replace(
        flat,
        forward=down(flat.forward),
        backward=down(flat.backward),
        weight=down(flat.weight),
        fused=down(flat.fused),
        forward_from=lags(flat.forward_from),
        backward_from=lags(flat.backward_from),
    )


def grids(flat: Flat, finest: int) -> list[Fraction]:
    """Grids to try, coarse to fine: for every doubling of the units of the longest time, the one
    that loses least of all times and lags to rounding; a finer grid must lose less.
    """
    lags = [lag for rows in (flat.forward_from, flat.backward_from) for row in rows for _, lag in row]
    ways = [t for t in (*flat.forward, *flat.backward, *flat.weight, *lags) if t]
    longest = max(ways, default=0)
    candidates = {Fraction(t, n) for t in sorted(set(ways))[-12:] for n in range(1, finest + 1)}
    chosen: list[Fraction] = []
    least, most = Fraction(sum(ways) + 1), 3
    while longest and most <= finest:
        scored = [
            (sum((t - int(t / g) * g for t in ways), Fraction(0)), -g)
            for g in candidates
            if longest / g <= most
        ]
        if scored and min(scored)[0] < least:
            least = min(scored)[0]
            chosen.append(-min(scored)[1])
        most *= 2
    return chosen


class _OneRank:
    """The model of rank d on whole-number times."""

    def __init__(self, flat: Flat, rank: int, lower: int, upper: int) -> None:
        self.flat, self.d, self.m = flat, rank, flat.num_microbatches
        self.model = cp_model.CpModel()
        self.horizon = upper
        self.trip = Paths.of(flat).f_to_b(rank, rank)
        saved, room = flat.saved[rank], flat.room[rank]
        self.fits = self.m if saved == 0 else min(self.m, room // saved)
        span = range(self.m)
        new = self.model.new_int_var
        self.f = [new(0, upper, f"f{i}") for i in span]
        self.b = [new(0, upper, f"b{i}") for i in span]
        self.w = [new(0, upper, f"w{i}") for i in span]
        self.phi = [new(0, upper, f"phi{i}") for i in span]
        self.beta = [new(0, upper, f"beta{i}") for i in span]
        self.order: dict[tuple[str, int, int], cp_model.IntVar] = {}
        self.value = new(max(0, lower), upper, "value")
        self._rank_rules()
        self._memory()
        self._crossings()
        self.model.add(self.f[0] == 0)
        self.model.add(self.value == self.w[-1] + flat.weight[rank])
        self.model.minimize(self.value)

    def _rank_rules(self) -> None:
        flat, d, add = self.flat, self.d, self.model.add
        rows = ((self.f, flat.forward[d]), (self.b, flat.backward[d]), (self.w, flat.weight[d]))
        intervals: list[cp_model.IntervalVar] = []
        for starts, length in rows:
            for before, after in zip(starts, starts[1:], strict=False):
                add(after >= before + length)
            intervals.extend(self.model.new_fixed_size_interval_var(x, length, "i") for x in starts)
        self.model.add_no_overlap(intervals)
        for i in range(self.m):
            add(self.b[i] - self.f[i] >= self.trip + self.phi[i] + self.beta[i])
            add(self.w[i] >= self.b[i] + flat.backward[d])

    def _before(self, kind: str, k: int, i: int) -> cp_model.IntVar:
        """A literal: B_k (or W_k) ends before F_i starts; its negation: the other way round."""
        if (kind, k, i) not in self.order:
            literal = self.model.new_bool_var(f"{kind}{k}<f{i}")
            starts = self.b if kind == "b" else self.w
            length = self.flat.backward[self.d] if kind == "b" else self.flat.weight[self.d]
            self.model.add(self.f[i] >= starts[k] + length).only_enforce_if(literal)
            self.model.add(starts[k] >= self.f[i] + self.flat.forward[self.d]).only_enforce_if(~literal)
            self.order[kind, k, i] = literal
        return self.order[kind, k, i]

    def _memory(self) -> None:
        flat, d = self.flat, self.d
        saved, pending, room = flat.saved[d], flat.pending[d], flat.room[d]
        back, weight = flat.backward[d], flat.weight[d]
        extra = min(weight, back) if self.fits * saved + pending > room else 0
        for i in range(self.m):
            if i >= self.fits:
                self.model.add(self.f[i] >= self.b[i - self.fits] + back + extra)
            held = (i + 1) * saved
            if held <= room:
                continue
            freed = [(saved - pending) * self._before("b", k, i) for k in range(i)]
            freed += [pending * self._before("w", k, i) for k in range(i)]
            self.model.add(sum(freed) >= held - room)
        for (kind, k, i), literal in list(self.order.items()):
            for other in ((kind, k - 1, i), (kind, k, i + 1), ("b", k, i)):
                if other in self.order and other != (kind, k, i):
                    self.model.add_implication(literal, self.order[other])

    def _crossings(self) -> None:
        flat, d, last = self.flat, self.d, self.flat.num_stages - 1
        down, up = {d: 0}, {d: 0}
        for r in range(d, last):
            down[r + 1] = down[r] + flat.forward[r] + flat.forward_from[r + 1][0][1]
            up[r + 1] = up[r] + flat.backward[r + 1] + flat.backward_from[r][0][1]
        for i in range(self.m):
            for k in range(max(0, i - self.fits + 1), i):
                behind = self._before("b", k, i)
                places = []
                away = self.b[k] - self.f[i]
                for j in range(d, last + 1):
                    here = self.model.new_bool_var("x")
                    self.model.add(away >= up[j] + down[j] + flat.forward[j]).only_enforce_if(here)
                    if j < last:
                        most = up[j + 1] + down[j + 1] - flat.backward[j + 1]
                        self.model.add(away <= most + self.phi[i] + self.beta[k]).only_enforce_if(here)
                    places.append(here)
                self.model.add_bool_or([behind, *places])

    def solve(self, time_limit_s: float, seed: int) -> tuple[int, bool, float]:
        """(lower bound in units, whether the optimum was reached, seconds)."""
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = seed
        # From below, value by value: what a bound needs. Found to prove more in the same time.
        solver.parameters.use_objective_lb_search = True
        solver.parameters.linearization_level = 2
        solver.parameters.max_time_in_seconds = max(0.05, time_limit_s)
        status = solver.solve(self.model)
        if status == cp_model.INFEASIBLE:
            return self.horizon + 1, True, solver.wall_time
        bound = math.ceil(solver.best_objective_bound - 1e-6)
        return bound, status == cp_model.OPTIMAL, solver.wall_time


def crossing_bound(
    flat: Flat,
    rank: int,
    grid: Fraction,
    *,
    upper_ns: int,
    time_limit_s: float,
    seed: int = 0,
    known_ns: int = 0,
) -> Crossing:
    """Bound the span of ``rank`` from below on a grid; never more than ``upper_ns``, a known value.

    ``flat`` has `Flat.relaxed` costs and is a chain. The model only asks for less than ``upper_ns``:
    if it has no solution, the known value is proved. known_ns : a bound already proved; an order of
    the model can always be drawn out to it, so nothing is lost by asking for no less.
    """
    coarse = scaled(shifted(flat), grid)
    upper = math.ceil(upper_ns / grid) - 1
    paths = Paths.of(coarse)
    lower = coarse.work(rank) + window_chain(coarse, paths.f_to_b(rank, rank), rank).idle_ns
    if lower > upper:
        return Crossing(upper_ns, rank, grid, lower, True, 0.0)
    lower = min(upper, max(lower, int(known_ns / grid)))
    units, closed, seconds = _OneRank(coarse, rank, lower, upper).solve(time_limit_s, seed)
    units = max(units, lower)
    value = upper_ns if units > upper else math.ceil(units * grid)
    return Crossing(min(value, upper_ns), rank, grid, units, closed, seconds)


def candidates(flat: Flat, finest: int) -> Iterator[tuple[int, Fraction]]:
    """(rank, grid) pairs worth trying, grids from coarse to fine.

    The ranks with the highest window bound come first; the last rank, which waits for nobody, never.
    """
    paths = Paths.of(flat)
    ranks = sorted(
        range(max(1, flat.num_ranks - 1)),
        key=lambda d: (-flat.work(d) - window_chain(flat, paths.f_to_b(d, d), d).idle_ns, d),
    )
    chosen = grids(shifted(flat), finest)
    for grid in chosen:
        yield ranks[0], grid
    for grid in chosen:
        for rank in ranks[1:3]:
            yield rank, grid
