"""What every action waited for, and the chain of waits that decides the step."""

from __future__ import annotations

from bisect import bisect_right

from zbcompile.errors import CheckError
from zbcompile.schedule.event_graph import EventGraph, describe_wait
from zbcompile.schedule.simulate import Timeline

__all__ = ["critical_path", "place_of", "waited_for"]


def waited_for(graph: EventGraph) -> list[int]:
    """Return for every node the node that decides its start; -1 for those that start at once.

    Where several do, it is one that is not the action before it on its rank: a message, or what a send waits
    for.

    Raises
    ------
    CheckError
        The graph has a cycle.
    """
    start = graph.earliest()
    if start is None:
        raise CheckError("deadlock: " + describe_wait(graph))
    tight = [
        (before, after)
        for before, edges in enumerate(graph.successors)
        for after, weight in edges
        if start[before] + weight == start[after]
    ]
    decides = [-1] * len(start)
    for before, after in tight:
        if decides[after] in (-1, after - 1):
            decides[after] = before
    return decides


def place_of(graph: EventGraph, node: int) -> tuple[int, int] | None:
    """Return (rank, position in its order) of an action's node; None for a transfer's."""
    if node >= len(graph.transfer_of):
        return None
    rank = bisect_right(graph.positions.base, node) - 1
    return rank, graph.positions.position[node]


def critical_path(graph: EventGraph, timeline: Timeline) -> list[tuple[int, int]]:
    """Return (rank, position) of the compute actions in the chain of waits to the end that decides the step.

    That is the end of the rank with the longest span, or under makespan the last end. Between two
    actions of the chain lie only the travel of a message, the wait for a send and what a gather or a
    reduction takes. Nothing but a shorter chain makes that rank end earlier.

    Parameters
    ----------
    graph
        The event graph of the timeline's schedule and problem.
    timeline
        Its times.
    """
    by_span = timeline.problem.objective == "span"
    lengths = timeline.rank_span if by_span else timeline.rank_end
    rank = max(range(len(lengths)), key=lambda r: lengths[r])
    ending, start = graph.ending(rank), graph.earliest()
    if not ending or start is None:
        return []
    decides, chain = waited_for(graph), []
    node = max(ending, key=lambda n: start[n] + graph.duration[n])
    while node >= 0:
        place = place_of(graph, node)
        if place is not None and graph.transfer_of[node] < 0:
            chain.append(place)
        node = decides[node]
    return chain[::-1]
