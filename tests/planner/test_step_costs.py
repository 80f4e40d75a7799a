"""What stages cost once a step: every clock of the planner, bounds and proofs, plans against brute force."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from tests.support.strategies import greedy_order, step_problems
from zbcompile.planner.core.compiled import vector
from zbcompile.planner.core.instance import Instance, numbered, to_codes, to_schedule
from zbcompile.planner.core.latest_starts import latest_row_starts
from zbcompile.planner.core.score import evaluate
from zbcompile.planner.core.scorer import Scorer
from zbcompile.planner.core.times import Clock
from zbcompile.schedule.check import faults
from zbcompile.schedule.problem import TRANSPORTS, Problem
from zbcompile.schedule.simulate import simulate


@given(step_problems(), st.integers(0, 999))
def test_all_clocks_are_the_simulator(problem: Problem, seed: int) -> None:
    codes = to_codes(greedy_order(problem, Random(seed)))
    schedule = to_schedule(codes, problem)
    if faults(schedule, problem):
        return
    timeline, instance = simulate(schedule, problem), Instance.of(problem)
    pair = (timeline.span_ns, timeline.makespan_ns)
    assert evaluate(instance, codes) == pair
    assert Clock.of(problem).measure(codes) == pair
    sums = sum(timeline.rank_span if problem.objective == "span" else timeline.rank_end)
    score = (timeline.value_ns, 100 * problem.num_ranks * timeline.value_ns + sums)
    assert Scorer(instance, list).score(codes) == score
    if seed % 8 == 0:
        assert Scorer(instance, vector).score(codes) == score
    firsts = [row[0] for row in latest_row_starts(instance, codes)]
    assert all(late <= first for late, first in zip(timeline.latest_start, firsts, strict=True))


@given(step_problems(), st.integers(0, 999), st.sampled_from(TRANSPORTS[1:]))
def test_the_clock_of_all_send_modes_is_the_simulator(problem: Problem, seed: int, transport: str) -> None:
    problem = problem.with_(transport=transport)
    codes = to_codes(greedy_order(problem, Random(seed)))
    schedule = to_schedule(codes, problem)
    found = faults(schedule, problem)
    if found:
        return
    timeline = simulate(schedule, problem)
    assert Clock.of(problem).measure(codes) == (timeline.span_ns, timeline.makespan_ns)
    assert numbered(codes)
