"""The event graph against an independent simulation: the same deadlocks, the same times."""

from __future__ import annotations

from collections import deque
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.strategies import greedy_order, problems
from zbcompile.errors import CheckError, UsageError
from zbcompile.passes.lower.insert_comm import insert_comm
from zbcompile.schedule.check import check, checked_times
from zbcompile.schedule.communication import insert_communication, lowered
from zbcompile.schedule.costs import Edge, Link, Profile, StageCost
from zbcompile.schedule.event_graph import EventGraph
from zbcompile.schedule.ir import Action, Kind, Placement, Schedule
from zbcompile.schedule.messages import Message
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.rules import durations
from zbcompile.schedule.simulate import simulate


class Machine:
    """Runs a program on made-up hardware, event by event, knowing nothing of graphs.

    Every rank goes through its row: a compute action needs its operands and takes its time; a send or receive
    is posted. A channel moves one message at a time, first in, first out, once both ends are posted.
    """

    def __init__(self, schedule: Schedule, problem: Problem, slots: int | None) -> None:
        self.schedule, self.problem, self.slots = schedule, problem, slots
        self.times = durations(problem)
        self.rank_of = problem.placement.rank_of
        self.edges = {(e.source, e.target): e for e in problem.profile.edges}
        self.position = [0] * schedule.num_ranks
        self.clock = [0] * schedule.num_ranks
        self.done: dict[Action, int] = {}
        self.start: dict[Action, int] = {}
        self.arrived: dict[Message, int] = {}
        self.sends: dict[tuple[int, int], deque[tuple[Message, int]]] = {}
        self.receives: dict[tuple[int, int], deque[tuple[Message, int]]] = {}
        self.sent: dict[tuple[int, int], list[Message]] = {}
        self.free: dict[tuple[int, int], int] = {}
        self.open: list[list[Message]] = [[] for _ in range(schedule.num_ranks)]

    def run(self) -> dict[Action, int] | None:
        """Start time of every compute action, or None when it comes to rest before its end."""
        moved = True
        while moved:
            moved = False
            for rank in range(self.schedule.num_ranks):
                while self._advance(rank):
                    moved = True
        finished = all(p == len(r) for p, r in zip(self.position, self.schedule.order, strict=True))
        return self.start if finished else None

    def _advance(self, rank: int) -> bool:
        row = self.schedule.order[rank]
        if self.position[rank] == len(row):
            return False
        action = row[self.position[rank]]
        begin = self._held(rank, action)
        if begin is None:
            return False
        if action.kind.is_compute:
            ready = self._operands(action)
            if ready is None:
                return False
            begin = max(begin, ready)
            self.start[action] = begin
            self.clock[rank] = self.done[action] = begin + self.times[action.kind][action.stage]
        else:
            self.clock[rank] = begin
            self._post(rank, action, begin)
        self.position[rank] += 1
        return True

    def _held(self, rank: int, action: Action) -> int | None:
        """When the transport lets the rank go on, or None while it does not."""
        begin, kind = self.clock[rank], self.problem.transport
        if (kind == "rendezvous") or (kind == "batched" and action.kind.is_compute):
            for message in self.open[rank]:
                if message not in self.arrived:
                    return None
                begin = max(begin, self.arrived[message])
            self.open[rank], self.clock[rank] = [], begin
        if self.slots is not None and action.kind.is_send:
            earlier = self.sent.get(self._channel(Message.of(action)), [])
            if len(earlier) >= self.slots:
                message = earlier[-self.slots]
                if message not in self.arrived:
                    return None
                begin = max(begin, self.arrived[message])
        return begin

    def _operands(self, action: Action) -> int | None:
        s, i = action.stage, action.microbatch
        wanted: list[int | None] = []
        if action.kind is Kind.FORWARD:
            wanted += [self._value(False, a, b, i) for a, b in self.edges if b == s]
        elif action.kind is Kind.BACKWARD_WEIGHT:
            wanted.append(self.done.get(Action(Kind.BACKWARD_INPUT, s, i)))
        else:
            wanted.append(self.done.get(Action(Kind.FORWARD, s, i)))
            wanted += [
                self._value(True, b, a, i) for (a, b), e in self.edges.items() if a == s and e.has_gradient
            ]
        known = [w for w in wanted if w is not None]
        return max(known, default=0) if len(known) == len(wanted) else None

    def _value(self, backward: bool, source: int, target: int, microbatch: int) -> int | None:
        if self.rank_of[source] != self.rank_of[target]:
            return self.arrived.get(Message(backward, source, target, microbatch))
        kinds = (Kind.BACKWARD_INPUT, Kind.FULL_BACKWARD) if backward else (Kind.FORWARD,)
        return next((self.done[a] for k in kinds if (a := Action(k, source, microbatch)) in self.done), None)

    def _channel(self, message: Message) -> tuple[int, int]:
        return self.rank_of[message.source], self.rank_of[message.target]

    def _post(self, rank: int, action: Action, when: int) -> None:
        message = Message.of(action)
        channel = self._channel(message)
        side = self.sends if action.kind.is_send else self.receives
        side.setdefault(channel, deque()).append((message, when))
        if action.kind.is_send:
            self.sent.setdefault(channel, []).append(message)
        if action.kind.is_send or self.problem.transport == "batched":
            self.open[rank].append(message)
        sends, receives = self.sends.get(channel, deque()), self.receives.get(channel, deque())
        while sends and receives:
            (one, sent), (other, posted) = sends.popleft(), receives.popleft()
            assert one == other
            self._move(channel, one, max(sent, posted, self.free.get(channel, 0)))

    def _move(self, channel: tuple[int, int], message: Message, begin: int) -> None:
        edge = self.edges[min(message.source, message.target), max(message.source, message.target)]
        link = self.problem.profile.link_between(*channel)
        size = edge.backward_bytes if message.backward else edge.forward_bytes
        whole = link.transfer_ns(size)
        self.arrived[message] = begin + whole
        self.free[channel] = begin + whole - link.latency_ns


def compare(schedule: Schedule, problem: Problem, slots: int | None) -> bool:
    """Whether both say that it ends; times must agree."""
    graph = EventGraph(schedule, problem, slots)
    early = graph.earliest()
    start = Machine(schedule, problem, slots).run()
    assert (early is None) == (start is None)
    if early is None or start is None:
        return False
    for rank, row in enumerate(schedule.order):
        for k, action in enumerate(row):
            if action.kind.is_compute:
                assert early[graph.node_of[rank][k]] == start[action], str(action)
    return True


@settings(max_examples=150)
@given(
    problems(),
    st.randoms(use_true_random=False),
    st.sampled_from([1, 2, 5, 10_000]),
    st.sampled_from([None, 1, 2, 3]),
    st.sampled_from(["async", "rendezvous", "batched"]),
)
def test_inserted_messages_end_or_hang_as_the_graph_says(
    problem: Problem, random: Any, depth: int, slots: int | None, transport: str
) -> None:
    problem = problem.with_(transport=transport)
    schedule = insert_communication(greedy_order(problem, random), problem, depth)
    ended = compare(schedule, problem, slots if transport == "async" else None)
    assert ended or transport != "async" or slots is not None


def shuffled(schedule: Schedule, random: Random) -> Schedule:
    """Sends later than they could be and receives anywhere, sends and receives of a channel in one order."""
    order = []
    for row in schedule.order:
        line = list(row)
        for _ in range(random.randrange(8)):
            k = random.randrange(len(line)) if line else 0
            if line and not line[k].kind.is_compute:
                action = line.pop(k)
                line.insert(min(len(line), k + random.randrange(5)), action)
        order.append(line)
    return Schedule.of(schedule.placement, schedule.num_microbatches, order)


def is_mixed_up(schedule: Schedule) -> bool:
    """Whether some channel is received in another order than it is sent."""
    rank_of = schedule.placement.rank_of
    sent: dict[tuple[int, int], list[Message]] = {}
    received: dict[tuple[int, int], list[Message]] = {}
    for _, _, action in schedule.actions():
        if not action.kind.is_compute:
            message = Message.of(action)
            side = sent if action.kind.is_send else received
            side.setdefault((rank_of[message.source], rank_of[message.target]), []).append(message)
    return sent != received


@pytest.mark.parametrize("transport", ["async", "rendezvous", "batched"])
def test_random_programs_end_or_hang_as_the_graph_says(transport: str) -> None:
    hung = ended = 0
    for seed in range(700):
        random = Random(seed)
        ranks = random.randint(2, 4)
        placement = random.choice([Placement.linear(ranks), Placement.v(ranks), Placement.looped(ranks)])
        count = placement.num_stages
        edges = [Edge(s, s + 1, random.randrange(9), random.randrange(9)) for s in range(count - 1)]
        if count > 2:
            edges.append(Edge(0, count - 1, 3, 2, random.random() < 0.5))
        stages = tuple(StageCost.simple(*(random.randint(0, 9) for _ in range(3))) for _ in range(count))
        profile = Profile(stages, tuple(edges), Link(random.randrange(4), random.choice([0, 10**9])))
        problem = Problem.of(profile, placement, random.randint(1, 4), transport=transport)
        schedule = insert_communication(greedy_order(problem, random), problem, random.randint(1, 3))
        schedule = shuffled(schedule, random)
        if is_mixed_up(schedule):
            continue
        slots = random.choice([None, 1, 2]) if transport == "async" else None
        if compare(schedule, problem, slots):
            ended += 1
        else:
            hung += 1
    assert min(hung, ended) > 20, (hung, ended)


@settings(max_examples=100)
@given(problems(), st.randoms(use_true_random=False))
def test_one_global_order_of_messages_never_hangs_on_one_communicator(problem: Problem, random: Any) -> None:
    schedule = greedy_order(problem, random)
    sent = insert_comm(schedule, problem, one_communicator=True)
    check(sent.schedule, problem)
    assert sent.schedule.compute_only() == schedule
    assert EventGraph(sent.schedule, problem, None, one_communicator=True).earliest() is not None
    assert sent.value_ns >= insert_comm(schedule, problem).value_ns


def test_receives_posted_early_on_one_communicator_hang_as_reported() -> None:
    """pytorch#172668: two stages a rank, receives posted ahead in one queue."""
    placement = Placement.v(2)
    problem = Problem.of(Profile((StageCost.simple(10, 10, 10),) * 4), placement, 2)
    order = Schedule.parse(
        """placement 0 1 1 0
        microbatches 2
        rank 0: 0F0 0F1 3F0 3BW0 3F1 3BW1 0BW0 0BW1
        rank 1: 1F0 2F0 1F1 2F1 2BW0 1BW0 2BW1 1BW1"""
    )
    early = insert_communication(order, problem, 100)
    assert EventGraph(early, problem).earliest() is not None
    assert EventGraph(early, problem, None, one_communicator=True).earliest() is None
    assert insert_comm(order, problem, one_communicator=True).value_ns > 0


@pytest.mark.parametrize("transport", ["async", "rendezvous", "batched"])
def test_edges_that_the_order_implies_change_nothing(transport: str) -> None:
    """Without them: the same hangs, and otherwise the same times and the same order of transfers."""
    hung = 0
    for seed in range(150):
        random = Random(seed)
        stages = tuple(StageCost.simple(*(random.randint(0, 5) for _ in range(5))) for _ in range(4))
        profile = Profile(stages, link=Link(random.randint(0, 3), 0))
        problem = Problem.of(profile, Placement.v(2), 4, transport=transport)
        order = insert_communication(greedy_order(problem, random), problem, random.randint(1, 3))
        order = shuffled(order, random)
        lean, full = (EventGraph(order, problem, 2, implied_edges=implied) for implied in (False, True))
        early = lean.earliest()
        assert early == full.earliest()
        if early is None:
            hung += 1
            assert lean.cycle() == full.cycle() != []
        else:
            assert lean.latest_first_starts(early) == full.latest_first_starts(early)
            assert lean.transfers() == full.transfers()
        edges = (sum(map(len, graph.successors)) for graph in (lean, full))
        assert next(edges) < next(edges)
    assert 0 < hung < 150


def test_the_judge_gives_the_times_of_simulate() -> None:
    profile = Profile.uniform(StageCost.simple(2, 3, 1), 4, latency_ns=1)
    for transport in ("async", "rendezvous", "batched"):
        problem = Problem.of(profile, Placement.v(2), 3, transport=transport)
        order = greedy_order(problem, Random(1))
        assert checked_times(order, problem) == simulate(order, problem)
        late = Schedule.of(order.placement, 3, [row[::-1] for row in order.order])
        with pytest.raises(CheckError, match="stands before its"):
            checked_times(late, problem)


@pytest.mark.parametrize("transport", ["rendezvous", "batched"])
def test_an_order_without_its_messages_has_no_times_where_sends_hold_their_rank(transport: str) -> None:
    profile = Profile.uniform(StageCost.simple(2, 3, 1), 4, latency_ns=1)
    problem = Problem.of(profile, Placement.v(2), 3, transport=transport)
    order = greedy_order(problem, Random(1))
    with pytest.raises(UsageError, match="without sends and receives"):
        EventGraph(order, problem)
    sent = lowered(order, problem)
    assert sent == insert_communication(order, problem) == lowered(sent, problem)
    assert simulate(order, problem).schedule == sent
    assert lowered(order, problem.with_(transport="async")) is order
    alone = Problem.of(profile, Placement((0,) * 4), 3, transport=transport)
    assert EventGraph(greedy_order(alone, Random(1)), alone).earliest() is not None
