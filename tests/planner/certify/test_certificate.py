"""Certificates: every method derived again, every forgery refused, the sum to follow by hand."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

from tests.planner.improve.test_fuse import random_fusing_problem, table_problem
from tests.planner.starts.test_classic import paper_problem
from tests.planner.test_variants import recompute
from tests.schedule.test_least_memory import branching_problem
from tests.support.planner_cases import random_placement, random_problem
from zbcompile.errors import CheckError
from zbcompile.formats import schedule_json
from zbcompile.planner.bounds.analytic import analytic_bounds, best_bound
from zbcompile.planner.bounds.bound import Bound
from zbcompile.planner.certify.certificate import explain, verify, verify_certificate
from zbcompile.planner.certify.derive import derivations
from zbcompile.planner.certify.facts import Derivation, Facts
from zbcompile.planner.core.instance import Instance, to_schedule
from zbcompile.planner.exact.crossing import crossing_bound
from zbcompile.planner.imported import rated
from zbcompile.planner.plan import plan
from zbcompile.planner.starts.initial import one_at_a_time
from zbcompile.schedule.costs import Profile, StageCost
from zbcompile.schedule.ir import Schedule
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.simulate import simulate
from zbcompile.schedule.solution import Certificate, Solution


@pytest.fixture(scope="module")
def recomputing() -> Solution:
    """A plan that may compute values again: its certificate holds over all levels of that."""
    return plan(recompute(4, 8, 200), time_limit_s=3)


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
            out.compare(as_plain(bound.witness))
            assert set(out.numbers) <= set(bound.witness), (problem, bound)
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


_CHOICES = {"rank", "outer_rank", "inner_rank", "start_stages", "end_stages", "end_in_flight"} | {
    "outer_stages",
    "in_flight",
    "price_eighths",
}
"""What a witness chooses. Another choice proves the bound as well, or the numbers do not fit it."""


def numbers_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of the derived numbers of a witness; of a window, its microbatch and filling are choices."""
    if isinstance(value, list):
        for k, entry in enumerate(value):
            if not (path[:1] == ("windows",) and len(path) == 2 and k in (0, 2, 3)):
                yield from numbers_in(entry, (*path, k))
    elif isinstance(value, dict):
        for name, entry in value.items():
            if name not in _CHOICES:
                yield from numbers_in(entry, (*path, name))
    elif isinstance(value, int):
        yield path


def test_every_number_of_a_witness_is_the_one_that_is_derived() -> None:
    """Zero times and branches too: none of them may be one more, and the true ones pass."""
    rng = random.Random(8)
    changed = 0
    for k in range(40):
        problem = any_problem(rng) if k % 2 else branching_problem(rng, rng.randint(1, 4))
        for bound in analytic_bounds(problem.with_(objective=rng.choice(("span", "makespan")))):
            good = certified(problem.with_(objective=bound.objective), bound)
            assert verify(good) == []
            for *path, last in numbers_in(as_plain(bound.witness)):
                witness = as_plain(bound.witness)
                place = witness
                for step in path:
                    place = place[step]
                place[last] += 1
                faults = verify(certified(good.problem, replace(bound, witness=witness)))
                assert "of the witness is not what follows" in str(faults), (problem, bound, path, last)
                changed += 1
    assert changed > 1000


def test_variants_erased_from_the_witness_are_refused(recomputing: Solution) -> None:
    """The bound of the chosen way alone is higher: what was offered stands in the solution."""
    solution = recomputing
    assert solution.offered is not None
    alone = best_bound(solution.problem)
    chosen, listed = solution.variants[0], solution.certificate.witness["costs"]
    level = {"choice": [0], "bound_ns": alone.value_ns, "method": alone.method, "witness": alone.witness}
    costs = [[row[k]] for row, k in zip(listed, solution.variants, strict=True)]
    forged = replace(
        solution.certificate,
        bound_ns=alone.value_ns,
        witness=as_plain({"rank": 0, "levels": [level], "costs": costs}),
    )
    plain = replace(forged, method=alone.method, witness=alone.witness)
    assert alone.value_ns > solution.certificate.bound_ns
    for changed, words in (
        (replace(solution, certificate=forged), "is not what follows|leaves out a level"),
        (replace(solution, certificate=plain), "not for all that were offered"),
        (replace(solution, offered=None), "does not say which variants"),
        (replace(solution, variants=(chosen + 5,) * 4), "none of those offered"),
        (replace(solution, variants=tuple(1 - min(v, 1) for v in solution.variants)), "does not run as"),
    ):
        with pytest.raises(CheckError, match=words):
            verify_certificate(changed)


def test_what_a_solver_s_witness_says_is_compared_too() -> None:
    problem = Problem.of(Profile.uniform(StageCost.simple(10, 10, 10), 4, 1), None, 10, 6, "makespan")
    instance = Instance.of(problem).relaxed()
    found = crossing_bound(instance, 0, Fraction(3, 2), upper_ns=10**6, time_limit_s=20)
    witness = {"solver": "CP-SAT", "rank": 0, "head_ns": 0, "grid": [3, 2], "units": found.units}
    crossing = Bound(found.value_ns, "crossing", "makespan", witness)
    assert verify(certified(problem, crossing)) == []
    exact = {"solver": "CP-SAT", "model": "exact", "actions": 120}
    bounds = [(crossing, witness), (Bound(1, "cp_sat", "makespan", exact), exact)]
    for bound, right in bounds:
        for name in right:
            wrong: Any = {"rank": 7, "grid": [4, 2], "solver": "me", "model": "mine"}.get(name, 10**6)
            forged = certified(problem, replace(bound, witness={**right, name: wrong}))
            with pytest.raises(CheckError, match="of the witness is not what follows|no usable 'rank'"):
                verify_certificate(forged)


Change = Callable[[dict[str, Any]], None]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: w.update(rank=9), "no usable 'rank'"),
        (lambda w: w.update(rank=True), "no usable 'rank'"),
        (lambda w: w["windows"].append(w["windows"][-1]), "overlap"),
        (lambda w: w.update(windows=7), "no list"),
        (lambda w: w["windows"].insert(0, ["x"]), "names no microbatch"),
        (lambda w: w["windows"].clear(), "idle_ns of the witness is not what follows"),
        (lambda w: (w["windows"].clear(), w.update(idle_ns=0)), "does not follow from its witness"),
        (lambda w: w.update(rank=2), "idle_ns of the witness is not what follows"),
        (lambda w: w["windows"][0].__setitem__(4, 10**6), r"windows\[0\]\[4\] of the witness"),
        (lambda w: w["windows"][0].append(1), r"windows\[0\] of the witness"),
        (lambda w: w.update(work_ns=w["work_ns"] + 1), "work_ns of the witness"),
        (lambda w: w.update(work_ns=float(w["work_ns"])), "work_ns of the witness"),
        (lambda w: w.update(trust=1), "'trust', which is no part"),
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
    solution = plan(table_problem(1, 10, "batched", 4, 12), time_limit_s=1)
    assert solution.certificate.method == "blocking_send"
    assert verify(solution) == []
    assert "a last message" in explain(solution)


def test_variants_hold_over_all_levels_or_are_refused(recomputing: Solution) -> None:
    solution = recomputing
    assert verify(solution) == []
    witness = as_plain(solution.certificate.witness)
    for change, words in (
        (lambda w: w["levels"].pop(), "leaves out a level"),
        (lambda w: w["levels"][0].update(choice=[5]), "no such way"),
        (lambda w: w["levels"][0].update(method=3), "no method"),
        (lambda w: w["levels"][0].update(method="cp_sat"), "no method"),
        (lambda w: w["levels"][0].update(bound_ns=10**9), "bound_ns of the witness"),
        (lambda w: w["levels"][0].update(note="x"), "no part of its bound"),
        (lambda w: w["costs"][0][0].append(1), "costs[0][0] of the witness"),
        (lambda w: w["costs"][0].reverse(), "costs[0][0][1] of the witness"),
        (lambda w: w["costs"].pop(), "costs of the witness"),
    ):
        forged = json.loads(json.dumps(witness))
        change(forged)
        certificate = replace(solution.certificate, witness=forged)
        faults = verify(replace(solution, certificate=certificate))
        assert words in str(faults[0]), faults


def test_a_file_keeps_all_that_a_check_needs(recomputing: Solution) -> None:
    solution = recomputing
    read = schedule_json.loads(schedule_json.dumps(solution)).solution()
    read = replace(read, offered=solution.offered)
    assert verify(read) == []
    assert explain(read) == explain(solution)


def test_the_sum_can_be_followed_by_hand(paper_profiles: dict[str, Any], golden: Any) -> None:
    problem = paper_problem(paper_profiles["configs"][0], 1)
    golden("certificate.txt", explain(plan(problem)))


@pytest.mark.parametrize(
    ("size", "accumulate", "words"),
    [
        (0, "order", "beyond the plan it holds up to 1 gradient of stage 0's weights"),
        (1, "order", "wait up to 1 gradient of stage 0's weights, counted in the peak"),
        (1, "memory", "gradients are summed as they come, not in microbatch order"),
    ],
)
def test_the_certificate_says_how_gradients_are_summed(size: int, accumulate: str, words: str) -> None:
    schedule = Schedule.parse("placement 0\nmicrobatches 3\nrank 0: 0F0 0F1 0F2 0B0 0BW1 0BW2 0W0\n")
    profile = Profile((StageCost(20, 20, 20, 37, 4, 2, gradient_bytes=size),))
    solution = rated(schedule, Problem.of(profile, None, 3, 16, accumulate=accumulate))
    assert f"{words}\n\n" in explain(solution)
