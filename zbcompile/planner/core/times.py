"""Span and makespan of an order under any send mode and any times of single actions.

Uses the same lowering and the same event graph as `zbcompile.schedule.communication` and
`zbcompile.schedule.event_graph`, on flat lists, for searches that try hundreds of orders. Equal to `simulate`
by test.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass

from zbcompile.planner.core.instance import BW, KINDS, Codes, F, Instance, W
from zbcompile.schedule.communication import post_slots
from zbcompile.schedule.ir import Kind
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.rules import dependencies

__all__ = ["Clock"]

Times = Sequence[Sequence[int]]
_Out = tuple[int, int, int, int]
_Edges = list[tuple[int, int, int]]
_Waits = tuple[tuple[int, int], ...]
"""What something waits for: (node, ns after its start)."""

_Messages = Sequence[int]
_SENDS = (Kind.SEND_F, Kind.SEND_B)
_RECEIVES = (Kind.RECV_F, Kind.RECV_B)


@dataclass(frozen=True, slots=True)
class Clock:
    """Times orders of one problem.

    Attributes
    ----------
    problem
        The problem.
    instance
        The same as plain tuples.
    out
        ``out[side][s]`` are the messages that F (side 0) or B and BW (side 1) of stage s sends to other
        ranks, as (target stage, rank, travel time, time that the channel is taken), by target.
    local
        ``local[side][s]`` are the stages of the same rank that F or B of stage s waits for.
    """

    problem: Problem
    instance: Instance
    out: tuple[tuple[tuple[_Out, ...], ...], ...]
    local: tuple[tuple[tuple[int, ...], ...], ...]

    @staticmethod
    def of(problem: Problem) -> Clock:
        """Collect the messages of a problem."""
        instance, rank_of = Instance.of(problem), problem.placement.rank_of
        out: list[list[list[_Out]]] = [[[] for _ in rank_of] for _ in range(2)]
        local: list[list[list[int]]] = [[[] for _ in rank_of] for _ in range(2)]
        for before, after, lag, reason in dependencies(problem, messages=True):
            source, target = before.stage, after.stage
            if reason == "message":
                link = problem.profile.link_between(rank_of[source], rank_of[target])
                sent = (target, rank_of[target], lag, lag - link.latency_ns)
                out[_SENDS.index(before.kind)][source].append(sent)
            elif reason in ("activation", "gradient"):
                local[KINDS.index(before.kind)][target].append(source)
        return Clock(
            problem,
            instance,
            tuple(tuple(tuple(sorted(row)) for row in rows) for rows in out),
            tuple(tuple(map(tuple, rows)) for rows in local),
        )

    def nominal(self, codes: Codes) -> list[list[int]]:
        """Return the profile's time of every action of an order."""
        instance = self.instance
        times = (instance.forward, instance.backward, instance.weight, instance.fused)
        return [[times[kind][s] for kind, s in row] for row in codes]

    def value(self, codes: Codes, times: Times | None = None) -> int | None:
        """Return the objective's value in ns, or ``None`` if the ranks deadlock.

        Parameters
        ----------
        codes
            The order.
        times
            Time of every action in ns, per rank and position; the profile's if left out.
        """
        pair = self.measure(codes, times)
        return None if pair is None else pair[0 if self.instance.objective == "span" else 1]

    def measure(self, codes: Codes, times: Times | None = None) -> tuple[int, int] | None:
        """Return (span, makespan) in ns, or ``None`` if the ranks deadlock. Parameters as for `value`."""
        run = _Run(self, codes, self.nominal(codes) if times is None else times)
        return (max(run.spans()), max(run.rank_ends())) if run.go() else None

    def starts(self, codes: Codes) -> list[list[int]] | None:
        """Return the earliest start of every action in ns, rank by rank; ``None`` on deadlock."""
        run = _Run(self, codes, self.nominal(codes))
        if not run.go():
            return None
        return [run.start[base : base + len(row)] for base, row in zip(run.base, codes, strict=True)]

    def score(self, codes: Codes) -> tuple[int, int] | None:
        """Return (value, sum of all rank spans), which orders equal values; ``None`` on deadlock."""
        run = _Run(self, codes, self.nominal(codes))
        if not run.go():
            return None
        spans = run.spans()
        return (max(spans) if self.instance.objective == "span" else max(run.rank_ends())), sum(spans)


class _Run:
    """One order being timed.

    Node ids: actions first, by rank and position, then transfers, then the gathers and the reductions of all
    stages (`zbcompile.planner.core.step_costs`).
    """

    def __init__(self, clock: Clock, codes: Codes, times: Times) -> None:
        self.clock, self.codes, self.times = clock, codes, times
        self.mode = clock.problem.sends
        self.queued = self.mode.holds_rank
        self.base, total = [], 0
        for row in codes:
            self.base.append(total)
            total += len(row)
        self.total = total
        self.start = [-1] * total
        self.edges: _Edges = []
        self._place()
        self._route()
        self._gather()

    def _gather(self) -> None:
        """Begin with the gathers of every rank, in the order of its stages' first F's."""
        steps, stages = self.clock.instance.steps, self.clock.instance.num_stages
        self.gather_node = self.total + len(self.lag)
        self.reduce_node = self.gather_node + stages
        self.gathered_at = [0] * stages
        self.weights_left = [self.clock.instance.num_microbatches] * stages
        self.channel: list[tuple[int, _Waits]] = []
        for row in self.codes:
            now = 0
            before: _Waits = ()
            for s in dict.fromkeys(s for kind, s in row if kind == F):
                if steps.gather[s]:
                    node = self.gather_node + s
                    self.edges += [(source, node, weight) for source, weight in before]
                    now, before = now + steps.gather[s], ((node, steps.gather[s]),)
                    self.gathered_at[s] = now
            self.channel.append((now, before))

    def _reduce(self, rank: int, node: int, s: int, length: int, now: int) -> None:
        """Begin the reduction of a stage's gradients if the W or BW that ends is its last."""
        self.weights_left[s] -= 1
        taken = self.clock.instance.steps.reduce[s]
        if self.weights_left[s] or not taken:
            return
        free, before = self.channel[rank]
        reduction = self.reduce_node + s
        for source, weight in (*before, (node, length)):
            self.edges.append((source, reduction, weight))
        self.channel[rank] = max(free, now) + taken, ((reduction, taken),)

    def _place(self) -> None:
        """Number the microbatch of every action and note the position of every F and backward."""
        instance = self.clock.instance
        m = instance.num_microbatches
        self.at = [[[-1] * m for _ in range(instance.num_stages)] for _ in range(2)]
        self.number: list[list[int]] = []
        for row in self.codes:
            count: dict[tuple[int, int], int] = {}
            numbers = []
            for k, (kind, s) in enumerate(row):
                if kind == W:
                    numbers.append(-1)
                    continue
                side = 0 if kind == F else 1
                i = count.get((side, s), 0)
                count[side, s] = i + 1
                self.at[side][s][i] = k
                numbers.append(i)
            self.number.append(numbers)

    def _route(self) -> None:
        """Find every message's predecessor on its channel, and where its receive is posted."""
        clock = self.clock
        self.sends: list[list[tuple[int, ...]]] = [[()] * len(row) for row in self.codes]
        self.posts: list[dict[int, list[int]]] = [{} for _ in self.codes]
        self.needs: list[dict[int, list[int]]] = [{} for _ in self.codes]
        self.side: list[int] = []
        self.lag: list[int] = []
        self.taken: list[int] = []
        self.before: list[int] = []
        channels: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for rank, row in enumerate(self.codes):
            for k, (kind, s) in enumerate(row):
                if kind == W:
                    continue
                side, i = (0 if kind == F else 1), self.number[rank][k]
                sent = []
                for target, there, lag, taken in clock.out[side][s]:
                    message = len(self.lag)
                    channel = channels.setdefault((rank, there), [])
                    self.side.append(side)
                    self.lag.append(lag)
                    self.taken.append(taken)
                    self.before.append(channel[-1][0] if channel else -1)
                    use = self.at[side][target][i]
                    self.needs[there].setdefault(use, []).append(message)
                    if self.mode.joins_exchange and side == 0:
                        while use and self.codes[there][use - 1][0] == W:
                            use -= 1
                    channel.append((message, use))
                    sent.append(message)
                if sent:
                    self.sends[rank][k] = tuple(sent)
        count = len(self.lag)
        self.sent_at: list[int] = [-1] * count
        self.posted_at: list[int] = [-1] * count
        self.sent_by: list[_Waits] = [()] * count
        self.posted_by: list[_Waits] = [()] * count
        self.begin: list[int] = [-1] * count
        self.after: list[int] = [-1] * count
        for message, before in enumerate(self.before):
            if before >= 0:
                self.after[before] = message
        if not self.mode.holds_rank:
            self.posted_at = [0] * count
            return
        for (_, there), channel in sorted(channels.items()):
            slots = post_slots([use for _, use in channel], self.mode.receive_depth)
            for (message, _), slot in zip(channel, slots, strict=True):
                self.posts[there].setdefault(slot, []).append(message)

    def _try_transfer(self, message: int) -> None:
        """Begin a transfer once both sides are there and the one before has left the channel."""
        while message >= 0 and self.begin[message] < 0:
            before = self.before[message]
            if self.sent_at[message] < 0 or self.posted_at[message] < 0:
                return
            if self.queued and before >= 0 and self.begin[before] < 0:
                return
            begin, node = max(self.sent_at[message], self.posted_at[message]), self.total + message
            for source, weight in (*self.sent_by[message], *self.posted_by[message]):
                self.edges.append((source, node, weight))
            if self.queued and before >= 0:
                begin = max(begin, self.begin[before] + self.taken[before])
                self.edges.append((self.total + before, node, self.taken[before]))
            self.begin[message] = begin
            self.queue.extend(self.waiting.pop(message, ()))
            message = self.after[message]

    def go(self) -> bool:
        """Run all ranks to the end; return False if they hang."""
        ranks = len(self.codes)
        self.waiting: dict[int, list[int]] = {}
        self.queue: deque[int] = deque(range(ranks))
        self.end = [0] * ranks
        self.left = self.total
        self.open: list[list[int]] = [[] for _ in self.codes]
        progress = [self._rank(rank) for rank in range(ranks)]
        while self.queue:
            rank = self.queue.popleft()
            message = next(progress[rank], -1)
            if message >= 0:
                self.waiting.setdefault(message, []).append(rank)
        return self.left == 0

    def _rank(self, rank: int) -> Generator[int, None, None]:
        """Walk along one rank's order; yield the message that it waits for."""
        row, needs = self.codes[rank], self.needs[rank]
        posts, sends = self.posts[rank], self.sends[rank]
        before: _Waits = ()
        now, steps = 0, self.clock.instance.steps
        for k, length in enumerate(self.times[rank]):
            node = self.base[rank] + k
            sent, posted = sends[k - 1] if k else (), posts.get(k, ())
            if sent or posted:
                now, before = yield from self._communicate(rank, sent, posted, now, before)
            if self.open[rank] and KINDS[row[k][0]] in self.mode.waits_before:
                now, before = yield from self._settle(rank, now, before)
            for message in needs.get(k, ()):
                while self.begin[message] < 0:
                    yield message
                now = max(now, self.begin[message] + self.lag[message])
                before += ((self.total + message, self.lag[message]),)
            if not self._ready(rank, k):
                return
            kind, s = row[k]
            if kind == F and self.number[rank][k] == 0 and steps.gather[s]:
                now = max(now, self.gathered_at[s])
                before += ((self.gather_node + s, steps.gather[s]),)
            for source, weight in before:
                self.edges.append((source, node, weight))
            self.start[node] = now
            before, now = ((node, length),), now + length
            if kind in (W, BW):
                self._reduce(rank, node, s, length, now)
            self.left -= 1
        self.end[rank] = now
        if row:
            yield from self._communicate(rank, sends[-1], posts.get(len(row), ()), now, before)

    def _communicate(
        self, rank: int, sent: _Messages, posted: _Messages, now: int, before: _Waits
    ) -> Generator[int, None, tuple[int, _Waits]]:
        """Post sends and receives at one place; return when the rank goes on, and what that waits for."""
        receives = (_RECEIVES, posted, self.posted_at, self.posted_by)
        sends = (_SENDS, sent, self.sent_at, self.sent_by)
        awaited, waits_before = self.mode.awaited, self.mode.waits_before
        for kinds, messages, at, by in (receives, sends) if self.mode.receives_first else (sends, receives):
            for message in messages:
                kind = kinds[self.side[message]]
                if self.open[rank] and kind in waits_before:
                    now, before = yield from self._settle(rank, now, before)
                at[message], by[message] = now, before
                self._try_transfer(message)
                if kind in awaited:
                    self.open[rank].append(message)
        return now, before

    def _settle(self, rank: int, now: int, before: _Waits) -> Generator[int, None, tuple[int, _Waits]]:
        """Wait until the posts that are due have arrived; return as `_communicate`."""
        due, self.open[rank] = self.mode.due(self.open[rank])
        for message in due:
            while self.begin[message] < 0:
                yield message
            now = max(now, self.begin[message] + self.lag[message])
            before += ((self.total + message, self.lag[message]),)
        return now, before

    def _ready(self, rank: int, k: int) -> bool:
        """Return whether what the action needs of its own rank stands before it."""
        kind, s = self.codes[rank][k]
        if kind == W:
            return True
        side, i = (0 if kind == F else 1), self.number[rank][k]
        if side == 1 and not 0 <= self.at[0][s][i] < k:
            return False
        return all(0 <= self.at[side][source][i] < k for source in self.clock.local[side][s])

    def rank_ends(self) -> list[int]:
        """Return when every rank has ended its actions, its reductions and its update."""
        updates = self.clock.instance.steps.update
        return [max(end, free) + u for end, (free, _), u in zip(self.end, self.channel, updates, strict=True)]

    def spans(self) -> list[int]:
        """Return the span of every rank, every first action as late as the ends allow."""
        instance, ends = self.clock.instance, self.rank_ends()
        steps = instance.steps
        late = [max(ends) + 1] * (self.reduce_node + instance.num_stages)
        ranks = [r for r, row in enumerate(self.codes) if row]
        for rank in ranks:
            last, free = self.base[rank] + len(self.codes[rank]) - 1, ends[rank] - steps.update[rank]
            late[last] = free - (self.end[rank] - self.start[last])
            for s in instance.stages_of[rank]:
                late[self.gather_node + s] = free - steps.gather[s]
                late[self.reduce_node + s] = free - steps.reduce[s]
        for source, node, weight in reversed(self.edges):
            if late[node] - weight < late[source]:
                late[source] = late[node] - weight
        firsts = [
            min(
                [
                    late[self.base[r]],
                    *(late[self.gather_node + s] for s in instance.stages_of[r] if steps.gather[s]),
                ]
            )
            for r in ranks
        ]
        return [ends[rank] - first for rank, first in zip(ranks, firsts, strict=True)]
