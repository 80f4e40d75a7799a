"""The exact model against brute force, with and without the help of bounds and hints."""

from __future__ import annotations

import random

import pytest

from tests.support.planner_cases import brute_force, random_problem
from zbcompile.planner.bounds.analytic import best_bound
from zbcompile.planner.core.instance import Instance
from zbcompile.planner.core.score import fits, latest_starts
from zbcompile.planner.exact.model import ask_below, refute, solve_exact
from zbcompile.planner.plan import plan
from zbcompile.planner.portfolio import NAMES
from zbcompile.planner.starts.initial import one_at_a_time
from zbcompile.schedule.costs import Edge, Link, Profile, StageCost
from zbcompile.schedule.ir import Placement
from zbcompile.schedule.least_memory import least_headroom
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.simulate import simulate


@pytest.mark.parametrize("objective", ["span", "makespan"])
def test_equals_brute_force_with_one_stage_per_rank(objective: str) -> None:
    for k in range(30):
        rng = random.Random(k)
        ranks, microbatches = rng.choice([(2, 2), (2, 3), (3, 2)])
        problem = random_problem(rng, ranks=ranks, microbatches=microbatches, objective=objective)
        result = solve_exact(Instance.of(problem), lower=0, time_limit_s=20)
        assert result.proved
        assert result.value_ns == result.bound_ns == brute_force(problem)


@pytest.mark.parametrize("rank_of", [(0, 1, 0), (0, 1, 1, 0), (0, 1, 0, 1)])
def test_equals_brute_force_with_several_stages_per_rank(rank_of: tuple[int, ...]) -> None:
    for k in range(6):
        rng = random.Random(k)
        problem = random_problem(
            rng, ranks=2, microbatches=2 if len(rank_of) == 3 else 1, placement=Placement(rank_of)
        )
        result = solve_exact(Instance.of(problem), lower=0, time_limit_s=20)
        assert result.value_ns == result.bound_ns == brute_force(problem)


def test_bound_and_hint_change_the_speed_and_not_the_result() -> None:
    for k in range(12):
        problem = random_problem(random.Random(k), ranks=3, microbatches=3)
        instance = Instance.of(problem)
        plain = solve_exact(instance, lower=0, time_limit_s=20)
        helped = solve_exact(
            instance, lower=best_bound(problem).value_ns, incumbent=one_at_a_time(instance), time_limit_s=20
        )
        assert plain.bound_ns == helped.bound_ns == helped.value_ns


def test_long_times_leave_no_order_out() -> None:
    """A step of 3.6 s, found at random: presolved, CP-SAT left out all orders as short as a known one."""
    costs = (
        (118_839_953, 0, 232_563_510, 232_563_510, 0, 1),
        (160_013_235, 0, 224_730_105, 202_257_094, 0, 1),
        (199_266_533, 0, 287_432_278, 258_689_050, 0, 1),
        (110_691_442, 0, 231_103_816, 231_103_816, 0, 1),
    )
    edges = (Edge(0, 1), Edge(1, 2), Edge(2, 3, has_gradient=False))
    profile = Profile(tuple(StageCost(*cost) for cost in costs), edges, Link(506_665_429))
    problem = Problem.of(profile, Placement.v(2), 3, 1)
    without = set(NAMES) - {"list_schedule", "split_or_fuse"}
    known = plan(problem, level=1, time_limit_s=600, without=without)
    value = simulate(known.schedule, problem).value_ns
    assert refute(Instance.of(problem), value + 1, time_limit_s=60) is False


def test_the_same_seed_gives_the_same_order() -> None:
    problem = Problem.of(Profile.uniform(StageCost.simple(3, 3, 2), 3), None, 4, 4)
    first, second = (solve_exact(Instance.of(problem), lower=0, seed=3) for _ in range(2))
    assert first.codes == second.codes


def test_a_hint_is_a_feasible_timing() -> None:
    """Latest starts keep every dependency and the value of the order."""
    problem = random_problem(random.Random(5), ranks=3, microbatches=3, placement=Placement.v(3))
    instance = Instance.of(problem)
    starts = latest_starts(instance, one_at_a_time(instance))
    for s in range(instance.num_stages):
        for i in range(3):
            for other, lag in instance.forward_from[s]:
                assert starts[0, s, i] >= starts[0, other, i] + instance.forward[other] + lag
            for other, lag in instance.backward_from[s]:
                assert starts[1, s, i] >= starts[1, other, i] + instance.backward[other] + lag


def test_an_order_at_the_bound_is_found_first() -> None:
    problem = Problem.of(Profile.uniform(StageCost.simple(1, 1, 1), 4), None, 8, 8)
    bound = best_bound(problem).value_ns
    result = solve_exact(Instance.of(problem), lower=bound, time_limit_s=60)
    assert (result.value_ns, result.proved) == (bound, True)


@pytest.mark.parametrize("seed", range(40))
def test_actions_without_length_make_no_circle(seed: int) -> None:
    """Some times are zero, or all: the solver's order can be run, and its value is the solver's."""
    rng = random.Random(seed)
    stages = tuple(
        StageCost.simple(rng.choice((0, 0, 2)), rng.choice((0, 0, 3)), rng.choice((0, 1)), 2, 1)
        for _ in range(6)
    )
    if seed == 0:
        stages = (StageCost.simple(0, 0, 0, 2, 1),) * 6
    problem = Problem.of(Profile(stages, link=Link(rng.randint(0, 1))), Placement.v(3), 3, None, "makespan")
    result = solve_exact(Instance.of(problem), lower=0, time_limit_s=20)
    assert result.proved
    assert result.value_ns == result.bound_ns


def timeless_problem(rng: random.Random) -> Problem:
    """Many actions without length and stages without bytes, caps that bind: linear, V, looped or any map."""
    rank_of, m = rng.choice(
        [
            ((0,), 3),
            ((0, 1), 2),
            ((0, 1), 3),
            ((0, 1, 2), 2),
            ((0, 1, 1, 0), 1),
            ((0, 1, 0, 1), 1),
            ((0, 0, 1), 2),
        ]
    )
    lengths = rng.choice(((0,), (0, 0, 0, 1, 4), (0, 1, 2, 5)))
    stages = tuple(
        StageCost.simple(
            rng.choice(lengths),
            rng.choice(lengths),
            rng.choice(lengths),
            saved := rng.randint(0, 3),
            min(saved, rng.choice((0, 1, 2))),
        )
        for _ in rank_of
    )
    edges = tuple(Edge(s, s + 1, has_gradient=rng.random() < 0.8) for s in range(len(rank_of) - 1))
    objective = rng.choice(("span", "makespan"))
    problem = Problem.of(
        Profile(stages, edges, Link(rng.choice((0, 0, 1, 3)))), Placement(rank_of), m, None, objective
    )
    least = [least_headroom(problem, r, fusing=False) for r in range(problem.num_ranks)]
    return problem.with_(caps=tuple(rng.choice((need, need, need + 1, None)) for need in least))


def test_actions_without_length_keep_memory_and_equal_brute_force() -> None:
    """Refutations too: none is shorter than the least, and one is as short."""
    for k in range(40):
        problem = timeless_problem(random.Random(k))
        instance, least = Instance.of(problem), brute_force(problem)
        result = solve_exact(instance, lower=0, time_limit_s=20)
        assert result.value_ns == result.bound_ns == least, problem
        assert result.codes is not None
        assert fits(instance, result.codes)
        assert refute(instance, least) is True
        assert refute(instance, least + 1) is False


def test_a_v_without_times_is_as_long_as_its_memory_makes_it() -> None:
    """Four microbatches in turns of two: the orders of 12 ns that starts alone allow break the cap."""
    stage = StageCost.simple(0, 0, 0, 1, 0)
    problem = Problem.of(Profile.uniform(stage, 4, 3), Placement((0, 1, 1, 0)), 4, 6, "makespan")
    two_less = problem.with_(caps=(None, None))
    assert solve_exact(Instance.of(two_less), lower=0, time_limit_s=20).value_ns == 12
    result = solve_exact(Instance.of(problem), lower=0, time_limit_s=60)
    assert result.value_ns == result.bound_ns == 18
    assert result.codes is not None
    assert fits(Instance.of(problem), result.codes)


@pytest.mark.parametrize(("p", "below", "above"), [(8, 449_600_000, 455_000_000), (16, 913_000_000, None)])
def test_questions_from_below_prove_more_than_the_sums(p: int, below: int, above: int | None) -> None:
    """A V with as many microbatches as ranks: 384 and 1,536 actions, the latter never minimised."""
    stage = StageCost.simple(9_261_000, 9_043_000, 4_668_500, 201_216, 73_728)
    profile = Profile.uniform(stage, 2 * p, 601_000)
    problem = Problem.of(profile, Placement.v(p), p, 2 * p * 201_216, "makespan")
    assert best_bound(problem).value_ns < below
    none = ask_below(Instance.of(problem), below, time_limit_s=60)
    assert none.proved
    assert none.codes is None
    if above is not None:
        found = ask_below(Instance.of(problem), above, time_limit_s=10)
        assert found.value_ns is not None
        assert below <= found.value_ns < above
