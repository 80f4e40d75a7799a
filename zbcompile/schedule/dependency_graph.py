"""The dependency graph of one microbatch, as a networkx graph: what planning begins with.

Nodes are the F's, B's and W's of all stages and the sends and receives between ranks; edges are what
`zbcompile.schedule.rules` yields::

    F(0) -> SF(0>1) -> RF(1<0) -> F(1) -> B(1) -> SB(1>0) -> RB(0<1) -> B(0) -> W(0)

The searches' arrays, the longest paths and the solver's precedences come from this graph. A BW stands for its
B and its W and is no node. networkx is imported where a graph is made, and not with this file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from zbcompile.schedule.costs import Profile
from zbcompile.schedule.ir import Placement, Schedule
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.rules import (
    Dependency,
    Rules,
    dependencies,
    durations,
    fused_pairs,
    predecessors,
)

if TYPE_CHECKING:
    import networkx

__all__ = ["dependency_graph", "order_graph", "planned_rules", "rules_of_graph", "step_graph"]


def dependency_graph(problem: Problem) -> networkx.DiGraph:
    """Return the dependency graph of one microbatch.

    Returns
    -------
    networkx.DiGraph
        Nodes are `zbcompile.schedule.rules.Step`, with ``stage``, ``rank``, ``kind`` and ``duration_ns`` (0
        for sends and receives). Edges have ``lag_ns`` and ``reason``.
    """
    import networkx

    times, rank_of = durations(problem), problem.placement.rank_of
    graph: networkx.DiGraph = networkx.DiGraph()
    graph.add_edges_from(
        (before, after, {"lag_ns": lag, "reason": reason})
        for before, after, lag, reason in dependencies(problem, messages=True)
    )
    for step, facts in graph.nodes.items():
        kind, stage, _ = step
        facts["stage"], facts["rank"], facts["kind"] = stage, rank_of[stage], kind
        facts["duration_ns"] = times[kind][stage] if kind.is_compute else 0
    return graph


def rules_of_graph(graph: networkx.DiGraph) -> Rules:
    """Return a dependency graph's rules between compute steps as tables: messages become travel times."""
    return Rules.of_rows(1 + max(step.stage for step in graph), _without_messages(graph))


def _without_messages(graph: networkx.DiGraph) -> Iterator[Dependency]:
    for after, sources in graph.pred.items():
        if after.peer is not None:
            continue
        for before, facts in sources.items():
            lag = facts["lag_ns"]
            while before.peer is not None:
                ((before, facts),) = graph.pred[before].items()
                lag += facts["lag_ns"]
            yield Dependency(before, after, lag, facts["reason"])


def planned_rules(problem: Problem) -> Rules:
    """Return the rules of a problem as its dependency graph has them.

    The graph is made once per profile and placement, and its tables are kept: as long as it lives, a graph of
    thousands of stages costs every garbage collection.
    """
    return _planned(problem.profile, problem.placement)


@lru_cache(maxsize=4)
def _planned(profile: Profile, placement: Placement) -> Rules:
    return rules_of_graph(dependency_graph(Problem.of(profile, placement)))


def step_graph(rules: Rules, lengths: Sequence[Sequence[int]]) -> networkx.DiGraph:
    """Return the graph of rules between (kind, stage) pairs, as tables number them.

    Parameters
    ----------
    lengths
        Times of F, B and W of every stage in ns.

    Returns
    -------
    networkx.DiGraph
        Nodes have ``duration_ns``. Edges have ``least_ns``: the least time from start to start.
    """
    import networkx

    graph: networkx.DiGraph = networkx.DiGraph()
    for kind, row in enumerate(lengths):
        for stage, length in enumerate(row):
            graph.add_node((kind, stage), duration_ns=length)
            for before, other, lag in rules.waits[kind][stage]:
                graph.add_edge((before, other), (kind, stage), least_ns=lengths[before][other] + lag)
    return graph


def order_graph(schedule: Schedule, problem: Problem) -> networkx.DiGraph:
    """Return the dependency graph of a compute order: all microbatches, with the order of each rank.

    Returns
    -------
    networkx.DiGraph
        Nodes are actions with ``rank`` and ``duration_ns``. Edges have ``reason`` (``order`` on a rank,
        ``data`` from the rules) and ``lag_ns``.

    Notes
    -----
    The graph does not use `zbcompile.schedule.event_graph`, on purpose: the tests compare its longest path
    with the times of `zbcompile.schedule.simulate`.
    """
    import networkx

    fused, ones = fused_pairs(schedule), [problem.one(i) for i in range(problem.num_microbatches)]
    times, rules = [durations(one) for one in ones], [Rules.of(one) for one in ones]
    graph: networkx.DiGraph = networkx.DiGraph()
    for rank, row in enumerate(schedule.compute_only().order):
        for action in row:
            length = times[action.microbatch][action.kind][action.stage]
            graph.add_node(action, rank=rank, duration_ns=length)
        for before, after in zip(row, row[1:], strict=False):
            graph.add_edge(before, after, reason="order", lag_ns=0)
    for action in list(graph):
        for before, lag in predecessors(action, rules[action.microbatch], fused):
            if not graph.has_edge(before, action):
                graph.add_edge(before, action, reason="data", lag_ns=lag)
    return graph
