"""Offset keys, keyed dispatch and annealing: legal orders, never longer, alike with and without numba."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.planner_cases import random_placement, random_problem, v_problem
from zbcompile.planner.core.dispatch import Dispatcher, Recipe
from zbcompile.planner.core.instance import Instance, to_codes, to_schedule
from zbcompile.planner.core.score import evaluate, fits, latest_row_starts
from zbcompile.planner.core.scorer import Scorer
from zbcompile.planner.improve.anneal import Annealer
from zbcompile.planner.plan import plan
from zbcompile.planner.starts import classic
from zbcompile.planner.starts.initial import one_at_a_time
from zbcompile.planner.starts.offset_key_orders import first_keys
from zbcompile.planner.starts.offset_keys import OffsetKeys
from zbcompile.planner.starts.stretch import stretch
from zbcompile.schedule.check import check
from zbcompile.schedule.costs import Profile, StageCost
from zbcompile.schedule.ir import Placement
from zbcompile.schedule.least_memory import least_headroom
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.simulate import simulate

SCRIPT = """
import random
from zbcompile.schedule.costs import Profile, StageCost
from zbcompile.schedule.ir import Placement
from zbcompile.planner.core.compiled import can_compile
from zbcompile.planner.core.instance import Instance
from zbcompile.planner.core.scorer import Scorer
from zbcompile.planner.improve.anneal import Annealer
from zbcompile.planner.starts.offset_key_orders import offset_key_orders
from zbcompile.schedule.problem import Problem
profile = Profile.uniform(StageCost.simple(30, 31, 17, 10, 4), 8, 2)
for objective in ("span", "makespan"):
    problem = Problem.of(profile, Placement.v(4), 6, 60, objective)
    instance = Instance.of(problem)
    pool = offset_key_orders(instance, Scorer(instance), random.Random(3), dispatches=12)
    print(can_compile(), pool, Annealer(instance).run(pool[0][2], 700, seed=5))
"""


def run_script(**environment: str) -> tuple[str, str]:
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=110,
        check=True,
    )
    flag = result.stdout.split()[0]
    return flag, result.stdout.replace(flag, "")


def test_the_same_order_without_numba() -> None:
    """NUMBA_DISABLE_JIT leaves the kernels as plain Python; where numba is absent both runs are that."""
    _, compiled = run_script()
    plain_flag, plain = run_script(NUMBA_DISABLE_JIT="1")
    assert plain_flag == "False"
    assert compiled == plain


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_annealing_keeps_orders_legal_and_never_longer(seed: int) -> None:
    rng = random.Random(seed)
    ranks = rng.randint(1, 4)
    placement = random_placement(rng, ranks) if rng.random() < 0.7 else None
    problem = random_problem(rng, ranks=ranks, microbatches=rng.randint(1, 5), placement=placement)
    instance = Instance.of(problem)
    before = one_at_a_time(instance)
    after = Annealer(instance).run(before, 300, seed=seed)
    check(to_schedule(after, problem), problem)
    measured, started = evaluate(instance, after), evaluate(instance, before)
    assert measured is not None
    assert started is not None
    which = 0 if instance.objective == "span" else 1
    assert measured[which] <= started[which]
    score = Scorer(instance).score(after)
    assert score is not None
    assert score[0] == measured[which]


def some_problem(seed: int) -> tuple[Problem, random.Random]:
    rng = random.Random(seed)
    ranks = rng.randint(1, 4)
    placement = random_placement(rng, ranks)
    return random_problem(rng, ranks=ranks, microbatches=rng.randint(1, 5), placement=placement), rng


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_dispatch_fits_and_finishes_under_any_keys(seed: int) -> None:
    """No limit on microbatches in flight: the reserve for deeper stages alone rules out a lock-up."""
    problem, rng = some_problem(seed)
    instance = Instance.of(problem)
    actions = 3 * instance.num_stages * instance.num_microbatches
    keys = [rng.randint(0, 50) for _ in range(actions)]
    codes = Dispatcher(instance).run(keys, Recipe(share=rng.choice((0, 50, 100))))
    assert codes is not None
    check(to_schedule(codes, problem), problem)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_dispatch_finishes_under_the_least_caps_where_b_keeps_more_than_it_frees(seed: int) -> None:
    """Several stages per rank and M_W > M_B: room for all F's and one B at a time is enough."""
    problem, rng = some_problem(seed)
    stages = tuple(
        replace(stage, saved_for_weight_bytes=stage.saved_bytes + rng.randint(0, 6))
        for stage in problem.profile.stages
    )
    problem = problem.with_(profile=replace(problem.profile, stages=stages))
    least = (least_headroom(problem, rank, fusing=False) for rank in range(problem.num_ranks))
    problem = problem.with_(caps=tuple(need + rng.choice((0, 0, 1, 5)) for need in least))
    instance = Instance.of(problem)
    keys = [rng.randint(0, 50) for _ in range(3 * instance.num_stages * instance.num_microbatches)]
    codes = Dispatcher(instance).run(keys, Recipe(share=rng.choice((0, 50, 100))))
    assert codes is not None
    check(to_schedule(codes, problem), problem)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6))
def test_gaps_are_the_waits_for_messages(seed: int) -> None:
    """Of every order met on the way; `simulate` is the oracle."""
    problem, _ = some_problem(seed)
    problem = problem.with_(objective="makespan")
    instance = Instance.of(problem)
    codes = Annealer(instance).run(one_at_a_time(instance), 100, seed=seed)
    timeline = simulate(to_schedule(codes, problem), problem)
    expected = [
        start - end
        for starts, ends in zip(timeline.start, timeline.end, strict=True)
        for start, end in zip(starts, [0, *ends], strict=False)
    ]
    assert Scorer(instance).gaps(codes) == expected


def test_search_is_shorter_than_the_published_order_at_half_memory() -> None:
    """V-Half of arXiv 2405.15362 at p = 4: the first round of annealing is enough."""
    profile = Profile.uniform(StageCost.simple(30, 29, 20, 34, 16), 8, 1)
    problem = Problem.of(profile, Placement.v(4), 12, 34 * 2 * 3)
    published = dict(classic.orders_for(problem))["V-Half"]
    instance = Instance.of(problem)
    annealed = Annealer(instance).run(published, 3000, seed=1)
    before, after = (Scorer(instance).score(codes) for codes in (published, annealed))
    assert before is not None
    assert after is not None
    assert after[0] < 0.98 * before[0]


def test_offset_keys_decode_on_every_placement() -> None:
    rng = random.Random(0)
    for placement in (Placement.v(4), Placement.looped(3, 3), Placement((0, 1, 1, 2, 0)), Placement.v(2, 3)):
        profile = Profile.uniform(StageCost.simple(3, 3, 2), placement.num_stages, 1)
        instance = Instance.of(Problem.of(profile, placement, 6))
        dispatcher = Dispatcher(instance)
        for offset_keys in first_keys(instance):
            changed = offset_keys.changed(rng)
            codes = dispatcher.run(changed.keys(instance), changed.recipe())
            assert codes is None or evaluate(instance, codes) is not None


def test_offset_keys_without_limits_stay_without() -> None:
    rng, keys = random.Random(0), OffsetKeys((3, 3), (3, 3), (1, 2, 1))
    for _ in range(50):
        keys = keys.changed(rng)
        assert keys.in_flight == ()
    assert keys.recipe().in_flight is None


def test_a_stretched_order_keeps_its_bubble() -> None:
    """Eight microbatches more at the same bubble: the middle is repeated, not the ends."""
    profile = Profile.uniform(StageCost.simple(10, 10, 10, 2, 1), 8)
    short = Problem.of(profile, Placement.v(4), 12, 16, "makespan")
    long = short.with_(num_microbatches=20)
    solution = plan(short, time_limit_s=30)
    instance = Instance.of(long)
    found = stretch(instance, to_codes(solution.schedule), 12, Scorer(instance))
    assert found
    assert all(fits(instance, codes) for codes in found)
    measured = evaluate(instance, found[0])
    assert measured is not None
    idle = solution.certificate.value_ns - Instance.of(short).work(0)
    assert measured[1] - instance.work(0) <= idle


def test_fused_backwards_are_stretched() -> None:
    """DualPipeV made for 24 microbatches: the same bubble with 60."""
    problem = v_problem(4, 60, 4 * 34 * 3)
    instance, short = Instance.of(problem), problem.with_(num_microbatches=24)
    codes = dict(classic.orders_for(short))["DualPipeV"]
    found = stretch(instance, codes, 24, Scorer(instance))
    before = evaluate(Instance.of(short), codes)
    after = evaluate(instance, found[0])
    assert before is not None
    assert after is not None
    assert after[0] - instance.work(0) == before[0] - replace(instance, num_microbatches=24).work(0)


@pytest.mark.parametrize("name", ["V-Half", "DualPipeV"])
def test_latest_starts_leave_every_rank_its_span(name: str) -> None:
    """The ends and first starts of all ranks are those of the clock."""
    problem = v_problem(4, 20, 4 * 34 * 3)
    instance = Instance.of(problem)
    codes = dict(classic.orders_for(problem))[name]
    starts, timeline = latest_row_starts(instance, codes), simulate(to_schedule(codes, problem), problem)
    times = (instance.forward, instance.backward, instance.weight, instance.fused)
    ends = [begins[-1] + times[row[-1][0]][row[-1][1]] for begins, row in zip(starts, codes, strict=True)]
    assert tuple(ends) == timeline.rank_end
    assert tuple(begins[0] for begins in starts) == timeline.latest_start


@pytest.mark.parametrize("objective", ["span", "makespan"])
def test_v_beats_one_stage_per_rank(objective: str) -> None:
    """At the memory of 1F1B, p = 4, m = 8: V is shorter than any order of one stage per rank."""
    halves = Profile.uniform(StageCost.simple(10, 10, 10, 2, 1), 8)
    wholes = Profile.uniform(StageCost.simple(20, 20, 20, 4, 2), 4)
    v = plan(Problem.of(halves, Placement.v(4), 8, 16, objective), time_limit_s=20)
    linear = plan(Problem.of(wholes, None, 8, 16, objective), time_limit_s=20)
    assert linear.certificate.is_optimal
    assert v.certificate.value_ns < linear.certificate.value_ns
