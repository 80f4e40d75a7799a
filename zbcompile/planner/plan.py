"""The straight line: bound, seeds, search, proof, certificate."""

from __future__ import annotations

from collections.abc import Callable

from zbcompile.errors import UsageError
from zbcompile.planner.bounds import Bound, best_bound
from zbcompile.planner.cpsat import solve_exact, split_is_exact
from zbcompile.planner.flat import BW, check_caps
from zbcompile.planner.fuse import improve_fusing
from zbcompile.planner.holding import holding_bound
from zbcompile.planner.seeds import try_classic, try_list_schedules
from zbcompile.planner.state import Best, Progress
from zbcompile.planner.variants import fixed, offers_variants, plan_variants
from zbcompile.problem import Problem
from zbcompile.solution import Solution

__all__ = ["Progress", "plan"]

_EXACT_OPS = 400
"""Most actions for which the exact model is worth building."""


def plan(
    problem: Problem,
    *,
    time_limit_s: float = 10.0,
    seed: int = 0,
    observer: Callable[[Progress], None] | None = None,
    fuse: str = "auto",
    variants: bool = True,
) -> Solution:
    """Find the best order that the time allows, with a certificate.

    time_limit_s : outer limit; the search itself is counted in tries, so that the same seed gives
        the same bytes wherever it ends by proof or by count.
    observer : called with a `Progress` at every better order or bound.
    fuse : ``auto`` (BW where it helps), ``never`` or ``always``.
    variants : whether stages may run as one of their variants.

    Raises `InfeasibleError` naming the rank and the least cap that works. Ctrl-C ends the search
    and keeps the best order.
    """
    if fuse not in ("auto", "never", "always"):
        raise UsageError(f"unknown choice of fusing {fuse!r}", needed="auto, never or always")
    if offers_variants(problem):
        if variants:
            return plan_variants(
                problem,
                lambda p, limit, tell: plan(p, time_limit_s=limit, seed=seed, observer=tell, fuse=fuse),
                lambda p: quick_value(p, seed),
                time_limit_s=time_limit_s,
                observer=observer,
            )
        problem = fixed(problem, (0,) * problem.num_stages)
    check_caps(problem, fusing=fuse != "never")
    best = Best(problem, best_bound(problem), time_limit_s=time_limit_s, observer=observer, fuse=fuse)
    holding = holding_bound(problem)
    if holding is not None:
        best.raise_bound(holding)
    try:
        try_classic(best)
        try_list_schedules(best, tries=400, seed=seed)
        if fuse == "auto":
            improve_fusing(best, seed=seed)
        prove(best, seed)
    except KeyboardInterrupt:
        best.report("interrupted")
    return best.solution()


def quick_value(problem: Problem, seed: int) -> int | None:
    """The value of the first orders alone: to rank assignments of variants and placements."""
    best = Best(problem, best_bound(problem), time_limit_s=2.0)
    try_classic(best)
    try_list_schedules(best, tries=12, seed=seed)
    return best.value


def prove(best: Best, seed: int) -> None:
    """Let CP-SAT close a small instance: a better order, a better bound, or both."""
    flat = best.flat
    ops = 3 * flat.num_stages * flat.num_microbatches
    if best.done or ops > _EXACT_OPS:
        return
    exact = split_is_exact(flat) and best.problem.transport == "async"
    hint = best.codes
    if hint is not None and any(kind == BW for row in hint for kind, _ in row):
        hint = None
    result = solve_exact(
        flat if exact else flat.relaxed(),
        lower=best.bound.value_ns,
        incumbent=hint,
        time_limit_s=max(0.1, best.seconds_left),
        seed=seed,
    )
    if result.codes is not None:
        best.offer(result.codes, "cp_sat")
    if result.bound_ns > best.bound.value_ns:
        witness = {"actions": ops, "solver": "CP-SAT", "seconds_limit": round(best.deadline - best.started)}
        best.raise_bound(Bound(result.bound_ns, "cp_sat", flat.objective, witness))
