"""Lower bounds: sound against the exact optimum, and equal to hand-computed values."""

from __future__ import annotations

import random

import pytest

from tests.support.planner_cases import brute_force, exact_value, random_placement, random_problem
from zbcompile.planner.bounds.analytic import analytic_bounds, best_bound
from zbcompile.planner.bounds.blocking_send import blocking_send_bound
from zbcompile.planner.bounds.knapsack import fractional
from zbcompile.planner.certify.methods import rederived
from zbcompile.planner.core.instance import Instance
from zbcompile.planner.core.paths import Paths, _AllPaths
from zbcompile.planner.core.times import Clock
from zbcompile.planner.exact.model import solve_exact
from zbcompile.schedule.costs import Edge, Link, Profile, StageCost
from zbcompile.schedule.ir import Placement
from zbcompile.schedule.problem import TRANSPORTS, Problem

BLOCKS = 12
PER_BLOCK = 40


@pytest.mark.timeout(600)
@pytest.mark.parametrize("block", range(BLOCKS))
def test_no_bound_exceeds_the_optimum(block: int) -> None:
    """480 instances: one to three stages per rank, unequal costs, both objectives."""
    tight = 0
    for k in range(PER_BLOCK):
        rng = random.Random(block * PER_BLOCK + k)
        if k % 2 == 0:
            ranks = rng.randint(2, 4)
            problem = random_problem(rng, ranks=ranks, microbatches=rng.randint(2, 4 if ranks == 4 else 5))
        else:
            ranks = rng.randint(2, 3)
            problem = random_problem(
                rng,
                ranks=ranks,
                microbatches=rng.randint(1, 3 if ranks == 2 else 2),
                placement=random_placement(rng, ranks),
            )
        best = exact_value(problem)
        for bound in analytic_bounds(problem):
            assert bound.value_ns <= best, (problem, bound)
        tight += best_bound(problem).value_ns == best
    assert tight >= PER_BLOCK // 3


def test_the_best_bound_is_the_first_of_all_of_them() -> None:
    """Found along a plain chain of stages in one pass, elsewhere by all pairs of ranks."""
    rng = random.Random(4)
    pairs = 0
    for k in range(300):
        ranks = rng.randint(1, 5)
        placement = random_placement(rng, ranks) if k % 2 else None
        problem = random_problem(rng, ranks=ranks, microbatches=rng.randint(1, 6), placement=placement)
        best = best_bound(problem)
        assert best == analytic_bounds(problem)[0]
        pairs += best.method == "enclosing_pair"
    assert pairs >= 10


@pytest.mark.parametrize("seed", range(5))
def test_sums_along_a_chain_are_its_longest_paths(seed: int) -> None:
    problem = random_problem(random.Random(seed), ranks=4, microbatches=2, placement=Placement.v(4))
    instance = Instance.of(problem)
    sums, table = Paths.of(instance), _AllPaths.between(instance)
    assert not isinstance(sums, _AllPaths)
    assert (sums.head, sums.tail) == (table.head, table.tail)
    for a in range(8):
        for b in range(8):
            assert sums.f_to_f(a, b) == table.f_to_f(a, b)
            assert sums.f_to_b(a, b) == table.f_to_b(a, b)
            assert sums.b_to_b(a, b) == table.b_to_b(a, b)


def test_brute_force_agrees_on_tiny_cases() -> None:
    for k in range(25):
        rng = random.Random(1000 + k)
        problem = random_problem(rng, ranks=2, microbatches=2)
        assert best_bound(problem).value_ns <= brute_force(problem) == exact_value(problem)


@pytest.mark.parametrize(("p", "m"), [(4, 8), (8, 24), (16, 40)])
def test_memory_windows_give_the_formula_of_zb_h1(p: int, m: int) -> None:
    """At cap p and equal stages the bubble is (p-1)(F+B-W+4c), arXiv 2401.10241, table 2 with latency."""
    forward, backward, weight, latency = 30, 28, 17, 2
    stage = StageCost.simple(forward, backward, weight, 100, 50)
    problem = Problem.of(Profile.uniform(stage, p, latency), None, m, 100 * p)
    bubble = (p - 1) * (forward + backward - weight + 4 * latency)
    bound = best_bound(problem)
    assert (bound.method, bound.value_ns) == ("memory_windows", m * (forward + backward + weight) + bubble)


def test_makespan_without_a_cap_is_head_and_work() -> None:
    problem = Problem.of(Profile.uniform(StageCost.simple(3, 3, 2), 4, 1), None, 10, None, "makespan")
    assert best_bound(problem).value_ns == 10 * 8 + 3 * (3 + 1)


def test_a_bound_holds_for_fused_backwards() -> None:
    """Where BW is cheaper than B + W, the bound must not count the full B + W."""
    stage = StageCost(4, 4, 4, 5, 10, 30)
    problem = Problem.of(Profile.uniform(stage, 1), Placement.linear(1), 6)
    assert best_bound(problem).value_ns == 6 * (4 + 5)


def test_fractional_knapsack() -> None:
    assert fractional([(5, 2, 3)], 5) == 10
    assert fractional([(5, 2, 3), (3, 1, 1)], 4) == 3 + 7
    assert fractional([(5, 0, 3)], 0) == 15
    assert fractional([(5, 1, 3)], -1) == 0


@pytest.mark.parametrize("transport", TRANSPORTS[1:])
def test_a_stage_that_feeds_two_ranks_waits_for_the_nearer_one_at_least(transport: str) -> None:
    """Rank 0 sends every F to ranks 1 and 2, 5 and 8 ns away."""
    stages = (StageCost.simple(4, 1, 1), StageCost.simple(1, 1, 1), StageCost.simple(1, 1, 1))
    profile = Profile(stages, (Edge(0, 1), Edge(0, 2, 3, 0)), Link(5, 1_000_000_000))
    problem = Problem.of(profile, None, 3, None, "span", transport)
    bound = blocking_send_bound(problem)
    assert bound is not None
    assert bound.value_ns >= 3 * (4 + 5 + 1 + 1) - 5
    assert bound.value_ns > best_bound(problem).value_ns
    assert rederived(problem, bound) == bound.value_ns
    found = solve_exact(Instance.of(problem), lower=0, time_limit_s=60, clock=Clock.of(problem))
    assert found.proved
    assert bound.value_ns <= found.bound_ns
