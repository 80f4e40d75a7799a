"""Placement auto: what is tried, what is kept, what is settled by a bound alone."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zbcompile.errors import InfeasibleError, UsageError
from zbcompile.planner.incumbent import Progress
from zbcompile.planner.placements import contiguous, placements_for, plan_auto
from zbcompile.planner.plan import plan
from zbcompile.schedule.check import check
from zbcompile.schedule.coarsen import coarsened
from zbcompile.schedule.costs import Profile, StageCost
from zbcompile.schedule.ir import Placement
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.simulate import simulate


def uniform(stages: int, ranks: int, m: int, cap: int | None = None, latency: int = 0) -> Problem:
    """Equal stages on some ranks, contiguous to begin with."""
    profile = Profile.uniform(StageCost.simple(3, 3, 2), stages, latency)
    placement = Placement(tuple(s * ranks // stages for s in range(stages)))
    return Problem.of(profile, placement, m, cap)


def test_one_stage_per_rank_leaves_linear_alone() -> None:
    assert placements_for(uniform(4, 4, 2), 4) == [("linear", Placement.linear(4))]


def test_two_stages_per_rank_are_tried_in_three_ways() -> None:
    found = placements_for(uniform(6, 3, 2), 3)
    assert found == [
        ("contiguous", Placement((0, 0, 1, 1, 2, 2))),
        ("v", Placement((0, 1, 2, 2, 1, 0))),
        ("looped", Placement((0, 1, 2, 0, 1, 2))),
    ]


def test_stages_that_do_not_divide_are_placed_too_and_no_placement_twice() -> None:
    found = dict(placements_for(uniform(5, 3, 2), 3))
    assert found["v"] == Placement((0, 1, 2, 2, 1))
    assert found["looped"] == Placement((0, 1, 2, 0, 1))
    assert placements_for(uniform(3, 1, 2), 1) == [("contiguous", Placement((0, 0, 0)))]
    with pytest.raises(UsageError, match="cannot share"):
        placements_for(uniform(3, 3, 2), 4)


@given(st.lists(st.integers(0, 9), min_size=2, max_size=7), st.data())
def test_contiguous_cuts_are_the_best_of_all(times: list[int], data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, len(times)))
    profile = Profile(tuple(StageCost.simple(t, 0, 0) for t in times))
    problem = Problem.of(profile)
    placement = contiguous(problem, ranks)
    assert placement.is_contiguous
    assert placement.num_ranks == ranks

    def busiest(ends: tuple[int, ...]) -> int:
        return max(sum(times[a:b]) for a, b in itertools.pairwise((0, *ends, len(times))))

    least = min(busiest(ends) for ends in itertools.combinations(range(1, len(times)), ranks - 1))
    assert max(sum(times[s] for s in placement.stages_of(r)) for r in range(ranks)) == least


def test_the_best_placement_is_kept_and_every_one_is_reported() -> None:
    result = plan_auto(uniform(4, 2, 3, 8), time_limit_s=3)
    solution = result.solution
    check(solution.schedule, solution.problem)
    assert simulate(solution.schedule, solution.problem).value_ns == solution.certificate.value_ns
    assert {t.name for t in result.tried} == {"contiguous", "v", "looped"}
    values = [t.value_ns for t in result.tried if t.value_ns is not None]
    assert solution.certificate.value_ns == min(values)
    for tried in result.tried:
        if tried.value_ns is None:
            assert tried.bound_ns is not None
            assert tried.bound_ns >= solution.certificate.value_ns
            assert "no better" in str(tried)
    assert result.bound_ns <= solution.certificate.value_ns
    assert {t.placement.num_ranks for t in result.tried} == {2}


def test_a_placement_that_no_bound_favours_is_not_searched() -> None:
    """With slow links, staying on a rank from stage to stage wins, and the bounds alone say so."""
    problem = uniform(4, 2, 1, None, latency=100).with_(objective="makespan")
    result = plan_auto(problem, time_limit_s=6)
    assert result.solution.problem.placement == Placement((0, 0, 1, 1))
    assert [t.name for t in result.tried if t.value_ns is None] == ["v", "looped"]


def test_caps_are_the_same_for_all_and_the_first_refusal_is_raised() -> None:
    problem = uniform(4, 2, 2, 4)
    assert plan_auto(problem, time_limit_s=4).solution.problem.caps == (4, 4)
    with pytest.raises(InfeasibleError, match="one microbatch alone"):
        plan_auto(problem.with_(caps=(3, 3)), time_limit_s=4)
    lopsided = Profile(tuple(StageCost.simple(2, 2, 1, saved, 0) for saved in (1, 1, 5, 5)))
    problem = Problem.of(lopsided, Placement((0, 0, 1, 1)), 2, 6)
    result = plan_auto(problem, time_limit_s=4)
    assert result.solution.problem.placement != Placement((0, 0, 1, 1))
    refused = [t for t in result.tried if t.bound_ns is None]
    assert [t.name for t in refused] == ["contiguous"]
    assert "no order fits" in str(refused[0])


def test_contiguous_stages_are_planned_as_well_as_joined_ones() -> None:
    """By counted tries: nothing is cut off by the clock."""
    problem = uniform(8, 4, 8, 8 * 2)
    whole = coarsened(problem, problem.placement)
    solver = ("quick_exact", "exact", "quick_crossing", "crossing", "from_below")
    value, joined = (
        plan(it, time_limit_s=60, level=1, without=solver).certificate.value_ns for it in (problem, whole)
    )
    assert value <= joined


def test_the_same_seed_gives_the_same_result_and_progress_never_rises() -> None:
    problem = uniform(4, 2, 2, 8, latency=1)
    seen: list[Progress] = []
    first = plan_auto(problem, seed=3, time_limit_s=60, observer=seen.append)
    assert plan_auto(problem, seed=3, time_limit_s=60) == first
    values = [p.best_ns for p in seen if p.best_ns is not None]
    assert values == sorted(values, reverse=True)
    assert len({p.bound_ns for p in seen}) == 1


def test_an_interrupt_keeps_the_best_placement_so_far() -> None:
    interrupted = False

    def observer(progress: Progress) -> None:
        nonlocal interrupted
        if not interrupted:
            interrupted = True
            raise KeyboardInterrupt

    result = plan_auto(uniform(8, 4, 8, 6, latency=1), time_limit_s=20, observer=observer)
    check(result.solution.schedule, result.solution.problem)
    assert [t.note for t in result.tried].count("interrupted") == 2


def test_random_stages_are_planned_under_their_caps() -> None:
    rng = random.Random(8)
    stages = tuple(
        StageCost.simple(rng.randint(1, 5), rng.randint(1, 5), rng.randint(0, 4), 2, 1) for _ in range(5)
    )
    problem = Problem.of(Profile(stages), Placement((0, 0, 1, 1, 2)), 3, 7)
    result = plan_auto(problem, time_limit_s=2)
    check(result.solution.schedule, result.solution.problem)
