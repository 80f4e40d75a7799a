"""IR, costs, dependency graph, clock and judge: an invariant each, over random problems."""

from __future__ import annotations

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.strategies import greedy_order, problems
from zbcompile.errors import CheckError, FormatError, UsageError
from zbcompile.schedule.check import check, faults
from zbcompile.schedule.communication import insert_communication
from zbcompile.schedule.costs import Link, Profile, StageCost
from zbcompile.schedule.dependency_graph import order_graph
from zbcompile.schedule.ir import Action, Kind, Placement, Schedule
from zbcompile.schedule.least_memory import least_headroom
from zbcompile.schedule.memory import memory_peaks
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.simulate import simulate


@given(problems(), st.randoms(use_true_random=False), st.booleans())
def test_text_round_trips(problem: Problem, random: object, with_messages: bool) -> None:
    schedule = greedy_order(problem, random)
    if with_messages:
        schedule = insert_communication(schedule, problem)
    assert Schedule.parse(str(schedule)) == schedule


@given(problems(), st.randoms(use_true_random=False))
def test_times_equal_the_longest_path_of_the_networkx_graph(problem: Problem, random: object) -> None:
    schedule = greedy_order(problem, random)
    timeline = simulate(schedule, problem)
    graph = order_graph(schedule, problem)
    start: dict[Action, int] = {}
    for node in nx.topological_sort(graph):
        start[node] = max(
            (
                start[u] + graph.nodes[u]["duration_ns"] + graph.edges[u, node]["lag_ns"]
                for u in graph.predecessors(node)
            ),
            default=0,
        )
    for rank, row in enumerate(schedule.order):
        assert timeline.start[rank] == tuple(start[a] for a in row)
    assert timeline.span_ns <= timeline.makespan_ns
    assert timeline.span_ns >= max(timeline.busy_ns(r) for r in range(schedule.num_ranks))


@given(problems(), st.randoms(use_true_random=False))
def test_first_actions_can_really_start_at_their_latest_start(problem: Problem, random: object) -> None:
    schedule = greedy_order(problem, random)
    timeline = simulate(schedule, problem)
    graph = order_graph(schedule, problem)
    begin: dict[Action, int] = {}
    for node in nx.topological_sort(graph):
        own = [
            begin[u] + graph.nodes[u]["duration_ns"] + graph.edges[u, node]["lag_ns"]
            for u in graph.predecessors(node)
        ]
        rank = graph.nodes[node]["rank"]
        begin[node] = max([*own, timeline.latest_start[rank] if schedule.order[rank][0] == node else 0])
    for rank, row in enumerate(schedule.order):
        assert begin[row[-1]] + graph.nodes[row[-1]]["duration_ns"] <= timeline.rank_end[rank]


@given(problems(), st.randoms(use_true_random=False))
def test_legal_orders_with_inserted_messages_pass_and_keep_their_times(
    problem: Problem, random: object
) -> None:
    schedule = greedy_order(problem, random)
    assert faults(schedule, problem) == []
    for depth in (1, 2, 10_000):
        lowered = insert_communication(schedule, problem, depth)
        check(lowered, problem)
        assert lowered.compute_only() == schedule
    unlimited, plain = simulate(lowered, problem), simulate(schedule, problem)
    if problem.profile.link.bytes_per_second == 0:
        assert unlimited.rank_span == plain.rank_span
    assert unlimited.makespan_ns >= plain.makespan_ns


@given(problems(), st.randoms(use_true_random=False), st.data())
def test_the_judge_refuses_what_was_broken(problem: Problem, random: object, data: st.DataObject) -> None:
    schedule = greedy_order(problem, random)
    rank = data.draw(st.integers(0, schedule.num_ranks - 1))
    row = list(schedule.order[rank])
    k = data.draw(st.integers(0, len(row) - 1))
    removed = row.pop(k)

    def rebuilt(changed: list[Action]) -> Schedule:
        order = [changed if r == rank else old for r, old in enumerate(schedule.order)]
        return Schedule.of(schedule.placement, schedule.num_microbatches, order)

    with pytest.raises(CheckError, match="missing"):
        check(rebuilt(row), problem)
    with pytest.raises(CheckError, match="twice"):
        check(rebuilt([*row, removed, removed]), problem)
    if removed.kind is Kind.BACKWARD_WEIGHT:
        with pytest.raises(CheckError, match="stands before its"):
            check(rebuilt([removed, *row]), problem)
    if removed.kind is Kind.FORWARD:
        with pytest.raises(CheckError, match="stands before its"):
            check(rebuilt([*row, removed]), problem)


@given(problems(), st.randoms(use_true_random=False))
def test_a_cap_at_the_peak_passes_and_one_byte_less_does_not(problem: Problem, random: object) -> None:
    schedule = greedy_order(problem, random)
    peaks = memory_peaks(schedule, problem)
    check(schedule, problem.with_(caps=tuple(peaks)))
    for rank, peak in enumerate(peaks):
        if peak > problem.static_bytes(rank):
            caps = tuple(p - (r == rank) for r, p in enumerate(peaks))
            with pytest.raises(CheckError, match="over the memory cap"):
                check(schedule, problem.with_(caps=caps))


@pytest.mark.parametrize("fusing", [False, True])
@given(problem=problems(max_microbatches=1))
def test_the_least_headroom_is_what_one_microbatch_needs(problem: Problem, fusing: bool) -> None:
    """The peak of one microbatch's F's down and backwards up, all split or all fused."""
    one = problem.with_(num_microbatches=1)
    split = (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
    order: list[list[Action]] = [[] for _ in range(one.num_ranks)]
    for stage in range(one.num_stages):
        order[one.placement.rank_of[stage]].append(Action(Kind.FORWARD, stage, 0))
    for stage in reversed(range(one.num_stages)):
        kinds = (Kind.FULL_BACKWARD,) if fusing else split
        order[one.placement.rank_of[stage]] += [Action(kind, stage, 0) for kind in kinds]
    peaks = memory_peaks(Schedule.of(one.placement, 1, order), one)
    least = [least_headroom(one, r, fusing=fusing) + one.static_bytes(r) for r in range(one.num_ranks)]
    assert peaks == least


def test_crossing_sends_deadlock_under_rendezvous_and_the_chain_is_named() -> None:
    stage = StageCost.simple(1, 1, 1)
    problem = Problem.of(Profile.uniform(stage, 2), num_microbatches=2, transport="rendezvous")
    text = """placement 0 1
    microbatches 2
    rank 0: 0F0 0SF0>1 0F1 0SF1>1 0RB0<1 0BW0 0RB1<1 0BW1
    rank 1: 1RF0<0 1F0 1BW0 1SB0>0 1RF1<0 1F1 1BW1 1SB1>0
    """
    with pytest.raises(CheckError, match="deadlock: .*waits for"):
        check(Schedule.parse(text), problem)
    check(Schedule.parse(text), problem.with_(transport="async"))


def test_receives_in_another_order_than_the_sends_are_refused() -> None:
    problem = Problem.of(Profile.uniform(StageCost.simple(1, 1, 1), 2), num_microbatches=2)
    text = """placement 0 1
    microbatches 2
    rank 0: 0RB0<1 0RB1<1 0F0 0SF0>1 0F1 0SF1>1 0BW0 0BW1
    rank 1: 1RF1<0 1RF0<0 1F0 1BW0 1SB0>0 1F1 1BW1 1SB1>0
    """
    with pytest.raises(CheckError, match="mixed up"):
        check(Schedule.parse(text), problem)


@pytest.mark.parametrize(
    "text", ["", "2Q0", "2F", "F0", "2F0>1", "2SF0", "2SF0<1", "2RF0>1", "99999999F0", "2F0 "]
)
def test_broken_action_texts_are_refused(text: str) -> None:
    with pytest.raises(FormatError):
        Action.parse(text)


def test_placements() -> None:
    assert Placement.v(3).rank_of == (0, 1, 2, 2, 1, 0)
    assert Placement.looped(3).rank_of == (0, 1, 2, 0, 1, 2)
    assert [Placement.named(n, 2, k).name for n, k in (("linear", 1), ("looped", 2), ("v", 2))] == [
        "linear",
        "looped",
        "v",
    ]
    assert Placement((0, 1, 0)).name == "map"
    with pytest.raises(UsageError, match="without a hole"):
        Placement((0, 2))


def test_links_round_transfer_times_up() -> None:
    assert Link(5, 3).transfer_ns(1) == 5 + 333_333_334
    assert Link(5).transfer_ns(10**9) == 5
