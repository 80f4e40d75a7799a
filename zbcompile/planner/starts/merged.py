"""Neighbouring stages on one rank, planned as one stage and taken apart again.

A rank's stages in a row run their F's one after the other, their B's in reverse and their W's in
reverse: an order of the merged problem, one stage per rank, becomes one of the problem itself.
"""

from __future__ import annotations

from zbcompile.planner.core.instance import Codes, F
from zbcompile.schedule.costs import Edge, Profile, StageCost
from zbcompile.schedule.ir import Placement
from zbcompile.schedule.problem import Problem

__all__ = ["merged", "taken_apart"]


def merged(problem: Problem) -> Problem | None:
    """The problem with each rank's stages as one; ``None`` unless they are neighbours in a plain chain."""
    rank_of, profile = problem.placement.rank_of, problem.profile
    chain = all(e.target == e.source + 1 and e.has_gradient for e in profile.edges)
    if list(rank_of) != sorted(rank_of) or len(rank_of) == problem.num_ranks:
        return None
    if not chain or len(profile.edges) != len(rank_of) - 1:
        return None
    extra = profile.overhead_ns
    stages = []
    for rank in range(problem.num_ranks):
        row = [profile.stages[s] for s in problem.placement.stages_of(rank)]
        more = (len(row) - 1) * extra
        stages.append(
            StageCost(
                sum(s.forward_ns for s in row) + more,
                sum(s.backward_input_ns for s in row) + more,
                sum(s.backward_weight_ns for s in row) + more,
                sum(s.full_backward_ns for s in row) + more,
                sum(s.saved_bytes for s in row),
                sum(s.saved_for_weight_bytes for s in row),
                sum(s.static_bytes for s in row),
            )
        )
    edges = tuple(
        Edge(rank_of[e.source], rank_of[e.target], e.forward_bytes, e.backward_bytes)
        for e in profile.edges
        if rank_of[e.source] != rank_of[e.target]
    )
    whole = Profile(tuple(stages), edges, profile.link, profile.links, extra)
    return problem.with_(profile=whole, placement=Placement.linear(problem.num_ranks))


def taken_apart(codes: Codes, problem: Problem) -> Codes:
    """An order of the merged problem as one of its own: ``F -> F0 F1``, ``B -> B1 B0``, ``W -> W1 W0``."""
    result: Codes = []
    for rank, row in enumerate(codes):
        stages = problem.placement.stages_of(rank)
        result.append([(kind, s) for kind, _ in row for s in (stages if kind == F else stages[::-1])])
    return result
