"""Split or fuse: the clock of every transport, the rule of thumb as the search finds it, sound bounds."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.planner_cases import brute_force
from tests.support.strategies import greedy_order, problems
from zbcompile.errors import CheckError
from zbcompile.planner.bounds.analytic import best_bound
from zbcompile.planner.bounds.blocking_send import blocking_send_bound
from zbcompile.planner.core.instance import (
    BW,
    B,
    Codes,
    Fusing,
    Instance,
    shaped,
    to_codes,
    to_schedule,
)
from zbcompile.planner.core.times import Clock
from zbcompile.planner.improve.fuse import SplitOrFuse
from zbcompile.planner.improve.jitter import jittered_mean
from zbcompile.planner.improve.row_changes import fuse_range, split_range
from zbcompile.planner.incumbent import Incumbent
from zbcompile.planner.parts import search
from zbcompile.planner.plan import plan
from zbcompile.planner.portfolio import NAMES
from zbcompile.planner.run import Effort, Run
from zbcompile.planner.starts.classic import orders_for
from zbcompile.planner.starts.fused_patterns import pattern_codes, split_windows
from zbcompile.planner.starts.initial import Classic, one_at_a_time
from zbcompile.schedule.check import check, faults
from zbcompile.schedule.costs import Link, Profile, StageCost
from zbcompile.schedule.ir import Kind, Placement
from zbcompile.schedule.problem import TRANSPORTS, Problem
from zbcompile.schedule.simulate import simulate

MS = 1_000_000


@given(problems(), st.randoms(use_true_random=False), st.sampled_from(TRANSPORTS))
def test_the_planners_clock_equals_the_simulation(problem: Problem, random: object, transport: str) -> None:
    problem = problem.with_(transport=transport)
    codes = to_codes(greedy_order(problem, random))
    schedule = to_schedule(codes, problem)
    try:
        timeline = simulate(schedule, problem)
    except CheckError:
        assert Clock.of(problem).measure(codes) is None
        return
    assert Clock.of(problem).measure(codes) == (timeline.span_ns, timeline.makespan_ns)


@given(problems(), st.sampled_from(TRANSPORTS))
def test_one_microbatch_at_a_time_never_deadlocks(problem: Problem, transport: str) -> None:
    problem = problem.with_(transport=transport)
    assert faults(to_schedule(one_at_a_time(Instance.of(problem)), problem), problem) == []


def table_problem(
    latency_ms: float, delta_percent: float, transport: str, p: int = 8, m: int = 32
) -> Problem:
    """ZB-H1's setting: F, B, W of 29.7, 29.4, 19.9 ms, a BW that saves some per cent of B, p * M_B."""
    stage = StageCost(29_700_000, 29_400_000, 19_900_000, 49_300_000 - round(294_000 * delta_percent), 2, 1)
    profile = Profile.uniform(stage, p, round(latency_ms * MS))
    return Problem.of(profile, None, m, 2 * p, "makespan", transport)


def zb_h1_with(problem: Problem, choice: str) -> int:
    """Makespan of ZB-H1 with backwards split everywhere (but on rank 0), by the rule of thumb, or nowhere."""
    instance, p, m = Instance.of(problem), problem.num_ranks, problem.num_microbatches
    windows = {
        "all": [(m, m) if d else (0, 0) for d in range(p)],
        "rule": [(d, p - d) if d else (0, 0) for d in range(p)],
        "never": [(0, 0)] * p,
    }[choice]
    head, tail = zip(*windows, strict=True)
    codes = pattern_codes(instance, (tuple(range(p, 0, -1)), tuple(range(p)), head, tail))
    return simulate(to_schedule(codes, problem), problem).makespan_ns


@pytest.mark.parametrize(
    ("latency", "delta", "transport", "known"),
    [
        (0.5, 0, "async", (2818, 2838, 3116)),
        (0.5, 0, "batched", (2980, 2841, 3120)),
        (0.5, 10, "async", (2814, 2764, 3002)),
        (5, 0, "async", (2944, 3144, 3422)),
        (5, 0, "batched", (3313, 3179, 3458)),
    ],
)
def test_the_event_graph_gives_the_known_figures_within_a_thousandth(
    latency: float, delta: float, transport: str, known: tuple[int, int, int]
) -> None:
    problem = table_problem(latency, delta, transport)
    for choice, expected in zip(("all", "rule", "never"), known, strict=True):
        assert zb_h1_with(problem, choice) == pytest.approx(expected * MS, rel=1e-3)


@pytest.mark.parametrize("times", [(17, 12, 19, 28), (13, 15, 11, 23), (15, 15, 19, 31)])
def test_the_rule_of_thumb_is_tried_even_where_no_time_is_left(times: tuple[int, ...]) -> None:
    """BW saves 3, and no W of a published order fills a gap as well: they are up to a twentieth longer.

    It is among the first orders, so it needs no other part either.
    """
    p, m = 4, 12
    problem = Problem.of(Profile.uniform(StageCost(*times, 4, 2), p), None, m, None, "makespan")
    first = plan(problem, level=1, time_limit_s=60, without=set(NAMES) - {"classic", "rule_of_thumb"})
    for solution in (plan(problem, time_limit_s=0), first):
        assert solution.certificate.value_ns <= zb_h1_with(problem, "rule")
        assert solution.certificate.lineage == ("rule_of_thumb",)
    assert plan(problem, time_limit_s=0, fuse="never").certificate.value_ns > zb_h1_with(problem, "rule")


def fused_search(problem: Problem, tries: int) -> Incumbent:
    """Search for fused backwards alone, from nothing."""
    effort = replace(Effort.of(problem), fusing=tries)
    run = Run(problem, time_limit_s=60, effort=effort)
    search(run, (SplitOrFuse(),))
    return run.incumbent


def splits_of(codes: Codes, stage: int) -> list[int]:
    """Microbatches of a stage that are split."""
    backwards = [kind for row in codes for kind, s in row if s == stage and kind in (B, BW)]
    return [i for i, kind in enumerate(backwards) if kind == B]


@pytest.mark.parametrize("transport", ["rendezvous", "batched"])
def test_blocking_sends_lead_to_the_rule_of_thumb(transport: str) -> None:
    """Rank 0 never splits; in the steady state nobody does; start and end are split."""
    p, m = 4, 12
    problem = table_problem(1, 10, transport, p, m)
    incumbent = fused_search(problem, 500)
    assert incumbent.codes is not None
    assert incumbent.value is not None
    check(incumbent.schedule(), problem)
    assert incumbent.value <= zb_h1_with(problem, "rule")
    assert splits_of(incumbent.codes, 0) == []
    for stage in range(1, p):
        splits = splits_of(incumbent.codes, stage)
        assert m - 1 in splits
        assert not set(range(p, m - p)) & set(splits)


def test_small_changes_alone_lead_from_fused_orders_to_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 1F1B as the only pattern to start from, the event graph leads to an order as short."""
    p, m = 4, 12
    fused = (tuple(range(p, 0, -1)), *((0,) * p,) * 3)
    monkeypatch.setattr("zbcompile.planner.improve.fuse.patterns", lambda *_: iter((fused,)))
    problem = table_problem(1, 10, "batched", p, m)
    incumbent = fused_search(problem, 1500)
    assert incumbent.value is not None
    assert incumbent.value <= 1.01 * zb_h1_with(problem, "rule")


@pytest.mark.parametrize(("latency", "delta", "steady"), [(5, 10, True), (5, 40, False), (0.5, 10, False)])
def test_async_splits_the_steady_state_only_where_it_pays(latency: float, delta: float, steady: bool) -> None:
    """Split iff delta < about 0.85 min(2c, TW): 2.9 < 8.5 ms; 11.8 > 8.5 ms; 2.9 > 0.85 ms."""
    problem = table_problem(latency, delta, "async", 4, 16)
    incumbent = fused_search(problem, 700)
    assert incumbent.codes is not None
    middle = set(range(6, 10))
    split = sum(len(middle & set(splits_of(incumbent.codes, s))) for s in range(1, 4))
    assert (split > 6) == steady


def test_plan_obeys_fuse_never_and_always() -> None:
    problem = table_problem(1, 10, "async", 3, 6)
    kinds = {}
    for fuse in ("never", "always", "auto"):
        solution = plan(problem, fuse=fuse, time_limit_s=2)
        check(solution.schedule, problem)
        kinds[fuse] = {a.kind for row in solution.schedule.order for a in row}
    assert Kind.FULL_BACKWARD not in kinds["never"]
    assert kinds["always"] == {Kind.FORWARD, Kind.FULL_BACKWARD}


@pytest.mark.parametrize(
    ("transport", "part", "lineage"),
    [
        ("rendezvous", "classic", "classic interleaved 1F1B, all split"),
        ("batched", "one_at_a_time", "one_at_a_time, all split"),
    ],
)
def test_first_orders_are_tried_all_split_where_sends_hold_their_rank(
    transport: str, part: str, lineage: str
) -> None:
    """Each of them fuses, and is longer as it is than with all of it split."""
    stage, placement = StageCost(30, 30, 20, 49, 2, 1), Placement.looped(2)
    problem = Problem.of(Profile.uniform(stage, 4, 0), placement, 4, None, "span", transport)
    found = {
        fuse: plan(problem, fuse=fuse, level=1, time_limit_s=60, without={*NAMES} - {part}).certificate
        for fuse in Fusing
    }
    assert found[Fusing.AUTO].value_ns == found[Fusing.NEVER].value_ns < found[Fusing.ALWAYS].value_ns
    assert found[Fusing.AUTO].lineage == (lineage,)


@given(st.data())
def test_fusing_and_splitting_ranges_keep_orders_legal_and_fusing_saves_memory(data: st.DataObject) -> None:
    problem = data.draw(problems())
    codes = to_codes(greedy_order(problem, data.draw(st.randoms(use_true_random=False))))
    stage = data.draw(st.integers(0, problem.num_stages - 1))
    low = data.draw(st.integers(0, problem.num_microbatches))
    rank, instance = problem.placement.rank_of[stage], Instance.of(problem)

    def with_row(row: list[tuple[int, int]]) -> Codes:
        return [row if r == rank else old for r, old in enumerate(codes)]

    fused = with_row(fuse_range(codes[rank], stage, low, low + 2))
    split = with_row(split_range(codes[rank], stage, low, low + 2, data.draw(st.integers(0, 3))))
    for changed in (fused, split, shaped(codes, Fusing.NEVER), shaped(codes, Fusing.ALWAYS)):
        assert faults(to_schedule(changed, problem), problem) == []
    peaks = [simulate(to_schedule(c, problem), problem).peak_bytes[rank] for c in (codes, fused)]
    if all(pending <= saved for pending, saved in zip(instance.pending, instance.saved, strict=True)):
        assert peaks[1] <= peaks[0]


def random_fusing_problem(rng: random.Random, transport: str) -> Problem:
    """Two or three ranks, BW anywhere between its longer part and B + W or even less than B."""
    p, m = rng.choice(((2, 2), (2, 2), (2, 2), (3, 2)))
    stages = []
    for _ in range(p):
        b, w, saved = rng.randint(1, 6), rng.randint(0, 6), rng.randint(1, 5)
        stages.append(
            StageCost(rng.randint(1, 6), b, w, rng.randint(max(0, b - 1), b + w), saved, rng.randint(0, 6))
        )
    caps = tuple(rng.randint(s.saved_bytes, m * s.saved_bytes + 3) for s in stages)
    profile = Profile(tuple(stages), link=Link(rng.randint(0, 3)), overhead_ns=rng.randint(0, 1))
    return Problem(
        profile, Problem.of(profile).placement, m, caps, rng.choice(("span", "makespan")), transport
    )


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_bounds_hold_over_all_orders_and_all_choices_of_fusing(transport: str) -> None:
    rng = random.Random(7)
    tight = 0
    for _ in range(12):
        problem = random_fusing_problem(rng, transport)
        least = brute_force(problem, fusing=True)
        bounds = [best_bound(problem).value_ns]
        blocking = blocking_send_bound(problem)
        if blocking is not None:
            bounds.append(blocking.value_ns)
        assert max(bounds) <= least
        tight += max(bounds) == least
    assert tight >= 3


def test_plan_meets_brute_force_on_small_instances() -> None:
    rng = random.Random(11)
    for transport in TRANSPORTS:
        for _ in range(2):
            problem = random_fusing_problem(rng, transport)
            value = plan(problem, time_limit_s=4).certificate.value_ns
            assert value <= 1.1 * brute_force(problem, fusing=True)


def test_jitter_favours_the_early_send_and_is_repeatable() -> None:
    problem = table_problem(0, 0, "async", 4, 8)
    instance, clock = Instance.of(problem), Clock.of(problem)
    fused, split = (
        pattern_codes(instance, ((4, 3, 2, 1), (0, 1, 2, 3), *windows))
        for windows in split_windows(instance)[1:3]
    )
    assert jittered_mean(clock, split) == jittered_mean(clock, split)
    assert jittered_mean(clock, split) < jittered_mean(clock, fused)
    assert jittered_mean(clock, split, percent=0) == clock.value(split)


@pytest.mark.parametrize("transport", ["rendezvous", "batched"])
def test_an_order_that_settles_a_tie_is_not_called_what_it_was(transport: str) -> None:
    """Nor is one that is shorter: only a published order is called by its name."""
    problem = table_problem(0.5, 0, transport, 4, 8)
    run = Run(problem, time_limit_s=60, effort=replace(Effort.of(problem), fusing=120))
    search(run, (Classic(), SplitOrFuse()))
    assert run.incumbent.codes not in [codes for _, codes in orders_for(problem)]
    assert run.incumbent.lineage[-1].split(" ")[0] == "split_or_fuse"
