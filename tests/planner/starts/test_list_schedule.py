"""The list scheduler and the fast clock."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planner.starts.test_classic import paper_problem
from tests.support.planner_cases import random_placement, random_problem
from zbcompile.planner.bounds.analytic import best_bound
from zbcompile.planner.core.dispatch import ALTERNATE, Dispatcher, Recipe
from zbcompile.planner.core.instance import Codes, Instance, to_codes, to_schedule
from zbcompile.planner.core.score import evaluate, fits
from zbcompile.planner.core.scorer import Scorer
from zbcompile.planner.starts.initial import one_at_a_time
from zbcompile.planner.starts.list_settings import in_order_settings
from zbcompile.schedule.check import check
from zbcompile.schedule.costs import Profile, StageCost
from zbcompile.schedule.memory import memory_peaks
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.simulate import simulate


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6))
def test_the_fast_clock_equals_the_clock(seed: int) -> None:
    """Random legal orders on random placements: span, makespan and the memory verdict agree."""
    rng = random.Random(seed)
    ranks = rng.randint(1, 4)
    placement = random_placement(rng, ranks) if rng.random() < 0.6 else None
    problem = random_problem(rng, ranks=ranks, microbatches=rng.randint(1, 5), placement=placement)
    instance = Instance.of(problem)
    codes = one_at_a_time(instance)
    for row in codes:
        for _ in range(20):
            k = rng.randrange(len(row))
            row.insert(rng.randrange(len(row)), row.pop(k))
        _repair(row)
    measured = evaluate(instance, codes)
    schedule = to_schedule(codes, problem)
    if measured is None:
        with pytest.raises(Exception, match="deadlock"):
            simulate(schedule, problem)
        return
    timeline = simulate(schedule, problem)
    assert measured == (timeline.span_ns, timeline.makespan_ns)
    inside = all(
        peak <= cap for peak, cap in zip(memory_peaks(schedule, problem), problem.caps, strict=True) if cap
    )
    assert fits(instance, codes) == inside
    assert to_codes(schedule) == codes


def _repair(row: list[tuple[int, int]]) -> None:
    """Sort the places of each stage so that every F, B, W prefix is legal."""
    for stage in {s for _, s in row}:
        places = [k for k, (_, s) in enumerate(row) if s == stage]
        done = [0, 0, 0]
        total = len(places) // 3
        for k in places:
            kind = row[k][0]
            if done[kind] == total or (kind and done[kind] >= done[kind - 1]):
                kind = next(c for c in (2, 1, 0) if done[c] < (done[c - 1] if c else total))
            done[kind] += 1
            row[k] = (kind, stage)


def list_schedule(
    instance: Instance, limits: tuple[int, ...], share: int, idle: tuple[int, ...]
) -> Codes | None:
    """One stage per rank, microbatches in order, F and B in turn; compiled and plain alike."""
    recipe = Recipe(ALTERNATE, share, on_rank=limits, idle=idle)
    keys = list(range(instance.num_microbatches)) * (3 * instance.num_stages)
    plain = Dispatcher(instance, list).run(keys, recipe)
    assert plain == Dispatcher(instance).run(keys, recipe)
    return plain


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6))
def test_list_schedules_are_legal(seed: int) -> None:
    rng = random.Random(seed)
    ranks, microbatches = rng.randint(1, 5), rng.randint(1, 6)
    problem = random_problem(rng, ranks=ranks, microbatches=microbatches)
    instance = Instance.of(problem)
    codes = list_schedule(
        instance,
        tuple(rng.randint(1, 6) for _ in range(ranks)),
        rng.choice((0, 50, 100)),
        tuple(rng.randint(0, 40) for _ in range(ranks)),
    )
    assert codes is not None
    check(to_schedule(codes, problem), problem)


def test_a_list_schedule_meets_the_bound_at_cap_p() -> None:
    problem = Problem.of(Profile.uniform(StageCost.simple(1, 1, 1), 16), None, 64, 32)
    instance, bound = Instance.of(problem), best_bound(problem).value_ns
    limits = tuple(2 * (16 - d) for d in range(16))
    codes = list_schedule(instance, limits, 100, (bound - instance.work(0),) * 16)
    assert codes is not None
    assert evaluate(instance, codes) == (bound, bound)


@pytest.mark.parametrize("row", range(1, 6))
def test_the_f_s_that_the_warm_up_bound_counts_meet_it(paper_profiles: dict[str, Any], row: int) -> None:
    """Published profiles at cap 2p, all but 1.5B m=24: one of the first settings is as short as the bound."""
    problem = paper_problem(paper_profiles["configs"][row], 2)
    instance, bound = Instance.of(problem), best_bound(problem)
    assert bound.method == "warmup"
    dispatcher, scorer = Dispatcher(instance), Scorer(instance)
    scores = (
        dispatcher.score(setting.keys(instance), setting.recipe, scorer)
        for setting in in_order_settings(instance, bound.value_ns)
    )
    assert min(score[0] for score in scores if score) == bound.value_ns


def test_weights_larger_than_saved_bytes_do_not_lock_up() -> None:
    """M_W > M_B: B needs headroom of its own, so F's must leave it."""
    problem = Problem.of(Profile.uniform(StageCost.simple(3, 3, 2, 4, 7), 3), None, 6, 12)
    codes = list_schedule(Instance.of(problem), (9, 9, 9), 100, (0, 0, 0))
    assert codes is not None
    check(to_schedule(codes, problem), problem)
