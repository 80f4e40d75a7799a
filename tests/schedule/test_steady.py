"""The steady state repeats action by action, and is found where an order has one."""

from __future__ import annotations

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.strategies import greedy_order, problems
from zbcompile.planner.core.instance import to_schedule
from zbcompile.planner.starts.classic import one_f_one_b, zb_h1
from zbcompile.schedule.costs import Profile, StageCost
from zbcompile.schedule.ir import Schedule
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.simulate import Timeline, simulate
from zbcompile.schedule.steady import Steady, phases, steady_state


def of_classic(name, p: int, m: int, lag: int = 3) -> Timeline:
    problem = Problem.of(Profile.uniform(StageCost.simple(30, 31, 20, 4, 2), p, lag), num_microbatches=m)
    return simulate(to_schedule(name(p, m), problem), problem)


def repeats(timeline: Timeline, steady: Steady) -> bool:
    """Whether each period holds what the first holds, moved in time and in the microbatches."""
    for row, starts, ends in zip(timeline.schedule.order, timeline.start, timeline.end, strict=True):
        periods: list[set[object]] = [set() for _ in range(steady.repeats)]
        for action, start, end in zip(row, starts, ends, strict=True):
            number = (start - steady.first_ns) // steady.period_ns
            if 0 <= number < steady.repeats:
                moved = number * steady.period_ns
                microbatch = action.microbatch - number * steady.step
                periods[number].add((action.kind, action.stage, microbatch, start - moved, end - moved))
        if not periods[0] or any(period != periods[0] for period in periods):
            return False
    return True


def test_a_long_classic_order_is_mostly_one_period() -> None:
    for order, step in ((one_f_one_b, 4), (zb_h1, 1)):  # with these lags 1F1B waits anew every fourth time
        timeline = of_classic(order, 4, 40)
        steady = steady_state(timeline)
        assert steady is not None
        assert steady.step == step
        assert steady.repeats * steady.step >= 30
        assert repeats(timeline, steady)
        filled, drains = phases(timeline)
        assert filled < steady.last_ns
        assert steady.first_ns < drains


def test_a_change_in_the_middle_ends_the_steady_state() -> None:
    timeline = of_classic(zb_h1, 3, 30)
    row = list(timeline.schedule.order[1])
    late = next(k for k, a in enumerate(row) if a.kind.letter == "W" and a.microbatch == 14)
    row.insert(late + 3, row.pop(late))
    order = [timeline.schedule.order[0], row, timeline.schedule.order[2]]
    changed = simulate(Schedule.of(timeline.problem.placement, 30, order), timeline.problem)
    steady, before = steady_state(changed), steady_state(timeline)
    assert before is not None
    if steady is not None:
        assert repeats(changed, steady)
        assert steady.repeats < before.repeats


def test_short_orders_have_none() -> None:
    assert steady_state(of_classic(zb_h1, 4, 2)) is None
    assert phases(of_classic(zb_h1, 4, 2)) is None


@settings(max_examples=40)
@given(problems(), st.integers(0, 99))
def test_what_is_found_repeats(problem: Problem, seed: int) -> None:
    timeline = simulate(greedy_order(problem, Random(seed)), problem)
    steady = steady_state(timeline)
    assert steady is None or repeats(timeline, steady)
