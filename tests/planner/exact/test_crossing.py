"""The crossing bound: sound against the exact optimum, and stronger where memory is short."""

from __future__ import annotations

import random
import threading
import time
from fractions import Fraction

import pytest

from tests.support.planner_cases import random_problem
from zbcompile.planner.bounds.analytic import best_bound
from zbcompile.planner.certify.certificate import verify_certificate
from zbcompile.planner.core.instance import Instance, is_chain
from zbcompile.planner.core.score import fits, value_of
from zbcompile.planner.exact.crossing import crossing_bound, grids, scaled, shifted
from zbcompile.planner.exact.model import solve_exact
from zbcompile.planner.incumbent import PlanState, Progress
from zbcompile.planner.plan import plan
from zbcompile.schedule.check import check
from zbcompile.schedule.costs import Edge, Profile, StageCost
from zbcompile.schedule.ir import Placement
from zbcompile.schedule.least_memory import least_headroom
from zbcompile.schedule.problem import Problem


def short_of_memory(rng: random.Random, ranks: int, microbatches: int) -> Problem:
    """Caps between one and about p microbatches."""
    problem = random_problem(rng, ranks=ranks, microbatches=microbatches, objective="span")
    return problem.with_(
        caps=tuple(int(least_headroom(problem, r) * rng.uniform(1, ranks * 0.9)) for r in range(ranks))
    )


@pytest.mark.parametrize("block", range(4))
def test_never_above_the_optimum(block: int) -> None:
    """80 instances with unequal stages, every rank, on the times themselves and on a coarser grid, with and
    without a bound already known."""
    stronger = 0
    for k in range(20):
        rng = random.Random(10_000 + 20 * block + k)
        ranks = rng.randint(2, 4)
        problem = short_of_memory(rng, ranks, rng.randint(2, 5 if ranks < 4 else 4))
        instance = Instance.of(problem)
        exact = solve_exact(instance, lower=0, time_limit_s=20)
        assert exact.proved
        found = []
        for rank in range(ranks):
            for grid in (Fraction(1), Fraction(3, 2)):
                bound = crossing_bound(
                    instance.relaxed(),
                    rank,
                    grid,
                    upper_ns=2 * exact.bound_ns,
                    time_limit_s=10,
                    known_ns=k % 2 * best_bound(problem).value_ns,
                )
                assert bound.closed
                found.append(bound.value_ns)
        assert max(found) <= exact.bound_ns, problem
        stronger += max(found) > best_bound(problem).value_ns
    assert stronger >= 1


@pytest.mark.parametrize("objective", ["span", "makespan"])
def test_the_whole_chain_is_exact(objective: str) -> None:
    """On the times themselves the optimum and an order that has it; on a coarser grid never above it."""
    for k in range(25):
        rng = random.Random(20_000 + k)
        ranks = rng.randint(2, 4)
        problem = short_of_memory(rng, ranks, rng.randint(2, 5 if ranks < 4 else 4))
        instance = Instance.of(problem.with_(objective=objective)).relaxed()
        exact = solve_exact(instance, lower=0, time_limit_s=20)
        assert exact.proved
        whole = crossing_bound(instance, None, Fraction(1), upper_ns=2 * exact.bound_ns, time_limit_s=20)
        assert (whole.value_ns, whole.closed) == (exact.bound_ns, True), problem
        assert whole.codes is not None
        assert fits(instance, whole.codes)
        assert value_of(instance, whole.codes) == exact.bound_ns
        coarse = crossing_bound(instance, None, Fraction(3, 2), upper_ns=2 * exact.bound_ns, time_limit_s=20)
        assert coarse.value_ns <= exact.bound_ns
        proved = crossing_bound(instance, None, Fraction(1), upper_ns=exact.bound_ns, time_limit_s=20)
        assert (proved.value_ns, proved.codes) == (exact.bound_ns, None)


def test_a_known_value_is_proved_when_nothing_shorter_exists() -> None:
    """p = 4, m = 8, times 3:3:2, memory of 3 microbatches: 88 is optimal, the analytic bound says 86."""
    problem = Problem.of(Profile.uniform(StageCost.simple(3, 3, 2), 4), None, 8, 6)
    assert best_bound(problem).value_ns == 86
    bound = crossing_bound(Instance.of(problem), 0, Fraction(1), upper_ns=88, time_limit_s=60)
    assert (bound.value_ns, bound.closed) == (88, True)


def test_scaled_times_never_exceed_the_real_ones() -> None:
    rng = random.Random(3)
    for _ in range(50):
        instance = Instance.of(random_problem(rng, ranks=3, microbatches=2, longest=1000))
        for grid in grids(instance, 24):
            coarse = scaled(instance, grid)
            for small, real in zip(coarse.forward, instance.forward, strict=True):
                assert small * grid <= real


def test_only_plain_chains_qualify() -> None:
    stage = StageCost.simple(1, 1, 1)
    assert is_chain(Instance.of(Problem.of(Profile.uniform(stage, 3), None, 2)))
    skip = Profile((stage,) * 3, (Edge(0, 1), Edge(1, 2), Edge(0, 2)))
    assert not is_chain(Instance.of(Problem.of(skip, None, 2)))
    assert not is_chain(Instance.of(Problem.of(Profile.uniform(stage, 4), Placement.v(2), 2)))


def paper_stages(microbatches: int) -> Problem:
    """Four ranks of the 1.5B profile (arXiv 2401.10241) with three quarters of the memory of 1F1B."""
    stage = StageCost.simple(18_522_000, 18_086_000, 9_337_000, 201_216, 73_728)
    return Problem.of(Profile.uniform(stage, 4, 601_000), None, microbatches, 3 * 201_216)


def test_the_whole_chain_proves_what_single_ranks_do_not() -> None:
    problem = paper_stages(8)
    instance = Instance.of(problem)
    first, second = (plan(problem, time_limit_s=100) for _ in range(2))
    assert first.certificate.is_optimal
    assert first.certificate.witness["rank"] is None
    assert verify_certificate(first, time_limit_s=60).proved
    assert first == second
    value = first.certificate.value_ns
    for rank in range(3):
        alone = crossing_bound(
            instance, rank, grids(shifted(instance), 96)[-1], upper_ns=value, time_limit_s=60
        )
        assert alone.closed
        assert alone.value_ns < value


def test_an_interrupt_while_the_models_are_asked_keeps_the_best_order() -> None:
    """Ctrl-C at the first answer: both threads end, and the order stays."""
    lines: list[Progress] = []

    def interrupt(progress: Progress) -> None:
        lines.append(progress)
        if progress.step == "crossing" and lines[0].step != progress.step:
            raise KeyboardInterrupt

    problem = paper_stages(16)
    begin, running = time.monotonic(), set(threading.enumerate())
    solution = plan(problem, time_limit_s=90, observer=interrupt)
    check(solution.schedule, problem)
    assert time.monotonic() - begin < 80
    assert set(threading.enumerate()) <= running
    last = -2 if lines[-1].state is PlanState.INTERRUPTED else -1
    assert lines[last].best_ns == solution.certificate.value_ns


def test_plan_proves_by_the_crossing_bound() -> None:
    """Unit times, p = 4, m = 12, half of 1F1B's memory: the analytic bound alone leaves a gap."""
    problem = Problem.of(Profile.uniform(StageCost.simple(1, 1, 1), 4), None, 12, 4)
    solution = plan(problem, time_limit_s=60)
    assert best_bound(problem).value_ns < solution.certificate.value_ns
    assert solution.certificate.is_optimal
