"""The exact model against brute force, with and without the help of bounds and hints."""

from __future__ import annotations

import random

import pytest

from tests.planner_cases import brute_force, random_problem
from zbcompile.costs import Profile, StageCost
from zbcompile.ir import Placement
from zbcompile.planner.bounds import best_bound
from zbcompile.planner.cpsat import right_shifted_starts, solve_exact
from zbcompile.planner.flat import Flat
from zbcompile.planner.seeds import one_at_a_time
from zbcompile.problem import Problem


@pytest.mark.parametrize("objective", ["span", "makespan"])
def test_equals_brute_force_with_one_stage_per_rank(objective: str) -> None:
    for k in range(30):
        rng = random.Random(k)
        ranks, microbatches = rng.choice([(2, 2), (2, 3), (3, 2)])
        problem = random_problem(rng, ranks=ranks, microbatches=microbatches, objective=objective)
        result = solve_exact(Flat.of(problem), lower=0, time_limit_s=20)
        assert result.proved
        assert result.value_ns == result.bound_ns == brute_force(problem)


@pytest.mark.parametrize("rank_of", [(0, 1, 0), (0, 1, 1, 0), (0, 1, 0, 1)])
def test_equals_brute_force_with_several_stages_per_rank(rank_of: tuple[int, ...]) -> None:
    for k in range(6):
        rng = random.Random(k)
        problem = random_problem(
            rng, ranks=2, microbatches=2 if len(rank_of) == 3 else 1, placement=Placement(rank_of)
        )
        result = solve_exact(Flat.of(problem), lower=0, time_limit_s=20)
        assert result.value_ns == result.bound_ns == brute_force(problem)


def test_bound_and_hint_change_the_speed_and_not_the_result() -> None:
    for k in range(12):
        problem = random_problem(random.Random(k), ranks=3, microbatches=3)
        flat = Flat.of(problem)
        plain = solve_exact(flat, lower=0, time_limit_s=20)
        helped = solve_exact(
            flat, lower=best_bound(problem).value_ns, incumbent=one_at_a_time(flat), time_limit_s=20
        )
        assert plain.bound_ns == helped.bound_ns == helped.value_ns


def test_the_same_seed_gives_the_same_order() -> None:
    problem = Problem.of(Profile.uniform(StageCost.simple(3, 3, 2), 3), None, 4, 4)
    first, second = (solve_exact(Flat.of(problem), lower=0, seed=3) for _ in range(2))
    assert first.codes == second.codes


def test_a_hint_is_a_feasible_timing() -> None:
    """Right-shifted starts keep every dependency and the value of the order."""
    problem = random_problem(random.Random(5), ranks=3, microbatches=3, placement=Placement.v(3))
    flat = Flat.of(problem)
    starts = right_shifted_starts(flat, one_at_a_time(flat))
    for s in range(flat.num_stages):
        for i in range(3):
            for other, lag in flat.forward_from[s]:
                assert starts[0, s, i] >= starts[0, other, i] + flat.forward[other] + lag
            for other, lag in flat.backward_from[s]:
                assert starts[1, s, i] >= starts[1, other, i] + flat.backward[other] + lag


def test_an_order_at_the_bound_is_found_first() -> None:
    problem = Problem.of(Profile.uniform(StageCost.simple(1, 1, 1), 4), None, 8, 8)
    bound = best_bound(problem).value_ns
    result = solve_exact(Flat.of(problem), lower=bound, time_limit_s=60)
    assert (result.value_ns, result.proved) == (bound, True)
