"""What stages cost once a step: every clock of the planner, bounds and proofs, plans against brute force."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.planner_cases import brute_force
from tests.support.strategies import greedy_order, step_problems, unequal_problems
from zbcompile.planner.bounds.analytic import analytic_bounds
from zbcompile.planner.certify.certificate import explain, verify
from zbcompile.planner.core.compiled import vector
from zbcompile.planner.core.early_reductions import with_early_reductions
from zbcompile.planner.core.instance import Instance, to_codes, to_schedule
from zbcompile.planner.core.score import evaluate, latest_row_starts, value_of
from zbcompile.planner.core.scorer import Scorer
from zbcompile.planner.core.times import Clock
from zbcompile.planner.core.unequal import UnequalScorer
from zbcompile.planner.exact.model import solve_exact
from zbcompile.planner.improve.anneal import Annealer
from zbcompile.planner.plan import plan
from zbcompile.schedule.check import faults
from zbcompile.schedule.costs import Link, Profile, StageCost
from zbcompile.schedule.ir import Kind, Placement, Schedule
from zbcompile.schedule.problem import OBJECTIVES, TRANSPORTS, Problem
from zbcompile.schedule.simulate import simulate


@given(step_problems(), st.integers(0, 999))
def test_all_clocks_are_the_simulator(problem: Problem, seed: int) -> None:
    codes = to_codes(greedy_order(problem, Random(seed)))
    schedule = to_schedule(codes, problem)
    if faults(schedule, problem):
        return
    timeline, instance = simulate(schedule, problem), Instance.of(problem)
    pair = (timeline.span_ns, timeline.makespan_ns)
    assert evaluate(instance, codes) == pair
    assert Clock.of(problem).measure(codes) == pair
    sums = sum(timeline.rank_span if problem.objective == "span" else timeline.rank_end)
    score = (timeline.value_ns, 100 * problem.num_ranks * timeline.value_ns + sums)
    assert Scorer(instance, list).score(codes) == score
    if seed % 8 == 0:
        assert Scorer(instance, vector).score(codes) == score
    firsts = [row[0] for row in latest_row_starts(instance, codes)]
    assert all(late <= first for late, first in zip(timeline.latest_start, firsts, strict=True))


@given(step_problems(), st.integers(0, 999), st.sampled_from(TRANSPORTS[1:]))
def test_the_clock_of_all_send_modes_is_the_simulator(problem: Problem, seed: int, transport: str) -> None:
    problem = problem.with_(transport=transport)
    codes = to_codes(greedy_order(problem, Random(seed)))
    schedule = to_schedule(codes, problem)
    if faults(schedule, problem):
        return
    timeline = simulate(schedule, problem)
    assert Clock.of(problem).measure(codes) == (timeline.span_ns, timeline.makespan_ns)


@given(unequal_problems(max_ranks=2, max_microbatches=3), st.integers(0, 999), st.data())
def test_the_clock_of_unequal_microbatches_is_the_simulator(
    problem: Problem, seed: int, data: st.DataObject
) -> None:
    amount = st.sampled_from([0, 1, 7, 20])
    stages = tuple(
        replace(cost, unshard_ns=data.draw(amount), reduce_ns=data.draw(amount), update_ns=data.draw(amount))
        for cost in problem.profile.stages
    )
    problem = problem.with_(profile=replace(problem.profile, stages=stages))
    codes = to_codes(greedy_order(problem.alike(max), Random(seed)))
    schedule = to_schedule(codes, problem)
    if faults(schedule, problem):
        return
    found = UnequalScorer(problem, list).score(codes)
    assert found is not None
    assert found[0] == simulate(schedule, problem).value_ns


def small_problem(rng: Random) -> Problem:
    """A problem small enough to try every order of it, with costs once a step."""
    placement = Placement(rng.choice([(0,), (0, 0), (0, 1), (0, 1, 0), (0, 1, 1), (0, 1, 1, 0)]))

    def cost() -> StageCost:
        f, b, w, saved, pending = (rng.randint(*ends) for ends in ((1, 5), (1, 5), (0, 5), (0, 3), (0, 2)))
        once = {"unshard_ns": (0, 0, 1, 4, 9), "reduce_ns": (0, 1, 3, 8, 20), "update_ns": (0, 0, 2)}
        more = {name: rng.choice(values) for name, values in once.items()}
        return replace(StageCost.simple(f, b, w, saved, pending), **more)

    stages = tuple(cost() for _ in placement.rank_of)
    profile = Profile(stages, link=Link(rng.randint(0, 2)))
    count = 1 if len(stages) > 2 else rng.randint(1, 2)
    return Problem.of(profile, placement, count, None, rng.choice(OBJECTIVES))


@pytest.mark.parametrize("seed", [0, 2, 5, 6, 7, 9])
def test_plans_bounds_and_proofs_against_brute_force(seed: int) -> None:
    problem = small_problem(Random(seed))
    least = brute_force(problem, fusing=True)
    assert all(bound.value_ns <= least for bound in analytic_bounds(problem))
    exact = solve_exact(Instance.of(problem), lower=0, time_limit_s=4.0)
    assert exact.bound_ns <= least
    assert exact.value_ns is None or exact.value_ns >= least
    assert not exact.proved or exact.value_ns == least
    solution = plan(problem, level=1, time_limit_s=6.0)
    certificate = solution.certificate
    assert certificate.bound_ns <= least == certificate.value_ns
    assert verify(solution) == []


def test_a_stage_ends_its_weights_early_where_that_hides_its_reduction() -> None:
    """Two stages per rank: a step planned with reductions beats one planned without and timed anew."""
    stage, placement = StageCost.simple(10, 10, 8, 2, 1), Placement.v(2)
    plain = Problem.of(Profile.uniform(stage, 4, 1), placement, 4, 8, "makespan")
    whole = plain.with_(profile=Profile.uniform(replace(stage, reduce_ns=60), 4, 1))
    before = simulate(plan(plain, level=1, time_limit_s=10.0).schedule, whole)
    after = simulate(plan(whole, level=1, time_limit_s=10.0).schedule, whole)
    assert after.value_ns < before.value_ns
    hidden = [sum(timeline.exposed_ns(rank) for rank in range(2)) for timeline in (before, after)]
    assert hidden[1] < hidden[0]
    early = [
        max(
            k
            for k, a in enumerate(row)
            if a.kind in (Kind.BACKWARD_WEIGHT, Kind.FULL_BACKWARD) and a.stage == s
        )
        for row, s in zip(after.schedule.order, (3, 2), strict=True)
    ]
    assert all(k < len(row) - 3 for k, row in zip(early, after.schedule.order, strict=True))


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_one_stage_per_rank_pays_its_gather_its_reduction_and_its_update_once(objective: str) -> None:
    """The order is that of the step without them; both are proved optimal."""
    stage = StageCost.simple(10, 10, 8, 2, 1)
    plain = Problem.of(Profile.uniform(stage, 4, 1), None, 8, 8, objective)
    whole = replace(stage, unshard_ns=3, reduce_ns=20, update_ns=5)
    problem = plain.with_(profile=Profile.uniform(whole, 4, 1))
    solution, bare = (plan(p, level=1, time_limit_s=10.0) for p in (problem, plain))
    assert bare.certificate.status == solution.certificate.status == "OPTIMAL"
    assert solution.certificate.value_ns == bare.certificate.value_ns + 28
    assert verify(solution) == []
    assert "the optimizer's step" in explain(solution)


def test_annealing_counts_the_whole_step() -> None:
    """The best order of an annealing is as short as it says, by the clock of its own and by the simulator."""
    stage = replace(StageCost.simple(10, 10, 8, 2, 1), unshard_ns=7, reduce_ns=60)
    problem = Problem.of(Profile.uniform(stage, 4, 1), Placement.v(2), 4)
    instance, codes = Instance.of(problem), to_codes(greedy_order(problem, Random(3), fuse=0.0))
    found = Annealer(instance).run(codes, 4000, seed=1)
    first, last = (Scorer(instance).score(order) for order in (codes, found))
    assert first is not None
    assert last is not None
    assert last[0] < first[0]
    assert last[0] == simulate(to_schedule(found, problem), problem).value_ns


@given(step_problems(), st.integers(0, 999))
def test_weights_of_one_stage_go_first_where_that_is_shorter(problem: Problem, seed: int) -> None:
    """No longer, the same actions, W's where W's were, and under the caps."""
    codes = to_codes(greedy_order(problem, Random(seed), fuse=0.2))
    schedule = to_schedule(codes, problem)
    if faults(schedule, problem):
        return
    problem = problem.with_(caps=tuple(simulate(schedule, problem).peak_bytes))
    instance = Instance.of(problem)
    value = value_of(instance, codes)
    assert value is not None
    found, shorter = with_early_reductions(instance, codes, value, partial(value_of, instance), None)
    assert shorter <= value
    assert shorter == simulate(to_schedule(found, problem), problem).value_ns
    assert faults(to_schedule(found, problem), problem) == []
    for row, other in zip(codes, found, strict=True):
        assert [kind for kind, _ in row] == [kind for kind, _ in other]
        assert sorted(row) == sorted(other)


def test_the_stage_whose_weights_go_first_hides_its_reduction() -> None:
    costs = tuple(replace(StageCost.simple(2, 2, 2), reduce_ns=9) for _ in range(2))
    problem = Problem.of(Profile(costs), Placement((0, 0)), 2)
    row = "0F0 0F1 1F0 1F1 1B0 1B1 0B0 0B1 0W0 1W0 0W1 1W1"
    codes = to_codes(Schedule.parse(f"placement 0 0\nmicrobatches 2\nrank 0: {row}\n"))
    instance = Instance.of(problem)
    found, value = with_early_reductions(instance, codes, 40, partial(value_of, instance), None)
    assert value_of(instance, codes) == 22 + 9 + 9
    assert value == 24 + 9 + 5
    assert found[0][-4:] in ([(2, 0), (2, 0), (2, 1), (2, 1)], [(2, 1), (2, 1), (2, 0), (2, 0)])
