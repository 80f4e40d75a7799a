"""The event graph: one structure for the deadlock proof, the predicted times and the watchdog's chain.

Nodes are the actions of every rank, in order, and one transfer per message. An edge a -> b with
weight w says: b starts at least w ns after a started. A message's transfer starts when both its
send and its receive are posted and the message before it on the channel has left; a channel is a
directed pair of ranks, first in, first out.

What a rank does at a communication action depends on the problem's transport:

    async       sends and receives are posted and the rank goes on; with S send slots, posting
                the k-th send of a channel waits until the (k-S)-th has arrived
    rendezvous  a send holds its rank until the message has arrived; receives are only posted
    batched     the run of communication actions between two compute actions is one exchange:
                all are posted together and all must finish before the rank goes on (which receives
                join which exchange is `zbcompile.communication`'s choice)

The step ends on every timing if and only if this graph has no cycle: ranks do not branch and no
receive has a choice of messages. Its longest path is the time of the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from zbcompile.costs import Edge
from zbcompile.errors import CheckError
from zbcompile.graph import Rules, durations, fused_pairs, predecessors
from zbcompile.ir import Action, Kind, Schedule
from zbcompile.problem import Problem

__all__ = ["EventGraph", "Message", "describe_wait", "messages_of"]

_FORWARD_KINDS = (Kind.FORWARD, Kind.SEND_F, Kind.RECV_F)


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a step: an activation (``backward`` False) or its gradient, between two ranks."""

    backward: bool
    source: int
    target: int
    microbatch: int

    @property
    def send(self) -> Action:
        """The action that sends it, on the rank of ``source``."""
        kind = Kind.SEND_B if self.backward else Kind.SEND_F
        return Action(kind, self.source, self.microbatch, self.target)

    @property
    def recv(self) -> Action:
        """The action that posts its receive, on the rank of ``target``."""
        kind = Kind.RECV_B if self.backward else Kind.RECV_F
        return Action(kind, self.target, self.microbatch, self.source)

    @staticmethod
    def of(action: Action) -> Message:
        """The message of a send or receive."""
        backward = action.kind in (Kind.SEND_B, Kind.RECV_B)
        assert action.peer is not None
        if action.kind.is_send:
            return Message(backward, action.stage, action.peer, action.microbatch)
        return Message(backward, action.peer, action.stage, action.microbatch)

    def __str__(self) -> str:
        what = "gradient" if self.backward else "activation"
        return f"the {what} of microbatch {self.microbatch} from stage {self.source} to stage {self.target}"


def messages_of(problem: Problem) -> Iterator[tuple[Edge, Message]]:
    """Every message that a step needs between different ranks."""
    rank_of = problem.placement.rank_of
    for edge in problem.profile.edges:
        if rank_of[edge.source] == rank_of[edge.target]:
            continue
        for microbatch in range(problem.num_microbatches):
            yield edge, Message(False, edge.source, edge.target, microbatch)
            if edge.has_gradient:
                yield edge, Message(True, edge.target, edge.source, microbatch)


class EventGraph:
    """Build with `EventGraph.of`. Nodes are integers; ``label`` turns one into words."""

    def __init__(
        self,
        schedule: Schedule,
        problem: Problem,
        send_slots: int | None,
        one_communicator: bool = False,
    ) -> None:
        self.schedule, self.problem, self.send_slots = schedule, problem, send_slots
        self.node_of: list[list[int]] = []
        self.duration: list[int] = []
        self.successors: list[list[tuple[int, int]]] = []
        self.where: list[tuple[int, int]] = []
        self.messages: list[Message | None] = []
        self._of_action: dict[Action, int] = {}
        self._sorted: list[int] | None = None
        self.transfer: dict[Message, int] = {}
        self._add_actions()
        if schedule.has_communication:
            self._add_transfers()
            if one_communicator:
                self._add_queues()
        self._add_order()
        self._add_data()

    @staticmethod
    def of(
        schedule: Schedule,
        problem: Problem,
        send_slots: int | None = None,
        one_communicator: bool = False,
    ) -> EventGraph:
        """The graph of a schedule; a compute-only one is first lowered to the problem's transport.

        Under ``async`` a compute-only schedule needs no lowering: its sends leave at once and its
        receives wait for nobody. With ``one_communicator`` a rank's transfers form one queue: each starts
        when the one before it, sent or received, is done (NCCL with a single communicator).
        Raises `CheckError` when an action that another needs is missing.
        """
        if problem.transport != "async" and not schedule.has_communication:
            from zbcompile.communication import insert_communication

            schedule = insert_communication(schedule, problem)
        return EventGraph(schedule, problem, send_slots, one_communicator)

    def _node(self, duration: int, where: tuple[int, int], message: Message | None = None) -> int:
        self.duration.append(duration)
        self.successors.append([])
        self.where.append(where)
        self.messages.append(message)
        return len(self.duration) - 1

    def _edge(self, before: int, after: int, weight: int) -> None:
        self.successors[before].append((after, weight))

    def _add_actions(self) -> None:
        times = durations(self.problem)
        for rank, row in enumerate(self.schedule.order):
            nodes = []
            for position, action in enumerate(row):
                length = times[action.kind][action.stage] if action.kind.is_compute else 0
                node = self._node(length, (rank, position))
                if action in self._of_action:
                    raise CheckError(f"{action} appears twice", where=f"rank {rank}", fix="keep one of them")
                self._of_action[action] = node
                nodes.append(node)
            self.node_of.append(nodes)

    def _require(self, action: Action, needed_by: Action | Message) -> int:
        node = self._of_action.get(action)
        if node is None:
            raise CheckError(
                f"{action} is missing", where=f"needed by {needed_by}", fix="add it to its rank's order"
            )
        return node

    def _add_transfers(self) -> None:
        problem, rank_of = self.problem, self.problem.placement.rank_of
        edges = {(e.source, e.target): e for e in problem.profile.edges}
        channels: dict[tuple[int, int], list[tuple[Message, int]]] = {}
        for row in self.schedule.order:
            for action in row:
                if not action.kind.is_send:
                    continue
                message = Message.of(action)
                edge = edges.get((min(message.source, message.target), max(message.source, message.target)))
                if edge is None or max(action.stage, action.peer or 0) >= problem.num_stages:
                    raise CheckError(f"{action}: the profile has no edge between these stages")
                channel = (rank_of[message.source], rank_of[message.target])
                total = problem.lag_ns(edge, backward=message.backward)
                node = self._node(total, (-1, -1), message)
                self.transfer[message] = node
                self._edge(self._of_action[action], node, 0)
                self._edge(self._require(message.recv, message), node, 0)
                sent = channels.setdefault(channel, [])
                if sent:
                    self._edge(sent[-1][1], node, self._occupancy(sent[-1][0], edges))
                if self.send_slots is not None and len(sent) >= self.send_slots:
                    earlier = sent[-self.send_slots][1]
                    self._edge(earlier, self._of_action[action], self.duration[earlier])
                sent.append((message, node))
        for action in self._of_action:
            if action.kind.is_recv:
                self._require(Message.of(action).send, action)

    def _add_queues(self) -> None:
        for row in self.schedule.order:
            queue = [self.transfer[Message.of(a)] for a in row if not a.kind.is_compute]
            for before, after in zip(queue, queue[1:], strict=False):
                self._edge(before, after, self.duration[before])

    def transfers(self) -> list[Message]:
        """All messages by planned start of their transfer; of two at once the one that others need first."""
        order, early = self._order(), self.earliest()
        if early is None:
            raise CheckError("deadlock: " + describe_wait(self))
        place = {node: k for k, node in enumerate(order)}
        return sorted(self.transfer, key=lambda m: (early[self.transfer[m]], place[self.transfer[m]]))

    def _occupancy(self, message: Message, edges: dict[tuple[int, int], Edge]) -> int:
        """How long a message keeps its channel: its size over the bandwidth, without the latency."""
        pair = (min(message.source, message.target), max(message.source, message.target))
        rank_of = self.problem.placement.rank_of
        link = self.problem.profile.link_between(rank_of[message.source], rank_of[message.target])
        return self.problem.lag_ns(edges[pair], backward=message.backward) - link.latency_ns

    def _add_order(self) -> None:
        transport = self.problem.transport
        for rank, row in enumerate(self.schedule.order):
            nodes = self.node_of[rank]
            pending: list[int] = []
            for position, action in enumerate(row):
                node = nodes[position]
                if position:
                    before = nodes[position - 1]
                    self._edge(before, node, self.duration[before])
                if action.kind.is_compute or transport == "rendezvous":
                    for transfer in pending:
                        self._edge(transfer, node, self.duration[transfer])
                    pending = []
                if transport == "rendezvous" and action.kind.is_send:
                    pending = [self.transfer[Message.of(action)]]
                elif transport == "batched" and not action.kind.is_compute:
                    pending.append(self.transfer[Message.of(action)])

    def _add_data(self) -> None:
        rules, fused = Rules.of(self.problem), fused_pairs(self.schedule)
        rank_of = self.problem.placement.rank_of
        explicit = self.schedule.has_communication
        for action, node in self._of_action.items():
            if not action.kind.is_compute:
                if action.kind.is_send:
                    producer = self._require(_producer(action, fused), action)
                    self._edge(producer, node, self.duration[producer])
                continue
            for before, lag in predecessors(action, rules, fused):
                source = self._require(before, action)
                if not explicit or rank_of[before.stage] == rank_of[action.stage]:
                    self._edge(source, node, self.duration[source] + lag)
                    continue
                message = Message(
                    action.kind is not Kind.FORWARD, before.stage, action.stage, action.microbatch
                )
                transfer = self.transfer.get(message)
                if transfer is None:
                    raise CheckError(f"{message.send} is missing", where=f"needed by {action}")
                self._edge(transfer, node, self.duration[transfer])
                self._edge(self._of_action[message.recv], node, 0)

    def _order(self) -> list[int]:
        """Topological order, made once; shorter than the number of nodes when there is a cycle."""
        if self._sorted is not None:
            return self._sorted
        waits = [0] * len(self.duration)
        for edges in self.successors:
            for after, _ in edges:
                waits[after] += 1
        order = [n for n, count in enumerate(waits) if count == 0]
        for node in order:
            for after, _ in self.successors[node]:
                waits[after] -= 1
                if waits[after] == 0:
                    order.append(after)
        self._sorted = order
        return order

    def earliest(self) -> list[int] | None:
        """Earliest start of every node in ns, or None when the graph has a cycle."""
        order = self._order()
        if len(order) < len(self.duration):
            return None
        start = [0] * len(self.duration)
        for node in order:
            begin = start[node]
            for after, weight in self.successors[node]:
                if begin + weight > start[after]:
                    start[after] = begin + weight
        return start

    def latest_first_starts(self, early: list[int]) -> list[int]:
        """Per rank: the latest start of its first compute action with every rank's end kept."""
        late: list[int | None] = [None] * len(early)
        firsts: list[int | None] = []
        for rank, row in enumerate(self.schedule.order):
            compute = [self.node_of[rank][k] for k, a in enumerate(row) if a.kind.is_compute]
            firsts.append(compute[0] if compute else None)
            if compute:
                late[compute[-1]] = early[compute[-1]]
        for node in reversed(self._order()):
            best = late[node]
            for after, weight in self.successors[node]:
                limit = late[after]
                if limit is not None and (best is None or limit - weight < best):
                    best = limit - weight
            late[node] = best
        return [0 if n is None else (late[n] or 0) for n in firsts]

    def interval(self, rank: int, position: int, start: list[int]) -> tuple[int, int]:
        """(start, end) of an action: of the transfer for a send or receive."""
        node = self.node_of[rank][position]
        action = self.schedule.order[rank][position]
        if not action.kind.is_compute:
            node = self.transfer[Message.of(action)]
        return start[node], start[node] + self.duration[node]

    def label(self, node: int) -> str:
        """A node in words."""
        message = self.messages[node]
        if message is not None:
            return str(message)
        rank, position = self.where[node]
        return f"{self.schedule.order[rank][position]} on rank {rank}"

    def cycle(self) -> list[int]:
        """Nodes of one cycle, each waiting for the next one; empty when there is none."""
        done = set(self._order())
        waits_for: dict[int, int] = {}
        for node, edges in enumerate(self.successors):
            if node not in done:
                for after, _ in edges:
                    if after not in done:
                        waits_for.setdefault(after, node)
        if not waits_for:
            return []
        node, seen = min(waits_for), []
        while node not in seen:
            seen.append(node)
            node = waits_for[node]
        return seen[seen.index(node) :]


def _producer(send: Action, fused: frozenset[tuple[int, int]]) -> Action:
    """The compute action whose result a send carries."""
    if send.kind is Kind.SEND_F:
        kind = Kind.FORWARD
    else:
        kind = Kind.FULL_BACKWARD if (send.stage, send.microbatch) in fused else Kind.BACKWARD_INPUT
    return Action(kind, send.stage, send.microbatch)


def describe_wait(graph: EventGraph, limit: int = 12) -> str:
    """Who waits for whom, along one cycle of a graph that has one."""
    nodes = graph.cycle()
    words = [graph.label(n) for n in nodes[:limit]]
    if len(nodes) > limit:
        words.append(f"... {len(nodes) - limit} more ...")
    return " waits for ".join([*words, graph.label(nodes[0])]) if nodes else "no cycle"
