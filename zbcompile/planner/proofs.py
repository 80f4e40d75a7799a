"""Where the hand-checkable bounds leave a gap, CP-SAT: the exact model, and the crossing bound."""

from __future__ import annotations

from zbcompile.planner.bounds import Bound
from zbcompile.planner.cpsat import solve_exact, split_is_exact
from zbcompile.planner.crossing import candidates, crossing_bound
from zbcompile.planner.flat import BW, is_chain
from zbcompile.planner.paths import Paths
from zbcompile.planner.state import Best

__all__ = ["EXACT_ACTIONS", "crossing_applies", "prove_crossing", "prove_exact"]

EXACT_ACTIONS = 400
"""Most actions for which the exact model is worth building."""

CROSSING_MICROBATCHES = 48
"""Most microbatches for which the crossing model is worth building."""


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


def crossing_applies(best: Best) -> bool:
    """One stage per rank, not too many microbatches, and at most the memory of p microbatches."""
    flat = best.flat
    return (
        is_chain(flat)
        and flat.num_microbatches <= CROSSING_MICROBATCHES
        and min(flat.room[r] // max(1, flat.saved[r]) for r in range(flat.num_ranks)) <= flat.num_ranks
    )


def prove_crossing(best: Best, seed: int, time_limit_s: float, finest: int = 96) -> None:
    """Raise the bound by the crossing model of single ranks, on grids from coarse to fine."""
    flat = best.flat.relaxed()
    if best.done or best.value is None or not crossing_applies(best):
        return
    paths = Paths.of(flat)
    end = best.seconds_left - min(time_limit_s, best.seconds_left)
    for rank, grid in candidates(flat, finest):
        left = best.seconds_left - end
        if best.done or left <= 0.05:
            return
        head = paths.head[rank] if flat.objective == "makespan" else 0
        found = crossing_bound(
            flat,
            rank,
            grid,
            upper_ns=best.value - head,
            time_limit_s=max(left / 3, min(left, 2.0)),
            seed=seed,
            known_ns=max(0, best.bound.value_ns - head),
        )
        witness = {
            "solver": "CP-SAT",
            "rank": rank,
            "head_ns": head,
            "grid": [grid.numerator, grid.denominator],
            "units": found.units,
        }
        best.raise_bound(Bound(head + found.value_ns, "crossing", flat.objective, witness))
