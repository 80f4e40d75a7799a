"""Planning for microbatches that differ in cost: clock, bounds, search, certificates; brute force."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.strategies import greedy_order, unequal_problems
from zbcompile.errors import CheckError, InfeasibleError, UsageError
from zbcompile.formats import schedule_json
from zbcompile.planner.assignments import bound_of
from zbcompile.planner.bounds.blocking_send import blocking_send_bound
from zbcompile.planner.certify.certificate import explain, verify, verify_certificate
from zbcompile.planner.core import compiled
from zbcompile.planner.core.instance import Codes, to_codes, to_schedule
from zbcompile.planner.core.unequal import UnequalScorer
from zbcompile.planner.plan import plan
from zbcompile.schedule.check import faults
from zbcompile.schedule.costs import Link, Profile, StageCost
from zbcompile.schedule.ir import Action, Placement, Schedule
from zbcompile.schedule.least_memory import least_headroom
from zbcompile.schedule.memory import memory_peaks
from zbcompile.schedule.microbatches import MicrobatchCost
from zbcompile.schedule.problem import OBJECTIVES, TRANSPORTS, Problem
from zbcompile.schedule.simulate import simulate
from zbcompile.schedule.sum_order import renumbered
from zbcompile.show.proof_words import proof_words


def problem_of(
    *factors: float,
    ranks: int = 4,
    cap: int | None = None,
    objective: str = "makespan",
    transport: str = "async",
) -> Problem:
    profile = Profile.uniform(StageCost.simple(18_522, 18_086, 9_337, 100, 58), ranks, 601)
    costs = [MicrobatchCost.of(factor) for factor in factors]
    return Problem.of(profile, None, len(factors), cap, objective, transport, microbatch_costs=costs)


MILLION = 1_000_000
DRAW = (0.78, 1.54, 0.79, 0.63, 0.96, 1.69, 1.06, 0.82)


def numbered(problem: Problem, rng: random.Random) -> tuple[Codes, tuple[int, ...]]:
    """Return a random legal order and permutation."""
    codes = to_codes(greedy_order(problem, rng))
    order = list(range(problem.num_microbatches))
    rng.shuffle(order)
    return codes, tuple(order)


@given(unequal_problems(), st.integers(0, 10**6), st.booleans())
def test_scorer_equals_simulate_and_the_judge(problem: Problem, seed: int, plain: bool) -> None:
    codes, order = numbered(problem, random.Random(seed))
    schedule = renumbered(to_schedule(codes, problem), order)
    peaks = memory_peaks(schedule, problem)
    vector = list if plain else compiled.vector

    def scorer(problem: Problem) -> UnequalScorer:
        made = UnequalScorer(problem, vector)
        made.set_order(order)
        return made

    score = scorer(problem).score(codes)
    assert scorer(problem.with_(caps=tuple(peaks))).fits(codes)
    for rank, peak in enumerate(peaks):
        if peak > problem.static_bytes(rank):
            caps = tuple(p - (r == rank) for r, p in enumerate(peaks))
            assert not scorer(problem.with_(caps=caps)).fits(codes)
    found = [fault for fault in faults(schedule, problem) if "deadlock" in str(fault)]
    assert (score is None) == bool(found)
    if score is not None:
        assert score[0] == simulate(schedule, problem).value_ns


def rows_of(words: Sequence[str]) -> list[tuple[str, ...]]:
    """Return every order of one stage's F's, B's and W's."""
    return [
        row
        for row in itertools.permutations(words)
        if all(row.index("F" + w[1:]) < row.index("B" + w[1:]) < row.index("W" + w[1:]) for w in words)
    ]


def least(problem: Problem, *, in_turn: bool) -> int:
    """Return the least value of all split orders of two stages on two ranks.

    With ``in_turn`` of those in which both stages take the microbatches in one order, else of all.
    """
    values = []
    words = [f"{kind}{i}" for i in range(problem.num_microbatches) for kind in "FBW"]
    for rows in itertools.product(rows_of(words), repeat=2):
        turns = {tuple(w[1:] for w in row if w[0] == kind) for row in rows for kind in "FBW"}
        if in_turn and len(turns) > 1:
            continue
        order = [[Action.parse(f"{stage}{word}") for word in row] for stage, row in enumerate(rows)]
        with contextlib.suppress(CheckError):  # a deadlock
            schedule = Schedule.of(problem.placement, problem.num_microbatches, order)
            values.append(simulate(schedule, problem).value_ns)
    return min(values)


@settings(max_examples=4)
@given(st.integers(0, 10**6), st.sampled_from(OBJECTIVES))
def test_bounds_hold_and_plans_are_the_best_that_take_microbatches_in_turn(seed: int, objective: str) -> None:
    rng = random.Random(seed)
    stages = tuple(StageCost.simple(*(rng.randint(1, 9) for _ in range(3))) for _ in range(2))
    costs = [
        MicrobatchCost(tuple(rng.randint(200_000, 3_000_000) for _ in range(rng.choice((1, 2)))))
        for _ in range(2)
    ]
    profile = Profile(stages, link=Link(2))
    problem = Problem.of(profile, None, 2, None, objective, "async", microbatch_costs=costs)
    found = plan(problem, fuse="never", level=1)
    assert found.certificate.bound_ns <= least(problem, in_turn=False)
    assert found.certificate.value_ns == least(problem, in_turn=True)
    assert verify(found) == []


@settings(max_examples=25)
@given(unequal_problems(), st.integers(0, 10**6), st.sampled_from(TRANSPORTS))
def test_no_order_beats_the_bound(problem: Problem, seed: int, transport: str) -> None:
    problem = problem.with_(transport=transport)
    schedule = greedy_order(problem, random.Random(seed))
    if not faults(schedule, problem):
        assert bound_of(problem).value_ns <= simulate(schedule, problem).value_ns


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_certificates_are_derived_again(objective: str, transport: str) -> None:
    problem = problem_of(1, 0.4, 1.9, 0.7, objective=objective, transport=transport)
    found = plan(problem, level=1, time_limit_s=1)
    assert verify_certificate(found).proved
    assert "no order has" in explain(found)
    read = schedule_json.loads(schedule_json.dumps(found)).solution()
    assert read == found
    wrong = replace(
        found.certificate, bound_ns=found.certificate.value_ns, method="head_and_work", witness={"rank": 0}
    )
    with pytest.raises(CheckError, match="proves nothing where microbatches differ"):
        verify_certificate(replace(found, certificate=wrong))


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("factors", [(1, 0.4, 1.9, 0.7), (0.1, 0.1, 9)])
def test_what_a_step_costs_beside_its_microbatches_is_in_their_bounds(
    objective: str, factors: tuple[float, ...]
) -> None:
    plain = problem_of(*factors, objective=objective)
    stages = (
        replace(stage, unshard_ns=30, reduce_ns=2000, update_ns=500 + s)
        for s, stage in enumerate(plain.profile.stages)
    )
    problem = plain.with_(profile=replace(plain.profile, stages=tuple(stages)))
    more = bound_of(problem).value_ns - bound_of(plain).value_ns
    assert 2530 <= more <= 2533
    found = plan(problem, level=1, time_limit_s=1)
    assert found.certificate.witness["once_a_step_ns"] == more
    assert verify(found) == []
    for wrong in (more + 1, more - 1):
        witness = {**found.certificate.witness, "once_a_step_ns": wrong}
        assert verify(replace(found, certificate=replace(found.certificate, witness=witness)))


def test_a_bound_of_the_least_microbatch_is_derived_with_the_bound_in_it() -> None:
    problem = problem_of(1, 0.4, 1.9, 0.7, transport="rendezvous")
    found, bound = plan(problem, level=1, time_limit_s=1), blocking_send_bound(problem)
    assert bound is not None
    assert bound.method == "least_microbatch"
    assert bound.witness["of"] == "blocking_send"
    weaker = replace(
        found.certificate, bound_ns=bound.value_ns, method=bound.method, witness=dict(bound.witness)
    )
    assert verify_certificate(replace(found, certificate=weaker)).derived_ns == bound.value_ns
    wrong = {**bound.witness, "witness": {**bound.witness["witness"], "last_message_ns": 0}}
    with pytest.raises(CheckError, match="last_message_ns"):
        verify_certificate(replace(found, certificate=replace(weaker, witness=wrong)))


def test_the_order_of_the_microbatches_shortens_a_step() -> None:
    problem = problem_of(*DRAW, cap=400)
    given = plan(problem, level=1, without=("permute", "anneal"))
    found = plan(problem, level=1)
    assert found.certificate.value_ns < 0.87 * given.certificate.value_ns
    assert [a.microbatch for a in given.schedule.order[0] if a.kind.value == "forward"] == list(range(8))
    assert found.certificate.lineage[-1] in ("permute", "anneal")
    assert schedule_json.dumps(plan(problem, level=1)) == schedule_json.dumps(found)


def test_blocking_sends_are_planned_under_their_own_clock() -> None:
    problem = problem_of(*DRAW, cap=400, transport="batched")
    given = plan(problem, level=1, time_limit_s=60, without=("permute",))
    found = plan(problem, level=1, time_limit_s=60)
    assert found.certificate.value_ns == simulate(found.schedule, problem).value_ns
    assert found.certificate.value_ns < given.certificate.value_ns


@pytest.mark.parametrize("placement", [Placement.looped(2), Placement.v(2)], ids=str)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_reduction_is_planned_and_classic_orders_that_hang_are_passed_by(
    placement: Placement, transport: str
) -> None:
    costs = tuple(MicrobatchCost.of(str(factor)) for factor in (3, 0.5, 1))
    stage = replace(StageCost.simple(2, 2, 2), unshard_ns=3, reduce_ns=5, update_ns=1)
    problem = Problem.of(
        Profile.uniform(stage, 4, 1), placement, 3, None, "span", transport, microbatch_costs=costs
    )
    solution = plan(problem, time_limit_s=0.5, level=1)
    assert simulate(solution.schedule, problem).value_ns == solution.certificate.value_ns


def test_microbatches_that_fit_one_by_one_alone_have_an_order() -> None:
    profile = Profile.uniform(StageCost.simple(10, 10, 10, 100, 50), 2)
    costs = [MicrobatchCost((MILLION,), sizes) for sizes in ((MILLION, 2 * MILLION), (2 * MILLION, MILLION))]
    problem = Problem.of(profile, Placement((0, 0)), 2, 300, "span", "async", microbatch_costs=costs)
    assert verify(plan(problem, level=1)) == []
    with pytest.raises(InfeasibleError, match="300 bytes"):
        plan(problem.with_(caps=(299,)), level=1)


def test_variants_are_chosen_for_microbatches_that_differ() -> None:
    lean = StageCost.simple(10, 20, 10, 20, 10)
    stage = replace(StageCost.simple(10, 10, 10, 100, 50), variants=(lean,))
    costs = [MicrobatchCost.of(f) for f in (1, 2, 0.5)]
    problem = Problem.of(Profile.uniform(stage, 2), None, 3, 120, "span", "async", microbatch_costs=costs)
    found = plan(problem, level=1, time_limit_s=2)
    assert found.offered is not None
    assert verify(found) == []


def test_a_part_that_is_none_is_refused_with_permute_in_the_list() -> None:
    with pytest.raises(UsageError, match="permute"):
        plan(problem_of(1, 2), without=("shuffle",))


def test_explain_tells_the_bound_and_the_least_cap_of_the_largest_microbatch() -> None:
    costs = [MicrobatchCost.of(1), MicrobatchCost.of(2, 3)]
    profile = Profile.uniform(StageCost.simple(10, 10, 10, 100, 50), 2)
    problem = Problem.of(profile, None, 2, None, "makespan", microbatch_costs=costs)
    assert least_headroom(problem, 0) == 300
    found = plan(problem, level=1)
    file = schedule_json.ScheduleFile.of(found)
    words = proof_words(file, simulate(found.schedule, problem))
    assert words is not None
    assert words.fault is None
    assert "each microbatch at its own cost" in words.reason or "alone takes" in words.reason
    wrong = replace(found.certificate, method="work", witness={"rank": 0})
    told = proof_words(replace(file, certificate=wrong), simulate(found.schedule, problem))
    assert told is not None
    assert "proves nothing where microbatches differ" in str(told.fault)
