"""V list schedules: as short as the peer's ZB-V, legal under any cap, and for the V alone."""

from __future__ import annotations

import random

import pytest

from tests.support.planner_cases import V_STAGE, peer_problem, random_problem, score, v_problem
from zbcompile.planner.core.instance import Instance, to_schedule
from zbcompile.planner.core.scorer import Scorer
from zbcompile.planner.starts.v_list import Settings, v_list_order, v_list_orders
from zbcompile.schedule.check import check
from zbcompile.schedule.costs import Profile
from zbcompile.schedule.ir import Placement
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.simulate import simulate


@pytest.mark.parametrize(("p", "m"), [(8, 24), (8, 64), (16, 48)])
@pytest.mark.parametrize("objective", ["span", "makespan"])
def test_v_list_schedules_reach_the_peers_zb_v(p: int, m: int, objective: str) -> None:
    """The published profiles at the memory of the peer's own ZB-V: never longer than its order."""
    problem, peer = peer_problem(p, m, "ZB-V", objective)
    instance = Instance.of(problem)
    value, _, codes = v_list_orders(instance, Scorer(instance))[0]
    schedule = to_schedule(codes, problem)
    check(schedule, problem)
    result = simulate(schedule, problem)
    assert value == (result.span_ns if objective == "span" else result.makespan_ns)
    assert value <= peer


@pytest.mark.parametrize("seed", range(40))
def test_v_list_schedules_are_legal_or_none(seed: int) -> None:
    """Unequal stages, any cap from one microbatch on, any budget."""
    rng = random.Random(seed)
    ranks = rng.randint(1, 4)
    placement = Placement.v(ranks, 2)
    problem = random_problem(rng, ranks=ranks, microbatches=rng.randint(1, 7), placement=placement)
    settings = Settings(rng.randint(0, 20), rng.random() < 0.5, rng.random() < 0.5)
    codes = v_list_order(Instance.of(problem), settings)
    if codes is not None:
        check(to_schedule(codes, problem), problem)


def test_v_list_schedules_are_for_the_v_alone_and_for_what_can_win() -> None:
    linear = Problem.of(Profile.uniform(V_STAGE, 4, 754), None, 8, 4 * 34)
    assert v_list_orders(Instance.of(linear), Scorer(Instance.of(linear))) == []
    instance = Instance.of(v_problem(4, 12, 8 * 34))
    scorer = Scorer(instance)
    first = v_list_order(instance, Settings(0, False, False))
    value = score(instance, first)
    assert v_list_orders(instance, scorer, value - 1) == []
    assert v_list_orders(instance, scorer, value)[0][0] <= value
