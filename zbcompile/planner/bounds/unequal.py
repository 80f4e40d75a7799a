"""Bounds where microbatches differ in cost: which ones hold, and why.

The proofs of the other bounds call the k-th executed F, B or W of a stage microbatch k. Where microbatches
differ that name has no one cost, so none of them is used on the problem itself. Three bounds are:

``least_microbatch``
    Give every microbatch the least of each cost that any microbatch has: times, bytes and sizes of messages
    per stage and edge. Take any order of the problem, and its times. Each action ends no later and holds no
    more than it did, and each message has arrived, so that the same starts are possible in the problem with
    the least costs, with the same first starts and no later ends. There microbatches are alike: whatever
    bounds that problem bounds this one.

``microbatch_work``
    A rank runs every F, B and W (or BW) of its stages once for every microbatch, each with that microbatch's
    own time; so its span is at least their sum. Until its first action, whichever microbatch it is of, the
    F's before it have passed: at least the head of the problem with the least costs. That adds to the
    makespan.

``longest_microbatch``
    The makespan is at least the longest path of any microbatch alone through all stages and back, at its own
    costs. The one with the most work is taken.

B and W together count as no more than BW, whichever is less, per microbatch. The last two count F's, B's and
W's; what a step costs beside them is added as to all bounds (`zbcompile.planner.bounds.once_a_step`).
"""

from __future__ import annotations

from collections.abc import Callable

from zbcompile.planner.bounds.bound import Bound
from zbcompile.planner.bounds.once_a_step import with_once_a_step
from zbcompile.planner.core.instance import Instance
from zbcompile.planner.core.paths import Paths
from zbcompile.schedule.problem import Problem

__all__ = ["least_microbatch_bound", "unequal_bound"]


def least_microbatch_bound(problem: Problem, of: Callable[[Problem], Bound | None]) -> Bound | None:
    """Return a bound of the problem whose microbatches all have the least of each cost, if there is one."""
    found = of(problem.alike(min))
    if found is None:
        return None
    witness = {"of": found.method, "witness": dict(found.witness)}
    return Bound(found.value_ns, "least_microbatch", found.objective, witness)


def unequal_bound(problem: Problem, of: Callable[[Problem], Bound]) -> Bound:
    """Return the best bound of a problem whose microbatches differ; ``of`` bounds one where they do not."""
    least = Instance.of(problem.alike(min)).relaxed()
    paths = Paths.of(least)
    ones = [Instance.of(problem.one(i)).relaxed() for i in range(problem.num_microbatches)]
    each = [[one.forward[s] + one.backward[s] + one.weight[s] for s in range(one.num_stages)] for one in ones]
    found: list[Bound] = []
    for rank, stages in enumerate(least.stages_of):
        work = sum(row[s] for row in each for s in stages)
        head = min(paths.head[s] for s in stages) if problem.objective == "makespan" else 0
        witness = {"rank": rank, "head_ns": head, "work_ns": work}
        found.append(Bound(head + work, "microbatch_work", problem.objective, witness))
    if problem.objective == "makespan":
        i = max(range(len(ones)), key=lambda i: sum(each[i]))
        path = max(Paths.of(ones[i]).tail)
        witness = {"microbatch": i, "path_ns": path}
        found.append(Bound(path, "longest_microbatch", problem.objective, witness))
    whole = [least_microbatch_bound(problem, of), *with_once_a_step(least, found)]
    return max((bound for bound in whole if bound is not None), key=lambda bound: bound.value_ns)
