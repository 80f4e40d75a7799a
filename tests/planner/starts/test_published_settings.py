"""Published orders whose W's are placed anew: as short as the peer's ZB-V, and legal under any cap."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from tests.support.planner_cases import peer_problem, random_problem
from zbcompile.planner.core.dispatch import Dispatcher
from zbcompile.planner.core.instance import Codes, Instance, to_schedule
from zbcompile.planner.core.scorer import Scorer
from zbcompile.planner.starts.classic import orders_for
from zbcompile.planner.starts.list_settings import Setting, less_idle, published_settings
from zbcompile.schedule.check import check
from zbcompile.schedule.costs import Profile, StageCost
from zbcompile.schedule.ir import Placement
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.simulate import simulate


def placed_anew(problem: Problem) -> list[Codes]:
    """All published orders with their W's placed anew."""
    instance, found = Instance.of(problem), []
    dispatcher = Dispatcher(instance)
    for name, codes in orders_for(problem):
        for setting in published_settings(instance, name, codes):
            found.append(dispatcher.run(setting.keys(instance), setting.recipe))
            for other in less_idle(setting, instance, max(map(instance.work, range(instance.num_ranks)))):
                found.append(dispatcher.run(other.keys(instance), other.recipe))
    return [codes for codes in found if codes is not None]


def best_zb_v(problem: Problem) -> tuple[int, Codes]:
    """ZB-V placed anew, by the standard settings, then with less idle time: the best value and its order."""
    instance = Instance.of(problem)
    dispatcher, scorer = Dispatcher(instance), Scorer(instance)
    name, order = orders_for(problem)[0]

    def best(settings: Iterable[Setting]) -> tuple[int, Codes, Setting]:
        found = []
        for setting in settings:
            codes = dispatcher.run(setting.keys(instance), setting.recipe)
            score = None if codes is None else scorer.score(codes)
            if codes is not None and score is not None:
                found.append((score[0], codes, setting))
        return min(found, key=lambda entry: entry[0])

    first = best(published_settings(instance, name, order))
    second = best(less_idle(first[2], instance, first[0]))
    return min(first, second, key=lambda entry: entry[0])[:2]


@pytest.mark.parametrize(("p", "m"), [(8, 24), (8, 64), (16, 48)])
@pytest.mark.parametrize("objective", ["span", "makespan"])
def test_they_reach_the_peers_zb_v(p: int, m: int, objective: str) -> None:
    """The published profiles at the memory of the peer's own ZB-V: never longer than its order."""
    problem, peer = peer_problem(p, m, "ZB-V", objective)
    value, codes = best_zb_v(problem)
    schedule = to_schedule(codes, problem)
    check(schedule, problem)
    result = simulate(schedule, problem)
    assert value == (result.span_ns if objective == "span" else result.makespan_ns)
    assert value <= peer


@pytest.mark.parametrize(("p", "peer"), [(16, 592_000), (32, 1_200_000)])
def test_they_are_shorter_than_the_peers_where_links_are_slow(p: int, peer: int) -> None:
    """Equal times, links of a fifth of an F: W's go where their rank would be idle for longest.

    The peer's spans are those of its grid, ``unit_c10``, m = p.
    """
    stage = StageCost.simple(5000, 5000, 5000, 2, 1)
    problem = Problem.of(Profile.uniform(stage, 2 * p, 1000), Placement.v(p), p, 4 * p)
    value, codes = best_zb_v(problem)
    check(to_schedule(codes, problem), problem)
    assert value < peer


@pytest.mark.parametrize("seed", range(20))
def test_they_are_legal_or_none(seed: int) -> None:
    """Unequal stages, any cap from one microbatch on."""
    rng = random.Random(seed)
    ranks = rng.randint(1, 4)
    placement = Placement.v(ranks, 2)
    problem = random_problem(rng, ranks=ranks, microbatches=rng.randint(1, 7), placement=placement)
    for codes in placed_anew(problem):
        check(to_schedule(codes, problem), problem)
