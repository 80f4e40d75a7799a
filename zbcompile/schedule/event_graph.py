"""The event graph of an order: it proves that the step ends, predicts its times and names chains of waits.

Nodes are the actions of every rank, in order, one transfer per message, and one per action of a stage as a
whole: its time on the rank's channel for these (`zbcompile.schedule.stage_actions`). An edge a -> b with
weight w says: b starts at least w ns after a started. A message's transfer starts when both its send and its
receive are posted and the message before it on the channel has left. A channel is a directed pair of ranks,
first in, first out.

A rank posts its sends and receives and goes on. Before which actions it then waits for which of them, the
problem's send mode says (`zbcompile.schedule.semantics`). With S send slots, posting the k-th send of a
channel waits until the (k-S)-th has arrived.

The step ends on every timing if and only if this graph has no cycle: ranks do not branch and no receive has a
choice of messages. Its longest path is the time of the step.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from itertools import chain
from types import MappingProxyType
from typing import NamedTuple

from zbcompile.errors import CheckError, UsageError
from zbcompile.schedule.costs import Edge
from zbcompile.schedule.ir import Action, Kind, Schedule
from zbcompile.schedule.messages import Message
from zbcompile.schedule.positions import Key, Positions
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.rules import SENT_BY, Dependency, Step, dependencies, durations, unfused
from zbcompile.schedule.stage_actions import channel_ns, update_ns

__all__ = ["EventGraph", "describe_wait"]


_FAR = 1 << 100
"""Later than any time: what no rank's end bounds."""


class _Route(NamedTuple):
    """What the messages of one kind between two stages have in common.

    Attributes
    ----------
    channel
        (source rank, target rank).
    lag
        Travel time of one message in ns.
    busy
        Time that one message occupies its channel in ns: its size over the bandwidth, without the latency.
    receives
        Microbatch -> number of the receive.
    each
        Per microbatch (lag, busy), where microbatches differ.
    """

    channel: tuple[int, int]
    lag: int
    busy: int
    receives: Mapping[int, int]
    each: Sequence[tuple[int, int]] = ()


class _Need(NamedTuple):
    """One value that the actions of one kind and stage wait for. All maps are by microbatch.

    Attributes
    ----------
    producers
        Numbers of the actions of ``kind`` and ``stage`` that make the value, or of their fused BW's.
    lag
        Travel time in ns that no transfer accounts for.
    sends, receives
        Numbers of the sends and receives of the messages that bring the value; None and empty where it needs
        no message.
    lags
        Per microbatch ``lag``, where microbatches differ.
    """

    producers: Mapping[int, int]
    kind: Kind
    stage: int
    lag: int = 0
    sends: Mapping[int, int] | None = None
    receives: Mapping[int, int] = MappingProxyType({})
    lags: Sequence[int] = ()


class EventGraph:
    """The event graph of an order. Nodes are integers: actions as `Positions` numbers them, then transfers.

    Parameters
    ----------
    schedule
        The order. Where sends hold no rank it may be compute-only: then messages leave at once and no receive
        needs to be posted. Under the other send modes it must contain its sends and receives
        (`zbcompile.schedule.communication.lowered`).
    problem
        Costs, links and send mode.
    send_slots
        Sends of a channel that may be on their way at once; None for any number.
    one_communicator
        A rank's transfers form one queue: each starts when the one before it, sent or received, is done (NCCL
        with a single communicator).
    implied_edges
        Also add data edges that a rank's order already implies. Times and cycles are the same without them.
    positions
        The numbers of the schedule's actions, where they are known.

    Attributes
    ----------
    node_of
        Per rank, the nodes of its actions.
    duration
        Of every node, in ns.
    successors
        Of every node, as (node, weight in ns).
    transfer_of
        The transfer of every send and receive, and that of every action of a stage as a whole; -1 for compute
        actions.
    carried
        Of every transfer the send, or the action of a stage as a whole.

    Raises
    ------
    CheckError
        An action that another one needs is missing, an action occurs twice, or the profile has no edge for a
        message.
    UsageError
        The send mode needs sends and receives in the order, and there are none.
    """

    def __init__(
        self,
        schedule: Schedule,
        problem: Problem,
        send_slots: int | None = None,
        one_communicator: bool = False,
        *,
        implied_edges: bool = False,
        positions: Positions | None = None,
    ) -> None:
        self.schedule, self.problem, self.send_slots = schedule, problem, send_slots
        self.one_communicator, self.implied_edges = one_communicator, implied_edges
        self.positions = positions or Positions(schedule)
        base = self.positions.base
        self.node_of = [range(first, end) for first, end in zip(base, base[1:], strict=False)]
        self.duration = self._durations()
        self.successors: list[list[tuple[int, int]]] = [[] for _ in self.duration]
        self.transfer_of = [-1] * len(self.duration)
        self.carried: list[Action] = []
        self._sorted: list[int] = []
        self._start: list[int] = []
        self._explicit = schedule.has_communication
        self._has_stage_actions = any(kind.is_of_stage for kind, _, _ in self.positions.rows)
        if self._explicit:
            self._add_transfers()
            if one_communicator:
                self._add_queues()
        self._add_stage_actions()
        self._add_order()
        self._add_data()

    def _durations(self) -> list[int]:
        positions = self.positions
        for rank, k, action in () if positions.all_once else self.schedule.actions():
            if positions.number(action) != positions.base[rank] + k:
                raise CheckError(f"{action} appears twice", where=f"rank {rank}", fix="keep one of them")
        times, result = durations(self.problem), [0] * positions.base[-1]
        for (kind, stage, _), nodes in positions.rows.items():
            if kind.is_compute:
                length = times[kind][stage]
                for node in nodes.values():
                    result[node] = length
        if self.problem.microbatch_costs:
            each = [durations(self.problem, i) for i in range(self.problem.num_microbatches)]
            for (kind, stage, _), nodes in positions.rows.items():
                for microbatch, node in nodes.items() if kind.is_compute else ():
                    result[node] = each[microbatch][kind][stage]
        return result

    def _edge(self, before: int, after: int, weight: int) -> None:
        self.successors[before].append((after, weight))

    def _add_transfers(self) -> None:
        routes: dict[Key, _Route] = {}
        sent: dict[tuple[int, int], list[int]] = {}
        busy: dict[tuple[int, int], int] = {}
        edges = {(edge.source, edge.target): edge for edge in self.problem.profile.edges}
        duration, successors, transfer_of = self.duration, self.successors, self.transfer_of
        slots, received = self.send_slots, []
        for node, action in enumerate(chain.from_iterable(self.schedule.order)):
            kind = action.kind
            if not kind.is_message:
                continue
            if kind.is_recv:
                received.append((node, action))
                continue
            key = (kind, action.stage, action.peer)
            if key not in routes:
                routes[key] = self._route(action, edges)
            channel, lag, taken, receives, each = routes[key]
            if each:
                lag, taken = each[action.microbatch]
            receive = receives.get(action.microbatch)
            if receive is None:
                raise _missing(Message.of(action).recv, Message.of(action))
            transfer = len(duration)
            duration.append(lag)
            successors.append([])
            self.carried.append(action)
            transfer_of[node] = transfer_of[receive] = transfer
            successors[node].append((transfer, 0))
            successors[receive].append((transfer, 0))
            earlier = sent.get(channel)
            if earlier is None:
                earlier = sent[channel] = []
            else:
                successors[earlier[-1]].append((transfer, busy[channel]))
            if slots is not None and len(earlier) >= slots:
                last = earlier[-slots]
                successors[last].append((node, duration[last]))
            earlier.append(transfer)
            busy[channel] = taken
        for node, action in received:
            if transfer_of[node] < 0:
                raise _missing(Message.of(action).send, action)

    def _route(self, send: Action, edges: Mapping[tuple[int, int], Edge]) -> _Route:
        problem, message, receive = self.problem, Message.of(send), Message.of(send).recv
        pair = (min(message.source, message.target), max(message.source, message.target))
        edge = edges.get(pair)
        if edge is None:
            raise CheckError(f"{send}: the profile has no edge between these stages")
        channel = (problem.placement.rank_of[message.source], problem.placement.rank_of[message.target])
        lag = problem.lag_ns(edge, backward=message.backward)
        latency = problem.profile.link_between(*channel).latency_ns
        each = [(own, own - latency) for own in self._lags(pair, backward=message.backward)]
        receives = self.positions.of(receive.kind, receive.stage, receive.peer)
        return _Route(channel, lag, lag - latency, receives, each)

    def _lags(self, pair: tuple[int, int], *, backward: bool) -> list[int]:
        """Return the travel time of each microbatch's message in ns; empty where microbatches are alike."""
        problem = self.problem
        if not problem.microbatch_costs:
            return []
        (edge,) = (edge for edge in problem.profile.edges if (edge.source, edge.target) == pair)
        own = [problem.edge_of(edge, i) for i in range(problem.num_microbatches)]
        return [problem.lag_ns(edge, backward=backward) for edge in own]

    def _add_queues(self) -> None:
        for nodes in self.node_of:
            queue = [self.transfer_of[node] for node in nodes if self.transfer_of[node] >= 0]
            for before, after in zip(queue, queue[1:], strict=False):
                self._edge(before, after, self.duration[before])

    def _add_stage_actions(self) -> None:
        """Add the time that each action of a stage as a whole takes on its rank's channel."""
        if not self._has_stage_actions:
            return
        duration, successors = self.duration, self.successors
        for nodes, row in zip(self.node_of, self.schedule.order, strict=True):
            earlier = -1
            for node, action in zip(nodes, row, strict=True):
                if not action.kind.is_of_stage:
                    continue
                transfer = self.transfer_of[node] = len(duration)
                duration.append(channel_ns(action, self.problem))
                successors.append([])
                self.carried.append(action)
                successors[node].append((transfer, 0))
                if action.kind is Kind.RESHARD:
                    continue
                if earlier >= 0:
                    successors[earlier].append((transfer, duration[earlier]))
                earlier = transfer
                if action.kind is Kind.UNSHARD:
                    forwards = self.positions.of(Kind.FORWARD, action.stage).values()
                    if forwards:
                        successors[transfer].append((min(forwards), duration[transfer]))

    def transfers(self) -> list[Message]:
        """Return all messages by planned start of their transfer, ties in topological order.

        Raises
        ------
        CheckError
            The graph has a cycle.
        """
        order, early = self._order(), self.earliest()
        if early is None:
            raise CheckError("deadlock: " + describe_wait(self))
        index = {node: k for k, node in enumerate(order)}
        actions = len(self.transfer_of)
        sent = [n for n in range(actions, len(early)) if self.carried[n - actions].kind.is_message]
        sent.sort(key=lambda node: (early[node], index[node]))
        return [Message.of(self.carried[node - actions]) for node in sent]

    def _add_order(self) -> None:
        successors, duration = self.successors, self.duration
        for nodes in self.node_of:
            for before in nodes[:-1]:
                successors[before].append((before + 1, duration[before]))
        if self.problem.sends.holds_rank:
            self._add_holds()

    def _add_holds(self) -> None:
        """Hold every rank where its send mode says, until what it waits for has arrived."""
        mode, transfer_of = self.problem.sends, self.transfer_of
        awaited, waits_before = mode.awaited, mode.waits_before
        successors, duration = self.successors, self.duration
        for nodes, row in zip(self.node_of, self.schedule.order, strict=True):
            open_posts: list[int] = []
            for node, action in zip(nodes, row, strict=True):
                kind = action.kind
                if open_posts and kind in waits_before:
                    due, open_posts = mode.due(open_posts)
                    for transfer in due:
                        successors[transfer].append((node, duration[transfer]))
                if kind in awaited:
                    open_posts.append(transfer_of[node])

    def _add_data(self) -> None:
        """Add what actions wait for by the rules, without edges that their rank's order implies."""
        rows: dict[Step, list[Dependency]] = {}
        for dependency in dependencies(self.problem, messages=self._explicit):
            rows.setdefault(dependency.after, []).append(dependency)
        needs: dict[Key, list[_Need]] = {}
        successors, duration = self.successors, self.duration
        for nodes, row in zip(self.node_of, self.schedule.order, strict=True):
            first = len(duration) if self.implied_edges else nodes.start
            for node, action in zip(nodes, row, strict=True):
                key, microbatch = (action.kind, action.stage, action.peer), action.microbatch
                if key not in needs:
                    needs[key] = list(self._needs(action, rows.get(unfused(action), ())))
                for producers, kind, stage, lag, sends, receives, lags in needs[key]:
                    before = producers.get(microbatch)
                    if before is None:
                        raise _missing(Action(kind, stage, microbatch), action)
                    if sends is None:
                        if lags:
                            lag = lags[microbatch]
                        if lag or not first <= before < node:
                            successors[before].append((node, duration[before] + lag))
                        continue
                    send = sends.get(microbatch)
                    if send is None:
                        message = Message(kind is not Kind.FORWARD, stage, action.stage, microbatch)
                        raise CheckError(f"{message.send} is missing", where=f"needed by {action}")
                    transfer, receive = self.transfer_of[send], receives[microbatch]
                    successors[transfer].append((node, duration[transfer]))
                    if not first <= receive < node:
                        successors[receive].append((node, 0))

    def _needs(self, action: Action, waits: Sequence[Dependency]) -> Iterator[_Need]:
        """Yield what the actions of this one's kind and stage wait for, from their rows of the rules."""
        positions, rank_of = self.positions, self.problem.placement.rank_of
        if action.kind.is_recv:  # it waits for its message through the transfer
            return
        if action.kind.is_send:
            kind = SENT_BY[action.kind]
            yield _Need(positions.made(kind, action.stage), kind, action.stage)
            return
        for before, _, lag, reason in waits:
            if reason == "receive":
                assert before.peer is not None
                message = Message(before.kind is Kind.RECV_B, before.peer, before.stage, 0)
                kind, stage = SENT_BY[message.send.kind], before.peer
                sends, receives = (
                    positions.of(a.kind, a.stage, a.peer) for a in (message.send, message.recv)
                )
                yield _Need(positions.made(kind, stage), kind, stage, 0, sends, receives)
                continue
            if rank_of[before.stage] != rank_of[action.stage] and self.problem.sends.holds_rank:
                raise UsageError(
                    "an order without sends and receives has no times under this send mode",
                    needed="a send mode that holds no rank",
                    given=self.problem.transport,
                    fix="put them in with zbcompile.schedule.communication.lowered",
                )
            own = reason == "own stage"
            made_by = (positions.of if own else positions.made)(before.kind, before.stage)
            pair = (min(before.stage, action.stage), max(before.stage, action.stage))
            lags = [] if own else self._lags(pair, backward=reason == "gradient")
            yield _Need(made_by, before.kind, before.stage, lag, lags=lags)

    def _order(self) -> list[int]:
        """Return the nodes in topological order; fewer than there are when the graph has a cycle.

        The order is computed once. The same walk finds the longest path to every node: its earliest start.
        """
        if self._sorted:
            return self._sorted
        waits, start = [0] * len(self.duration), [0] * len(self.duration)
        for edges in self.successors:
            for after, _ in edges:
                waits[after] += 1
        order = [n for n, count in enumerate(waits) if count == 0]
        for node in order:
            begin = start[node]
            for after, weight in self.successors[node]:
                if begin + weight > start[after]:
                    start[after] = begin + weight
                waits[after] -= 1
                if waits[after] == 0:
                    order.append(after)
        self._sorted, self._start = order, start
        return order

    def reweighted(self, successors: Mapping[int, list[tuple[int, int]]]) -> EventGraph:
        """Return this graph with other weights of the same edges, for which its order is not sought again.

        Parameters
        ----------
        successors
            The new edges of some nodes. The graph has no cycle.
        """
        other = copy(self)
        other.successors = list(self.successors)
        for node, edges in successors.items():
            other.successors[node] = edges
        start = [0] * len(self.duration)
        for node in self._order():
            begin = start[node]
            for after, weight in other.successors[node]:
                if begin + weight > start[after]:
                    start[after] = begin + weight
        other._start = start
        return other

    def earliest(self) -> list[int] | None:
        """Return the earliest start of every node in ns, or None when the graph has a cycle."""
        return self._start if len(self._order()) == len(self.duration) else None

    def ending(self, rank: int) -> list[int]:
        """Return the nodes that a rank ends no sooner than: its last compute action, and its channel's."""
        nodes = self.node_of[rank]
        compute = next((node for node in reversed(nodes) if self.transfer_of[node] < 0), None)
        shared = []
        if self._has_stage_actions:
            shared = [self.transfer_of[n] for n in nodes if self._is_of_stage(n)]
        return shared if compute is None else [compute, *shared]

    def _is_of_stage(self, node: int) -> bool:
        transfer = self.transfer_of[node]
        return transfer >= 0 and self.carried[transfer - len(self.transfer_of)].kind.is_of_stage

    def rank_ends(self, early: list[int]) -> list[int]:
        """Return when every rank has ended its actions, its reductions and its update, in ns.

        Parameters
        ----------
        early
            What `earliest` returned.
        """
        ends = []
        for rank in range(self.schedule.num_ranks):
            last = max((early[n] + self.duration[n] for n in self.ending(rank)), default=0)
            ends.append(last + update_ns(self.problem, rank))
        return ends

    def latest_first_starts(self, early: list[int]) -> list[int]:
        """Return per rank the latest start in ns of its first F or UNSHARD, with every rank's end kept.

        Parameters
        ----------
        early
            What `earliest` returned.
        """
        late, successors = [_FAR] * len(early), self.successors
        firsts: list[list[int]] = []
        for rank, (nodes, end) in enumerate(zip(self.node_of, self.rank_ends(early), strict=True)):
            ending = self.ending(rank)
            compute = next((node for node in nodes if self.transfer_of[node] < 0), None)
            firsts.append([n for n in ending if n >= len(self.transfer_of)])
            firsts[-1] += [] if compute is None else [compute]
            for node in ending:
                late[node] = end - update_ns(self.problem, rank) - self.duration[node]
        for node in reversed(self._order()):
            best = late[node]
            for after, weight in successors[node]:
                if late[after] - weight < best:
                    best = late[after] - weight
            late[node] = best
        return [min((late[n] for n in nodes), default=0) for nodes in firsts]

    def times(self, rank: int, start: list[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return starts and ends of a rank's actions in ns; a send or receive has those of its transfer."""
        shown = [max(node, self.transfer_of[node]) for node in self.node_of[rank]]
        starts = tuple([start[node] for node in shown])
        return starts, tuple([start[node] + self.duration[node] for node in shown])

    def label(self, node: int) -> str:
        """Name a node for people."""
        actions = len(self.transfer_of)
        if node >= actions:
            carried = self.carried[node - actions]
            return str(Message.of(carried)) if carried.kind.is_message else f"{carried} on its channel"
        rank = bisect_right(self.positions.base, node) - 1
        return f"{self.schedule.order[rank][self.positions.position[node]]} on rank {rank}"

    def cycle(self) -> list[int]:
        """Return the nodes of one cycle, each waiting for the next one; empty when there is none."""
        done = set(self._order())
        if len(done) == len(self.duration):
            return []
        full = EventGraph(
            self.schedule, self.problem, self.send_slots, self.one_communicator, implied_edges=True
        )
        waits_for: dict[int, int] = {}
        for node, edges in enumerate(full.successors):
            if node not in done:
                for after, _ in edges:
                    if after not in done:
                        waits_for.setdefault(after, node)
        node, seen = min(waits_for), []
        while node not in seen:
            seen.append(node)
            node = waits_for[node]
        return seen[seen.index(node) :]


def _missing(action: Action, needed_by: Action | Message) -> CheckError:
    return CheckError(
        f"{action} is missing", where=f"needed by {needed_by}", fix="add it to its rank's order"
    )


def describe_wait(graph: EventGraph, limit: int = 12) -> str:
    """Say who waits for whom along one cycle, naming at most ``limit`` nodes; "no cycle" if there is none."""
    nodes = graph.cycle()
    words = [graph.label(n) for n in nodes[:limit]]
    if len(nodes) > limit:
        words.append(f"... {len(nodes) - limit} more ...")
    return " waits for ".join([*words, graph.label(nodes[0])]) if nodes else "no cycle"
