"""Where sends and receives go in an order, so that no timing can make the step hang.

Rules (proved by the event graph of `zbcompile.schedule.event_graph`):

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

from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter

from zbcompile.errors import CheckError
from zbcompile.schedule.event_graph import EventGraph, Message, messages_of
from zbcompile.schedule.ir import Action, Kind, Schedule
from zbcompile.schedule.positions import Positions
from zbcompile.schedule.problem import Problem

__all__ = ["RECEIVE_DEPTH", "insert_communication", "insert_in_total_order", "post_slots"]

RECEIVE_DEPTH = 2
"""Receives posted ahead per channel. Two cost no time against unbounded buffers (docs/runtime.md)."""


def insert_communication(schedule: Schedule, problem: Problem, depth: int = RECEIVE_DEPTH) -> Schedule:
    """A compute order with its sends and receives put in.

    ``0F0 | 1F0 -->  0F0 0SF0>1 | 1RF0<0 1F0``
    """
    schedule = schedule.compute_only()
    places = Positions(schedule)
    rank_of, batched = problem.placement.rank_of, problem.transport == "batched"
    sends: dict[int, list[Message]] = {}
    channels: dict[tuple[int, int], list[tuple[int, int, int, Message]]] = {}
    for message, producer, user in _uses(problem, places):
        backward, source, target, _ = message
        sends.setdefault(producer, []).append(message)
        use = places.position[user]
        if batched and not backward:
            use = _before_weights(schedule.order[rank_of[target]], use)
        channel = channels.setdefault((rank_of[source], rank_of[target]), [])
        channel.append((places.position[producer], target, use, message))
    receives: list[dict[int, list[Action]]] = [{} for _ in schedule.order]
    for (_, target), sent in sorted(channels.items()):
        sent.sort(key=itemgetter(0, 1))
        slots = post_slots([use for _, _, use, _ in sent], 0 if batched else depth)
        for slot, (_, _, _, message) in zip(slots, sent, strict=True):
            receives[target].setdefault(slot, []).append(message.recv)
    order = []
    for rank, row in enumerate(schedule.order):
        line: list[Action] = list(receives[rank].get(0, ()))
        for k, action in enumerate(row):
            line.append(action)
            sent_here = [m.send for m in sorted(sends.get(places.base[rank] + k, ()), key=lambda m: m.target)]
            posted_here = receives[rank].get(k + 1, [])
            line += posted_here + sent_here if problem.transport == "rendezvous" else sent_here + posted_here
        order.append(line)
    return Schedule.of(schedule.placement, schedule.num_microbatches, order)


def _uses(problem: Problem, places: Positions) -> Iterator[tuple[Message, int, int]]:
    """Every message with the numbers of the action that makes it and of the one that uses it."""
    rows: dict[tuple[bool, int], Mapping[int, int]] = {}
    for stage in range(problem.num_stages):
        rows[False, stage] = places.of(Kind.FORWARD, stage)
        rows[True, stage] = {**places.of(Kind.FULL_BACKWARD, stage), **places.of(Kind.BACKWARD_INPUT, stage)}
    for _, message in messages_of(problem):
        backward, source, target, microbatch = message
        producer, user = rows[backward, source].get(microbatch), rows[backward, target].get(microbatch)
        if producer is None or user is None:
            kind = Kind.BACKWARD_INPUT if backward else Kind.FORWARD
            raise CheckError(
                f"{Action(kind, source if producer is None else target, microbatch)} is missing",
                where=f"needed for {message}",
                fix="add it to its rank's order",
            )
        yield message, producer, user


def insert_in_total_order(schedule: Schedule, problem: Problem) -> Schedule:
    """The same for transports that refuse several communicators: one order of messages, the same on all
    ranks.

    A send is posted after its producer and after all that stands before it in the global order; a
    receive right after what stands before it on its rank.
    """
    schedule = schedule.compute_only()
    many = max(1, len(problem.profile.edges) * problem.num_microbatches)
    messages = EventGraph.of(insert_communication(schedule, problem, many), problem).transfers()
    places = Positions(schedule)
    rank_of = problem.placement.rank_of
    producers = {message: producer for message, producer, _ in _uses(problem, places)}
    slot = [0] * schedule.num_ranks
    posted: list[dict[int, list[Action]]] = [{} for _ in schedule.order]
    for message in messages:
        source, target = rank_of[message.source], rank_of[message.target]
        slot[source] = max(slot[source], places.position[producers[message]] + 1)
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
