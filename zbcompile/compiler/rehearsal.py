"""Rehearsing an order: real processes and messages, sleeping compute."""

from __future__ import annotations

from collections.abc import Sequence

from zbcompile.compiler.lower import lower
from zbcompile.errors import UsageError
from zbcompile.runtime.group import PipelineGroup
from zbcompile.runtime.launch import spawn
from zbcompile.runtime.rehearse import Rehearsal, rehearse_rank
from zbcompile.schedule.ir import Schedule
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.solution import Solution

__all__ = ["rehearse"]


def rehearse(
    solution: Solution, *, steps: int = 3, stall_limit_s: float = 300.0, timeout_s: float = 600.0
) -> Rehearsal | None:
    """Run an order with sleeping compute and real messages.

    Started by torchrun, this process runs its rank; otherwise one process per rank is started here.

    Returns
    -------
    Rehearsal or None
        Planned against measured; None on all ranks but the first.

    Raises
    ------
    PipelineError, UsageError
        A rank failed; the order has one rank, or another number than the process group.
    """
    if solution.problem.microbatch_costs:
        raise UsageError(
            "a rehearsal sleeps as long for every microbatch, and these differ in cost",
            where="microbatch_costs",
            fix="rehearse a plan for microbatches that are alike",
        )
    plan = lower(solution, merge=False)
    programs = plan.programs()
    num_ranks = plan.problem.num_ranks
    group = PipelineGroup.present(None, stall_limit_s)
    if group is None:
        if num_ranks == 1:
            raise UsageError("an order on one rank sends nothing; there is nothing to rehearse")
        arguments = (plan.schedule, plan.problem, programs, steps, stall_limit_s)
        results: list[Rehearsal] = spawn(_process, num_ranks, arguments, timeout_s=timeout_s)
        return results[0]
    group.require_size(num_ranks)
    result = _run(group, plan.schedule, plan.problem, programs, steps)
    return result if group.rank == 0 else None


def _process(
    rank: int, schedule: Schedule, problem: Problem, programs: Sequence[str], steps: int, stall_limit_s: float
) -> Rehearsal:
    return _run(PipelineGroup(None, stall_limit_s), schedule, problem, programs, steps)


def _run(
    group: PipelineGroup, schedule: Schedule, problem: Problem, programs: Sequence[str], steps: int
) -> Rehearsal:
    try:
        return rehearse_rank(group, schedule, problem, programs[group.rank], steps=steps)
    finally:
        group.close()
