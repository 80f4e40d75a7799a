"""The critical path: a chain without slack, found again by making its actions longer."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.support.strategies import greedy_order, problems
from zbcompile.errors import CheckError
from zbcompile.schedule.communication import lowered
from zbcompile.schedule.critical_path import critical_path, waited_for
from zbcompile.schedule.event_graph import EventGraph
from zbcompile.schedule.ir import Action, Kind
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.simulate import Timeline, simulate, timeline_of


def found(problem: Problem, seed: int) -> tuple[EventGraph, Timeline, list[tuple[int, int]]]:
    graph = EventGraph(lowered(greedy_order(problem, Random(seed)), problem), problem)
    timeline = timeline_of(graph)
    return graph, timeline, critical_path(graph, timeline)


@settings(max_examples=60)
@given(problems(), st.integers(0, 99), st.sampled_from(["async", "rendezvous", "batched"]))
def test_the_path_ends_where_the_step_does_and_nothing_on_it_could_begin_earlier(
    problem: Problem, seed: int, transport: str
) -> None:
    problem = problem.with_(transport=transport)
    try:
        graph, timeline, path = found(problem, seed)
    except CheckError:  # under batched sends some random orders deadlock
        assume(False)
    lengths = timeline.rank_span if problem.objective == "span" else timeline.rank_end
    rank = lengths.index(max(lengths))
    assert (path[-1][0], timeline.end[path[-1][0]][path[-1][1]]) == (rank, timeline.rank_end[rank])
    assert timeline.start[path[0][0]][path[0][1]] == 0
    for (r, k), (s, n) in zip(path, path[1:], strict=False):
        assert timeline.end[r][k] <= timeline.start[s][n]
    start = graph.earliest()
    for node, before in enumerate(waited_for(graph)):
        if before < 0:
            assert start[node] == 0
        else:
            assert (node, start[node] - start[before]) in graph.successors[before]


@given(problems(), st.integers(0, 99))
@settings(max_examples=40)
def test_a_longer_action_on_the_path_makes_its_end_later_by_as_much(problem: Problem, seed: int) -> None:
    problem = problem.with_(objective="makespan", transport="async")
    _, timeline, path = found(problem, seed)
    rank, position = path[len(path) // 2]
    action = timeline.schedule.order[rank][position]
    field = {
        Kind.FORWARD: "forward_ns",
        Kind.BACKWARD_INPUT: "backward_input_ns",
        Kind.BACKWARD_WEIGHT: "backward_weight_ns",
        Kind.FULL_BACKWARD: "full_backward_ns",
    }[action.kind]
    stages = list(problem.profile.stages)
    stages[action.stage] = replace(stages[action.stage], **{field: getattr(stages[action.stage], field) + 5})
    like = sum(_like(timeline.schedule.order[r][k], action) for r, k in path)
    longer = problem.with_(profile=replace(problem.profile, stages=tuple(stages)))
    assert simulate(timeline.schedule, longer).makespan_ns >= timeline.makespan_ns + 5 * like


def _like(a: Action, b: Action) -> bool:
    return (a.kind, a.stage) == (b.kind, b.stage)
