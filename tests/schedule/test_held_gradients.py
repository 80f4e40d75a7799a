"""Gradients held beyond the plan: counted from the order as the runtime's sums really hold them."""

from __future__ import annotations

import weakref
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
from zbcompile.schedule.held_gradients import held_bytes, held_sets, held_words
from zbcompile.schedule.ir import Kind, Placement, Schedule
from zbcompile.schedule.problem import Problem

_MAKES = (Kind.BACKWARD_WEIGHT, Kind.FULL_BACKWARD)


def really_held(schedule: Schedule, sizes: list[int]) -> tuple[list[int], list[int]]:
    """Per stage the sets, per rank the bytes, that lived at once in the sums beyond one of every stage."""
    sets, amounts = [0] * schedule.num_stages, [0] * schedule.num_ranks
    for rank, row in enumerate(schedule.order):
        sums, alive = GradientSums(), {s: [] for s in schedule.placement.stages_of(rank)}
        for action in row:
            if action.kind not in _MAKES:
                continue
            gradient = torch.ones(sizes[action.stage], dtype=torch.uint8)
            alive[action.stage].append(weakref.ref(gradient))
            sums.add(action.stage, action.microbatch, {"weight": gradient})
            del gradient
            beyond = {s: max(0, sum(r() is not None for r in refs) - 1) for s, refs in alive.items()}
            amounts[rank] = max(amounts[rank], sum(count * sizes[s] for s, count in beyond.items()))
            for s, count in beyond.items():
                sets[s] = max(sets[s], count)
    return sets, amounts


@given(problems(max_microbatches=6), st.randoms(use_true_random=False), st.floats(0, 1))
def test_what_is_counted_is_what_the_sums_hold(problem: Problem, random: Random, fuse: float) -> None:
    schedule = greedy_order(problem, random, fuse)
    sizes = [random.randrange(4) for _ in range(problem.num_stages)]
    sets, amounts = really_held(schedule, sizes)
    assert list(held_sets(schedule)) == sets
    assert list(held_bytes(schedule, sizes)) == amounts


@pytest.mark.parametrize(
    ("rank", "sets"),
    [("0BW0 0BW1 0BW2", 0), ("0BW1 0BW2 0W0", 1), ("0BW0 0BW2 0BW3 0W1", 2), ("0W3 0W2 0W1 0W0", 2)],
)
def test_sets_wait_for_the_earlier_microbatches(rank: str, sets: int) -> None:
    """The first set of a stage is the one that the plan counts."""
    schedule = Schedule.parse(f"placement 0\nmicrobatches 4\nrank 0: {rank}\n")
    assert held_sets(schedule) == (sets,)
    assert held_bytes(schedule, (10,)) == (10 * sets,)


def test_published_orders_hold_nothing() -> None:
    for placement in (Placement.linear(4), Placement.v(2), Placement.looped(2)):
        problem = Problem.of(Profile.uniform(StageCost.simple(3, 3, 2), 4), placement, 8)
        for name, codes in orders_for(problem):
            assert held_words(held_sets(to_schedule(codes, problem))) == "", name


def test_words_name_stages_and_count_the_rest() -> None:
    assert held_words((0, 0)) == ""
    assert held_words((0, 1)) == "up to 1 gradient of stage 1's weights"
    assert held_words((3, 1), (1,)) == "up to 1 gradient of stage 1's weights"
    assert held_words((3, 0, 2)) == "up to 3 gradients of stage 0's weights, 2 of stage 2's"
    assert held_words((1, 2, 3, 4, 5, 6, 0)) == (
        "up to 1 gradient of stage 0's weights, 2 of stage 1's, 3 of stage 2's, 4 of stage 3's, "
        "at most 6 of each of 2 more stages'"
    )
