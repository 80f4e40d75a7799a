"""Other numbers of the ranks change no plan's value: ranks are alike but for their stages, caps and links."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planner.test_variants import recompute
from tests.support.strategies import problems
from zbcompile.errors import InfeasibleError
from zbcompile.planner.certify.certificate import explain, verify
from zbcompile.planner.imported import rated
from zbcompile.planner.plan import plan
from zbcompile.planner.portfolio import NAMES
from zbcompile.schedule.costs import Link, Profile, StageCost
from zbcompile.schedule.ir import Placement
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.renumber import Numbering
from zbcompile.schedule.simulate import simulate
from zbcompile.schedule.solution import Solution


@settings(max_examples=10)
@given(problems(max_ranks=3, max_microbatches=3), st.randoms(use_true_random=False))
def test_plans_are_equal_in_value_and_bound(problem: Problem, rng: random.Random) -> None:
    """By a few parts whose tries are counted: the answers of a solver may be cut off on a busy machine."""
    problem = problem.with_(caps=tuple(rng.choice((None, 40, 60)) for _ in range(problem.num_ranks)))
    numbering = Numbering(tuple(rng.sample(range(problem.num_ranks), problem.num_ranks)))
    without = set(NAMES) - {"classic", "one_at_a_time", "rule_of_thumb", "list_schedule"}
    found: list[Solution | None] = []
    for one in (problem, numbering.of_problem(problem)):
        try:
            found.append(plan(one, level=1, time_limit_s=600, without=without))
        except InfeasibleError:
            found.append(None)
    first, second = found
    if first is None or second is None:
        assert first is second
        return
    assert simulate(second.schedule, second.problem).value_ns == first.certificate.value_ns
    assert second.certificate.bound_ns == first.certificate.bound_ns
    assert numbering.of_problem(problem) == second.problem
    assert verify(second) == verify(first) == []


def test_a_chain_is_planned_alike_under_every_numbering() -> None:
    """With a variant on one stage, and caps and links that move along."""
    chain = recompute(3, 4, 200)
    link = ((0, 1), Link(7))
    profile = Profile(chain.profile.stages, chain.profile.edges, chain.profile.link, (link,))
    chain = chain.with_(profile=profile, caps=(200, 180, 160), objective="makespan")
    values = set()
    for new in itertools.permutations(range(3)):
        problem = Numbering(new).of_problem(chain)
        solution = plan(problem, level=1, time_limit_s=600)
        assert solution.problem.placement == problem.placement
        assert solution.problem.profile == problem.profile.choose(solution.variants)
        assert verify(solution) == []
        values.add((solution.certificate.value_ns, solution.certificate.bound_ns, solution.variants))
    assert len(values) == 1


def test_witnesses_name_the_ranks_as_given() -> None:
    """The second stage has most work, and it is on rank 0; its bound is derived under other numbers."""
    stages = (StageCost.simple(1, 1, 1), StageCost.simple(5, 5, 5), StageCost.simple(1, 1, 1))
    problem = Problem.of(Profile(stages), Placement((2, 0, 1)), 6)
    solution = plan(problem, time_limit_s=10)
    imported = rated(solution.schedule, problem)
    for certificate in (solution.certificate, imported.certificate):
        assert 0 in (certificate.witness.get("rank"), certificate.witness.get("inner_rank"))
    assert verify(solution) == verify(imported) == []
    assert "ranks are numbered by their first stages; 0, 1, ... are (2, 0, 1)" in explain(solution)


def test_an_infeasible_cap_names_the_rank_as_given() -> None:
    stage = StageCost.simple(1, 1, 1, 4, 2)
    problem = Problem.of(Profile((stage,) * 3), Placement((2, 0, 1)), 2, (9, 3, 9))
    with pytest.raises(InfeasibleError) as caught:
        plan(problem)
    assert "rank 1" in str(caught.value)
