"""Microbatches that differ in cost: factors, clock, memory, judge; by hand and by the longest path."""

from __future__ import annotations

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.strategies import greedy_order, unequal_problems
from zbcompile.errors import CheckError, InfeasibleError, UsageError
from zbcompile.schedule.check import check
from zbcompile.schedule.communication import insert_communication
from zbcompile.schedule.costs import Edge, Link, Profile, StageCost
from zbcompile.schedule.dependency_graph import order_graph
from zbcompile.schedule.ir import Schedule
from zbcompile.schedule.least_memory import check_caps
from zbcompile.schedule.limits import check_plannable
from zbcompile.schedule.microbatches import MicrobatchCost, profile_of
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.simulate import simulate
from zbcompile.schedule.sum_order import numbered_by_turn, sum_order

COST = StageCost(10, 12, 8, 19, 100, 50)
PROFILE = Profile((COST, COST), (Edge(0, 1, 1000, 1000),), Link(3, 10**9))
ORDER = Schedule.parse(
    "placement 0 1\nmicrobatches 2\nrank 0: 0F1 0F0 0B1 0W1 0BW0\nrank 1: 1F1 1F0 1B1 1B0 1W1 1W0\n"
)


def unequal(*factors: tuple[float, float], **changes: object) -> Problem:
    costs = [MicrobatchCost.of(time, size) for time, size in factors]
    return Problem.of(PROFILE, num_microbatches=len(factors), microbatch_costs=costs, **changes)


def test_clock_and_memory_by_hand() -> None:
    problem = unequal((1, 1), (0.5, 2))
    timeline = simulate(ORDER, problem)
    # Microbatch 1: half the time, twice the bytes. Its messages take 3 + 2000 ns, the other ones 3 + 1000.
    assert timeline.start[0] == (0, 5, 4032, 4038, 4042)
    assert timeline.end[0] == (5, 15, 4038, 4042, 4061)
    assert timeline.start[1] == (2008, 2013, 2023, 2029, 2041, 2045)
    assert timeline.end[1] == (2013, 2023, 2029, 2041, 2045, 2053)
    assert timeline.makespan_ns == 4061
    assert timeline.memory == ((200, 300, 200, 100, 0), (200, 300, 200, 150, 50, 0))
    assert timeline.peak_bytes == (300, 300)
    assert problem.work_ns(0) == 45


def test_costs_are_rounded_to_the_nearest_whole_number_and_fusing_never_loses_by_it() -> None:
    stage = profile_of(Profile((StageCost(5, 3, 4, 7, 1, 1),)), MicrobatchCost.of(0.5, 1.5)).stages[0]
    assert (stage.forward_ns, stage.backward_input_ns, stage.backward_weight_ns) == (3, 2, 2)
    assert (stage.full_backward_ns, stage.saved_bytes) == (3, 2)
    assert MicrobatchCost.of("1.0000005").time_ppm == (1_000_001,)
    assert MicrobatchCost.of(1e-7).time_ppm == (0,)
    assert MicrobatchCost.of(".8", 2) == MicrobatchCost((800_000,), (2_000_000,))


@pytest.mark.parametrize("factor", ["", "x", "-1", "1001", "nan", "inf", "1e9", "1/3", float("nan"), -0.5])
def test_what_is_no_factor_is_refused(factor: float | str) -> None:
    with pytest.raises(UsageError, match="no number from 0 to 1000"):
        MicrobatchCost.of(factor)


def test_costs_that_do_not_fit_the_problem_are_refused() -> None:
    with pytest.raises(UsageError, match="one cost per microbatch"):
        Problem.of(PROFILE, num_microbatches=3, microbatch_costs=[MicrobatchCost()])
    with pytest.raises(UsageError, match="one for all stages or one per stage"):
        Problem.of(PROFILE, microbatch_costs=[MicrobatchCost((1, 2, 3))])
    with pytest.raises(UsageError, match="factor in millionths"):
        MicrobatchCost((-1,))
    far = [MicrobatchCost.of(1000)] * 2
    large = Profile((StageCost(1 << 45, 0, 0, 0, 0, 0),))
    with pytest.raises(UsageError, match="too large to add up"):
        check_plannable(Problem.of(large, num_microbatches=2, microbatch_costs=far))


def test_microbatches_that_cost_what_the_profile_says_are_alike() -> None:
    assert unequal((1, 1), (1, 1)) == Problem.of(PROFILE, num_microbatches=2)


def test_judge_and_caps_count_the_bytes_of_each_microbatch() -> None:
    check(ORDER, unequal((1, 1), (1, 2), cap=300))
    with pytest.raises(CheckError, match="rank 0"):
        check(ORDER, unequal((1, 1), (1, 2), cap=299))
    check_caps(unequal((1, 1), (1, 2), cap=200))
    with pytest.raises(InfeasibleError, match="200 bytes"):
        check_caps(unequal((1, 1), (1, 2), cap=199))


def test_gradients_are_summed_in_the_order_of_the_backwards_where_that_is_one() -> None:
    planned, alike = unequal((1, 1), (2, 1)), Problem.of(PROFILE, num_microbatches=2)
    assert sum_order(ORDER, alike) == (0, 1)
    assert sum_order(ORDER, planned) == (1, 0)
    apart = Schedule.parse(str(ORDER).replace("1B1 1B0", "1B0 1B1"))
    assert sum_order(apart, planned) == (0, 1)
    same = Schedule.parse(
        "placement 0 1\nmicrobatches 2\nrank 0: 0F1 0F0 0BW1 0BW0\nrank 1: 1F1 1BW1 1F0 1BW0\n"
    )
    assert sum_order(same, planned) == (1, 0)
    assert str(numbered_by_turn(same, planned).order[0][0]) == "0F0"
    assert numbered_by_turn(same, alike) is same


@given(unequal_problems(), st.randoms(use_true_random=False), st.booleans())
def test_times_equal_the_longest_path_of_the_networkx_graph(
    problem: Problem, random: object, with_messages: bool
) -> None:
    schedule = greedy_order(problem, random)
    graph, start = order_graph(schedule, problem), {}
    for node in nx.topological_sort(graph):
        start[node] = max(
            (
                start[u] + graph.nodes[u]["duration_ns"] + graph.edges[u, node]["lag_ns"]
                for u in graph.predecessors(node)
            ),
            default=0,
        )
    if with_messages and not problem.profile.link.bytes_per_second:
        schedule = insert_communication(schedule, problem, 100)
    timeline = simulate(schedule, problem)
    for rank, row in enumerate(schedule.order):
        found = {a: s for a, s in zip(row, timeline.start[rank], strict=True) if a.kind.is_compute}
        assert found == {a: start[a] for a in found}
