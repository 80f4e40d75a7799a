"""The blocking-send bound, for sends that hold up their rank until they arrive (`SendMode.travel_is_work`).

After an F or B whose result goes to another rank, the rank's next action starts no earlier than the message
has arrived. So the travel time may be counted as part of the F or B, and the links as instant: an order of
the problem is an order of that instant-link problem, whose bounds hold up to one travel time, since a rank
whose last action is a fused BW does not wait for its last message.
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


def instant_links(problem: Problem) -> tuple[Problem, int] | None:
    """Return the problem with travel times moved into F and B, and the time to take off its bounds.

    Returns
    -------
    tuple of Problem and int, or None
        The problem with instant links, and the longest travel time of a gradient in ns. ``None`` where a
        rank may compute before what it sent has arrived, or where an F or B sends to more than one stage.
    """
    profile = problem.profile
    chain = all(edge.target == edge.source + 1 and edge.has_gradient for edge in profile.edges)
    if not problem.sends.travel_is_work or not chain or len(profile.edges) != profile.num_stages - 1:
        return None
    forward, backward = [0] * profile.num_stages, [0] * profile.num_stages
    for edge in profile.edges:
        forward[edge.source] = problem.lag_ns(edge)
        backward[edge.target] = problem.lag_ns(edge, backward=True)
    instance = Instance.of(problem).relaxed()
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
    edges = tuple(Edge(e.source, e.target) for e in profile.edges)
    instant = Profile(tuple(stages), edges, Link())
    return problem.with_(profile=instant, transport=ASYNC.name), max(backward)


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
