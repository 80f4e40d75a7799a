"""The one judge of a schedule: is it complete, in dependency order, free of deadlock and under the caps?"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from itertools import chain
from operator import itemgetter

from zbcompile.errors import CheckError
from zbcompile.schedule.communication import lowered
from zbcompile.schedule.event_graph import EventGraph, describe_wait
from zbcompile.schedule.held_gradients import MAKES_GRADIENTS
from zbcompile.schedule.ir import Action, Kind, Schedule
from zbcompile.schedule.memory import memory_during
from zbcompile.schedule.messages import Message
from zbcompile.schedule.positions import Key, Positions
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.rules import OWN_STAGE, dependencies
from zbcompile.schedule.simulate import Timeline, timeline_of

__all__ = ["check", "checked_times", "faults", "is_well_formed", "judge"]

_FEWER = "start fewer forwards before it, or raise the cap"
_MORE_ROOM = (
    "run the W's of earlier microbatches before it, sum gradients as they come "
    '(accumulate="memory"), or raise the cap'
)
_SPLIT = (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)


def check(schedule: Schedule, problem: Problem) -> None:
    """Judge a schedule.

    Raises
    ------
    CheckError
        The first fault, with its rank, stage and microbatch.
    """
    for fault in faults(schedule, problem):
        raise fault


def checked_times(schedule: Schedule, problem: Problem) -> Timeline:
    """Judge a schedule and return its times: `check` and `simulate` with one event graph for both.

    Raises
    ------
    CheckError
        The first fault.
    """
    found, graph = judge(schedule, problem)
    if graph is None:
        raise found[0]
    return timeline_of(graph)


def faults(schedule: Schedule, problem: Problem) -> list[CheckError]:
    """Return all faults of the first test that finds any; empty for a sound schedule.

    Notes
    -----
    The tests, in this order: shape (placement, rows), completeness, order on each rank, actions of stages as
    a whole, order of messages, deadlock, memory. A test makes sense only where the ones before it found
    nothing.
    """
    return judge(schedule, problem)[0]


def judge(schedule: Schedule, problem: Problem) -> tuple[list[CheckError], EventGraph | None]:
    """Return the faults and, where there are none, the event graph; `timeline_of` gives its times."""
    found, positions = _shape(schedule, problem), Positions(schedule)
    if not found:
        found = _complete(schedule, problem, positions) or _rank_order(positions) or _stage_order(positions)
    found = found or _message_order(schedule, problem)
    if found:
        return found, None
    try:
        timed = lowered(schedule, problem)
        graph = EventGraph(timed, problem, positions=positions if timed is schedule else None)
    except CheckError as error:
        return [error], None
    found = _deadlock(graph) or _memory(schedule, problem)
    return found, None if found else graph


def is_well_formed(schedule: Schedule, problem: Problem) -> bool:
    """Return whether an order is complete, and on every rank each action stands behind what it waits for.

    Messages, deadlock between ranks and memory are not looked at: this needs no event graph.
    """
    if _shape(schedule, problem):
        return False
    positions = Positions(schedule)
    if _complete(schedule, problem, positions) or _rank_order(positions) or _stage_order(positions):
        return False
    rank_of = problem.placement.rank_of
    for before, after, _, reason in dependencies(problem):
        if reason == "own stage" or rank_of[before.stage] != rank_of[after.stage]:
            continue
        made, used = (positions.made(step.kind, step.stage) for step in (before, after))
        if any(made[i] > number for i, number in used.items()):
            return False
    return True


def _shape(schedule: Schedule, problem: Problem) -> list[CheckError]:
    if schedule.placement != problem.placement:
        return [
            CheckError(
                "the schedule's placement is not the problem's",
                needed=list(problem.placement.rank_of),
                given=list(schedule.placement.rank_of),
            )
        ]
    if schedule.num_microbatches != problem.num_microbatches:
        return [
            CheckError(
                "the schedule has another number of microbatches than the problem",
                needed=problem.num_microbatches,
                given=schedule.num_microbatches,
            )
        ]
    if len(schedule.order) != schedule.num_ranks:
        return [
            CheckError("one row of actions per rank", needed=schedule.num_ranks, given=len(schedule.order))
        ]
    return []


def _complete(schedule: Schedule, problem: Problem, positions: Positions) -> list[CheckError]:
    """Test that every (stage, microbatch) has F, and either BW or both B and W, once, on its own rank."""
    if not _all_in_place(problem, positions):
        return _misplaced(schedule, problem, positions)
    return [fault for stage in range(problem.num_stages) for fault in _missing(stage, problem, positions)]


def _all_in_place(problem: Problem, positions: Positions) -> bool:
    """Whether every action exists in the problem and occurs once, on the rank of its stage."""
    for (_, stage, peer), numbers in positions.rows.items():
        if max(stage, peer or 0) >= problem.num_stages or max(numbers) >= problem.num_microbatches:
            return False
        rank = problem.placement.rank_of[stage]
        if min(numbers.values()) < positions.base[rank] or max(numbers.values()) >= positions.base[rank + 1]:
            return False
    return positions.all_once


def _misplaced(schedule: Schedule, problem: Problem, positions: Positions) -> list[CheckError]:
    found = []
    for rank, position, action in schedule.actions():
        where = f"rank {rank}, position {position}"
        peer = action.peer if action.peer is not None else 0
        if action.stage >= problem.num_stages or peer >= problem.num_stages:
            found.append(
                CheckError(
                    f"{action} names a stage that does not exist",
                    where=where,
                    needed=f"< {problem.num_stages}",
                )
            )
        elif action.microbatch >= problem.num_microbatches:
            found.append(
                CheckError(
                    f"{action} names a microbatch that does not exist",
                    where=where,
                    needed=f"< {problem.num_microbatches}",
                )
            )
        elif problem.placement.rank_of[action.stage] != rank:
            home = problem.placement.rank_of[action.stage]
            found.append(
                CheckError(f"{action} stands on the wrong rank", where=where, fix=f"move it to rank {home}")
            )
        elif positions.number(action) != positions.base[rank] + position:
            found.append(CheckError(f"{action} appears twice", where=where, fix="keep one of them"))
    return found


def _missing(stage: int, problem: Problem, positions: Positions) -> Iterator[CheckError]:
    has = {kind: positions.of(kind, stage) for kind in Kind if kind.is_compute}
    rank = problem.placement.rank_of[stage]
    for microbatch in range(problem.num_microbatches):
        fused = microbatch in has[Kind.FULL_BACKWARD]
        where = f"rank {rank}, stage {stage}, microbatch {microbatch}"
        for kind in _SPLIT if fused else ():
            if microbatch in has[kind]:
                yield CheckError(
                    f"{Action(kind, stage, microbatch)} stands beside a fused {stage}BW{microbatch}",
                    where=where,
                    fix="keep either B and W or BW",
                )
        for kind in (Kind.FORWARD,) if fused else (Kind.FORWARD, *_SPLIT):
            if microbatch not in has[kind]:
                what = f"{Action(kind, stage, microbatch)} is missing"
                yield CheckError(what, where=where, fix="add it to the rank's order")


def _rank_order(positions: Positions) -> list[CheckError]:
    """Test that on every stage F comes before B and B before W, before a wrong order shows up as a cycle."""
    wrong = []
    for (kind, stage, _), numbers in positions.rows.items():
        if kind in OWN_STAGE:
            earlier = positions.of(OWN_STAGE[kind], stage)
            wrong += [(n, kind, stage, i, earlier[i]) for i, n in numbers.items() if earlier[i] > n]
    found = []
    for number, kind, stage, microbatch, earlier_number in sorted(wrong, key=itemgetter(0)):
        action, before = Action(kind, stage, microbatch), Action(OWN_STAGE[kind], stage, microbatch)
        rank = bisect_right(positions.base, number) - 1
        base = positions.base[rank]
        found.append(
            CheckError(
                f"{action} stands before its {before}",
                where=f"rank {rank}, positions {number - base} and {earlier_number - base}",
                fix=f"move {action} behind {before}",
            )
        )
    return found


def _stage_order(positions: Positions) -> list[CheckError]:
    """Test that actions of a stage as a whole stand before its first F, or behind its last backward work."""
    found = []
    for kind, stage, _ in positions.rows:
        if not kind.is_of_stage:
            continue
        action = Action(kind, stage, 0)
        number = positions.of(kind, stage)[0]
        rank = bisect_right(positions.base, number) - 1
        where = f"rank {rank}, position {number - positions.base[rank]}"
        if kind is Kind.UNSHARD:
            if number > min(positions.of(Kind.FORWARD, stage).values()):
                found.append(
                    CheckError(f"{action} stands behind an F of its stage", where=where, fix="move it up")
                )
            continue
        last = max(max(positions.of(k, stage).values(), default=0) for k in MAKES_GRADIENTS)
        if number < last:
            found.append(
                CheckError(
                    f"{action} stands before the last W of its stage", where=where, fix="move it behind"
                )
            )
        if kind is Kind.RESHARD and not positions.of(Kind.UNSHARD, stage):
            found.append(
                CheckError(f"{action} has no {stage}UNSHARD", where=where, fix="add it before the first F")
            )
    return found


def _message_order(schedule: Schedule, problem: Problem) -> list[CheckError]:
    """Test that on every channel the receives are posted in the order of the sends."""
    if not schedule.has_communication:
        return []
    rank_of = problem.placement.rank_of
    sent: dict[tuple[int, int], list[Message]] = {}
    received: dict[tuple[int, int], list[Message]] = {}
    routes: dict[Key, tuple[bool, int, int, list[Message]]] = {}
    for action in chain.from_iterable(schedule.order):
        if action.peer is None:
            continue
        key = (action.kind, action.stage, action.peer)
        if key not in routes:
            backward, source, target, _ = Message.of(action)
            ends = sent if action.kind.is_send else received
            channel = (rank_of[source], rank_of[target])
            routes[key] = backward, source, target, ends.setdefault(channel, [])
        backward, source, target, messages = routes[key]
        messages.append(Message(backward, source, target, action.microbatch))
    found = []
    for channel in sorted(set(sent) | set(received)):
        left, right = sent.get(channel, []), received.get(channel, [])
        if left == right:
            continue
        where = f"channel from rank {channel[0]} to rank {channel[1]}"
        arrivals, departures = set(right), set(left)
        for message in left:
            if message not in arrivals:
                found.append(CheckError(f"{message.send} is sent and never received", where=where))
                return found
        for message in right:
            if message not in departures:
                found.append(CheckError(f"{message.recv} is received and never sent", where=where))
                return found
        for k, (a, b) in enumerate(zip(left, right, strict=True)):
            if a != b:
                found.append(
                    CheckError(
                        f"messages would be mixed up: send {k} is {a.send}, receive {k} is {b.recv}",
                        where=where,
                        fix="post the receives in the order of the sends",
                    )
                )
                break
    return found


def _deadlock(graph: EventGraph) -> list[CheckError]:
    """Test that the event graph has no cycle."""
    if graph.earliest() is not None:
        return []
    return [
        CheckError("deadlock: " + describe_wait(graph), fix="break the circle: move one of these actions")
    ]


def _memory(schedule: Schedule, problem: Problem) -> list[CheckError]:
    """Test the caps; one fault per rank, at the first action that exceeds its cap."""
    found: list[CheckError] = []
    for rank, cap in enumerate(problem.caps):
        if cap is None:
            continue
        for k, held in enumerate(memory_during(schedule, problem, rank)):
            if held > cap:
                action = schedule.order[rank][k]
                found.append(
                    CheckError(
                        f"over the memory cap at {action}",
                        where=f"rank {rank}, stage {action.stage}, microbatch {action.microbatch}",
                        needed=f"{held} bytes",
                        given=f"a cap of {cap} bytes",
                        fix=_MORE_ROOM if action.kind in MAKES_GRADIENTS else _FEWER,
                    )
                )
                break
    return found
