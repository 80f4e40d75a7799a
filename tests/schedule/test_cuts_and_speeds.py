"""Pieces joined into stages, and what stages cost on ranks of different speed."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.strategies import problems
from zbcompile.errors import UsageError
from zbcompile.schedule.coarsen import coarsened
from zbcompile.schedule.costs import Edge, Profile, StageCost
from zbcompile.schedule.cuts import CutProblem, Cuts
from zbcompile.schedule.ir import Placement
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.speeds import AS_PROFILED, on_ranks, relative, speeds_of, stage_at


def test_pieces_are_joined_and_slowed() -> None:
    pieces = Profile(
        tuple(StageCost(k, 2 * k, 3 * k, 4 * k, 10 * k, k, k, f"piece {k}") for k in (1, 2, 3, 4)),
        (Edge(0, 1, 5, 6), Edge(1, 2, 7, 8), Edge(0, 2, 1, 1), Edge(2, 3, 9, 9)),
        overhead_ns=2,
    )
    cuts = Cuts(pieces, (1, 2, 1), speeds_of((1, 0.4, 2)))
    profile = cuts.profile(Placement.linear(3))
    assert cuts.first_pieces == (0, 1, 3)
    assert profile.stages[1] == StageCost(13, 25, 38, 50, 50, 5, 5)  # (5, 10, 15, 20) / 0.4, rounded up
    assert profile.stages[2] == StageCost(2, 4, 6, 8, 40, 4, 4, "piece 4")
    assert profile.edges == (Edge(0, 1, 6, 7), Edge(1, 2, 9, 9))
    assert profile.overhead_ns == 2
    assert cuts.profile(Placement((1, 0, 2))).stages[1].forward_ns == 5


@given(problems(), st.data())
def test_cuts_are_coarse_stages_but_for_the_host_overhead(problem: Problem, data: st.DataObject) -> None:
    count = problem.num_stages
    ends = data.draw(st.sets(st.integers(1, count - 1))) if count > 1 else set()
    sizes = tuple(b - a for a, b in zip([0, *sorted(ends)], [*sorted(ends), count], strict=True))
    placement = Placement(tuple(part for part, size in enumerate(sizes) for _ in range(size)))
    plain = Problem.of(
        Profile(problem.profile.stages, problem.profile.edges, problem.profile.link),
        placement,
        problem.num_microbatches,
    )
    task = CutProblem.of(plain.profile, Placement.linear(len(sizes)), problem.num_microbatches)
    assert task.problem(sizes) == coarsened(plain, placement)


@given(st.integers(0, 10**9), st.floats(0.001, 1000))
def test_a_time_at_a_speed_is_rounded_up(time_ns: int, speed: float) -> None:
    (millionths,) = speeds_of((speed,))
    slowed = stage_at(StageCost.simple(time_ns, 0, 0), millionths).forward_ns
    assert slowed == math.ceil(time_ns * AS_PROFILED / millionths) or abs(slowed * millionths) > 2**52
    assert slowed * millionths >= time_ns * AS_PROFILED > (slowed - 1) * millionths


def test_times_follow_the_rank_and_nothing_else_changes() -> None:
    stage = StageCost(10, 20, 30, 45, 7, 3, 1, variants=(StageCost(11, 21, 31, 46, 5, 3),))
    profile = Profile((stage,) * 2, source="by hand")
    slowed = on_ranks(profile, Placement((1, 0)), speeds_of((1, 0.5)))
    assert slowed.stages[1] == stage
    assert slowed.stages[0].variants[0].full_backward_ns == 92
    assert slowed.stages[0].saved_bytes == 7
    assert slowed.source == "by hand; times divided by the speeds of the ranks, 1 0.5"
    assert on_ranks(profile, Placement((1, 0)), speeds_of((1, 1.0))) is profile
    assert on_ranks(profile, Placement((1, 0)), ()) is profile
    assert relative(speeds_of((0.5, 1))) == (AS_PROFILED, 2 * AS_PROFILED)
    assert relative(()) == ()


@pytest.mark.parametrize(
    "given_speeds", [(0,), (-1,), (math.nan,), (math.inf,), (1e-4,), (True,), ("1",), 3, "12"]
)
def test_speeds_that_cannot_be_meant_are_refused(given_speeds: Any) -> None:
    with pytest.raises(UsageError, match="speed of a rank"):
        speeds_of(given_speeds)


def test_one_speed_per_rank() -> None:
    with pytest.raises(UsageError, match="one speed per rank"):
        speeds_of((1, 1), 3)
    with pytest.raises(UsageError, match="one speed per rank"):
        on_ranks(Profile((StageCost.simple(1, 1, 1),)), Placement((0,)), (1, 1))
