"""The dependency rules against a statement of their own, and all forms of them against each other."""

from __future__ import annotations

import networkx as nx
import pytest
from hypothesis import given

from tests.support.strategies import problems
from zbcompile.errors import UsageError
from zbcompile.planner.bounds.analytic import best_bound
from zbcompile.planner.core.instance import KINDS, B, F, Instance, W
from zbcompile.planner.core.paths import Paths
from zbcompile.planner.incumbent import Incumbent
from zbcompile.schedule import dependency_graph as module
from zbcompile.schedule.costs import Edge, Link, Profile, StageCost
from zbcompile.schedule.dependency_graph import dependency_graph, rules_of_graph, step_graph
from zbcompile.schedule.ir import Action, Kind, Placement, Schedule
from zbcompile.schedule.messages import messages_of
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.rules import Rules, Step, dependencies, durations
from zbcompile.schedule.simulate import simulate

Row = tuple[str, int, str, int, int]
"""Kind and stage of what is waited for, kind and stage of what waits, lag in ns."""


def by_hand(problem: Problem) -> set[Row]:
    """What F, B and W of one microbatch wait for, from the edges alone."""
    rows: set[Row] = set()
    rank_of, profile = problem.placement.rank_of, problem.profile
    for s in range(problem.num_stages):
        rows |= {("F", s, "B", s, 0), ("B", s, "W", s, 0)}
    for edge in profile.edges:
        a, b = rank_of[edge.source], rank_of[edge.target]
        there = 0 if a == b else profile.link_between(a, b).transfer_ns(edge.forward_bytes)
        back = 0 if a == b else profile.link_between(b, a).transfer_ns(edge.backward_bytes)
        rows.add(("F", edge.source, "F", edge.target, there))
        if edge.has_gradient:
            rows.add(("B", edge.target, "B", edge.source, back))
    return rows


@given(problems())
def test_the_walk_says_what_the_edges_say(problem: Problem) -> None:
    found = [
        (before.kind.letter, before.stage, after.kind.letter, after.stage, lag)
        for before, after, lag, _ in dependencies(problem)
    ]
    assert set(found) == by_hand(problem)
    assert len(found) == len(set(found))


@given(problems())
def test_walk_graph_and_tables_are_the_same_rules(problem: Problem) -> None:
    graph, rules = dependency_graph(problem), Rules.of(problem)
    assert [(a, b, f["lag_ns"], f["reason"]) for a, b, f in graph.edges(data=True)] == sorted(
        dependencies(problem, messages=True), key=lambda d: list(graph).index(d.before)
    )
    assert rules_of_graph(graph) == rules
    assert Instance.under(problem, rules_of_graph(graph)) == Instance.of(problem)
    assert rules.waits[KINDS.index(Kind.FULL_BACKWARD)] == rules.waits[B]
    tables = {
        (KINDS[before].letter, other, KINDS[kind].letter, s, lag)
        for kind in (F, B, W)
        for s, row in enumerate(rules.waits[kind])
        for before, other, lag in row
    }
    assert tables == by_hand(problem)


@given(problems())
def test_every_node_says_what_it_is(problem: Problem) -> None:
    graph, times = dependency_graph(problem), durations(problem)
    computed = {(step.kind, step.stage) for step in graph if step.kind.is_compute}
    assert computed == {(k, s) for k in times if k.letter != "BW" for s in range(problem.num_stages)}
    sent = {
        Step(action.kind, action.stage, action.peer)
        for _, message in messages_of(problem)
        for action in (message.send, message.recv)
    }
    assert {step for step in graph if not step.kind.is_compute} == sent
    for step, facts in graph.nodes.items():
        length = times[step.kind][step.stage] if step.kind.is_compute else 0
        assert (facts["stage"], facts["kind"], facts["duration_ns"]) == (step.stage, step.kind, length)
        assert facts["rank"] == problem.placement.rank_of[step.stage]
    assert nx.is_directed_acyclic_graph(graph)


def in_ns(graph: nx.DiGraph) -> nx.DiGraph:
    """The graph with its least times from start to start as lengths of edges, and an end for all to reach."""
    whole = nx.DiGraph()
    for node, facts in graph.nodes(data=True):
        whole.add_edge(node, "end", ns=facts["duration_ns"])
    for before, after, facts in graph.edges(data=True):
        whole.add_edge(before, after, ns=graph.nodes[before]["duration_ns"] + facts["lag_ns"])
    return whole


@given(problems(max_microbatches=1))
def test_longest_paths_are_those_of_networkx(problem: Problem) -> None:
    """Of the graph with sends and receives, by networkx's own algorithm; and one microbatch takes as long."""
    graph, instance = in_ns(dependency_graph(problem)), Instance.of(problem)
    paths, count = Paths.of(instance), problem.num_stages
    longest = nx.dag_longest_path_length(graph, weight="ns")
    assert longest == max(a + b for a, b in zip(paths.head, paths.tail, strict=True))
    for node in range(2 * count):
        step = Step(KINDS[node // count], node % count)
        above = graph.subgraph(nx.ancestors(graph, step) | {step})
        below = graph.subgraph(nx.descendants(graph, step) | {step})
        assert paths.head[node] == nx.dag_longest_path_length(above, weight="ns")
        assert paths.tail[node] == nx.dag_longest_path_length(below, weight="ns")
    alone = problem.with_(placement=Placement.linear(count), caps=())
    kinds = (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
    order = Schedule.of(alone.placement, 1, [[Action(k, s, 0) for k in kinds] for s in range(count)])
    whole = nx.dag_longest_path_length(in_ns(dependency_graph(alone)), weight="ns")
    assert simulate(order, alone).makespan_ns == whole


@given(problems())
def test_other_lags_change_travel_between_stages_alone(problem: Problem) -> None:
    rules = Rules.of(problem)
    assert rules.with_lags(lambda wait: wait.lag_ns) == rules
    doubled = rules.with_lags(lambda wait: 2 * wait.lag_ns + 1)
    assert doubled.lags == [2 * lag + 1 for lag in rules.lags]
    assert all(wait.lag_ns == 0 for s, row in enumerate(doubled.waits[W]) for wait in row if wait.stage == s)


def test_planning_makes_the_graph_once_and_does_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many microbatches and caps; a travel time that the graph alone has moves the plan's value."""
    made = []

    def slower(problem: Problem) -> nx.DiGraph:
        made.append(problem)
        graph = dependency_graph(problem)
        for _, _, facts in graph.edges(data=True):
            facts["lag_ns"] += 100 * (facts["reason"] == "message")
        return graph

    problem = Problem.of(Profile.uniform(StageCost.simple(31, 21, 11), 3, 5), None, 2)
    stock = Incumbent(problem, best_bound(problem), time_limit_s=1.0)
    monkeypatch.setattr(module, "dependency_graph", slower)
    module._planned.cache_clear()
    for changed in (problem, problem.with_(num_microbatches=9), problem.with_(caps=(1000,) * 3)):
        slow = Incumbent(changed, best_bound(changed), time_limit_s=1.0).instance.rules
    module._planned.cache_clear()
    assert len(made) == 1
    assert slow.lags == [lag + 100 for lag in stock.instance.rules.lags]


def test_lengths_of_the_step_graph() -> None:
    profile = Profile((StageCost.simple(3, 2, 1), StageCost.simple(5, 7, 4)), link=Link(10))
    instance = Instance.of(Problem.of(profile))
    graph = step_graph(instance.rules, (instance.forward, instance.backward, instance.weight))
    assert list(graph.edges(data="least_ns")) == [
        ((F, 0), (F, 1), 13),
        ((F, 0), (B, 0), 3),
        ((F, 1), (B, 1), 5),
        ((B, 0), (W, 0), 2),
        ((B, 1), (B, 0), 17),
        ((B, 1), (W, 1), 7),
    ]


def test_a_circle_is_refused_where_it_is_stated() -> None:
    """No profile states one, so no graph has one."""
    for source, target in ((1, 0), (1, 1)):
        with pytest.raises(UsageError, match="an edge goes from a stage to a later one"):
            Edge(source, target)
