"""The dependency rules between actions, as flat arrays and as a networkx graph.

For every edge s -> t of the profile and every microbatch i::

    F(t, i)  waits for  F(s, i)   plus the link's time, when s and t are on different ranks
    B(s, i)  waits for  B(t, i)   plus the link's time, where a gradient flows
    B(s, i)  waits for  F(s, i)
    W(s, i)  waits for  B(s, i)

A fused BW stands for its B and its W, and its gradient is ready when it ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zbcompile.schedule.ir import Action, Kind, Schedule
from zbcompile.schedule.problem import Problem

if TYPE_CHECKING:
    import networkx

__all__ = ["Rules", "durations", "predecessors", "to_networkx"]

_F, _B, _W, _BW = Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT, Kind.FULL_BACKWARD


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules of one problem. They are the same for every microbatch.

    Attributes
    ----------
    forward_from
        Per stage, the (earlier stage, lag in ns) that its F waits for.
    backward_from
        Per stage, the (later stage, lag in ns) that its B or BW waits for.
    """

    forward_from: tuple[tuple[tuple[int, int], ...], ...]
    backward_from: tuple[tuple[tuple[int, int], ...], ...]

    @staticmethod
    def of(problem: Problem) -> Rules:
        """Collect the rules from the profile's edges and links."""
        forward: list[list[tuple[int, int]]] = [[] for _ in range(problem.num_stages)]
        backward: list[list[tuple[int, int]]] = [[] for _ in range(problem.num_stages)]
        for edge in problem.profile.edges:
            forward[edge.target].append((edge.source, problem.lag_ns(edge)))
            if edge.has_gradient:
                backward[edge.source].append((edge.target, problem.lag_ns(edge, backward=True)))
        return Rules(tuple(map(tuple, forward)), tuple(map(tuple, backward)))


def durations(problem: Problem) -> dict[Kind, tuple[int, ...]]:
    """Return the time of each compute kind per stage in ns, host overhead included."""
    stages, extra = problem.profile.stages, problem.profile.overhead_ns
    return {
        _F: tuple(s.forward_ns + extra for s in stages),
        _B: tuple(s.backward_input_ns + extra for s in stages),
        _W: tuple(s.backward_weight_ns + extra for s in stages),
        _BW: tuple(s.full_backward_ns + extra for s in stages),
    }


def predecessors(
    action: Action, rules: Rules, fused: frozenset[tuple[int, int]]
) -> Iterator[tuple[Action, int]]:
    """Yield what a compute action waits for, as (action, lag in ns).

    Parameters
    ----------
    fused
        The (stage, microbatch) pairs that the schedule runs as BW.
    """
    stage, microbatch = action.stage, action.microbatch
    if action.kind is _F:
        for source, lag in rules.forward_from[stage]:
            yield Action(_F, source, microbatch), lag
    elif action.kind is _W:
        yield Action(_B, stage, microbatch), 0
    else:
        yield Action(_F, stage, microbatch), 0
        for target, lag in rules.backward_from[stage]:
            kind = _BW if (target, microbatch) in fused else _B
            yield Action(kind, target, microbatch), lag


def fused_pairs(schedule: Schedule) -> frozenset[tuple[int, int]]:
    """Return the (stage, microbatch) pairs that run as BW."""
    return frozenset((a.stage, a.microbatch) for row in schedule.order for a in row if a.kind is _BW)


def to_networkx(schedule: Schedule, problem: Problem) -> networkx.DiGraph:
    """Return the dependency graph of a compute order.

    Returns
    -------
    networkx.DiGraph
        Nodes are actions with ``rank`` and ``duration_ns``. Edges have ``why`` (``order`` on a rank,
        ``data`` from the rules) and ``lag_ns``.

    Notes
    -----
    The graph does not use `zbcompile.schedule.event_graph`, on purpose: the tests compare its longest path
    with the times of `zbcompile.schedule.simulate`.
    """
    import networkx as nx

    rules, times, fused = Rules.of(problem), durations(problem), fused_pairs(schedule)
    graph: networkx.DiGraph = nx.DiGraph()
    for rank, row in enumerate(schedule.compute_only().order):
        for action in row:
            graph.add_node(action, rank=rank, duration_ns=times[action.kind][action.stage])
        for before, after in zip(row, row[1:], strict=False):
            graph.add_edge(before, after, why="order", lag_ns=0)
    for action in list(graph):
        for before, lag in predecessors(action, rules, fused):
            if not graph.has_edge(before, action):
                graph.add_edge(before, action, why="data", lag_ns=lag)
    return graph
