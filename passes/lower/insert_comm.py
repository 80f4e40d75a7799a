"""Put the communication into an order, and say how many messages may be on their way at once.

``compute order --> the same order with sends and receives, and the number of send slots``::

    0F0 | 1F0   -->   0F0 0SF0>1 | 1RF0<0 1F0

Contract in: a legal compute order. Contract out: the compute actions of each rank are unchanged, and the
event graph with that many receives posted ahead and that many send slots has no cycle, so that no timing can
make it hang. Of all such pairs that are tried it is the smallest that costs no time against unbounded
buffers. Both numbers bound the memory that messages hold. Rules and proof:
`zbcompile.schedule.communication`, docs/reference/send-modes.md. Stages that cost something once a step get
their actions (`zbcompile.schedule.stage_actions`), and times count them. No torch is loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from zbcompile.errors import CheckError
from zbcompile.passes.lower.slot_clock import SlotClock
from zbcompile.schedule.check import is_well_formed
from zbcompile.schedule.communication import insert_communication, insert_in_total_order
from zbcompile.schedule.event_graph import EventGraph, describe_wait
from zbcompile.schedule.ir import Schedule
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.simulate import timeline_of
from zbcompile.schedule.stage_actions import has_step_costs, with_stage_actions

__all__ = ["CommSchedule", "insert_comm", "keep_comm"]

_SLOTS_TRIED = {1: (1, 2), 2: (1, 2), 3: (2, 3), 4: (4,), 8: (8,)}
"""Receives posted ahead per channel -> send slots that are tried with them; the smallest pairs come first."""


@dataclass(frozen=True, slots=True)
class CommSchedule:
    """An order with its communication.

    Attributes
    ----------
    schedule
        The order, sends and receives included.
    send_slots
        Messages that may be on their way per channel before the sender waits; None: any number.
    value_ns
        Predicted span or makespan, as the problem's objective says.
    one_communicator
        Whether it is planned for a single queue of transfers per rank.
    """

    schedule: Schedule
    send_slots: int | None
    value_ns: int
    one_communicator: bool = False


def insert_comm(
    schedule: Schedule,
    problem: Problem,
    *,
    one_communicator: bool = False,
    compute_ns: int | None = None,
) -> CommSchedule:
    """Put sends and receives into a compute order.

    Sends that hold up their rank bound what is on its way by themselves.

    Parameters
    ----------
    schedule, problem
        The order and what it is for.
    one_communicator
        Whether the library is given a single communicator: all messages then have one global order.
    compute_ns
        The value of the compute order, if it is known: messages that leave as soon as they can. No buffers
        make it shorter, so a pair with that value is taken without a look at unbounded buffers.

    Raises
    ------
    CheckError
        The send mode would deadlock; names the chain of waits.
    """
    if one_communicator:
        placed = with_stage_actions(insert_in_total_order(schedule, problem), problem)
        return CommSchedule(placed, None, _unbounded_value(placed, problem, True), True)
    if problem.sends.holds_rank:
        placed = _placed(schedule, problem)
        return CommSchedule(placed, None, _unbounded_value(placed, problem))
    alike = not problem.microbatch_costs and not has_step_costs(problem)
    if alike and is_well_formed(schedule.compute_only(), problem):
        clock = SlotClock(schedule.compute_only(), problem)
        return _fewest(schedule, problem, lambda depth: clock.placed(depth).value, compute_ns)

    def by_graph(depth: int) -> Callable[[int | None], int | None]:
        placed = _placed(schedule, problem, depth)
        return lambda slots: _value(placed, problem, slots)

    return _fewest(schedule, problem, by_graph, compute_ns)


def _fewest(
    schedule: Schedule,
    problem: Problem,
    timed: Callable[[int], Callable[[int | None], int | None]],
    compute_ns: int | None,
) -> CommSchedule:
    """Return the smallest pair of numbers that costs no time.

    Parameters
    ----------
    timed
        Receives posted ahead -> number of send slots -> value in ns, None where the ranks hang.
    """
    least: int | None = None
    for depth, tried in _SLOTS_TRIED.items():
        value_of = timed(depth)
        for slots in tried:
            value = value_of(slots)
            if value is not None and value == compute_ns:
                return CommSchedule(_placed(schedule, problem, depth), slots, value)
            if least is None:
                least = timed(_everything(problem))(None)
                if least is None:
                    return _unbounded(schedule, problem)
            if value is not None and value <= least:
                return CommSchedule(_placed(schedule, problem, depth), slots, value)
    return _unbounded(schedule, problem)


def _placed(schedule: Schedule, problem: Problem, depth: int | None = None) -> Schedule:
    """Put in the communication, and the actions of stages as a whole."""
    return with_stage_actions(insert_communication(schedule, problem, depth), problem)


def _everything(problem: Problem) -> int:
    """Return a number of receives to post ahead that is that of all messages."""
    return max(1, len(problem.profile.edges) * problem.num_microbatches)


def _unbounded(schedule: Schedule, problem: Problem) -> CommSchedule:
    """Put in the communication with all receives posted at the start and any number of send slots."""
    placed = _placed(schedule, problem, _everything(problem))
    return CommSchedule(placed, None, _unbounded_value(placed, problem))


def keep_comm(schedule: Schedule, problem: Problem) -> CommSchedule:
    """Find the fewest send slots that cost no time, for an order that comes with its communication.

    Raises
    ------
    CheckError
        The messages of the order can hang; names the chain of waits.
    """
    schedule = with_stage_actions(schedule, problem)
    least = _unbounded_value(schedule, problem)
    if problem.sends.holds_rank:
        return CommSchedule(schedule, None, least)
    for slots in (1, 2, 3, 4, 8):
        value = _value(schedule, problem, slots)
        if value is not None and value <= least:
            return CommSchedule(schedule, slots, value)
    return CommSchedule(schedule, None, least)


def _value(schedule: Schedule, problem: Problem, send_slots: int | None) -> int | None:
    """Return the predicted span or makespan, or None if that few slots make a cycle of waits."""
    graph = EventGraph(schedule, problem, send_slots)
    return None if graph.earliest() is None else timeline_of(graph).value_ns


def _unbounded_value(schedule: Schedule, problem: Problem, one_communicator: bool = False) -> int:
    """Return the predicted span or makespan with any number of slots."""
    graph = EventGraph(schedule, problem, None, one_communicator)
    if graph.earliest() is None:
        raise CheckError("deadlock: " + describe_wait(graph), fix="choose another transport or order")
    return timeline_of(graph).value_ns
