"""The crossing bound: what the forward and the backward wave cost each other when memory is short.

The models are in `zbcompile.planner.exact.crossing_model`.

One rank d of a chain with one stage per rank is looked at, with the stages d..S-1 from it on. With
dn[j] = sum over d <= r < j of (TF_r + c) and up[j] = sum over d < r <= j of (TB_r + c), let
phi_i = F_i(S-1) - F_i(d) - dn[S-1] and beta_i = B_i(d) - up[S-1] - B_i(S-1) be how late
microbatch i is on its way down and up. Both are >= 0 and only grow along the way. Then

(W) B_i - F_i >= RT_d + phi_i + beta_i on rank d;
(X) for l < i with F_i before B_l on rank d there is a rank j where they pass each other:
    B_l - F_i >= up[j] + dn[j] + TF_j and, if j < S-1,
    B_l - F_i <= up[j+1] + dn[j+1] - TB_{j+1} + phi_i + beta_l.
    Proof: let j+1 be the first rank where B_l precedes F_i. On j, B_l >= F_i + TF; on j+1,
    F_i >= B_l + TB; put in the way from and to d, and the lateness at j+1, at most the whole.
(M) F_{l+k} >= B_l + TB with k = headroom // M_B, and min(TW, TB) later when k * M_B + M_W exceeds
    the headroom.

The shortest time of rank d alone under these rules is a lower bound of its span; CP-SAT finds it, or bounds
it from below. Times may be replaced by smaller ones: the optimum never grows when a duration shrinks, so
small whole numbers (`scaled`) give valid bounds that the solver can close. Before that the lags of F's are
moved to the B's (`shifted`): every rank's clock runs ahead of the one before it by the lag, which changes no
span, and one lag of twice the size survives a coarser grid.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction

from ortools.sat.python import cp_model

from zbcompile.planner.bounds.memory_window import memory_window_bound
from zbcompile.planner.core.instance import Codes, F, Instance
from zbcompile.planner.core.paths import Paths
from zbcompile.planner.exact.crossing_model import OneRank, WholeChain

__all__ = [
    "Crossing",
    "crossing_bound",
    "grids",
    "most_likely_ranks",
    "rounding_loss",
    "scaled",
    "shifted",
]


@dataclass(frozen=True, slots=True)
class Crossing:
    """A proved lower bound.

    Attributes
    ----------
    value_ns
        The bound.
    rank
        The rank it was proved on, ``None`` for the whole chain.
    grid
        The unit of time in ns on which it was proved.
    units
        The bound in these units.
    closed
        Whether the solver ended by itself.
    seconds
        Time used.
    codes
        An order that is best on the grid, if the whole chain was asked and one was found.
    """

    value_ns: int
    rank: int | None
    grid: Fraction
    units: int
    closed: bool
    seconds: float
    codes: Codes | None = None


def shifted(instance: Instance) -> Instance:
    """Return the chain with no lag before F's and both lags before B's: no order's span changes."""
    down = {s: row[0][1] for s, row in enumerate(instance.forward_from) if row}
    rules = instance.rules.with_lags(lambda wait: 0 if wait.kind == F else wait.lag_ns + down[wait.stage])
    return replace(instance, rules=rules)


def scaled(instance: Instance, grid: Fraction) -> Instance:
    """Return the problem with all times divided by ``grid`` and rounded down."""

    def down(values: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(int(v / grid) for v in values)

    return replace(
        instance,
        forward=down(instance.forward),
        backward=down(instance.backward),
        weight=down(instance.weight),
        fused=down(instance.fused),
        rules=instance.rules.with_lags(lambda wait: int(wait.lag_ns / grid)),
    )


def _all_times(instance: Instance) -> list[int]:
    return [t for t in (*instance.forward, *instance.backward, *instance.weight, *instance.rules.lags) if t]


def _lost(ways: list[int], grid: Fraction) -> Fraction:
    return sum((t - int(t / grid) * grid for t in ways), Fraction(0))


def rounding_loss(instance: Instance, grid: Fraction) -> float:
    """Return the share of all times and lags of a chain that `scaled` loses after `shifted`."""
    ways = _all_times(shifted(instance))
    return float(_lost(ways, grid) / max(1, sum(ways)))


def grids(instance: Instance, finest: int) -> list[Fraction]:
    """Return grids to try, coarse to fine.

    For every doubling of the units of the longest time, the one that loses least of all times and lags to
    rounding; a finer grid must lose less.
    """
    ways = _all_times(instance)
    longest = max(ways, default=0)
    candidates = {Fraction(t, n) for t in sorted(set(ways))[-12:] for n in range(1, finest + 1)}
    chosen: list[Fraction] = []
    least, most = Fraction(sum(ways) + 1), 3
    while longest and most <= finest:
        scored = [(_lost(ways, g), -g) for g in candidates if longest / g <= most]
        if scored and min(scored)[0] < least:
            least = min(scored)[0]
            chosen.append(-min(scored)[1])
        most *= 2
    return chosen


def crossing_bound(
    instance: Instance,
    rank: int | None,
    grid: Fraction,
    *,
    upper_ns: int,
    time_limit_s: float,
    seed: int = 0,
    known_ns: int = 0,
    solver: cp_model.CpSolver | None = None,
) -> Crossing:
    """Bound the span of a rank, or the objective of the whole chain, from below on a grid.

    The model only asks for less than ``upper_ns``: if it has no solution, the known value is proved.

    Parameters
    ----------
    instance
        A chain with the costs of `Instance.relaxed`.
    rank
        The rank; ``None`` asks for the whole chain: its objective, and an order.
    grid
        Unit of time in ns.
    upper_ns
        A known value; the bound is never more.
    time_limit_s
        Seconds.
    seed
        The solver's seed.
    known_ns
        A bound already proved. An order of the model can always be drawn out to it, so nothing is lost by
        asking for no less.
    solver
        A solver to use, so that another thread can stop it.
    """
    steady = rank is None and instance.objective == "makespan"
    coarse, d = scaled(instance if steady else shifted(instance), grid), rank or 0
    upper = math.ceil(upper_ns / grid) - 1
    paths = Paths.of(coarse)
    lower = coarse.work(d) + memory_window_bound(coarse, paths.f_to_b(d, d), d).idle_ns
    if lower > upper:
        return Crossing(upper_ns, rank, grid, upper + 1, True, 0.0)
    lower = min(upper, max(lower, int(known_ns / grid)))
    model = WholeChain(coarse, lower, upper) if rank is None else OneRank(coarse, rank, lower, upper)
    found = model.solve(solver or cp_model.CpSolver(), time_limit_s, seed)
    units = max(found.units, lower)
    value = upper_ns if units > upper else min(upper_ns, math.ceil(units * grid))
    return Crossing(value, rank, grid, units, found.closed, found.seconds, found.codes)


def most_likely_ranks(instance: Instance) -> list[int]:
    """Return the ranks by their memory-window bound, highest first.

    The last rank, which waits for none, is left out.
    """
    paths = Paths.of(instance)
    return sorted(
        range(max(1, instance.num_ranks - 1)),
        key=lambda d: (-instance.work(d) - memory_window_bound(instance, paths.f_to_b(d, d), d).idle_ns, d),
    )
