"""The same order again and again, with messages that come late by chance.

A rank keeps its order whatever comes late, so that a late message holds up all that stands behind it. Every
message is late for itself; one may overtake another.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from zbcompile.errors import CheckError, UsageError
from zbcompile.schedule.communication import lowered
from zbcompile.schedule.event_graph import EventGraph, describe_wait
from zbcompile.schedule.ir import Kind, Schedule
from zbcompile.schedule.messages import Message, messages_of
from zbcompile.schedule.problem import Problem

__all__ = ["JITTERS", "Jitter", "Replay"]

_FAR = 1 << 100


def _exponential(rng: random.Random, mean_ns: int) -> float:
    return rng.expovariate(1 / mean_ns)


def _uniform(rng: random.Random, mean_ns: int) -> float:
    return rng.uniform(0, 2 * mean_ns)


JITTERS: Mapping[str, Callable[[random.Random, int], float]] = {
    "exponential": _exponential,
    "uniform": _uniform,
}
"""How late a message is: draws from a distribution by its mean in ns. Uniform is from 0 to twice the mean."""


@dataclass(frozen=True, slots=True)
class Jitter:
    """How late messages are.

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
            raise UsageError("a jitter is late by some time on the mean", needed="at least 1 ns")

    def draws(self, problem: Problem, count: int, seed: int) -> list[dict[Message, int]]:
        """Return, for each of some steps, by how many ns every message of a problem is late.

        The same seed gives the same draws; problems with the same messages get the same.
        """
        rng, draw = random.Random(seed), JITTERS[self.kind]
        messages = [message for _, message in messages_of(problem)]
        return [{message: int(draw(rng, self.mean_ns)) for message in messages} for _ in range(count)]


class Replay:
    """An order that is timed with late messages.

    Parameters
    ----------
    schedule
        The order, with or without sends and receives.
    problem
        Costs, links, send mode and objective.

    Attributes
    ----------
    size
        Waits that every timing walks through.

    Raises
    ------
    CheckError
        The order cannot run.
    """

    def __init__(self, schedule: Schedule, problem: Problem) -> None:
        graph = EventGraph(lowered(schedule, problem), problem)
        order = graph.sorted_nodes()
        if order is None:
            raise CheckError("deadlock: " + describe_wait(graph))
        self.problem, self._order, self._duration = problem, order, graph.duration
        self._compute = [[node for node in nodes if graph.transfer_of[node] < 0] for nodes in graph.node_of]
        self._messages, self._waits = _waits(graph)
        self.size = sum(map(len, self._waits))

    def value_ns(self, late: Mapping[Message, int] | None = None) -> int:
        """Return the span or makespan, as the problem's objective says.

        Parameters
        ----------
        late
            By how many ns each message is late; nothing where left out.
        """
        extra = [0] * (len(self._messages) + 1)  # the last is that of waits for no message
        if late is not None:
            extra[:-1] = [late.get(message, 0) for message in self._messages]
        start, waits = [0] * len(self._duration), self._waits
        for node in self._order:
            begin = start[node]
            for after, weight, message in waits[node]:
                ready = begin + weight + extra[message]
                if ready > start[after]:
                    start[after] = ready
        ends = [start[row[-1]] + self._duration[row[-1]] for row in self._compute if row]
        if self.problem.objective == "makespan":
            return max(ends)
        firsts = self._latest_first_starts(start, extra)
        return max(end - first for end, first in zip(ends, firsts, strict=True))

    def _latest_first_starts(self, start: Sequence[int], extra: Sequence[int]) -> list[int]:
        """Return per rank that computes the latest start of its first action, with every rank's end kept."""
        late, waits = [_FAR] * len(start), self._waits
        for row in self._compute:
            if row:
                late[row[-1]] = start[row[-1]]
        for node in reversed(self._order):
            best = late[node]
            for after, weight, message in waits[node]:
                last = late[after] - weight - extra[message]
                if last < best:
                    best = last
            late[node] = best
        return [late[row[0]] for row in self._compute if row]


def _waits(graph: EventGraph) -> tuple[list[Message], list[list[tuple[int, int, int]]]]:
    """Return the messages, and per node (node that waits, weight in ns, number of the message or -1)."""
    actions = len(graph.transfer_of)
    numbers: dict[Message, int] = {}
    row_of = [rank for rank, nodes in enumerate(graph.node_of) for _ in nodes]
    action_of = [action for row in graph.schedule.order for action in row]
    found: list[list[tuple[int, int, int]]] = []
    for node, edges in enumerate(graph.successors):
        line = []
        for after, weight in edges:
            message = None
            if node >= actions:
                if after < actions:  # the next transfer of the channel leaves when this one has left
                    message = Message.of(graph.carried[node - actions])
            elif after < actions and row_of[node] != row_of[after]:
                made, used = action_of[node], action_of[after]
                backward = made.kind is not Kind.FORWARD
                message = Message(backward, made.stage, used.stage, made.microbatch)
            number = -1 if message is None else numbers.setdefault(message, len(numbers))
            line.append((after, weight, number))
        found.append(line)
    return list(numbers), found
