"""The last-round-trip bound: sound against the exact model, two traps, two formulas, both ways to find V."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping

import pytest

from tests.prove.cases import METHOD, Verdict, judge, make_problem
from tests.support.planner_cases import PEER, exact_value, peer_problem
from zbcompile.errors import CheckError
from zbcompile.planner.bounds import last_round_trip
from zbcompile.planner.bounds.analytic import analytic_bounds, best_bound
from zbcompile.planner.bounds.bound import Bound
from zbcompile.planner.bounds.last_round_trip import _along_chain, _best_outer, _span, _trip
from zbcompile.planner.bounds.left_weights import most_left
from zbcompile.planner.bounds.rank_idle import rank_idle
from zbcompile.planner.certify.derive import derivations
from zbcompile.planner.certify.facts import Derivation, Facts
from zbcompile.planner.core.instance import Instance, is_path
from zbcompile.planner.core.paths import Paths
from zbcompile.planner.exact.model import refute
from zbcompile.schedule.costs import Edge, Link, Profile, StageCost
from zbcompile.schedule.ir import Placement
from zbcompile.schedule.problem import Problem


def strongest(problem: Problem) -> Bound:
    """The best last-round-trip bound."""
    return next(bound for bound in analytic_bounds(problem) if bound.method == METHOD)


def test_no_order_is_shorter_on_a_sample() -> None:
    """``make prove`` asks the same of thousands."""
    verdicts = Counter(judge(make_problem(seed))[0] for seed in range(250))
    assert verdicts[Verdict.VIOLATED] == 0
    assert verdicts[Verdict.HELD] >= 60
    assert verdicts[Verdict.UNDECIDED] <= 2


@pytest.mark.parametrize("seed", [82, 86, 91])
def test_the_judge_finds_the_order_below_a_bound_one_too_high(seed: int) -> None:
    """Here the bound is above all others and is the optimum."""
    problem = make_problem(seed)
    verdict, bound = judge(problem)
    assert verdict is Verdict.HELD
    assert bound is not None
    assert refute(Instance.of(problem).relaxed(), bound.value_ns + 1) is False


def test_stages_without_bytes_may_all_be_in_flight() -> None:
    """If they were left out of V the bound would be 89."""
    problem = Problem.of(Profile.uniform(StageCost.simple(2, 2, 1, 0, 0), 8), Placement.v(4), 8)
    assert strongest(problem).value_ns <= 80
    assert best_bound(problem).value_ns == 80


def test_no_path_is_taken_for_granted_between_backwards() -> None:
    """One edge without gradient: B's of stages 2 and 3 do not wait for each other."""
    stages = (StageCost.simple(3, 3, 3, 1, 1),) * 6
    profile = Profile(stages, (Edge(2, 3, has_gradient=False),), Link(2))
    for objective in ("span", "makespan"):
        problem = Problem.of(profile, Placement((1, 0, 0, 0, 1, 1)), 1, None, objective)
        best = exact_value(problem)
        assert all(bound.value_ns <= best for bound in analytic_bounds(problem))


@pytest.mark.parametrize(("p", "c"), [(4, 1), (8, 2), (16, 5)])
def test_a_v_of_equal_stages_idles_by_the_formula(p: int, c: int) -> None:
    """idle = 3(p-1)(f+b+2c) + 2(f+b) - N(f+b+w) + w, N the room in half-stage activations, whatever m.

    As long as N F's do not fill the way to the first B: up to N = 2p where f <= b + 2c.
    """
    f, b, w = 30, 28, 17
    for room in range(p + 2, 2 * p + 1):
        for m in (2 * p, 3 * p + 1):
            profile = Profile.uniform(StageCost.simple(f, b, w, 10, 4), 2 * p, c)
            problem = Problem.of(profile, Placement.v(p), m, 10 * room)
            idle = 3 * (p - 1) * (f + b + 2 * c) + 2 * (f + b) - room * (f + b + w) + w
            bound = strongest(problem)
            assert bound.value_ns == 2 * m * (f + b + w) + idle
            assert (bound.witness["inner_rank"], bound.witness["outer_rank"]) == (p - 1, 0)


@pytest.mark.parametrize(("p", "v"), [(4, 2), (4, 4), (8, 2), (8, 3)])
def test_looped_ranks_at_their_own_memory_idle_by_the_formula(p: int, v: int) -> None:
    """span >= work + (p-1)(f+b+2c) + 2(v-1)pc - (n-1)w, n = (v-1)p + 1 the last rank's own peak."""
    f, b, w, c = 30, 28, 7, 3
    for m in (2 * p, 4 * p):
        profile = Profile.uniform(StageCost.simple(f, b, w, 10, 10), v * p, c)
        caps = [10 * ((v - 1) * p + 2 * (p - 1 - r) + 1) for r in range(p)]
        problem = Problem.of(profile, Placement.looped(p, v), m, caps)
        n = (v - 1) * p + 1
        idle = (p - 1) * (f + b + 2 * c) + 2 * (v - 1) * p * c - (n - 1) * w
        assert strongest(problem).value_ns == v * m * (f + b + w) + idle


def test_published_v_orders_meet_the_bound() -> None:
    """The peer's own ZB-V and V-Half orders: no bound above them, and those of the span that it proves."""
    proved = 0
    for row in PEER:
        for name in ("ZB-V", "V-Half", "V-Min"):
            if row["set"] == "paper" and name in row["schedules"]:
                problem, value = peer_problem(row["p"], row["m"], name, "span")
                assert best_bound(problem).value_ns <= value
                proved += best_bound(problem).value_ns == value
    assert proved >= 1


def test_a_price_is_derived_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """With no tries to spend every witness has a price, and every number of it is the one that is derived."""
    monkeypatch.setattr(last_round_trip, "_TRIES", 0)
    seen = 0
    for seed in range(60):
        problem = make_problem(seed)
        for bound in (b for b in analytic_bounds(problem) if b.method == METHOD):
            assert derive_again(problem, bound.witness) == bound.value_ns
            if "price_eighths" in bound.witness:
                seen += 1
                forged = {**bound.witness, "left_ns": bound.witness["left_ns"] - 1}  # type: ignore[operator]
                with pytest.raises(CheckError, match="left_ns of the witness is not what follows"):
                    derive_again(problem, forged)
    assert seen >= 60


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"inner_rank": 9}, "no usable 'inner_rank'"),
        ({"inner_rank": 1}, "of the witness is not what follows"),
        ({"outer_rank": 1}, "not two stages of its outer rank"),
        ({"outer_stages": [0]}, "not two stages of its outer rank"),
        ({"outer_stages": [7, 0]}, "no way leads from the outer rank"),
        ({"outer_stages": [0, 7]}, "no way leads from the inner rank"),
        ({"in_flight": 3}, "no list"),
        ({"in_flight": [1, 1]}, "in_flight.* of the witness is not what follows"),
        ({"in_flight": [99, 1]}, "in_flight.* of the witness is not what follows"),
        ({"price_eighths": 9}, "no usable 'price_eighths'"),
        ({"price_eighths": 4}, "left_ns of the witness|no part of its bound"),
        ({"trust": 1}, "no part of its bound"),
    ],
)
def test_a_broken_witness_is_refused_in_words(change: dict[str, object], words: str) -> None:
    problem = Problem.of(Profile.uniform(StageCost.simple(30, 28, 17, 10, 4), 8, 1), Placement.v(4), 12, 60)
    bound = best_bound(problem)
    assert (bound.method, bound.witness["inner_rank"], bound.witness["outer_rank"]) == (METHOD, 3, 0)
    derive_again(problem, bound.witness)
    with pytest.raises(CheckError, match=words):
        derive_again(problem, {**bound.witness, **change})


def derive_again(problem: Problem, witness: Mapping[str, object]) -> int:
    """Derive a witness's bound and compare every number."""
    out = Derivation()
    derivations(problem.objective)[METHOD](Facts(problem), witness, out)
    out.compare(witness)
    return out.total


def test_a_price_gives_no_more_than_trying_all() -> None:
    """On few tries the bound is weaker, never stronger, and the derivation by prices of a byte agrees."""
    rng, weaker, equal = random.Random(3), 0, 0
    for seed in range(150):
        instance = Instance.of(make_problem(seed)).relaxed()
        rank, back = rng.randrange(instance.num_ranks), rng.randint(0, 60)
        low, high = (most_left(instance, rank, back, tries) for tries in (0, 10**6))
        if low is None or high is None:
            assert high is None
            continue
        assert low.value_ns >= high.value_ns
        weaker, equal = weaker + (low.value_ns > high.value_ns), equal + (low.value_ns == high.value_ns)
    assert weaker >= 5
    assert equal >= 30


def test_the_outer_rank_along_a_chain_is_the_best_of_all() -> None:
    found = 0
    for seed in range(120):
        problem = make_problem(seed)
        instance = Instance.of(problem).relaxed()
        paths = Paths.of(instance)
        if not is_path(instance):
            continue
        outers = _along_chain(instance, paths)
        for rank in range(instance.num_ranks):
            trip = _trip(instance, paths, rank_idle(instance, paths, rank))
            if trip is not None:
                along, best = outers[trip.first], _best_outer(instance, paths, trip)
                values = [_span(instance, paths, trip, outer).value_ns for outer in (along, best)]
                assert values[0] == values[1]
                found += 1
    assert found > 50
