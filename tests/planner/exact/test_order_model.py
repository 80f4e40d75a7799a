"""The exact model decides what is fused and knows what sends do to their ranks."""

from __future__ import annotations

import random

import pytest
from ortools.sat.python import cp_model

from tests.planner.improve.test_fuse import random_fusing_problem
from tests.prove.cases import make_problem
from tests.support.other_send_modes import other_send_modes
from tests.support.planner_cases import brute_force
from tests.support.strategies import greedy_order
from zbcompile.errors import CheckError
from zbcompile.planner.core.instance import (
    BW,
    B,
    Codes,
    Fusing,
    Instance,
    numbered,
    to_codes,
    to_schedule,
)
from zbcompile.planner.core.times import Clock
from zbcompile.planner.exact.early_ends import end_early
from zbcompile.planner.exact.memory_model import add_memory
from zbcompile.planner.exact.message_model import add_messages
from zbcompile.planner.exact.model import ExactResult, refute, solve_exact
from zbcompile.planner.exact.order_model import OrderModel
from zbcompile.planner.exact.reach import can_model
from zbcompile.planner.exact.solver import run
from zbcompile.planner.exact.ticks import Ticks
from zbcompile.planner.plan import plan
from zbcompile.schedule.costs import Edge, Link, Profile, StageCost
from zbcompile.schedule.ir import Placement
from zbcompile.schedule.least_memory import least_headroom
from zbcompile.schedule.memory import memory_peaks
from zbcompile.schedule.problem import TRANSPORTS, Problem
from zbcompile.schedule.semantics import SEND_MODES
from zbcompile.schedule.simulate import simulate


def clock_of(problem: Problem) -> Clock | None:
    """The clock that the model needs: none where no send holds up its rank."""
    return Clock.of(problem) if problem.sends.holds_rank else None


def solved(problem: Problem, lower: int = 0) -> ExactResult:
    """The model's answer, whose order `simulate` times as the model does."""
    result = solve_exact(Instance.of(problem), lower=lower, time_limit_s=60, clock=clock_of(problem))
    assert result.proved
    assert result.codes is not None
    assert result.value_ns == result.bound_ns
    assert simulate(to_schedule(result.codes, problem), problem).value_ns == result.value_ns
    return result


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_equals_brute_force_over_fusing_and_order_under_every_send_mode(transport: str) -> None:
    rng = random.Random(3)
    for k in range(5):
        problem = random_fusing_problem(rng, transport)
        if k < 2:  # two stages per rank, which share channels
            stages = (*problem.profile.stages, *problem.profile.stages)[:4]
            rank_of = rng.choice(((0, 1, 1, 0), (0, 1, 0, 1)))
            objective = problem.objective
            profile = Profile(stages, link=problem.profile.link)
            problem = Problem.of(profile, Placement(rank_of), 1, None, objective, transport)
        least = brute_force(problem, fusing=True)
        assert solved(problem).value_ns == least
        instance, clock = Instance.of(problem), clock_of(problem)
        assert refute(instance, least, clock=clock) is True
        assert refute(instance, least + 1, clock=clock) is False


def gradients_problem(seed: int, transport: str = "async") -> Problem:
    """Two ranks whose gradients may wait for their turn in the sum, under caps that leave little room."""
    rng = random.Random(seed)
    stages = []
    for _ in range(2):
        b, w, f = rng.randint(1, 6), rng.randint(2, 9), rng.randint(1, 6)
        fused, saved, pending = rng.randint(b, b + w - 1), rng.randint(1, 2), rng.randint(0, 2)
        stages.append(StageCost(f, b, w, fused, saved, pending, gradient_bytes=rng.randint(4, 12)))
    profile = Profile(tuple(stages), link=Link(rng.randint(0, 6)))
    count, objective = rng.choice((3, 4)), rng.choice(("span", "makespan"))
    problem = Problem(profile, Placement.linear(2), count, (None, None), objective, transport)
    least = [least_headroom(problem, rank) for rank in range(2)]
    return problem.with_(caps=tuple(need + rng.randint(0, 5) for need in least))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_gradients_that_wait_for_their_turn_are_in_the_model(transport: str) -> None:
    matter = 0
    for seed in (202, 208):  # in about three of a hundred problems their bytes decide the value
        problem = gradients_problem(seed, transport).with_(num_microbatches=3)
        least = brute_force(problem, fusing=True)
        assert solved(problem).value_ns == least
        matter += least > solved(problem.with_(accumulate="memory")).value_ns
    assert matter or transport != "async"


def test_an_order_fits_the_model_where_it_fits_its_ranks() -> None:
    """At the peaks of a random order of F, B, W and BW, and not where one rank has a byte less."""
    rng = random.Random(5)
    waits = 0
    for _ in range(40):
        stages = tuple(
            StageCost(1, 1, 1, 1, rng.randint(0, 1), rng.randint(0, 1), gradient_bytes=rng.randint(0, 9))
            for _ in range(rng.randint(2, 3))
        )
        placement = Placement(rng.choice(((0, 0), (0, 1)) if len(stages) == 2 else ((0, 1, 0), (0, 1, 1))))
        problem = Problem(Profile(stages), placement, rng.randint(2, 4), (None,) * placement.num_ranks)
        codes = to_codes(greedy_order(problem, rng, 0.5))
        peaks = memory_peaks(to_schedule(codes, problem), problem)
        plain = memory_peaks(to_schedule(codes, problem), problem.with_(accumulate="memory"))
        waits += peaks != plain
        assert value_of_fixed(problem.with_(caps=tuple(peaks)), codes, early=False) is not None
        for rank in [rank for rank, peak in enumerate(peaks) if peak]:
            caps = tuple(peak - (r == rank) for r, peak in enumerate(peaks))
            assert value_of_fixed(problem.with_(caps=caps), codes, early=False) is None
    assert waits >= 5


def value_of_fixed(problem: Problem, codes: Codes, *, early: bool) -> int | None:
    """The value that the model gives to one order; None if it says that it deadlocks or does not fit."""
    instance = Instance.of(problem)
    ticks = Ticks.of(instance, clock_of(problem), early=early)
    times = (instance.forward, instance.backward, instance.weight, instance.fused, instance.rules.lags)
    horizon = ticks.most(problem.num_microbatches * sum(map(sum, times)))
    orders = OrderModel(ticks, horizon, 0, Fusing.AUTO)
    rows = numbered(codes)
    for row in rows:
        ops = [(B, *op[1:]) if op[0] == BW else op for op in row]
        for before, after in zip(ops, ops[1:], strict=False):
            orders.model.add(orders.start[after] >= orders.end(before))
    fused = {op[1:] for row in rows for op in row if op[0] == BW}
    for pair, literal in orders.fused.items():
        orders.model.add(literal == (pair in fused))
    add_memory(orders)
    add_messages(orders)
    if early:
        end_early(orders)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers, solver.parameters.linearization_level = 1, 2
    status = run(solver, orders.model, horizon)
    if status == cp_model.INFEASIBLE:
        return None
    assert status == cp_model.OPTIMAL
    return ticks.bound_ns(round(solver.objective_value))


@pytest.mark.parametrize("transport", [*TRANSPORTS[1:], "drained"])
def test_one_order_has_the_value_that_simulate_gives_it(transport: str) -> None:
    """V, looped and any map, with branches; deadlocks too, some of them of messages that take no time."""
    deadlocks = 0
    with other_send_modes():
        for seed in (2, 3, 6, 8, 11, 14):
            problem = make_problem(seed)
            problem = problem.with_(
                transport=transport,
                caps=(None,) * problem.num_ranks,
                num_microbatches=2,
                objective="makespan",
            )
            codes = to_codes(greedy_order(problem, random.Random(seed)))
            try:
                value = simulate(to_schedule(codes, problem), problem).value_ns
            except CheckError:
                value, deadlocks = None, deadlocks + 1
            assert value_of_fixed(problem, codes, early=False) == value, seed
    assert deadlocks or transport != "batched"


def test_ranks_end_as_early_as_their_order_allows() -> None:
    """Else rank 0 would end later so that rank 1 starts later, and the span be too short by 8 ns."""
    stages = (StageCost.simple(10, 1, 20, 1, 0), StageCost.simple(1, 1, 100, 1, 0))
    problem = Problem.of(Profile(stages, link=Link(5)), None, 2)
    codes = [
        [(0, 0), (0, 0), (1, 0), (2, 0), (1, 0), (2, 0)],
        [(0, 1), (1, 1), (0, 1), (1, 1), (2, 1), (2, 1)],
    ]
    assert simulate(to_schedule(codes, problem), problem).span_ns == 212
    assert value_of_fixed(problem, codes, early=False) == 204
    assert value_of_fixed(problem, codes, early=True) == 212


def test_a_mode_that_leaves_sends_open_is_not_in_the_model() -> None:
    with other_send_modes():
        modes = {mode.name: can_model(mode) for mode in (*SEND_MODES, *map(_mode, ("buffered", "drained")))}
    assert modes == {"async": True, "rendezvous": True, "batched": True, "buffered": False, "drained": True}


def _mode(name: str):  # type: ignore[no-untyped-def]
    return Problem.of(Profile((StageCost.simple(1, 1, 1),)), transport=name).sends


def fused_choice() -> Problem:
    """Where BW's are longer and shorter than B and W, and one rank is short of bytes."""
    rows = ((3, 7, 6, 12, 2, 0), (8, 4, 9, 8, 0, 0), (2, 5, 7, 6, 4, 2), (7, 1, 3, 5, 4, 2))
    profile = Profile(tuple(StageCost(*row) for row in rows))
    return Problem.of(profile, Placement.v(2), 2, (None, 6), "makespan")


def equal_stages(rank_of: tuple[int, ...], edges: tuple[Edge, ...], *caps: int) -> Problem:
    """Equal stages, and a cap that takes one of them at a time."""
    stage = StageCost.simple(3, 3, 2, 4, 2)
    return Problem.of(Profile((stage,) * len(rank_of), edges), Placement(rank_of), 2, caps)


@pytest.mark.parametrize(
    ("problem", "value"),
    [
        (fused_choice(), 63),
        (equal_stages((0, 1, 1), (Edge(0, 1), Edge(0, 2)), 100, 4), 38),
        (equal_stages((0, 0), (Edge(0, 1, has_gradient=False),), 4), 32),
    ],
    ids=["fused choice", "two users", "no gradient"],
)
def test_small_cases_are_closed(problem: Problem, value: int) -> None:
    certificate = plan(problem, time_limit_s=20).certificate
    assert (certificate.value_ns, certificate.is_optimal) == (value, True)
