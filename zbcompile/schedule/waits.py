"""What ranks wait for in a timed order: the pauses between their actions, and when each action could run.

A pause lies between two compute actions of a rank. In its first part a blocking send may hold the rank; for
the rest the rank is idle, until what the next action needs arrives. Times are those of
`zbcompile.schedule.simulate`: every action as early as the order allows. `zbcompile.schedule.wait_roots`
follows a wait back to its root.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from zbcompile.schedule.event_graph import EventGraph
from zbcompile.schedule.ir import Action, Kind
from zbcompile.schedule.memory import memory_during
from zbcompile.schedule.rules import COMPUTE_KINDS, Rules
from zbcompile.schedule.simulate import Timeline, timeline_of

__all__ = ["Pause", "Waits"]

_BACKWARDS = (Kind.BACKWARD_INPUT, Kind.FULL_BACKWARD)


@dataclass(frozen=True, slots=True)
class Pause:
    """A time in which a rank computes nothing.

    Attributes
    ----------
    rank
        The rank.
    start_ns, end_ns
        From the end of an action, or the start of the step, to the start of the next.
    held_ns
        How much of it, from its start on, a blocking send held the rank.
    before
        Position of the action that ends the pause on its rank.
    """

    rank: int
    start_ns: int
    end_ns: int
    held_ns: int
    before: int

    @property
    def idle_ns(self) -> int:
        """How long the rank could have computed and did not."""
        return self.end_ns - self.start_ns - self.held_ns


class Waits:
    """The waits of one order.

    Parameters
    ----------
    graph
        The order's event graph.
    timeline
        Its times, where they are known.

    Attributes
    ----------
    start
        When every node starts, in ns.
    ready, source
        Per action, when what it needs from other ranks has arrived in ns, and the node that it comes from
        last; 0 and -1 where it needs nothing.
    hold
        Action -> when the last message that holds its rank before it has arrived in ns, and its transfer.
    behind
        Transfer -> the one before it on its channel.
    """

    def __init__(self, graph: EventGraph, timeline: Timeline | None = None) -> None:
        self.graph, self.timeline = graph, timeline or timeline_of(graph)
        self.schedule, self.problem = graph.schedule, graph.problem
        early = graph.earliest()
        assert early is not None
        self.start = early
        self.num_actions = len(graph.transfer_of)
        self.ready = [0] * self.num_actions
        self.source = [-1] * self.num_actions
        self.hold: dict[int, tuple[int, int]] = {}
        self.behind: dict[int, int] = {}
        self._during: dict[int, list[int]] = {}
        self._collect()

    def _collect(self) -> None:
        """Note for every action what it waits for last: data, and a transfer that holds its rank."""
        count, position, start = self.num_actions, self.graph.positions.position, self.start
        ready, source = self.ready, self.source
        holds = self.problem.sends.holds_rank
        for node, edges in enumerate(self.graph.successors):
            begin = start[node]
            for after, weight in edges:
                if after >= count:
                    if node >= count:
                        self.behind[after] = node
                    continue
                if after == node + 1 and position[after]:
                    continue
                when = begin + weight
                if holds and node >= count and not self._brings(node, after):
                    if when >= self.hold.get(after, (-1, 0))[0]:
                        self.hold[after] = (when, node)
                elif when > ready[after] or source[after] < 0:
                    ready[after], source[after] = when, node

    def _brings(self, transfer: int, node: int) -> bool:
        """Return whether a transfer carries what an action computes with."""
        send, action = self.graph.carried[transfer - self.num_actions], self.action(node)
        if send.kind.is_of_stage:
            return True
        if send.peer != action.stage or send.microbatch != action.microbatch:
            return False
        return action.kind is Kind.FORWARD if send.kind is Kind.SEND_F else action.kind in _BACKWARDS

    def rank_of(self, node: int) -> int:
        """Return the rank of an action's node."""
        return bisect_right(self.graph.positions.base, node) - 1

    def action(self, node: int) -> Action:
        """Return the action of a node."""
        return self.schedule.order[self.rank_of(node)][self.graph.positions.position[node]]

    def end(self, node: int) -> int:
        """Return when a node ends in ns."""
        return self.start[node] + self.graph.duration[node]

    @cached_property
    def computes(self) -> tuple[tuple[int, ...], ...]:
        """Per rank, the nodes of its compute actions."""
        transfer_of = self.graph.transfer_of
        return tuple(tuple(n for n in nodes if transfer_of[n] < 0) for nodes in self.graph.node_of)

    def reached(self, before: int, node: int) -> tuple[int, int | None]:
        """Return when a rank could begin an action after the one before it, and the transfer that held it.

        ``before`` is -1 where the action is the rank's first.
        """
        free = self.free(before)
        if not self.hold:
            return free, None
        first = self.graph.node_of[self.rank_of(node)].start if before < 0 else before + 1
        latest, by = free, None
        for n in range(first, node + 1):
            when, transfer = self.hold.get(n, (0, -1))
            if when > latest:
                latest, by = when, transfer
        return latest, by

    def pauses(self, rank: int) -> Iterator[Pause]:
        """Yield the pauses of a rank from first to last, that before its first action included."""
        before = -1
        for node in self.computes[rank]:
            free, begin = self.free(before), self.start[node]
            if begin > free:
                reached, _ = self.reached(before, node)
                position = self.graph.positions.position[node]
                yield Pause(rank, free, begin, min(reached, begin) - free, position)
            before = node

    def free(self, before: int) -> int:
        """Return when a rank has ended an action in ns; -1 stands for the start of the step."""
        return 0 if before < 0 else self.end(before)

    def before(self, node: int) -> int:
        """Return the compute node before one on its rank, or -1."""
        row = self.computes[self.rank_of(node)]
        place = bisect_right(row, node) - 2
        return row[place] if place >= 0 else -1

    def local(self, node: int) -> int:
        """Return the last action of its own rank whose result an action computes with, or -1."""
        action, rank = self.action(node), self.rank_of(node)
        waits = Rules.of(self.problem).waits[COMPUTE_KINDS.index(action.kind)][action.stage]
        made = (
            self.graph.positions.made(COMPUTE_KINDS[w.kind], w.stage).get(action.microbatch) for w in waits
        )
        return max((n for n in made if n is not None and self.rank_of(n) == rank), default=-1)

    def needed(self, node: int) -> int:
        """Return when all that an action computes with is there, in ns."""
        local = self.local(node)
        return self.ready[node] if local < 0 else max(self.ready[node], self.end(local))

    def during(self, rank: int) -> list[int]:
        """Return per position of a rank the most bytes held while the action runs."""
        if rank not in self._during:
            self._during[rank] = list(memory_during(self.schedule, self.problem, rank))
        return self._during[rank]

    def _taken(self, node: int) -> int:
        """Return the bytes that an action holds on to."""
        rank, k = self.rank_of(node), self.graph.positions.position[node]
        after = self.timeline.memory[rank]
        return after[k] - (after[k - 1] if k else self.problem.static_bytes(rank))

    def blocker(self, node: int, cap: int, since_ns: int) -> int | None:
        """Return the last action before one that leaves its bytes no room under the cap.

        Parameters
        ----------
        since_ns
            Only actions that end later than this.
        """
        rank, taken = self.rank_of(node), self._taken(node)
        during = self.during(rank)
        row, before = self.graph.node_of[rank], self.before(node)
        while taken > 0 and before >= 0 and self.end(before) > since_ns:
            if during[before - row.start] + taken > cap:
                return before
            before = self.before(before)
        return None

    def lacking(self, node: int, position: int, cap: int) -> int:
        """Return the bytes that a rank lacks to run an action sooner, right before that at a position."""
        rank, k = self.rank_of(node), self.graph.positions.position[node]
        during = self.during(rank)
        return max(during[position:k], default=0) + self._taken(node) - cap
