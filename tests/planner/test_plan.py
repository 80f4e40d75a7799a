"""Planning from a problem to a certified order."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.planner.starts.test_classic import paper_problem
from zbcompile.errors import InfeasibleError, UsageError
from zbcompile.planner.bounds.analytic import best_bound
from zbcompile.planner.compare import compare
from zbcompile.planner.core.instance import Instance, to_schedule
from zbcompile.planner.exact import model, proofs
from zbcompile.planner.exact.model import ExactResult
from zbcompile.planner.imported import rated
from zbcompile.planner.incumbent import Progress
from zbcompile.planner.parts import search
from zbcompile.planner.placements import plan_auto
from zbcompile.planner.plan import plan
from zbcompile.planner.portfolio import NAMES, PORTFOLIO
from zbcompile.planner.run import Run
from zbcompile.planner.starts.classic import orders_for
from zbcompile.planner.starts.initial import OneAtATime, one_at_a_time
from zbcompile.schedule.check import check
from zbcompile.schedule.costs import Edge, Link, Profile, StageCost
from zbcompile.schedule.ir import Placement
from zbcompile.schedule.limits import MAX_AMOUNT, MOST_SEED, check_plannable
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.simulate import simulate


@pytest.mark.parametrize("row", range(6))
def test_published_rows_at_cap_p_are_proved_optimal(paper_profiles: dict[str, Any], row: int) -> None:
    config = paper_profiles["configs"][row]
    problem = paper_problem(config, 1)
    solution = plan(problem)
    check(solution.schedule, problem)
    work, value = problem.work_ns(0), solution.certificate.value_ns
    assert solution.certificate.is_optimal
    assert round(1 - work / value, 4) == config["published_bubble_rate"]["ZB-1p"]


def test_cp_sat_proves_what_the_bounds_leave_open() -> None:
    problem = Problem.of(Profile.uniform(StageCost.simple(3, 3, 2), 4), None, 8, 6)
    solution = plan(problem, time_limit_s=60)
    assert solution.certificate.status == "OPTIMAL"
    assert solution.certificate.value_ns == 88


def test_a_cap_below_one_microbatch_names_the_least_that_works() -> None:
    problem = Problem.of(Profile.uniform(StageCost.simple(3, 3, 2, 10, 4), 3), None, 4, (10, 9, 10))
    with pytest.raises(InfeasibleError) as caught:
        plan(problem)
    assert (caught.value.where, caught.value.needed, caught.value.given) == ("rank 1", 10, 9)
    plan(problem.with_(caps=(10, 10, 10)), time_limit_s=2)


def test_progress_is_monotone() -> None:
    seen: list[Progress] = []
    problem = Problem.of(Profile.uniform(StageCost.simple(3, 3, 2), 4, 1), None, 8, 6)
    solution = plan(problem, observer=seen.append, time_limit_s=20)
    values = [p.best_ns for p in seen if p.best_ns is not None]
    bounds = [p.bound_ns for p in seen]
    assert values == sorted(values, reverse=True)
    assert bounds == sorted(bounds)
    assert values[-1] == solution.certificate.value_ns


def test_the_same_seed_gives_the_same_order() -> None:
    problem = Problem.of(Profile.uniform(StageCost.simple(3, 4, 2), 3, 1), None, 5, 5)
    assert plan(problem, seed=1, time_limit_s=60) == plan(problem, seed=1, time_limit_s=60)


def test_an_interrupt_keeps_the_best_order() -> None:
    """Ctrl-C is raised by the observer at the second progress line."""
    problem = Problem.of(Profile.uniform(StageCost.simple(3, 3, 2), 4, 1), None, 8, 6)
    lines: list[Progress] = []

    def interrupt(progress: Progress) -> None:
        lines.append(progress)
        if len(lines) == 2:
            raise KeyboardInterrupt

    solution = plan(problem, observer=interrupt)
    check(solution.schedule, problem)
    assert solution.certificate.value_ns == lines[1].best_ns


def test_no_time_still_gives_a_classic_order() -> None:
    problem = Problem.of(Profile.uniform(StageCost.simple(3, 4, 2), 4, 1), None, 12, 16)
    solution = plan(problem, time_limit_s=0)
    assert solution.origin.startswith("classic")
    check(solution.schedule, problem)


def test_unknown_choices_are_refused() -> None:
    problem = Problem.of(Profile.uniform(StageCost.simple(3, 4, 2), 2))
    with pytest.raises(UsageError, match="fusing"):
        plan(problem, fuse="sometimes")


def test_questions_that_are_not_answered_are_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times of a few ns leave no step below one: each question is asked further down, then it ends."""
    asked = []

    def silent(instance: Instance, value_ns: int, **_: object) -> ExactResult:
        asked.append(value_ns)
        return ExactResult(None, None, 0, False, 0.0)

    monkeypatch.setattr(model, "ask_below", silent)
    problem = Problem.of(Profile.uniform(StageCost.simple(2, 2, 1, 2, 1), 8, 1), Placement.v(4), 4, 16)
    run = Run(problem, time_limit_s=60)
    search(run, (OneAtATime(), proofs.FromBelow()))
    assert run.value is not None
    assert asked[0] <= run.value
    assert asked == sorted(set(asked), reverse=True)
    assert asked[-1] == run.bound.value_ns + 1


@pytest.mark.parametrize("fuse", ["auto", "never", "always"])
@pytest.mark.parametrize("times", [(9, 6, 1, 7), (8, 9, 5, 14)])
def test_an_order_is_called_classic_only_if_it_is_that_order(times: tuple[int, ...], fuse: str) -> None:
    """A tie that is settled for fewer splits, or a choice of fusing, makes another order of it."""
    profile = Profile.uniform(StageCost(*times, 2, 1), 4, 1)
    problem = Problem.of(profile, None, 4, 16, "makespan", "rendezvous")
    solution = plan(problem, time_limit_s=2, fuse=fuse)
    name, _, change = solution.origin.partition(" > ")
    for known, codes in orders_for(problem):
        if name == f"classic {known}":
            same = solution.schedule == to_schedule(codes, problem)
            assert change == ("" if same else {"never": "split", "always": "fused"}[fuse])


def big(stages: int, microbatches: int, edges: tuple[Edge, ...] = ()) -> Problem:
    """Equal stages on as many ranks."""
    stage = StageCost.simple(3, 3, 2, 4, 2)
    return Problem.of(Profile((stage,) * stages, edges, Link(1)), None, microbatches, 8)


@pytest.mark.parametrize("transport", ["async", "rendezvous"])
def test_thousands_of_stages_take_seconds(transport: str) -> None:
    """Nothing but the orders themselves grows with the stages: within twice the limit and two seconds."""
    before = time.process_time()
    solution = plan(big(4096, 2).with_(transport=transport), time_limit_s=1)
    assert time.process_time() - before < 4 * 3  # a busy machine counts its waits for memory, too
    assert solution.certificate.bound_ns > 0
    assert solution.certificate.gap < 0.01


def test_problems_too_large_for_any_limit_are_refused_with_the_most_that_is_planned() -> None:
    skips = tuple(Edge(s, s + 1) for s in range(599)) + (Edge(0, 599),)
    for problem, words in (
        (big(4097, 1), "at most 4096 stages; given: 4097"),
        (big(600, 2, skips), "no plain chain.*at most 512 stages; given: 600"),
        (big(64, 513), "at most 32768; given: 64 x 513 = 32832"),
        (big(64, 257).with_(transport="batched"), "under batched.*at most 16384; given: 64 x 257 = 16448"),
    ):
        with pytest.raises(UsageError, match=f"(?s){words}"):
            plan(problem, time_limit_s=1)
        with pytest.raises(UsageError, match=f"(?s){words}"):
            plan_auto(problem, time_limit_s=1)
    check_plannable(big(64, 512))
    check_plannable(big(4096, 8))
    check_plannable(big(64, 256).with_(transport="rendezvous"))
    with pytest.raises(UsageError, match="(?s)too many stages to compare.*at most 1024"):
        compare(big(2000, 2), seconds_per_row=0.02)


def test_seeds_and_sums_that_cannot_be_kept_are_refused_by_name() -> None:
    problem = big(2, 2)
    for seed in (-1, 1 << 31, 1.0, True):
        for call in (plan, plan_auto, compare):
            with pytest.raises(UsageError, match="(?s)seed.*needed: a whole number from 0 to 2147483647"):
                call(problem, seed=seed)
    plan(problem, seed=MOST_SEED, time_limit_s=1)
    stage = StageCost.simple(MAX_AMOUNT // 128, 3, 2)
    for wide, needed in (
        (
            Problem.of(Profile((stage, stage)), num_microbatches=64),
            f"in at most {MAX_AMOUNT} ns; given: 9007",
        ),
        (Problem.of(Profile((StageCost.simple(3, 3, 2, 1 << 60),) * 2), num_microbatches=2), "bytes; given"),
    ):
        for call in (plan, plan_auto, compare):
            with pytest.raises(UsageError, match=f"(?s)too large to add up.*{needed}"):
                call(wide)
        with pytest.raises(UsageError, match="too large to add up"):
            rated(to_schedule(one_at_a_time(Instance.of(wide)), wide), wide)


@pytest.mark.parametrize("placement", [Placement.v(2), Placement.looped(2)])
def test_blocking_sends_begin_no_worse_than_what_is_planned_without(placement: Placement) -> None:
    """Several stages per rank: what is planned for sends that hold up nobody is offered."""
    stage = StageCost.simple(15, 14, 9, 20, 9)
    problem = Problem.of(Profile.uniform(stage, 4, 1), placement, 4, 160, "span", "rendezvous")
    run = Run(problem, time_limit_s=60)
    search(run, [part for part in PORTFOLIO if part.name == "other_mode"])
    free = plan(problem.with_(transport="async"), time_limit_s=30)
    assert run.value is not None
    assert run.value <= simulate(free.schedule, problem).value_ns
    assert run.incumbent.lineage[-1] == "other_mode"
    alone = problem.with_(placement=Placement.linear(4), caps=(160,) * 4)
    run = Run(alone, time_limit_s=60)
    search(run, [part for part in PORTFOLIO if part.name == "other_mode"])
    assert run.value is None


def test_stages_that_take_no_time_under_little_memory_are_planned() -> None:
    """Without gradients of inputs nothing comes back: no bound sees the links, and the best bound is 0."""
    edges = tuple(Edge(s, s + 1, has_gradient=False) for s in range(3))
    profile = Profile((StageCost.simple(0, 0, 0, 2, 1),) * 4, edges, Link(5))
    problem = Problem.of(profile, Placement.v(2), 6, 4)
    assert best_bound(problem).value_ns == 0
    without = set(NAMES) - {"list_schedule", "anneal"}
    solution = plan(problem, level=1, time_limit_s=600, without=without)
    check(solution.schedule, problem)
    assert simulate(solution.schedule, problem).value_ns == solution.certificate.value_ns > 0
