"""Puts the sends and receives into an order, so that no timing can make the step hang.

``0F0 | 1F0  -->  0F0 0SF0>1 | 1RF0<0 1F0``

Rules (the event graph of `zbcompile.schedule.event_graph` proves each order):

* A send is posted right after the action that produces its message. Several at the same place are in the
  order of their target stages.
* Receives of a channel (a directed pair of ranks) are posted in the order in which the *sender* sends, never
  in the order of use.
* The receive of a channel's k-th message is posted right after the action that used message k - depth, and in
  any case before the first use of a later message.
* Where the send mode wants receives first, they are posted before the sends at the same place, so that a rank
  that a send holds up is already open for its peers.
* Where receives join exchanges, a receive is posted right before its use. An activation's receive moves
  further back, across the W's directly before its use, to the exchange that sends a gradient (Megatron's
  ``send_backward_recv_forward``). No action waits for a W, so this makes no order deadlock.
* One communicator for all channels (`insert_in_total_order`): all messages have one global order, by planned
  start, and every rank posts its sends and receives in that order. No circle of waits is possible, but a
  message may wait behind an unrelated one; the event graph predicts what that costs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter

from zbcompile.errors import CheckError
from zbcompile.schedule.event_graph import EventGraph
from zbcompile.schedule.ir import Action, Kind, Schedule
from zbcompile.schedule.messages import Message, messages_of
from zbcompile.schedule.positions import Positions
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.stage_actions import with_stage_actions, with_those_of

__all__ = ["insert_communication", "insert_in_total_order", "lowered", "post_slots"]


def lowered(schedule: Schedule, problem: Problem) -> Schedule:
    """Return an order in the form that an `EventGraph` of the problem takes.

    An order without messages gets its sends and receives where sends hold their rank. Stages that cost
    something once a step get their actions (`with_stage_actions`). Every other order is returned as it is.

    Raises
    ------
    CheckError
        An action that a message needs is missing.
    """
    if not schedule.has_communication and problem.sends.holds_rank:
        schedule = insert_communication(schedule, problem)
    return with_stage_actions(schedule, problem)


def insert_communication(schedule: Schedule, problem: Problem, depth: int | None = None) -> Schedule:
    """Put the sends and receives into an order, in place of those that it has.

    Actions of stages as a whole stay behind the compute action that they stand behind.

    Parameters
    ----------
    depth
        Receives posted ahead per channel; that of the send mode if left out. Where receives join exchanges it
        is not used.

    Raises
    ------
    CheckError
        An action that a message needs is missing, or stands on another rank than its stage.
    """
    given, schedule = schedule, schedule.compute_only()
    _check_ranks(schedule, problem)
    positions = Positions(schedule)
    rank_of, mode = problem.placement.rank_of, problem.sends
    if depth is None or mode.joins_exchange:
        depth = mode.receive_depth
    sends: dict[int, list[Message]] = {}
    channels: dict[tuple[int, int], list[tuple[int, int, int, Message]]] = {}
    for message, producer, user in _uses(problem, positions):
        backward, source, target, _ = message
        sends.setdefault(producer, []).append(message)
        use = positions.position[user]
        if mode.joins_exchange and not backward:
            use = _before_weights(schedule.order[rank_of[target]], use)
        channel = channels.setdefault((rank_of[source], rank_of[target]), [])
        channel.append((positions.position[producer], target, use, message))
    receives: list[dict[int, list[Action]]] = [{} for _ in schedule.order]
    for (_, target), sent in sorted(channels.items()):
        sent.sort(key=itemgetter(0, 1))
        slots = post_slots([use for _, _, use, _ in sent], depth)
        for slot, (_, _, _, message) in zip(slots, sent, strict=True):
            receives[target].setdefault(slot, []).append(message.recv)
    order = []
    for rank, row in enumerate(schedule.order):
        posted, first = receives[rank], positions.base[rank]
        line: list[Action] = list(posted.get(0, ()))
        for k, action in enumerate(row):
            line.append(action)
            messages, posted_here = sends.get(first + k), posted.get(k + 1, ())
            if mode.receives_first:
                line += posted_here
            if messages:
                line += [m.send for m in sorted(messages, key=itemgetter(2))]
            if not mode.receives_first:
                line += posted_here
        order.append(line)
    return with_those_of(Schedule.of(schedule.placement, schedule.num_microbatches, order), given)


def _check_ranks(schedule: Schedule, problem: Problem) -> None:
    """Refuse an action on another rank than its stage: its messages would go between other ranks."""
    rank_of = problem.placement.rank_of
    for rank, row in enumerate(schedule.order):
        for position, action in enumerate(row):
            if rank_of[action.stage] != rank:
                raise CheckError(
                    f"{action} stands on the wrong rank",
                    where=f"rank {rank}, position {position}",
                    fix=f"move it to rank {rank_of[action.stage]}",
                )


def _uses(problem: Problem, positions: Positions) -> Iterator[tuple[Message, int, int]]:
    """Yield every message with the numbers of the action that makes it and of the one that uses it."""
    rows: dict[tuple[bool, int], Mapping[int, int]] = {}
    for stage in range(problem.num_stages):
        fused, split = (positions.of(k, stage) for k in (Kind.FULL_BACKWARD, Kind.BACKWARD_INPUT))
        rows[False, stage] = positions.of(Kind.FORWARD, stage)
        rows[True, stage] = {**fused, **split}
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
    """Put the sends and receives into an order for a library with one communicator for all channels.

    All ranks post their messages in one global order. A send is posted after its producer and after the
    messages before it in the global order; a receive is posted right after the message before it on its rank.

    Raises
    ------
    CheckError
        An action that a message needs is missing or stands on another rank than its stage, or the order
        deadlocks.
    """
    given, schedule = schedule, schedule.compute_only()
    _check_ranks(schedule, problem)
    many = max(1, len(problem.profile.edges) * problem.num_microbatches)
    messages = EventGraph(insert_communication(schedule, problem, many), problem).transfers()
    positions = Positions(schedule)
    rank_of = problem.placement.rank_of
    producers = {message: producer for message, producer, _ in _uses(problem, positions)}
    slot = [0] * schedule.num_ranks
    posted: list[dict[int, list[Action]]] = [{} for _ in schedule.order]
    for message in messages:
        source, target = rank_of[message.source], rank_of[message.target]
        slot[source] = max(slot[source], positions.position[producers[message]] + 1)
        posted[source].setdefault(slot[source], []).append(message.send)
        posted[target].setdefault(slot[target], []).append(message.recv)
    order = []
    for rank, row in enumerate(schedule.order):
        line: list[Action] = list(posted[rank].get(0, ()))
        for k, action in enumerate(row):
            line.append(action)
            line.extend(posted[rank].get(k + 1, ()))
        order.append(line)
    return with_those_of(Schedule.of(schedule.placement, schedule.num_microbatches, order), given)


def _before_weights(row: Sequence[Action], position: int) -> int:
    """Return the position of the first of the W's directly before ``position``, or ``position`` itself."""
    while position and row[position - 1].kind is Kind.BACKWARD_WEIGHT:
        position -= 1
    return position


def post_slots(uses: Sequence[int], depth: int) -> list[int]:
    """Return for each message of a channel the compute position before which its receive is posted.

    Parameters
    ----------
    uses
        Per message in the order sent, the position of the action that uses it.
    depth
        Receives posted ahead; 0 posts each right before the use.

    Returns
    -------
    list of int
        The positions never decrease, and none is after the use of its own or any later message.
    """
    latest: list[int] = list(uses)
    slots: list[int] = []
    for k in range(len(latest) - 2, -1, -1):
        latest[k] = min(latest[k], latest[k + 1])
    for k, last in enumerate(latest):
        wanted = last if depth == 0 else (0 if k < depth else uses[k - depth] + 1)
        slots.append(max(min(wanted, last), slots[-1] if slots else 0))
    return slots
