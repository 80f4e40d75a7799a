"""Coarsening: neighbouring stages joined into one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from zbcompile.errors import UsageError
from zbcompile.schedule.costs import Edge, Profile, StageCost
from zbcompile.schedule.ir import Placement
from zbcompile.schedule.problem import Problem

__all__ = ["coarsened", "joined_edges", "joined_stage"]


def coarsened(problem: Problem, placement: Placement) -> Problem:
    """Return the problem with the stages of each rank of a contiguous placement joined into one.

    ``0 | 1 | 2 | 3`` on ranks ``0 0 1 1``  -->  ``0+1 | 2+3`` on ranks ``0 1``

    Times and bytes of joined stages add up. The host overhead counts once per action, so a joined stage's F,
    B, W and BW carry it for every further stage as well. Edges between two joined stages become one with
    their bytes added; edges within one disappear. A stage that is joined with none stays as it is.

    Parameters
    ----------
    problem
        The problem; its own placement does not matter.
    placement
        Rank of every stage, never falling from a stage to the next.

    Returns
    -------
    Problem
        One stage per rank, with the caps, links, objective and transport of ``problem``.

    Raises
    ------
    UsageError
        The placement is not contiguous.
    """
    profile, rank_of = problem.profile, placement.rank_of
    if not placement.is_contiguous or len(rank_of) != profile.num_stages:
        raise UsageError("only neighbouring stages can be joined", given=list(rank_of))
    stages = tuple(
        joined_stage([profile.stages[s] for s in placement.stages_of(rank)], profile.overhead_ns)
        for rank in range(placement.num_ranks)
    )
    coarse = replace(profile, stages=stages, edges=joined_edges(profile, rank_of))
    return problem.with_(profile=coarse, placement=Placement.linear(placement.num_ranks))


def joined_edges(profile: Profile, part_of: Sequence[int]) -> tuple[Edge, ...]:
    """Return the edges between parts, of which ``part_of`` names each stage's."""
    flows: dict[tuple[int, int], Edge] = {}
    for edge in profile.edges:
        pair = part_of[edge.source], part_of[edge.target]
        if pair[0] == pair[1]:
            continue
        known = flows.get(pair, Edge(*pair, has_gradient=False))
        flows[pair] = Edge(
            *pair,
            known.forward_bytes + edge.forward_bytes,
            known.backward_bytes + edge.backward_bytes,
            known.has_gradient or edge.has_gradient,
        )
    return tuple(flows.values())


def joined_stage(stages: Sequence[StageCost], overhead_ns: int = 0) -> StageCost:
    """Return one stage that costs what several neighbours cost together.

    ``overhead_ns`` is what each of its actions costs more for every stage after the first.
    """
    if len(stages) == 1:
        return stages[0]
    total, more = StageCost.combined(stages, sum), (len(stages) - 1) * overhead_ns
    return replace(
        total,
        forward_ns=total.forward_ns + more,
        backward_input_ns=total.backward_input_ns + more,
        backward_weight_ns=total.backward_weight_ns + more,
        full_backward_ns=total.full_backward_ns + more,
    )
