"""Recompute variants: the joint bound against brute force, the choice, infeasible caps, the large lever."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from functools import partial

import pytest

from tests.support.planner_cases import brute_force, random_placement
from zbcompile.errors import InfeasibleError
from zbcompile.planner.assignments import candidates, fixed
from zbcompile.planner.core.instance import Instance
from zbcompile.planner.incumbent import Progress
from zbcompile.planner.plan import plan
from zbcompile.planner.variants import cheapest, joint_bound, offers_variants
from zbcompile.schedule.check import check
from zbcompile.schedule.costs import Link, Profile, StageCost
from zbcompile.schedule.least_memory import least_headroom
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.simulate import simulate


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
    assert set(chosen.variants) == {0, 1}
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
