"""Recompute variants: the joint bound against brute force, the choice, infeasible caps, the large lever."""

from __future__ import annotations

import contextlib
import itertools
import random
from dataclasses import replace
from functools import partial

import pytest

from tests.support.planner_cases import brute_force, random_placement
from zbcompile.errors import InfeasibleError
from zbcompile.planner import assignments as ranking
from zbcompile.planner import joint_bound as joint
from zbcompile.planner.assignments import bound_of, candidates, fixed, uniform
from zbcompile.planner.bounds.bound import Bound
from zbcompile.planner.certify.certificate import verify_certificate
from zbcompile.planner.core.instance import Instance, to_schedule
from zbcompile.planner.imported import rated
from zbcompile.planner.incumbent import Order, Progress
from zbcompile.planner.joint_bound import cheapest, joint_bound, offers_variants
from zbcompile.planner.plan import plan
from zbcompile.planner.portfolio import NAMES
from zbcompile.planner.starts.initial import one_at_a_time
from zbcompile.planner.variants import plan_variants
from zbcompile.schedule.check import check
from zbcompile.schedule.costs import Link, Profile, StageCost
from zbcompile.schedule.ir import Placement
from zbcompile.schedule.least_memory import least_headroom
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.simulate import simulate
from zbcompile.schedule.solution import Solution

SLOW = frozenset(NAMES) - {"classic", "one_at_a_time", "list_schedules"}
"""Parts that variants are planned without where the tries are counted."""


def way(rng: random.Random, *, fusing: bool) -> StageCost:
    """Any costs; BW is B + W unless ``fusing``."""
    b, w, saved = rng.randint(1, 6), rng.randint(0, 5), rng.randint(2, 8)
    fused = rng.randint(max(0, b - 1), b + w) if fusing else b + w
    return StageCost(rng.randint(1, 6), b, w, fused, saved, rng.randint(0, saved), rng.randint(0, 2))


def random_problem(rng: random.Random, *, fusing: bool) -> Problem:
    """Two ranks, one or two stages each, up to two variants per stage, caps that some assignment fits."""
    placement = random_placement(rng, 2) if not fusing and rng.random() < 0.2 else None
    count = placement.num_stages if placement else 2
    stages = tuple(
        replace(
            way(rng, fusing=fusing),
            variants=tuple(way(rng, fusing=fusing) for _ in range(rng.randint(0, 2 if count < 3 else 1))),
        )
        for _ in range(count)
    )
    profile = Profile(stages, link=Link(rng.randint(0, 2)))
    m = 2 if count < 3 else 1
    problem = Problem.of(profile, placement, m, None, rng.choice(("span", "makespan")))
    lean = problem.with_(profile=replace(profile, stages=tuple(cheapest(s) for s in stages)))
    caps = tuple(
        problem.static_bytes(r) + least_headroom(lean, r) + rng.randint(0, 8)
        for r in range(problem.num_ranks)
    )
    return problem.with_(caps=caps)


def feasible(problem: Problem) -> bool:
    """Whether one microbatch fits on every rank."""
    headroom = Instance.of(problem).headroom
    return all(least_headroom(problem, r) <= headroom[r] for r in range(problem.num_ranks))


def assignments(problem: Problem) -> list[tuple[int, ...]]:
    """Every assignment whose caps can be met."""
    levels = [range(1 + len(stage.variants)) for stage in problem.profile.stages]
    return [a for a in itertools.product(*levels) if feasible(fixed(problem, a))]


@pytest.mark.parametrize("fusing", [False, True])
def test_the_joint_bound_holds_over_all_assignments_and_orders(fusing: bool) -> None:
    rng = random.Random(3)
    solve = partial(brute_force, fusing=fusing)
    tight = judged = 0
    for _ in range(30):
        problem = random_problem(rng, fusing=fusing)
        open_ones = assignments(problem)
        if not open_ones:
            continue
        least = min(solve(fixed(problem, a)) for a in open_ones)
        bound = joint_bound(problem).value_ns
        assert bound <= least
        judged, tight = judged + 1, tight + (bound == least)
    assert judged >= 20
    assert tight >= judged // 4


def test_plan_picks_the_best_assignment_of_small_instances() -> None:
    rng = random.Random(5)
    for _ in range(6):
        problem = random_problem(rng, fusing=True)
        open_ones = assignments(problem)
        if not open_ones:
            with pytest.raises(InfeasibleError):
                plan(problem, time_limit_s=5)
            continue
        solution = plan(problem, time_limit_s=20)
        least = min(brute_force(fixed(problem, a), fusing=True) for a in open_ones)
        check(solution.schedule, solution.problem)
        assert solution.problem == fixed(problem, solution.variants or (0,) * problem.num_stages)
        assert solution.certificate.bound_ns <= least <= solution.certificate.value_ns
        assert solution.certificate.value_ns <= 1.1 * least
        assert simulate(solution.schedule, solution.problem).value_ns == solution.certificate.value_ns


def recompute(p: int, m: int, cap: int) -> Problem:
    """Unit times with M_B of 100 and M_W of 50; the variant holds 0.56 M_B and takes 1.12 B."""
    lean = StageCost(100, 112, 100, 212, 56, 50)
    stage = StageCost(100, 100, 100, 200, 100, 50, variants=(lean,))
    return Problem.of(Profile.uniform(stage, p, 1), None, m, cap)


def test_recompute_at_half_memory_is_a_quarter_shorter() -> None:
    problem = recompute(8, 24, 400)
    without = plan(problem, variants=False, time_limit_s=3)
    assert not offers_variants(without.problem)
    chosen = plan(problem, time_limit_s=6)
    assert chosen.certificate.value_ns <= 0.75 * without.certificate.value_ns
    assert 1 in chosen.variants
    assert chosen.certificate.method == "variants"


def test_variants_are_left_alone_where_memory_does_not_bind() -> None:
    solution = plan(recompute(4, 8, 10_000), time_limit_s=3)
    assert solution.variants == (0, 0, 0, 0)


def test_a_cap_that_only_the_variant_fits() -> None:
    solution = plan(recompute(3, 4, 60), time_limit_s=5)
    assert solution.variants == (1, 1, 1)
    with pytest.raises(InfeasibleError) as caught:
        plan(recompute(3, 4, 55), time_limit_s=5)
    assert caught.value.needed == 56


def test_candidates_are_prefixes_and_suffixes_of_the_ranks_without_repeats() -> None:
    found = list(candidates(recompute(3, 4, 60)))
    assert found[0] == (0, 0, 0)
    assert len(found) == len(set(found))
    assert {(1, 1, 1), (1, 0, 0), (1, 1, 0), (0, 0, 1), (0, 1, 1)} < set(found)


def test_progress_over_assignments_never_rises_and_keeps_one_bound() -> None:
    seen: list[Progress] = []
    plan(recompute(4, 8, 200), time_limit_s=3, observer=seen.append)
    values = [p.best_ns for p in seen if p.best_ns is not None]
    assert values == sorted(values, reverse=True)
    assert len({p.bound_ns for p in seen}) == 1


def test_an_interrupt_while_variants_are_ranked_keeps_the_best() -> None:
    calls = 0

    def observer(progress: Progress) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt

    problem = recompute(4, 8, 200)
    solution = plan(problem, time_limit_s=3, observer=observer)
    check(solution.schedule, solution.problem)


def test_without_fusing_the_least_cap_counts_what_waits_for_w() -> None:
    """The variant saves less and holds more for its W: split, the stage as it is needs the smaller cap."""
    lean = StageCost.simple(5, 3, 2, 1, 6)
    stage = replace(StageCost.simple(3, 3, 2, 4, 2), variants=(lean,))
    problem = Problem.of(Profile((stage,)), None, 2, 3)
    assert plan(problem, time_limit_s=2).variants == (1,)
    with pytest.raises(InfeasibleError, match="needs 4 bytes on rank 0"):
        plan(problem, time_limit_s=2, fuse="never")
    assert plan(problem.with_(caps=(4,)), time_limit_s=2, fuse="never").variants == (0,)


def named_levels(seed: int) -> Problem:
    """Stages whose variants of one name stand at other levels of each, under a cap that binds."""
    rng, stages = random.Random(seed), []
    for s in range(3):
        f, saved = rng.randint(80, 120), rng.randint(9, 12)
        ways = [
            StageCost(f, f + more, f, 2 * f + more, saved - less, 2, name=f"stage {s}, recompute={name}")
            for more, less, name in ((15, 3, "min_memory"), (90, 8, "full"))
        ]
        if s == seed % 3:
            price = StageCost(f, f + 8, f, 2 * f + 8, saved - 2, 2, name=f"stage {s}, recompute=0.5")
            ways.insert(0, price)
        stages.append(StageCost(f, f, f, 2 * f, saved, 3, name=f"stage {s}", variants=tuple(ways)))
    return Problem.of(Profile(tuple(stages), link=Link(5)), None, 6, 20)


def test_one_variant_on_all_stages_is_the_same_level_or_the_same_name() -> None:
    found = uniform(named_levels(1))
    assert found == [(0, 0, 0), (1, 1, 1), (2, 2, 2), (2, 3, 2), (1, 2, 1)]
    assert {
        tuple(stage.name.partition("=")[2] for stage in fixed(named_levels(1), choice).profile.stages)
        for choice in found[3:]
    } == {("full",) * 3, ("min_memory",) * 3}


@pytest.mark.parametrize("seed", range(2))
def test_no_variant_that_is_chosen_by_hand_for_all_stages_is_shorter(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By counted tries: each is planned as it is alone, or its own bound is no better."""
    monkeypatch.setattr(ranking, "_PLAN_ACTIONS", 50)
    problem = named_levels(seed)
    plan_here = partial(plan, level=1, time_limit_s=1000, without=SLOW)
    chosen = plan_here(problem).certificate
    for choice in uniform(problem):
        with contextlib.suppress(InfeasibleError):
            alone = plan_here(fixed(problem, choice)).certificate
            assert chosen.value_ns <= alone.value_ns


def test_a_variant_for_all_stages_that_quick_plans_rank_last_is_planned_all_the_same() -> None:
    problem = named_levels(1)
    chosen, starts_first = (1, 2, 1), []

    def quick(given: Problem, _: float) -> tuple[int, Order]:
        level = tuple(stage.name.partition("=")[2] for stage in given.profile.stages)
        order = Order(one_at_a_time(Instance.of(given)), ("one_at_a_time",))
        return (10_000 if len(set(level)) == 1 else 5_000), order

    def find(given: Problem, seconds: float, tell: object, known: object, *, first: bool) -> Solution:
        found = rated(to_schedule(one_at_a_time(Instance.of(given)), given), given)
        starts_first.append(first)
        value = 4_000 if given == fixed(problem, chosen) else 4_500
        return replace(found, certificate=replace(found.certificate, value_ns=value))

    solution = plan_variants(problem, find, quick, time_limit_s=100)
    assert solution.variants == chosen
    assert False in starts_first
    assert True in starts_first


def test_orders_of_quick_plans_are_never_lost() -> None:
    """A search that finds nothing better than one microbatch after the other still takes the known order."""
    problem = recompute(4, 8, 10_000)
    left = (*[name for name in NAMES if name != "one_at_a_time"],)
    worst = plan(fixed(problem, (0,) * 4), without=left, level=1).certificate.value_ns
    found = plan(problem, without=("anneal", "exact", "quick_exact"), time_limit_s=0.01).certificate
    assert found.value_ns < worst


class NoTime:
    """A clock of a ranking whose time is over when it begins."""

    limit, nominal_s = 0.2, 0.2

    def seconds_left(self) -> float:
        return 0.0

    def __call__(self, progress: Progress) -> None: ...


def test_without_time_for_ranking_the_variant_that_holds_least_still_gets_its_first_orders() -> None:
    """Others have lower bounds, and may fit under the cap with one microbatch after the other only."""
    problem, planned = recompute(4, 8, 10_000), list[Problem]()

    def quick(given: Problem, seconds: float) -> tuple[int, Order]:
        assert seconds == 0
        planned.append(given)
        return 5_000, Order(one_at_a_time(Instance.of(given)), ("one_at_a_time",))

    ranked = ranking.rank(problem, quick, joint_bound(problem), NoTime(), fusing=True)
    assert planned == [fixed(problem, (1,) * 4)]
    assert ranked.finalists == ((1,) * 4,)
    assert len(ranked.orders) == 1


@pytest.mark.parametrize("placement", [Placement.linear(8), Placement.v(8)])
def test_the_joint_bound_looks_at_no_more_assignments_than_it_may(
    placement: Placement, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer of them give a lower bound that still holds, and holds in a certificate."""
    stage = StageCost(100, 100, 100, 200, 10, 3)
    lean = tuple(StageCost(100, 100 + 30 * k, 100, 200 + 30 * k, 10 - 2 * k, 3) for k in (1, 2, 3))
    profile = Profile((replace(stage, variants=lean),) * placement.num_stages, link=Link(5))
    problem = Problem.of(profile, placement, 12, 30, "span", "rendezvous")
    asked: list[Problem] = []

    def counted(asked_of: Problem) -> Bound:
        asked.append(asked_of)
        return bound_of(asked_of)

    monkeypatch.setattr(joint, "bound_of", counted)
    values = []
    for most in (1, 3, 12, None):
        asked.clear()
        values.append(joint_bound(problem, most).value_ns)
        assert most is None or len(asked) <= most
    assert values == sorted(values)
    assert values[0] < values[-1]
    monkeypatch.setattr(joint, "_MOMENT_S", 0.001)
    solution = plan(problem, time_limit_s=0.01)
    assert solution.certificate.bound_ns == values[0]
    verify_certificate(solution)
