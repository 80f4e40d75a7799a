"""Neighbouring stages joined into one: work, bytes, messages and host overhead are kept."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from zbcompile.errors import UsageError
from zbcompile.planner.joint_bound import cheapest
from zbcompile.schedule.coarsen import coarsened
from zbcompile.schedule.costs import Edge, Link, Profile, StageCost
from zbcompile.schedule.ir import Placement
from zbcompile.schedule.problem import Problem

STAGES = tuple(replace(StageCost.simple(k, k, k, k, k), static_bytes=k) for k in range(1, 5))


def test_joining_stages_keeps_work_bytes_and_messages() -> None:
    edges = (Edge(0, 1, 9, 9), Edge(0, 2, 5, 0, False), Edge(1, 2, 7, 3), Edge(2, 3, 1, 1))
    problem = Problem.of(Profile(STAGES, edges, Link(4, 2)), Placement.v(2, 2), 3, cap=50)
    coarse = coarsened(problem, Placement((0, 0, 1, 1)))
    assert coarse.placement == Placement.linear(2)
    assert [s.forward_ns for s in coarse.profile.stages] == [3, 7]
    assert [s.static_bytes for s in coarse.profile.stages] == [3, 7]
    assert coarse.profile.edges == (Edge(0, 1, 12, 3, True),)
    assert coarse.caps == (50, 50)


def test_no_cost_of_a_stage_is_lost() -> None:
    """Whatever costs a stage has: joined they add up, and the cheapest way to run has the least of each."""
    names = [cost.name for cost in fields(StageCost) if cost.type == "int"]
    one = StageCost(**{name: 3 + 2 * k for k, name in enumerate(names)})
    other = StageCost(**{name: 60 - 5 * k for k, name in enumerate(names)})
    of_all_ways = ("static_bytes", "gradient_bytes", "unshard_ns", "reduce_ns", "update_ns")
    together = Placement((0, 0))
    joined = coarsened(Problem.of(Profile((one, other)), together), together).profile.stages[0]
    least = cheapest(replace(one, variants=(replace(other, static_bytes=99, gradient_bytes=99),)))
    assert len(names) >= 7
    for name in names:
        a, b = getattr(one, name), getattr(other, name)
        assert getattr(joined, name) == a + b
        assert getattr(least, name) == (a if name in of_all_ways else min(a, b))


def test_every_joined_stage_pays_the_host_overhead_that_its_stages_pay() -> None:
    problem = Problem.of(Profile(STAGES, overhead_ns=10), Placement((0, 0, 0, 1)))
    first, second = coarsened(problem, problem.placement).profile.stages
    assert (first.forward_ns, first.full_backward_ns) == (1 + 2 + 3 + 20, 2 + 4 + 6 + 20)
    assert second == STAGES[3]


def test_one_stage_per_rank_stays_as_it_is() -> None:
    problem = Problem.of(Profile(STAGES, overhead_ns=10))
    assert coarsened(problem, problem.placement) == problem


def test_stages_that_are_no_neighbours_are_not_joined() -> None:
    with pytest.raises(UsageError, match="neighbouring"):
        coarsened(Problem.of(Profile(STAGES)), Placement.v(2, 2))
