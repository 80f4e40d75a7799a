"""Communication: where sends and receives stand in the order, and how much may be on its way at once.

``compute order --> the same order with sends and receives, and the number of send slots``::

    0F0 | 1F0   -->   0F0 0SF0>1 | 1RF0<0 1F0

Contract in: a legal compute order. Contract out: the compute actions of each rank are unchanged; the event
graph with that many receives posted ahead and that many send slots has no cycle (no timing can make it
hang); of all such pairs it is the smallest that costs no time against unbounded buffers. Both numbers bound
the memory that messages hold. Rules and proof: `zbcompile.schedule.communication`, docs/runtime.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from zbcompile.errors import CheckError
from zbcompile.schedule.communication import insert_communication, insert_in_total_order
from zbcompile.schedule.event_graph import EventGraph, describe_wait
from zbcompile.schedule.ir import Schedule
from zbcompile.schedule.problem import Problem

__all__ = ["CommSchedule", "insert_comm", "keep_comm"]

_TRIED = ((1, 1), (1, 2), (2, 1), (2, 2), (3, 2), (3, 3), (4, 4), (8, 8))


@dataclass(frozen=True, slots=True)
class CommSchedule:
    """An order with its communication. depth, send_slots : per channel; None: any number.

    value_ns : its predicted span or makespan, as the problem's objective says. one_communicator : planned
    for a single queue of transfers per rank.
    """

    schedule: Schedule
    depth: int | None
    send_slots: int | None
    value_ns: int
    one_communicator: bool = False


def insert_comm(schedule: Schedule, problem: Problem, *, one_communicator: bool = False) -> CommSchedule:
    """Put the sends and receives in. Raises `CheckError` when the transport would deadlock.

    one_communicator : for a library that is given a single communicator: one global order of messages.
    The transports ``rendezvous`` and ``batched`` bound what is on its way by themselves.
    """
    if one_communicator:
        lowered = insert_in_total_order(schedule, problem)
        return CommSchedule(lowered, None, None, _least(lowered, problem, True), True)
    if problem.transport != "async":
        lowered = insert_communication(schedule, problem)
        return CommSchedule(lowered, None, None, _least(lowered, problem))
    many = max(1, len(problem.profile.edges) * problem.num_microbatches)
    unbounded = insert_communication(schedule, problem, many)
    best = CommSchedule(unbounded, None, None, _least(unbounded, problem))
    for depth, slots in _TRIED:
        lowered = insert_communication(schedule, problem, depth)
        value = _value(lowered, problem, slots)
        if value is not None and value <= best.value_ns:
            return CommSchedule(lowered, depth, slots, value)
    return best


def keep_comm(schedule: Schedule, problem: Problem) -> CommSchedule:
    """For an order that comes with its communication: the fewest send slots that cost no time.

    Raises `CheckError` when its messages can hang.
    """
    value = _least(schedule, problem)
    if problem.transport != "async":
        return CommSchedule(schedule, None, None, value)
    for slots in (1, 2, 3, 4, 8):
        found = _value(schedule, problem, slots)
        if found is not None and found <= value:
            return CommSchedule(schedule, None, slots, value)
    return CommSchedule(schedule, None, None, value)


def _value(
    schedule: Schedule, problem: Problem, send_slots: int | None, one_communicator: bool = False
) -> int | None:
    """Predicted span or makespan; None when that few slots make a circle of waits."""
    graph = EventGraph(schedule, problem, send_slots, one_communicator)
    early = graph.earliest()
    if early is None:
        if send_slots is None:
            raise CheckError("deadlock: " + describe_wait(graph), fix="choose another transport or order")
        return None
    late = graph.latest_first_starts(early)
    ends = []
    for rank, row in enumerate(schedule.order):
        compute = [graph.node_of[rank][k] for k, a in enumerate(row) if a.kind.is_compute]
        ends.append(early[compute[-1]] + graph.duration[compute[-1]] if compute else 0)
    if problem.objective == "makespan":
        return max(ends)
    return max(end - start for end, start in zip(ends, late, strict=True))


def _least(schedule: Schedule, problem: Problem, one_communicator: bool = False) -> int:
    """Predicted span or makespan with any number of slots."""
    value = _value(schedule, problem, None, one_communicator)
    assert value is not None
    return value
