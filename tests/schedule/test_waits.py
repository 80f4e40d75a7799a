"""Why ranks wait: pauses make up what a rank does not compute, and every reason holds when it is tried."""

from __future__ import annotations

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.strategies import greedy_order, problems
from zbcompile.schedule.communication import lowered
from zbcompile.schedule.costs import Link, Profile, StageCost
from zbcompile.schedule.critical_path import critical_path
from zbcompile.schedule.event_graph import EventGraph
from zbcompile.schedule.ir import Action, Kind, Schedule
from zbcompile.schedule.memory import memory_peaks
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.semantics import SEND_MODES
from zbcompile.schedule.wait_roots import Link as Step
from zbcompile.schedule.wait_roots import chain, stretches
from zbcompile.schedule.waits import Waits

ROOTS = {"start", "order", "room", "held", "receive", "channel"}


def waits_of(problem: Problem, seed: int, transport: str) -> Waits | None:
    """The waits of a random order within its own peaks; None if it deadlocks under the send mode."""
    schedule = greedy_order(problem, Random(seed))
    problem = problem.with_(caps=tuple(memory_peaks(schedule, problem)), transport=transport)
    graph = EventGraph(lowered(schedule, problem), problem)
    return None if graph.earliest() is None else Waits(graph)


@settings(max_examples=60)
@given(problems(), st.integers(0, 999), st.sampled_from([mode.name for mode in SEND_MODES]))
def test_pauses_and_their_reasons(problem: Problem, seed: int, transport: str) -> None:
    waits = waits_of(problem, seed, transport)
    if waits is None:
        return
    for rank in range(problem.num_ranks):
        pauses = list(waits.pauses(rank))
        computed = waits.timeline.busy_ns(rank)
        assert computed + sum(p.idle_ns + p.held_ns for p in pauses) == waits.timeline.rank_end[rank]
        assert all(p.idle_ns >= 0 <= p.held_ns <= p.end_ns - p.start_ns for p in pauses)
        if transport == "async":
            assert not any(p.held_ns for p in pauses)
        if transport == "rendezvous":
            assert sum(p.held_ns for p in pauses) == held_by_hand(waits, rank)
        for pause in pauses:
            links = chain(waits, rank, pause.before)
            assert links[-1].kind in ROOTS
            assert all(link.kind in ("made", "room") for link in links[:-1])
            if links[0].kind == "made":
                assert links[0].until_ns == pause.end_ns
            for link in links:
                try_it(waits, link)


def held_by_hand(waits: Waits, rank: int) -> int:
    """Time between a send's post and its arrival, for the sends before the rank's last compute action."""
    nodes, row = waits.graph.node_of[rank], waits.schedule.order[rank]
    last = max((k for k, action in enumerate(row) if action.kind.is_compute), default=0)
    sends = [n for n, action in zip(nodes, row[:last], strict=False) if action.kind.is_send]
    return sum(waits.end(waits.graph.transfer_of[n]) - waits.start[n] for n in sends)


def try_it(waits: Waits, link: Step) -> None:
    """Move the action of a reason to where the reason says that it could, or could not, have run."""
    if link.kind == "made":
        assert link.end_ns <= link.until_ns
    if link.kind == "room":
        assert link.until is not None
        assert link.until_ns <= link.start_ns
        assert peak_if_moved(waits, link, link.until) > waits.problem.caps[link.rank]
    if link.kind == "order":
        assert link.first
        assert peak_if_moved(waits, link, link.first[0]) <= waits.problem.caps[link.rank]


def peak_if_moved(waits: Waits, link: Step, before: Action) -> int:
    """Most bytes of the rank with the action right before another one of it."""
    row = [action for action in waits.schedule.order[link.rank] if action != link.action]
    row.insert(row.index(before), link.action)
    order = [*waits.schedule.order]
    order[link.rank] = tuple(row)
    return memory_peaks(Schedule.of(waits.schedule.placement, 1, order), waits.problem)[link.rank]


@settings(max_examples=40)
@given(problems(), st.integers(0, 999))
def test_the_critical_path_is_work_and_travel_without_a_pause(problem: Problem, seed: int) -> None:
    waits = waits_of(problem, seed, "async")
    assert waits is not None
    lags = {problem.lag_ns(edge, backward=back) for edge in problem.profile.edges for back in (False, True)}
    spans = waits.timeline.rank_span
    rank = spans.index(max(spans))
    path = list(stretches(waits, critical_path(waits.graph, waits.timeline)))
    assert path[0].start_ns == 0
    assert (path[-1].rank, path[-1].end_ns) == (rank, waits.timeline.rank_end[rank])
    for stretch in path:
        assert not any(
            stretch.start_ns < p.end_ns and p.start_ns < stretch.end_ns for p in waits.pauses(stretch.rank)
        )
    for one, other in zip(path, path[1:], strict=False):
        assert other.start_ns - one.end_ns in {*lags, 0}


def test_a_rank_without_room_is_named_with_what_makes_room() -> None:
    """Rank 0 may hold one microbatch: rank 1 waits for F1, which has no room before B0 ends, then W0 runs."""
    text = "placement 0 1\nmicrobatches 2\nrank 0: 0F0 0B0 0W0 0F1 0B1 0W1\nrank 1: 1F0 1B0 1W0 1F1 1B1 1W1\n"

    def reasons(pending: int) -> list[tuple[str, str, list[str]]]:
        profile = Profile.uniform(StageCost.simple(10, 10, 10, 4, pending), 2, 1)
        problem = Problem.of(profile, num_microbatches=2, cap=[4, None])
        links = chain(Waits(EventGraph(Schedule.parse(text), problem)), 1, 3)
        assert [link.action for link in links] == [Action(Kind.FORWARD, 0, 1)] * len(links)
        return [(link.kind, str(link.until), list(map(str, link.first))) for link in links]

    made, room, order = reasons(0)
    assert (made[0], room[:2], order[0], order[2]) == ("made", ("room", "0B0"), "order", ["0W0"])
    assert [row[:2] for row in reasons(4)] == [("made", "None"), ("room", "0W0")]


def test_a_blocking_send_names_what_its_receiver_runs_first() -> None:
    """Rank 1 posts two receives ahead, so the third message waits until it has run its first F."""
    stages = (StageCost.simple(10, 10, 10), StageCost.simple(50, 10, 10))
    problem = Problem.of(Profile(stages, link=Link(3)), num_microbatches=4, transport="rendezvous")
    text = (
        "placement 0 1\nmicrobatches 4\nrank 0: 0F0 0F1 0F2 0F3 0BW0 0BW1 0BW2 0BW3\n"
        "rank 1: 1F0 1F1 1F2 1F3 1BW0 1BW1 1BW2 1BW3\n"
    )
    waits = Waits(EventGraph(lowered(Schedule.parse(text), problem), problem))
    pauses = {waits.schedule.order[0][p.before]: p for p in waits.pauses(0)}
    pause = pauses[Action(Kind.FORWARD, 0, 3)]
    assert (pause.start_ns, pause.held_ns, pause.end_ns) == (36, 30, 66)
    (link,) = chain(waits, 0, pause.before)
    assert (link.kind, str(link.until), link.until_rank, link.until_ns) == ("held", "0SF2>1", 1, 66)
    assert list(map(str, link.first)) == ["1F0"]
