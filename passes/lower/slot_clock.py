"""Time a compute order for any number of receives posted ahead and any number of send slots, on flat lists.

``async`` alone. The communication stands where `zbcompile.schedule.communication.insert_communication` puts
it, and the value is that of the event graph of `zbcompile.schedule.event_graph`, both by test. There is no
graph and no action is made: `zbcompile.passes.lower.insert_comm` times one order with many pairs of numbers.
No torch is loaded.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from zbcompile.schedule.communication import post_slots
from zbcompile.schedule.ir import Kind, Schedule
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.rules import durations

__all__ = ["SlotClock"]

_COMPUTE, _SEND, _RECV, _TRANSFER = range(4)
_FAR = 1 << 62
_SIDE = {Kind.FORWARD: 0, Kind.BACKWARD_INPUT: 1, Kind.FULL_BACKWARD: 1}
"""Which messages an action sends and uses: activations (0) or gradients (1); a W neither."""

_Op = tuple[int, int, int, tuple[int, ...]]
"""Compute, its rank, its time in ns, the messages that it uses. Or send or receive, its rank, its message. Or
transfer, -1, its message."""


@dataclass(frozen=True, slots=True)
class _Route:
    """What the messages of one side between two stages have in common.

    Attributes
    ----------
    channel
        The messages of the channel, in the order sent.
    lag, busy
        Travel time, and time that the channel is taken, in ns.
    number
        Microbatch -> message.
    """

    channel: list[int]
    lag: int
    busy: int
    number: dict[int, int] = field(default_factory=dict)


class SlotClock:
    """Times one compute order.

    Parameters
    ----------
    schedule
        The order, without sends and receives. `zbcompile.schedule.check.is_well_formed` holds.
    problem
        What it is for.

    Attributes
    ----------
    lag, busy
        Per message, its travel time and the time that it takes its channel, in ns.
    place
        Per message, the messages of its channel and its own place among them.
    """

    def __init__(self, schedule: Schedule, problem: Problem) -> None:
        self.objective = problem.objective
        self.channels: dict[tuple[int, int], list[int]] = {}
        self.lag: list[int] = []
        self.busy: list[int] = []
        self.place: list[tuple[list[int], int]] = []
        self._connect(problem)
        self.sends = [
            [self._sent(rank, a.kind, a.stage, a.microbatch) for a in row]
            for rank, row in enumerate(schedule.order)
        ]
        self.transfers: list[_Op] = [(_TRANSFER, -1, message, ()) for message in range(len(self.lag))]
        self.before = [channel[k - 1] if k else -1 for channel, k in self.place]
        self.after = [channel[k + 1] if k + 1 < len(channel) else -1 for channel, k in self.place]
        self.use = [-1] * len(self.lag)
        self.compute = self._computed(schedule, problem)

    def _connect(self, problem: Problem) -> None:
        """Collect per side and stage the routes of the messages that its actions send and use."""
        rank_of = problem.placement.rank_of
        found: list[tuple[int, int, int, _Route]] = []
        for edge in problem.profile.edges:
            ways = [(0, edge.source, edge.target)]
            if edge.has_gradient:
                ways.append((1, edge.target, edge.source))
            for side, source, target in ways:
                ranks = rank_of[source], rank_of[target]
                if ranks[0] != ranks[1]:
                    lag = problem.lag_ns(edge, backward=side == 1)
                    busy = lag - problem.profile.link_between(*ranks).latency_ns
                    found.append(
                        (side, source, target, _Route(self.channels.setdefault(ranks, []), lag, busy))
                    )
        self.out: list[list[list[_Route]]] = [[[] for _ in rank_of] for _ in range(2)]
        self.into: list[list[list[_Route]]] = [[[] for _ in rank_of] for _ in range(2)]
        for side, source, target, route in sorted(found, key=lambda entry: entry[:3]):
            self.out[side][source].append(route)
            self.into[side][target].append(route)

    def _sent(self, rank: int, kind: Kind, stage: int, microbatch: int) -> tuple[_Op, ...]:
        """Number the messages that an action sends, in the order of their target stages."""
        side = _SIDE.get(kind)
        if side is None:
            return ()
        ops = []
        for route in self.out[side][stage]:
            number = len(self.lag)
            route.number[microbatch] = number
            self.lag.append(route.lag)
            self.busy.append(route.busy)
            self.place.append((route.channel, len(route.channel)))
            route.channel.append(number)
            ops.append((_SEND, rank, number, ()))
        return tuple(ops)

    def _computed(self, schedule: Schedule, problem: Problem) -> list[list[_Op]]:
        """Return the compute actions with the messages that they use, and note the place of every use."""
        times, rows = durations(problem), []
        for rank, row in enumerate(schedule.order):
            ops: list[_Op] = []
            for k, action in enumerate(row):
                kind, stage, microbatch = action.kind, action.stage, action.microbatch
                side = _SIDE.get(kind)
                routes = () if side is None else self.into[side][stage]
                needs = tuple([route.number[microbatch] for route in routes])
                for message in needs:
                    self.use[message] = k
                ops.append((_COMPUTE, rank, times[kind][stage], needs))
            rows.append(ops)
        return rows

    def placed(self, depth: int) -> PlacedOrder:
        """Return the order with its receives posted so far ahead."""
        posts: list[dict[int, list[_Op]]] = [{} for _ in self.compute]
        for (_, target), channel in sorted(self.channels.items()):
            slots = post_slots([self.use[message] for message in channel], depth)
            for message, slot in zip(channel, slots, strict=True):
                posts[target].setdefault(slot, []).append((_RECV, target, message, ()))
        rows = []
        for rank, (ops, sends) in enumerate(zip(self.compute, self.sends, strict=True)):
            row, posted = list(posts[rank].get(0, ())), posts[rank]
            for k, (op, sent) in enumerate(zip(ops, sends, strict=True), 1):
                row.append(op)
                row += sent
                if k in posted:
                    row += posted[k]
            rows.append(row)
        return PlacedOrder(self, rows)


class PlacedOrder:
    """An order of a `SlotClock` with its sends and receives.

    Attributes
    ----------
    rows
        Per rank, its actions.
    ends
        Per rank, its first and its last compute action; None where it has none.
    """

    def __init__(self, clock: SlotClock, rows: list[list[_Op]]) -> None:
        self.clock, self.rows = clock, rows
        self.ends = [_first_and_last(row) for row in rows]

    def value(self, send_slots: int | None) -> int | None:
        """Return the span or makespan in ns, or None where the ranks hang.

        Parameters
        ----------
        send_slots
            Messages that may be on their way per channel before the sender waits; None: any number.
        """
        run = _Run(self, send_slots)
        if not run.go():
            return None
        return max(run.spans()) if self.clock.objective == "span" else max(run.end)


def _first_and_last(row: list[_Op]) -> tuple[_Op | None, _Op | None]:
    first = next((op for op in row if op[0] == _COMPUTE), None)
    return first, next((op for op in reversed(row) if op[0] == _COMPUTE), None)


class _Run:
    """One walk.

    Attributes
    ----------
    room
        Per message, the one that must have arrived before it is sent; -1 for none.
    sent, posted, begin
        Per message, when it was sent, when its receive was posted and when its transfer began; -1: not yet.
    at, now, end
        Per rank, where it is, its time, and the end of its last compute action.
    waiting, queue
        Message -> the ranks that wait for it, and the ranks that can go on.
    trail
        All actions and transfers in topological order.
    """

    def __init__(self, order: PlacedOrder, send_slots: int | None) -> None:
        self.order, self.clock, self.rows = order, order.clock, order.rows
        count, ranks = len(order.clock.lag), len(order.rows)
        self.room = [-1] * count
        if send_slots is not None:
            places = order.clock.place
            self.room = [channel[k - send_slots] if k >= send_slots else -1 for channel, k in places]
        self.sent, self.posted, self.begin = [-1] * count, [-1] * count, [-1] * count
        self.at, self.now, self.end = [0] * ranks, [0] * ranks, [0] * ranks
        self.waiting: dict[int, list[int]] = {}
        self.queue = deque(range(ranks))
        self.trail: list[_Op] = []

    def go(self) -> bool:
        """Run all ranks as far as they get; return whether that is to the end."""
        while self.queue:
            rank = self.queue.popleft()
            message = self._advance(rank)
            if message >= 0:
                self.waiting.setdefault(message, []).append(rank)
        return all(k == len(row) for k, row in zip(self.at, self.rows, strict=True))

    def _advance(self, rank: int) -> int:
        """Run one rank on; return the message that it waits for, -1 at its end."""
        row, lag, begin, sent, posted = self.rows[rank], self.clock.lag, self.begin, self.sent, self.posted
        room, note, last = self.room, self.trail.append, self.order.ends[rank][1]
        now = self.now[rank]
        for k in range(self.at[rank], len(row)):
            op = row[k]
            what, _, number, needs = op
            if what == _COMPUTE:
                for message in needs:
                    start = begin[message]
                    if start < 0:
                        self.at[rank], self.now[rank] = k, now
                        return message
                    if start + lag[message] > now:
                        now = start + lag[message]
                now += number
                note(op)
                if op is last:
                    self.end[rank] = now
                continue
            if what == _RECV:
                posted[number] = now
            else:
                earlier = room[number]
                if earlier >= 0:
                    if begin[earlier] < 0:
                        self.at[rank], self.now[rank] = k, now
                        return earlier
                    now = max(now, begin[earlier] + lag[earlier])
                sent[number] = now
            note(op)
            if sent[number] >= 0 and posted[number] >= 0:
                self._transfer(number)
        self.at[rank], self.now[rank] = len(row), now
        return -1

    def _transfer(self, message: int) -> None:
        """Begin a transfer if the one before it on the channel has begun, and then those behind it."""
        clock, sent, posted, begin = self.clock, self.sent, self.posted, self.begin
        while message >= 0 and sent[message] >= 0 and posted[message] >= 0:
            start, before = max(sent[message], posted[message]), clock.before[message]
            if before >= 0:
                if begin[before] < 0:
                    return
                start = max(start, begin[before] + clock.busy[before])
            begin[message] = start
            self.trail.append(clock.transfers[message])
            if message in self.waiting:
                self.queue.extend(self.waiting.pop(message))
            message = clock.after[message]

    def spans(self) -> list[int]:
        """Return the span of every rank: every first action as late as all ends allow."""
        rows, ends, room = self.rows, self.order.ends, self.room
        lag, busy, before = self.clock.lag, self.clock.busy, self.clock.before
        limit, late, first = [_FAR] * len(lag), [_FAR] * len(rows), [0] * len(rows)
        for op in reversed(self.trail):
            what, rank, number, needs = op
            if what == _COMPUTE:
                start = (self.end[rank] if op is ends[rank][1] else late[rank]) - number
                for message in needs:
                    if start - lag[message] < limit[message]:
                        limit[message] = start - lag[message]
                late[rank] = start
                if op is ends[rank][0]:
                    first[rank] = start
                continue
            if what == _TRANSFER:
                earlier = before[number]
                if earlier >= 0 and limit[number] - busy[earlier] < limit[earlier]:
                    limit[earlier] = limit[number] - busy[earlier]
                continue
            if limit[number] < late[rank]:
                late[rank] = limit[number]
            earlier = room[number] if what == _SEND else -1
            if earlier >= 0 and late[rank] - lag[earlier] < limit[earlier]:
                limit[earlier] = late[rank] - lag[earlier]
        return [end - start for end, start in zip(self.end, first, strict=True)]
