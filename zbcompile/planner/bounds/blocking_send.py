"""The blocking-send bound, for sends that hold up their rank until they arrive (`SendMode.travel_is_work`).

After an F or B whose results go to other ranks, the rank's next action starts no earlier than all of them
have arrived. So the shortest of their travel times may be counted as part of the F or B, and as much less of
each on its link: what waits for one of them on another rank waits as long as before, and what waits on the
same rank comes after all of them in any case. Bytes depend on the order alone, which stays. So an order of
the problem is an order of that problem, whose bounds hold up to one travel time, since a rank whose last
action is a fused BW does not wait for its last message. Where every stage feeds one other, links become
instant.
"""

from __future__ import annotations

from zbcompile.planner.bounds.analytic import best_bound
from zbcompile.planner.bounds.bound import Bound
from zbcompile.planner.bounds.unequal import least_microbatch_bound
from zbcompile.planner.core.instance import Instance
from zbcompile.schedule.costs import Edge, Link, Profile, StageCost
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.semantics import ASYNC

__all__ = ["blocking_send_bound", "instant_links"]

_A_BYTE_A_NS = Link(0, 1_000_000_000)
"""On this link a message of as many bytes as ns travels for so long."""


def instant_links(problem: Problem) -> tuple[Problem, int] | None:
    """Return the problem with travel times moved into F and B, and the time to take off its bounds.

    Returns
    -------
    tuple of Problem and int, or None
        The problem with shorter links, and the longest travel time of a gradient in ns that was moved.
        ``None`` where a rank may compute before what it sent has arrived.
    """
    if not problem.sends.travel_is_work:
        return None
    profile, instance = problem.profile, Instance.of(problem).relaxed()
    forward, backward = _shortest_ways(problem)
    stages = []
    for s, cost in enumerate(profile.stages):
        b, w = instance.backward[s] + backward[s], instance.weight[s]
        stages.append(
            StageCost(
                instance.forward[s] + forward[s],
                b,
                w,
                b + w,
                instance.saved[s],
                instance.pending[s],
                cost.static_bytes,
                gradient_bytes=cost.gradient_bytes,
                unshard_ns=cost.unshard_ns,
                reduce_ns=cost.reduce_ns,
                update_ns=cost.update_ns,
            )
        )
    edges = tuple(
        Edge(
            edge.source,
            edge.target,
            max(0, problem.lag_ns(edge) - forward[edge.source]),
            max(0, problem.lag_ns(edge, backward=True) - backward[edge.target]) if edge.has_gradient else 0,
            edge.has_gradient,
        )
        for edge in profile.edges
    )
    left = Profile(tuple(stages), edges, _A_BYTE_A_NS)
    return problem.with_(profile=left, transport=ASYNC.name), max(backward)


def _shortest_ways(problem: Problem) -> tuple[list[int], list[int]]:
    """Return per stage the least travel time of what its F and its B send to other ranks; 0 without any."""
    profile, rank_of = problem.profile, problem.placement.rank_of
    forward: list[list[int]] = [[] for _ in profile.stages]
    backward: list[list[int]] = [[] for _ in profile.stages]
    for edge in profile.edges:
        if rank_of[edge.source] == rank_of[edge.target]:
            continue
        forward[edge.source].append(problem.lag_ns(edge))
        if edge.has_gradient:
            backward[edge.target].append(problem.lag_ns(edge, backward=True))
    return [min(ways, default=0) for ways in forward], [min(ways, default=0) for ways in backward]


def blocking_send_bound(problem: Problem) -> Bound | None:
    """Return the best analytic bound of `instant_links`, less what its last message may not cost.

    ``None`` where `instant_links` does not apply.
    """
    if problem.microbatch_costs:
        return least_microbatch_bound(problem, blocking_send_bound)
    pair = instant_links(problem)
    if pair is None:
        return None
    found = best_bound(pair[0])
    value = max(0, found.value_ns - pair[1])
    witness = {"of": found.method, "last_message_ns": pair[1], **found.witness}
    return Bound(value, "blocking_send", found.objective, witness)
