"""Gradients that wait for their turn: counted from the order as the runtime's sums really hold them."""

from __future__ import annotations

import weakref
from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.strategies import greedy_order, problems
from zbcompile.planner.core.instance import to_schedule
from zbcompile.planner.starts.classic import orders_for
from zbcompile.runtime.gradients import GradientSums
from zbcompile.schedule.costs import Profile, StageCost
from zbcompile.schedule.held_gradients import gradients_words, held_sets, held_words
from zbcompile.schedule.ir import Kind, Placement, Schedule
from zbcompile.schedule.memory import memory_after, memory_peaks
from zbcompile.schedule.problem import Problem

_MAKES = (Kind.BACKWARD_WEIGHT, Kind.FULL_BACKWARD)


def really_held(schedule: Schedule, problem: Problem) -> tuple[list[int], list[list[int]]]:
    """Per stage the most sets, per action the bytes, that lived in the sums beyond one set of every stage."""
    sizes = [stage.gradient_bytes for stage in problem.profile.stages]
    sets, amounts = [0] * schedule.num_stages, []
    for rank, row in enumerate(schedule.order):
        sums = GradientSums(accumulate=problem.accumulate)
        alive = {s: [] for s in schedule.placement.stages_of(rank)}
        beyond, held = dict.fromkeys(alive, 0), []
        for action in row:
            if action.kind in _MAKES:
                gradient = torch.ones(sizes[action.stage], dtype=torch.uint8)
                alive[action.stage].append(weakref.ref(gradient))
                sums.add(action.stage, action.microbatch, {"weight": gradient})
                del gradient
                beyond = {s: max(0, sum(r() is not None for r in refs) - 1) for s, refs in alive.items()}
            held.append(sum(count * sizes[s] for s, count in beyond.items()))
            for s, count in beyond.items():
                sets[s] = max(sets[s], count)
        amounts.append(held)
    return sets, amounts


@given(problems(max_microbatches=6), st.randoms(use_true_random=False), st.floats(0, 1))
def test_what_is_counted_is_what_the_sums_hold(problem: Problem, random: Random, fuse: float) -> None:
    """Both ways to sum, microbatches in any order."""
    schedule = greedy_order(problem, random, fuse)
    sets, amounts = really_held(schedule, problem)
    assert sets == (list(held_sets(schedule)) if problem.accumulate == "order" else [0] * len(sets))
    without = problem.with_(profile=without_gradients(problem.profile), kept_gradients=False)
    problem = problem.with_(kept_gradients=False)
    for rank, held in enumerate(amounts):
        pairs = zip(memory_after(schedule, problem, rank), memory_after(schedule, without, rank), strict=True)
        assert [counted - alone for counted, alone in pairs] == held


def without_gradients(profile: Profile) -> Profile:
    return replace(profile, stages=tuple(replace(stage, gradient_bytes=0) for stage in profile.stages))


@pytest.mark.parametrize(
    ("rank", "sets"),
    [("0BW0 0BW1 0BW2", 0), ("0BW1 0BW2 0W0", 1), ("0BW0 0BW2 0BW3 0W1", 2), ("0W3 0W2 0W1 0W0", 2)],
)
def test_sets_wait_for_the_earlier_microbatches(rank: str, sets: int) -> None:
    """The first set of a stage is the one that the plan counts."""
    schedule = Schedule.parse(f"placement 0\nmicrobatches 4\nrank 0: {rank}\n")
    assert held_sets(schedule) == (sets,)
    stage = StageCost(1, 1, 1, 2, 0, 0, 7, gradient_bytes=10)
    problem = Problem.of(Profile((stage,)), None, 4)
    assert memory_peaks(schedule, problem) == [7 + 10 * sets]
    assert memory_peaks(schedule, problem.with_(accumulate="memory")) == [7]
    assert memory_peaks(schedule, problem.with_(accumulate="memory", kept_gradients=True)) == [17]


def test_published_orders_hold_nothing() -> None:
    for placement in (Placement.linear(4), Placement.v(2), Placement.looped(2)):
        problem = Problem.of(Profile.uniform(StageCost.simple(3, 3, 2), 4), placement, 8)
        for name, codes in orders_for(problem):
            assert not any(held_sets(to_schedule(codes, problem))), name


def test_words_name_stages_and_count_the_rest() -> None:
    assert held_words({}) == ""
    assert held_words({1: 1}) == "up to 1 gradient of stage 1's weights"
    assert held_words({2: 2, 0: 3}) == "up to 3 gradients of stage 0's weights, 2 of stage 2's"
    assert held_words({stage: stage + 1 for stage in range(6)}) == (
        "up to 1 gradient of stage 0's weights, 2 of stage 1's, 3 of stage 2's, 4 of stage 3's, "
        "at most 6 of each of 2 more stages'"
    )


def test_words_say_whether_what_waits_is_counted() -> None:
    schedule = Schedule.parse(
        "placement 0 1\nmicrobatches 3\nrank 0: 0B0 0BW1 0BW2 0W0\nrank 1: 1B0 1BW1 1W0\n"
    )
    stages = (StageCost(1, 1, 1, 2, 0, 0, gradient_bytes=10), StageCost(1, 1, 1, 2, 0, 0))
    counted = Problem.of(Profile(stages), schedule.placement, 3)
    unknown = counted.with_(profile=without_gradients(counted.profile))
    wait = "for their turn in the sum wait up to 1 gradient of stage 0's weights, counted in the peak"
    assert gradients_words(schedule, counted) == gradients_words(schedule, counted, 0) == wait
    assert gradients_words(schedule, counted, 1) == ""
    held = "beyond the plan it holds up to 1 gradient of stage 0's weights"
    assert gradients_words(schedule, unknown) == held
    as_they_come = gradients_words(schedule, counted.with_(accumulate="memory"))
    assert as_they_come == "gradients are summed as they come, not in microbatch order"
