"""The same order again and again, with messages whose latency is drawn.

A rank keeps its order whatever comes late, so that a late message holds up all that stands behind it. Every
message has a latency of its own; one may overtake another.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from zbcompile.errors import CheckError, UsageError
from zbcompile.schedule.communication import lowered
from zbcompile.schedule.event_graph import EventGraph, describe_wait
from zbcompile.schedule.ir import Kind, Schedule
from zbcompile.schedule.messages import Message, messages_of
from zbcompile.schedule.problem import Problem

__all__ = ["JITTERS", "Jitter", "Replay"]


def _exponential(rng: random.Random, mean_ns: int) -> float:
    return rng.expovariate(1 / mean_ns)


def _uniform(rng: random.Random, mean_ns: int) -> float:
    return rng.uniform(0, 2 * mean_ns)


JITTERS: Mapping[str, Callable[[random.Random, int], float]] = {
    "exponential": _exponential,
    "uniform": _uniform,
}
"""Draws of a latency by its mean in ns. Uniform is from 0 to twice the mean."""


@dataclass(frozen=True, slots=True)
class Jitter:
    """What the latency of messages is drawn from, in place of that of the profile's links.

    Attributes
    ----------
    kind
        A name of `JITTERS`.
    mean_ns
        The mean in ns, at least 1.
    """

    kind: str
    mean_ns: int

    def __post_init__(self) -> None:
        if self.kind not in JITTERS:
            raise UsageError(f"unknown jitter {self.kind[:40]!r}", needed=" or ".join(JITTERS))
        if self.mean_ns < 1:
            raise UsageError("the mean latency is too small", needed="at least 1 ns")

    def draws(self, problem: Problem, count: int, seed: int) -> list[dict[Message, int]]:
        """Return, for each of some steps, by how many ns every message comes later than the links say.

        The same seed gives the same latencies; problems with the same messages get the same.
        """
        rng, draw = random.Random(seed), JITTERS[self.kind]
        rank_of, link = problem.placement.rank_of, problem.profile.link_between
        usual = {
            message: link(rank_of[message.source], rank_of[message.target]).latency_ns
            for _, message in messages_of(problem)
        }
        return [
            {message: int(draw(rng, self.mean_ns)) - latency for message, latency in usual.items()}
            for _ in range(count)
        ]


class Replay:
    """An order that is timed with other latencies.

    Parameters
    ----------
    schedule
        The order, with or without sends and receives.
    problem
        Costs, links, send mode and objective.

    Raises
    ------
    CheckError
        The order cannot run.
    """

    def __init__(self, schedule: Schedule, problem: Problem) -> None:
        self.graph = EventGraph(lowered(schedule, problem), problem)
        if self.graph.earliest() is None:
            raise CheckError("deadlock: " + describe_wait(self.graph))
        self._rows = {node: row for node, row in enumerate(_messages(self.graph)) if any(row)}

    @property
    def size(self) -> int:
        """Waits that every timing walks through."""
        return sum(map(len, self.graph.successors))

    def value_ns(self, late: Mapping[Message, int] | None = None) -> int:
        """Return the span or makespan, as the problem's objective says.

        Parameters
        ----------
        late
            By how many ns each message comes later than the links say, sooner where negative; at most by
            their latency. Left out: as they say.
        """
        graph = self.graph
        if late is not None:
            waits = graph.successors
            graph = graph.reweighted(
                {
                    node: [
                        (after, weight + (late.get(message, 0) if message else 0))
                        for (after, weight), message in zip(waits[node], row, strict=True)
                    ]
                    for node, row in self._rows.items()
                }
            )
        early = graph.earliest()
        assert early is not None
        ends = graph.rank_ends(early)
        if graph.problem.objective == "makespan":
            return max(ends)
        firsts = graph.latest_first_starts(early)
        return max(end - first for end, first in zip(ends, firsts, strict=True))


def _messages(graph: EventGraph) -> Iterator[list[Message | None]]:
    """Yield per node, for each of its edges, the message that the other end waits for; None for none."""
    actions = len(graph.transfer_of)
    rank_of = [rank for rank, nodes in enumerate(graph.node_of) for _ in nodes]
    action_of = [action for row in graph.schedule.order for action in row]
    for node, edges in enumerate(graph.successors):
        if node >= actions:  # a transfer: the next one of its channel does not wait for its arrival
            sent = graph.carried[node - actions]
            message = Message.of(sent) if sent.kind.is_send else None
            yield [message if after < actions else None for after, _ in edges]
            continue
        made = action_of[node]
        yield [
            Message(made.kind is not Kind.FORWARD, made.stage, action_of[after].stage, made.microbatch)
            if after < actions and rank_of[after] != rank_of[node]
            else None
            for after, _ in edges
        ]
