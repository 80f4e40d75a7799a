"""Gradients that wait for their turn in the sum: orders fit, bounds hold, nothing waits without need."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.memory_oracle import fits_by_hand
from tests.support.strategies import greedy_order, problems
from zbcompile.planner.certify.certificate import verify_certificate
from zbcompile.planner.core.early_weights import fitted, in_sum_order, with_fewest_waits
from zbcompile.planner.core.instance import BW, B, Codes, F, Instance, W, to_codes, to_schedule
from zbcompile.planner.core.score import fits, value_of
from zbcompile.planner.core.scorer import Scorer
from zbcompile.planner.plan import plan
from zbcompile.schedule.costs import Link, Profile, StageCost
from zbcompile.schedule.held_gradients import held_sets
from zbcompile.schedule.least_memory import least_headroom
from zbcompile.schedule.memory import memory_peaks
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.simulate import simulate


def without_sets(problem: Problem) -> Problem:
    return problem.with_(accumulate="memory")


@given(problems(max_microbatches=5), st.randoms(use_true_random=False))
def test_an_order_in_sum_order_lets_nothing_wait_and_needs_no_more_bytes(
    problem: Problem, rng: random.Random
) -> None:
    profile = replace(
        problem.profile, stages=tuple(replace(s, gradient_bytes=1) for s in problem.profile.stages)
    )
    problem = problem.with_(profile=profile, accumulate="order")
    instance, codes = Instance.of(problem), to_codes(greedy_order(problem, rng, rng.random()))
    other = in_sum_order(instance, codes)
    assert [sorted(row) for row in other] == [sorted(row) for row in codes]
    schedule = to_schedule(other, problem)
    assert held_sets(schedule) == (0,) * problem.num_stages
    assert value_of(instance, other) is not None
    before = memory_peaks(to_schedule(codes, problem), without_sets(problem))
    after = memory_peaks(schedule, problem)
    assert all(a <= b for a, b in zip(after, before, strict=True))
    kept = with_fewest_waits(instance, codes, lambda order: value_of(instance, order))
    value, least = value_of(instance, codes), value_of(instance, kept)
    assert value is not None
    assert least is not None
    assert least <= value
    assert sum(held_sets(to_schedule(kept, problem))) <= sum(held_sets(to_schedule(codes, problem)))
    tight = Instance.of(problem.with_(caps=tuple(before)))
    found = fitted(tight, codes)
    assert found in (codes, other)
    assert (found == codes) == fits(tight, codes)


def test_an_order_that_is_no_longer_in_sum_order_is_kept_in_it() -> None:
    """Two BW's stand before an earlier W, and the rank waits for its messages anyway."""
    stage = StageCost(2, 2, 1, 3, 1, 1, gradient_bytes=5)
    problem = Problem.of(Profile((stage, stage)), None, 3)
    instance = Instance.of(problem)
    mixed: Codes = [
        [(F, 0)] * 3 + [(B, 0), (BW, 0), (BW, 0), (W, 0)],
        [(F, 1), (BW, 1), (F, 1), (BW, 1), (F, 1), (BW, 1)],
    ]
    kept = with_fewest_waits(instance, mixed, lambda order: value_of(instance, order))
    assert kept == in_sum_order(instance, mixed) != mixed
    assert (value_of(instance, kept), value_of(instance, mixed)) == (20, 21)
    assert in_sum_order(Instance.of(without_sets(problem)), mixed) is mixed


def rows_of_one_stage(stage: int, count: int) -> Iterator[list[tuple[int, int]]]:
    """Every order of one stage with each backward split or fused."""

    def extend(row: list[int]) -> Iterator[list[int]]:
        f, b, w, bw = (row.count(kind) for kind in (F, B, W, BW))
        if f == count and b + bw == count and w == b:
            yield row
        if f < count:
            yield from extend([*row, F])
        if b + bw < f:
            yield from extend([*row, B])
            yield from extend([*row, BW])
        if w < b:
            yield from extend([*row, W])

    for row in extend([]):
        yield [(kind, stage) for kind in row]


def shortest(problem: Problem) -> int:
    """Least value over every order of one stage per rank that fits by hand."""
    instance = Instance.of(problem)
    alone = []
    for rank in range(problem.num_ranks):
        rows = []
        for row in rows_of_one_stage(rank, problem.num_microbatches):
            order: Codes = [[] for _ in range(problem.num_ranks)]
            order[rank] = row
            if fits_by_hand(problem, rank, to_schedule(order, problem).order[rank]):
                rows.append(row)
        alone.append(rows)
    values = (value_of(instance, list(rows)) for rows in itertools.product(*alone))
    return min(value for value in values if value is not None)


@pytest.mark.parametrize("seed", range(8))
def test_plans_fit_and_bounds_hold_against_brute_force(seed: int) -> None:
    rng = random.Random(seed)
    ranks, count = ((1, 4), (2, 2))[seed % 2]
    stages = []
    for _ in range(ranks):
        f, b, w, saved = (rng.randint(1, 6) for _ in range(4))
        fused = b + w - rng.randint(0, min(b, w))
        pending, gradients = rng.randint(0, saved), rng.randint(1, 4)
        stages.append(StageCost(f, b, w, fused, saved, pending, rng.randint(0, 3), gradient_bytes=gradients))
    problem = Problem.of(
        Profile(tuple(stages), link=Link(rng.randint(0, 2))),
        None,
        count,
        None,
        rng.choice(("span", "makespan")),
    )
    problem = problem.with_(kept_gradients=rng.random() < 0.3)
    for slack in (0, 2, 5, 20):
        caps = (problem.static_bytes(r) + least_headroom(problem, r) + slack for r in range(ranks))
        capped = problem.with_(caps=tuple(caps))
        solution = plan(capped, time_limit_s=1.0, level=1)
        least, certificate = shortest(capped), solution.certificate
        assert certificate.bound_ns <= least <= certificate.value_ns
        assert simulate(solution.schedule, capped).value_ns == certificate.value_ns
        assert all(fits_by_hand(capped, r, row) for r, row in enumerate(solution.schedule.order))
        assert verify_certificate(solution).proved


def test_scorers_count_what_waits() -> None:
    stage = StageCost(1, 1, 1, 1, 2, 1, 0, gradient_bytes=10)
    row = [(F, 0)] * 4 + [(B, 0), (BW, 0), (BW, 0), (BW, 0), (W, 0)]
    for spare, legal in ((-1, False), (0, True)):
        problem = Problem.of(Profile((stage,)), None, 4, 1 + 20 + spare)
        instance = Instance.of(problem)
        assert fits(instance, [row]) is legal
        for vector in (list, None):
            scorer = Scorer(instance) if vector is None else Scorer(instance, vector)
            assert (scorer.score([row]) is not None) is legal
        assert Scorer(Instance.of(without_sets(problem))).score([row]) is not None


@pytest.mark.parametrize("transport", ["async", "rendezvous"])
def test_bounds_over_variants_are_derived_again_with_gradients_kept(transport: str) -> None:
    """Whatever variant runs, a stage holds its own gradients: the variant here says nothing of them."""
    rng = random.Random(1)
    stages = []
    for _ in range(3):
        f, b, w = (rng.randint(2, 9) for _ in range(3))
        lean = StageCost(f, b + f, w, b + w + f, 2, 1)
        stages.append(StageCost(f, b, w, b + w, 5, 3, 7, variants=(lean,), gradient_bytes=rng.randint(1, 4)))
    problem = Problem.of(Profile(tuple(stages), link=Link(1)), None, 5, None, "span", transport)
    problem = problem.with_(kept_gradients=True)
    caps = (None, *(problem.static_bytes(rank) + 9 for rank in (1, 2)))
    solution = plan(problem.with_(caps=caps), time_limit_s=1.0, level=1)
    assert solution.certificate.method == "variants"
    assert verify_certificate(solution).proved
