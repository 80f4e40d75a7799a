"""Certificates: every method derived again, every forgery refused, the sum to follow by hand."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

from tests.planner.improve.test_fuse import random_fusing_problem, table_problem
from tests.planner.starts.test_classic import paper_problem
from tests.planner.test_variants import recompute
from tests.support.planner_cases import random_placement, random_problem
from zbcompile.errors import CheckError
from zbcompile.formats import schedule_json
from zbcompile.planner.bounds.analytic import analytic_bounds
from zbcompile.planner.bounds.bound import Bound
from zbcompile.planner.certify.certificate import explain, verify, verify_certificate
from zbcompile.planner.certify.derive import Derivation, Facts, derivations
from zbcompile.planner.core.instance import Instance, to_schedule
from zbcompile.planner.exact.crossing import crossing_bound
from zbcompile.planner.plan import plan
from zbcompile.planner.starts.initial import one_at_a_time
from zbcompile.schedule.costs import Profile, StageCost
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.simulate import simulate
from zbcompile.schedule.solution import Certificate, Solution


def any_problem(rng: random.Random) -> Problem:
    """One or several stages per rank, with and without cheaper fused backwards."""
    if rng.random() < 0.3:
        return random_fusing_problem(rng, "async")
    ranks = rng.randint(1, 4)
    placement = random_placement(rng, ranks) if rng.random() < 0.6 else None
    return random_problem(rng, ranks=ranks, microbatches=rng.randint(1, 6), placement=placement)


def as_plain(witness: Any) -> Any:
    """What is left of a witness after a file."""
    return json.loads(json.dumps(dict(witness)))


def test_every_analytic_bound_is_derived_again_to_the_nanosecond() -> None:
    rng = random.Random(2)
    methods: dict[str, int] = {}
    for _ in range(300):
        problem = any_problem(rng)
        for bound in analytic_bounds(problem):
            out = Derivation()
            derivations(problem.objective)[bound.method](Facts(problem), as_plain(bound.witness), out)
            assert out.total == bound.value_ns, (problem, bound)
            methods[bound.method] = methods.get(bound.method, 0) + 1
    assert set(methods) == set(derivations("makespan"))
    assert min(methods.values()) >= 20


def certified(problem: Problem, bound: Bound) -> Solution:
    """A slow order with a given bound as its certificate."""
    schedule = to_schedule(one_at_a_time(Instance.of(problem)), problem)
    value = simulate(schedule, problem).value_ns
    certificate = Certificate(
        problem.objective, value, min(bound.value_ns, value), bound.method, as_plain(bound.witness)
    )
    return Solution(problem, schedule, certificate)


def test_a_bound_one_nanosecond_too_high_is_refused() -> None:
    rng = random.Random(4)
    refused = 0
    for _ in range(30):
        problem = any_problem(rng)
        for bound in analytic_bounds(problem):
            good = certified(problem, bound)
            assert verify(good) == []
            if bound.value_ns >= good.certificate.value_ns:
                continue
            forged = replace(bound, value_ns=bound.value_ns + 1)
            faults = verify(certified(problem, forged))
            assert [f.needed for f in faults] == [f"at least {bound.value_ns + 1} ns"]
            refused += 1
    assert refused > 50


Change = Callable[[dict[str, Any]], None]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: w.update(rank=9), "no usable 'rank'"),
        (lambda w: w.update(rank=True), "no usable 'rank'"),
        (lambda w: w["windows"].append(w["windows"][-1]), "overlap"),
        (lambda w: w.update(windows=7), "no list"),
        (lambda w: w["windows"].insert(0, ["x"]), "names no microbatch"),
        (lambda w: w["windows"].clear(), "does not follow"),
        (lambda w: w.update(rank=2), "does not follow"),
    ],
)
def test_a_broken_witness_is_refused_in_words(change: Change, words: str) -> None:
    problem = Problem.of(Profile.uniform(StageCost.simple(10, 10, 10), 3, 1), None, 8, 6)
    (bound,) = [
        b for b in analytic_bounds(problem) if b.method == "memory_windows" and b.witness["rank"] == 0
    ]
    witness = as_plain(bound.witness)
    assert verify(certified(problem, bound)) == []
    change(witness)
    with pytest.raises(CheckError, match=words):
        verify_certificate(certified(problem, replace(bound, witness=witness)))


def test_another_value_method_or_objective_is_refused() -> None:
    problem = Problem.of(Profile.uniform(StageCost.simple(3, 3, 2), 2), None, 4, 4)
    solution = plan(problem, time_limit_s=5)
    assert verify(solution) == []
    for change in (
        {"value_ns": solution.certificate.value_ns + 1},
        {"method": "trust me"},
        {"method": "one_microbatch"},
        {"objective": "makespan"},
    ):
        certificate = replace(solution.certificate, **change)
        assert len(verify(replace(solution, certificate=certificate))) == 1


def test_solver_bounds_are_proved_again_or_said_not_to_be() -> None:
    problem = Problem.of(Profile.uniform(StageCost.simple(3, 3, 2), 3), None, 6, 4)
    solution = plan(problem, time_limit_s=30)
    assert solution.certificate.is_optimal
    value = solution.certificate.value_ns
    proved = replace(solution.certificate, method="cp_sat", witness={})
    assert verify_certificate(replace(solution, certificate=proved)).derived_ns == value
    hurried = verify_certificate(replace(solution, certificate=proved), time_limit_s=0.0)
    assert not hurried.proved
    assert hurried.derived_ns <= value
    slow = certified(problem, Bound(value + 1, "cp_sat", "span", {}))
    with pytest.raises(CheckError, match="finds an order below"):
        verify_certificate(slow)


def test_crossing_bounds_are_proved_again_or_refused() -> None:
    problem = Problem.of(Profile.uniform(StageCost.simple(10, 10, 10), 4, 1), None, 10, 6)
    bounds = {}
    for objective in ("span", "makespan"):
        here = problem.with_(objective=objective)
        instance, analytic = Instance.of(here).relaxed(), analytic_bounds(here)[0].value_ns
        found = crossing_bound(instance, 0, Fraction(1), upper_ns=10**6, time_limit_s=20)
        assert found.value_ns > analytic
        bounds[objective] = found.value_ns
        witness = {"rank": 0, "grid": [1, 1]}
        solution = certified(here, Bound(found.value_ns, "crossing", objective, witness))
        assert verify(solution) == []
        assert not verify_certificate(solution, time_limit_s=0.0).proved
        too_high = certified(here, Bound(found.value_ns + 1, "crossing", objective, witness))
        with pytest.raises(CheckError, match="shorter order"):
            verify_certificate(too_high)
        broken = replace(solution.certificate, witness={"rank": 0, "grid": [1, 0]})
        assert "grid" in verify(replace(solution, certificate=broken))[0].what
        for fine in (10**16, 10**30):
            broken = replace(solution.certificate, witness={"rank": None, "grid": [1, fine]})
            assert "too fine" in verify(replace(solution, certificate=broken))[0].what
    assert bounds["span"] == bounds["makespan"]


def test_blocking_send_bounds_are_derived_again() -> None:
    solution = plan(table_problem(1, 10, "batched", 4, 12), time_limit_s=4)
    assert solution.certificate.method == "blocking_send"
    assert verify(solution) == []
    assert "a last message" in explain(solution)


def test_variants_hold_over_all_levels_or_are_refused() -> None:
    solution = plan(recompute(4, 8, 200), time_limit_s=3)
    assert verify(solution) == []
    witness = as_plain(solution.certificate.witness)
    for change, words in (
        (lambda w: w["levels"].pop(), "leaves out a level"),
        (lambda w: w["levels"][0].update(choice=[5]), "no such way"),
        (lambda w: w["levels"][0].update(method=3), "no method"),
        (lambda w: w["costs"][0][0].append(1), "six whole numbers"),
        (lambda w: w["costs"][0].reverse(), "does not run as the variant"),
        (lambda w: w["costs"].pop(), "no costs per stage"),
    ):
        forged = json.loads(json.dumps(witness))
        change(forged)
        certificate = replace(solution.certificate, witness=forged)
        faults = verify(replace(solution, certificate=certificate))
        assert words in str(faults[0]), faults


def test_a_file_keeps_all_that_a_check_needs() -> None:
    solution = plan(recompute(4, 8, 200), time_limit_s=3)
    read = schedule_json.loads(schedule_json.dumps(solution)).solution()
    assert verify(read) == []
    assert explain(read) == explain(solution)


def test_the_sum_can_be_followed_by_hand(paper_profiles: dict[str, Any], golden: Any) -> None:
    problem = paper_problem(paper_profiles["configs"][0], 1)
    golden("certificate.txt", explain(plan(problem)))
