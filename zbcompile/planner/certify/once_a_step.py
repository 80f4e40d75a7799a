"""What every order pays once a step beside its F's, B's and W's, derived from the profile alone."""

from __future__ import annotations

from zbcompile.planner.certify.facts import Derivation
from zbcompile.schedule.problem import Problem

__all__ = ["add_once_a_step"]

_OF_ONE_RANK = ("work", "memory_windows", "start_end_idle", "microbatch_work")
_OF_THE_OUTER_RANK = ("enclosing_pair", "last_round_trip")


def add_once_a_step(problem: Problem, method: str, out: Derivation) -> int:
    """Add the least gather, the least reduction and the update that a bound on F's, B's and W's leaves out.

    A bound on one rank, as derived in ``out``, adds those of that rank; others the least of all ranks.
    Returns the time in ns.
    """
    stages = problem.profile.stages
    if not any(cost.unshard_ns or cost.reduce_ns or cost.update_ns for cost in stages):
        return 0
    rank = out.numbers.get("outer_rank" if method in _OF_THE_OUTER_RANK else "rank")
    of_rank = isinstance(rank, int) and method in (*_OF_ONE_RANK, *_OF_THE_OUTER_RANK, "head_and_work")
    targets = {edge.target for edge in problem.profile.edges}
    opening = min(cost.unshard_ns for s, cost in enumerate(stages) if s not in targets)
    by_end = method == "head_and_work"
    if problem.objective == "makespan":
        by_end |= method == "microbatch_work" or not of_rank
    least: tuple[int, int, int, int] | None = None
    for r in range(problem.num_ranks):
        own = [stages[s] for s in problem.placement.stages_of(r)]
        gather = opening if by_end else min(cost.unshard_ns for cost in own)
        reduction, update = min(cost.reduce_ns for cost in own), sum(cost.update_ns for cost in own)
        row = (gather + reduction + update, gather, reduction, update)
        if (r == rank) if of_rank else (least is None or row < least):
            least = row
    assert least is not None
    total, gather, reduction, update = least
    out.add("parameters gathered before the first F", gather)
    out.add("gradients reduced after the last W", reduction)
    out.add("the optimizer's step", update)
    out.numbers["once_a_step_ns"] = total
    return total
