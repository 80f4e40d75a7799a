"""Rehearsing an order: real processes and messages, sleeping compute."""

from __future__ import annotations

from collections.abc import Sequence

from zbcompile.compiler.lower import LoweredPlan, lower
from zbcompile.errors import UsageError
from zbcompile.runtime.group import PipelineGroup
from zbcompile.runtime.launch import spawn
from zbcompile.runtime.rehearse import Rehearsal, rehearse_rank
from zbcompile.schedule.solution import Solution

__all__ = ["rehearse", "rehearse_each"]


def rehearse(
    solution: Solution, *, steps: int = 3, stall_limit_s: float = 300.0, timeout_s: float = 600.0
) -> Rehearsal | None:
    """Run an order with sleeping compute and real messages; see `rehearse_each`."""
    found = rehearse_each([solution], steps=steps, stall_limit_s=stall_limit_s, timeout_s=timeout_s)
    return found[0] if found else None


def rehearse_each(
    solutions: Sequence[Solution],
    *,
    steps: int = 3,
    stall_limit_s: float = 300.0,
    timeout_s: float = 600.0,
) -> list[Rehearsal]:
    """Run orders one after the other, with sleeping compute and real messages.

    Started by torchrun, this process runs its rank; otherwise one process per rank is started here.

    Parameters
    ----------
    solutions
        The orders, all on the same number of ranks.

    Returns
    -------
    list
        Planned against measured, for each; empty on all ranks but the first.

    Raises
    ------
    PipelineError, UsageError
        A rank failed; an order has one rank, or another number than the process group; microbatches differ in
        cost.
    """
    plans = [_lowered(solution) for solution in solutions]
    num_ranks = plans[0].problem.num_ranks
    group = PipelineGroup.present(None, stall_limit_s)
    if group is None:
        if num_ranks == 1:
            raise UsageError("an order on one rank sends nothing; there is nothing to rehearse")
        results = spawn(_process, num_ranks, (plans, steps, stall_limit_s), timeout_s=timeout_s)
        return results[0]
    group.require_size(num_ranks)
    found = _run(group, plans, steps)
    return found if group.rank == 0 else []


def _lowered(solution: Solution) -> LoweredPlan:
    if solution.problem.microbatch_costs:
        raise UsageError(
            "a rehearsal sleeps as long for every microbatch, and these differ in cost",
            where="microbatch_costs",
            fix="rehearse a plan for microbatches that are alike",
        )
    return lower(solution, merge=False)


def _process(rank: int, plans: Sequence[LoweredPlan], steps: int, stall_limit_s: float) -> list[Rehearsal]:
    return _run(PipelineGroup(None, stall_limit_s), plans, steps)


def _run(group: PipelineGroup, plans: Sequence[LoweredPlan], steps: int) -> list[Rehearsal]:
    try:
        return [
            rehearse_rank(group, plan.schedule, plan.problem, plan.programs()[group.rank], steps=steps)
            for plan in plans
        ]
    finally:
        group.close()
