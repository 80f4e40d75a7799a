"""Keyed dispatch where sends hold their rank: a priority per action becomes an order that does not hang.

Time runs forward. When a rank's action has ended it chooses its next one, the one with the smallest key among
those whose values were sent. From then on it takes the values that this one needs, and it starts when these
have arrived and its own sends were taken. So a rank is held until the ranks that it sends to choose, or have
receives posted ahead. A choice that would close a circle of ranks, each held by the next, is not made.

The order is timed by the clock of the send mode afterwards: receives that share a channel, or join an
exchange across W's, may make it a little longer than here. The keys are offset keys, which are evolved.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from zbcompile.planner.core.instance import BW, B, Codes, F, Op, W
from zbcompile.planner.core.scorer import Score
from zbcompile.planner.core.times import Clock
from zbcompile.planner.incumbent import Order
from zbcompile.planner.run import Run
from zbcompile.planner.starts.evolve import Pool
from zbcompile.planner.starts.offset_key_orders import first_keys
from zbcompile.planner.starts.offset_keys import OffsetKeys

__all__ = ["HeldDispatch", "Priorities", "held_dispatch"]

_MOST_STEPS = 50_000
"""Most actions times ranks that are dispatched: a quarter of a second each time."""


@dataclass(frozen=True, slots=True)
class Priorities:
    """What decides a dispatch: keys, and per stage from which microbatch up to which backwards are fused."""

    offsets: OffsetKeys
    fused: tuple[tuple[int, int], ...]

    def changed(self, m: int, rng: random.Random) -> Priorities:
        """Return the priorities with other keys or limits, or others fused at one stage or at all."""
        if rng.random() < 0.7:
            return replace(self, offsets=self.offsets.changed(rng))
        s, every = rng.randrange(len(self.fused)), rng.random() < 0.3
        low, high = sorted((rng.choice((0, 1, 2, m // 2, m)), rng.choice((0, m // 2, m - 2, m - 1, m))))
        fused = ((low, high) if every or k == s else old for k, old in enumerate(self.fused))
        return replace(self, fused=tuple(fused))


@dataclass(frozen=True, slots=True)
class HeldDispatch:
    """Orders dispatched as sends hold the ranks, by offset keys that are evolved."""

    name: str = "held_dispatch"
    instant: bool = False

    def applies(self, run: Run) -> bool:
        """Return whether sends hold their rank, some rank has several stages, and the orders are short."""
        return run.holds_rank and run.several and run.actions * run.instance.num_ranks <= _MOST_STEPS

    def propose(self, run: Run) -> Iterator[Order]:
        """Yield what is better than all before."""
        instance, clock, rng = run.instance, run.incumbent.clock, random.Random(run.seed)
        count, m = instance.num_stages, instance.num_microbatches
        first = [
            Priorities(keys, (fused,) * count) for keys in first_keys(instance) for fused in ((0, 0), (0, m))
        ]

        def score(priorities: Priorities) -> Score | None:
            codes = held_dispatch(clock, priorities)
            return None if codes is None else clock.score(codes)

        pool, tries = Pool[Priorities](score, most=12, changed=4), len(first) + run.effort.dispatches // 4
        for chosen in pool.evolve(first, lambda old, rng: old.changed(m, rng), rng, tries, run.over):
            codes = held_dispatch(clock, chosen)
            assert codes is not None
            yield Order(codes, (self.name,))


@dataclass(slots=True)
class _Sent:
    """A message: the action that needs it, the travel time, and when it arrives, once it is taken."""

    user: Op
    lag: int
    arrival: int | None = None


@dataclass(slots=True)
class _Rank:
    """Where a rank stands: what it chose and has not ended, when it chose that, and whether it has started.

    And when its last action ended, what that sent, the bytes held, and all that it chose so far.
    """

    next: Op | None = None
    chosen: int = 0
    running: bool = False
    free: int = 0
    sent: list[_Sent] = field(default_factory=list)
    held: int = 0
    row: list[tuple[int, int]] = field(default_factory=list)


def held_dispatch(clock: Clock, priorities: Priorities) -> Codes | None:
    """Return the order, or ``None`` if the ranks get stuck."""
    return _Dispatch(clock, priorities).run()


class _Dispatch:
    """One dispatch. A BW counts as its B among what was done and what others wait for."""

    def __init__(self, clock: Clock, priorities: Priorities) -> None:
        self.clock, self.instance = clock, clock.instance
        self.keys, self.fused = priorities.offsets.keys(clock.instance), priorities.fused
        self.in_flight = priorities.offsets.in_flight
        self.ahead = clock.problem.sends.receive_depth
        instance = self.instance
        self.ranks = [_Rank() for _ in instance.stages_of]
        self.done = [[0] * instance.num_stages for _ in (F, B, W)]
        self.waiting = [0] * instance.num_stages
        self.ended: dict[Op, int] = {}
        self.times = (instance.forward, instance.backward, instance.weight, instance.fused)
        self.events: list[tuple[int, int]] = []

    def run(self) -> Codes | None:
        """Let all ranks run to the end."""
        self._settle(0)
        while self.events:
            now = self.events[0][0]
            while self.events and self.events[0][0] == now:
                self._end(now, self.ranks[heapq.heappop(self.events)[1]])
            self._settle(now)
        m = self.instance.num_microbatches
        stuck = any(self.waiting) or any(count < m for count in self.done[B])
        return None if stuck else [rank.row for rank in self.ranks]

    def _end(self, now: int, rank: _Rank) -> None:
        """End the action that a rank runs, and send what it made."""
        assert rank.next is not None
        kind, s, i = rank.next
        rank.running, rank.free, rank.next, rank.sent = False, now, None, []
        if kind == W:
            return
        side = F if kind == F else B
        self.ended[side, s, i] = now
        for target, _, lag, _ in self.clock.out[side][s]:
            ahead = i < self.done[side][target] + self.ahead
            rank.sent.append(_Sent((side, target, i), lag, now + lag if ahead else None))

    def _settle(self, now: int) -> None:
        """Let ranks choose, best first, and start, until nothing more happens at this time."""
        while True:
            found = sorted(entry for number in range(len(self.ranks)) for entry in self._choices(number))
            fitting = (entry for entry in found if not self._hangs(*entry[1:]))
            chosen = next(fitting, None)
            if chosen is None:
                break
            self._choose(now, *chosen[1:])
        for number, rank in enumerate(self.ranks):
            if rank.next is not None and not rank.running:
                self._start(number, rank)

    def _choices(self, number: int) -> list[tuple[int, int, Op]]:
        """Return what a rank without a next action could run, as (key, rank, action)."""
        rank, instance = self.ranks[number], self.instance
        if rank.next is not None:
            return []
        found = []
        room, peak, m = instance.headroom[number] - rank.held, instance.memory.peak, instance.num_microbatches
        for place, s in enumerate(instance.stages_of[number]):
            f, b, w = (self.done[kind][s] for kind in (F, B, W))
            free = f < m and f - b < self.in_flight[s] and self._is_sent((F, s, f))
            if free and self._forward_peak(number, place) <= room:
                found.append((F, s, f))
            if b < f and self._is_sent((B, s, b)):
                first, last = self.fused[s]
                kind = BW if first <= b < last or peak[B][s] > room else B
                if peak[kind][s] <= room:
                    found.append((kind, s, b))
            if self.waiting[s]:
                found.append((W, s, w))
        return [(self._key(op), number, op) for op in found]

    def _key(self, op: Op) -> int:
        """Return the key of an action."""
        side, s, i = _as_user(op)
        return self.keys[(side * self.instance.num_stages + s) * self.instance.num_microbatches + i]

    def _forward_peak(self, number: int, place: int) -> int:
        """Return the bytes that an F of a rank's stage needs, with what may have to follow it at once.

        As in `zbcompile.planner.core.dispatch`: an F of every deeper stage that has some left.
        """
        change, peak = self.instance.memory.change, self.instance.memory.peak
        s, *deeper = self.instance.stages_of[number][place:]
        held = change[F][s]
        most = max(peak[F][s], held + peak[BW][s])
        for d in deeper:
            if self.done[F][d] < self.instance.num_microbatches:
                held += change[F][d]
                most = max(most, held + peak[BW][d])
        return most

    def _is_sent(self, op: Op) -> bool:
        """Return whether all that an F or B needs has been made."""
        kind, s, i = op
        return all(
            (before, other, i) in self.ended for before, other, _ in self.instance.rules.waits[kind][s]
        )

    def _hangs(self, number: int, op: Op) -> bool:
        """Return whether a rank that chose an action would be held by ranks that it holds itself."""
        user = _as_user(op)
        todo, seen = [number], set[int]()
        while todo:
            here = todo.pop()
            for sent in self.ranks[here].sent:
                there = self.instance.rank_of[sent.user[1]]
                other = self.ranks[there]
                if sent.arrival is not None or (there == number and sent.user == user):
                    continue
                if there == number:
                    return True
                if other.next is not None and not other.running and there not in seen:
                    seen.add(there)
                    todo.append(there)
        return False

    def _choose(self, now: int, number: int, op: Op) -> None:
        """Let a rank choose its next action, which takes the messages that it needs."""
        rank, (kind, s, _) = self.ranks[number], op
        rank.next, rank.chosen = op, now
        rank.row.append((kind, s))
        rank.held += self.instance.memory.change[kind][s]
        self.done[B if kind == BW else kind][s] += 1
        self.waiting[s] += {B: 1, W: -1}.get(kind, 0)
        side, _, last = _as_user(op)
        for other in self.ranks:
            for sent in other.sent:
                near = sent.user[:2] == (side, s) and sent.user[2] < last + max(1, self.ahead + 1)
                if sent.arrival is None and near:
                    sent.arrival = max(other.free, now) + sent.lag

    def _start(self, number: int, rank: _Rank) -> None:
        """Start what a rank chose, if all that it sent is taken."""
        assert rank.next is not None
        arrivals = [sent.arrival for sent in rank.sent]
        if any(arrival is None for arrival in arrivals):
            return
        kind, s, i = rank.next
        begin = max([rank.chosen, *(arrival for arrival in arrivals if arrival is not None)])
        for before, other, lag in self.instance.rules.waits[kind][s] if kind != W else ():
            made, away = self.ended[before, other, i], self.instance.rank_of[other] != number
            begin = max(begin, max(made, 0 if self.ahead or not away else rank.chosen) + lag)
        rank.running = True
        heapq.heappush(self.events, (begin + self.times[kind][s], number))


def _as_user(op: Op) -> Op:
    """Return an action by the name under which messages are for it."""
    return (B, *op[1:]) if op[0] == BW else op
