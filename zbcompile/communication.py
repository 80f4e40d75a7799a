"""Where sends and receives go in an order, so that no timing can make the step hang.

Rules (proved by the event graph of `zbcompile.events`):

* A send is posted right after the action that produces it; where several leave at once, in the
  order of their target stages.
* Receives of a channel (a directed pair of ranks) are posted in the order in which the *sender*
  sends, never in the order of use.
* ``async`` and ``rendezvous``: the receive of a channel's k-th message is posted right after the
  action that used message k - depth, and in any case before the first use of a later message.
* ``rendezvous``: receives are posted before the sends that stand at the same place, so that a
  rank held up by a send is already open for its peers.
* One communicator for all (``insert_in_total_order``): all messages in one global order, by planned start;
  every rank posts its sends and receives in that order. Nothing can wait in a circle, but a message may
  stand behind one that it has nothing to do with; the event graph predicts what that costs.
* ``batched``: the receive joins the exchange right before its use; an activation's receive goes
  further back, across W's that stand before its use, to the exchange that sends a gradient
  (`send_backward_recv_forward` in Megatron's terms). Nobody waits for a W, so no order deadlocks by it.
"""

from __future__ import annotations

from collections.abc import Sequence

from zbcompile.errors import CheckError
from zbcompile.events import EventGraph, Message, messages_of
from zbcompile.ir import Action, Kind, Schedule
from zbcompile.problem import Problem

__all__ = ["RECEIVE_DEPTH", "insert_communication", "insert_in_total_order", "post_slots"]

RECEIVE_DEPTH = 2
"""Receives posted ahead per channel. Two cost no time against unbounded buffers (docs/runtime.md)."""

_GRADIENT = (Kind.BACKWARD_INPUT, Kind.FULL_BACKWARD)


def insert_communication(schedule: Schedule, problem: Problem, depth: int = RECEIVE_DEPTH) -> Schedule:
    """A compute order with its sends and receives put in.

    ``0F0 | 1F0 -->  0F0 0SF0>1 | 1RF0<0 1F0``
    """
    schedule = schedule.compute_only()
    position = {a: (rank, k) for rank, k, a in schedule.actions()}
    sends: dict[Action, list[Message]] = {}
    channels: dict[tuple[int, int], list[tuple[int, Message]]] = {}
    users: dict[Message, int] = {}
    rank_of = problem.placement.rank_of
    for _, message in messages_of(problem):
        producer = _find(message, message.source, position)
        user = _find(message, message.target, position)
        sends.setdefault(producer, []).append(message)
        channel = (rank_of[message.source], rank_of[message.target])
        channels.setdefault(channel, []).append((position[producer][1], message))
        users[message] = position[user][1]
        if problem.transport == "batched" and not message.backward:
            users[message] = _before_weights(schedule.order[rank_of[message.target]], users[message])
    receives: list[dict[int, list[Action]]] = [{} for _ in schedule.order]
    for (_, target), sent in sorted(channels.items()):
        ordered = [m for _, m in sorted(sent, key=lambda item: (item[0], item[1].target))]
        lead = 0 if problem.transport == "batched" else depth
        for slot, message in zip(post_slots([users[m] for m in ordered], lead), ordered, strict=True):
            receives[target].setdefault(slot, []).append(message.recv)
    order = []
    for rank, row in enumerate(schedule.order):
        line: list[Action] = list(receives[rank].get(0, ()))
        for k, action in enumerate(row):
            line.append(action)
            sent_here = [m.send for m in sorted(sends.get(action, ()), key=lambda m: m.target)]
            posted_here = receives[rank].get(k + 1, [])
            line += posted_here + sent_here if problem.transport == "rendezvous" else sent_here + posted_here
        order.append(line)
    return Schedule.of(schedule.placement, schedule.num_microbatches, order)


def insert_in_total_order(schedule: Schedule, problem: Problem) -> Schedule:
    """The same for transports that refuse several communicators: one order of messages, the same on all
    ranks.

    A send is posted after its producer and after all that stands before it in the global order; a
    receive right after what stands before it on its rank.
    """
    schedule = schedule.compute_only()
    many = max(1, len(problem.profile.edges) * problem.num_microbatches)
    messages = EventGraph.of(insert_communication(schedule, problem, many), problem).transfers()
    position = {a: k for _, k, a in schedule.actions()}
    rank_of = problem.placement.rank_of
    where: dict[Action, tuple[int, int]] = {a: (r, k) for r, k, a in schedule.actions()}
    slot = [0] * schedule.num_ranks
    posted: list[dict[int, list[Action]]] = [{} for _ in schedule.order]
    for message in messages:
        source, target = rank_of[message.source], rank_of[message.target]
        producer = _find(message, message.source, where)
        slot[source] = max(slot[source], position[producer] + 1)
        posted[source].setdefault(slot[source], []).append(message.send)
        posted[target].setdefault(slot[target], []).append(message.recv)
    order = []
    for rank, row in enumerate(schedule.order):
        line: list[Action] = list(posted[rank].get(0, ()))
        for k, action in enumerate(row):
            line.append(action)
            line.extend(posted[rank].get(k + 1, ()))
        order.append(line)
    return Schedule.of(schedule.placement, schedule.num_microbatches, order)


def _find(message: Message, stage: int, position: dict[Action, tuple[int, int]]) -> Action:
    kinds = _GRADIENT if message.backward else (Kind.FORWARD,)
    for kind in kinds:
        action = Action(kind, stage, message.microbatch)
        if action in position:
            return action
    raise CheckError(
        f"{Action(kinds[0], stage, message.microbatch)} is missing",
        where=f"needed for {message}",
        fix="add it to its rank's order",
    )


def _before_weights(row: Sequence[Action], position: int) -> int:
    """The position of the first of the W's that stand directly before ``position``, or itself."""
    while position and row[position - 1].kind is Kind.BACKWARD_WEIGHT:
        position -= 1
    return position


def post_slots(uses: Sequence[int], depth: int) -> list[int]:
    """For each message of a channel, before which compute position its receive is posted.

    ``uses[k]`` is the position that needs message k. Slots never decrease, and none is after the
    use of its own or any later message.
    """
    latest: list[int] = list(uses)
    slots: list[int] = []
    for k in range(len(latest) - 2, -1, -1):
        latest[k] = min(latest[k], latest[k + 1])
    for k, last in enumerate(latest):
        wanted = last if depth == 0 else (0 if k < depth else uses[k - depth] + 1)
        slots.append(max(min(wanted, last), slots[-1] if slots else 0))
    return slots
