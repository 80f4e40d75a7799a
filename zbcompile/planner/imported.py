"""Orders from elsewhere: rated instead of searched for."""

from __future__ import annotations

from zbcompile.planner.bounds.analytic import best_bound
from zbcompile.schedule.check import checked_times
from zbcompile.schedule.ir import Schedule
from zbcompile.schedule.limits import check_amounts
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.renumber import Numbering
from zbcompile.schedule.solution import Certificate, Solution

__all__ = ["rated"]


def rated(schedule: Schedule, problem: Problem) -> Solution:
    """Judge an order and certify it with the best bound of its problem that needs no solver.

    Raises
    ------
    CheckError
        The order is incomplete, out of order, can hang or exceeds a cap.
    UsageError
        The costs are too large to add up.
    """
    for profile in problem.profiles():
        check_amounts(profile, problem.num_microbatches)
    value = checked_times(schedule, problem).value_ns
    numbering = Numbering.by_first_stage(problem.placement)
    bound = best_bound(numbering.of_problem(problem))
    witness = numbering.back().of_witness(bound.witness)
    certificate = Certificate(problem.objective, value, bound.value_ns, bound.method, witness)
    return Solution(problem, schedule, certificate, (0,) * problem.num_stages, "imported")
