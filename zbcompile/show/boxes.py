"""What the lanes of a rank are made of: its work, the time that sends hold it, its messages, its memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from zbcompile.formats.measured_json import Measured
from zbcompile.schedule.ir import Action, Kind
from zbcompile.schedule.messages import Message, messages_of
from zbcompile.schedule.simulate import Timeline
from zbcompile.show.lanes import Box, Transfer
from zbcompile.show.scale import Window

__all__ = ["has_messages", "held_times", "measured_boxes", "memory_steps", "planned_boxes", "transfers_of"]


def planned_boxes(
    timeline: Timeline,
    rank: int,
    windows: Sequence[Window],
    critical: frozenset[tuple[int, int]] = frozenset(),
    follow: int | None = None,
) -> list[Box]:
    """Return the compute actions of a rank and the times that sends hold it, in order of time.

    Parameters
    ----------
    windows
        The parts of the step that are drawn; what lies in none of them is left out.
    critical
        (rank, position) of the actions on the critical path.
    follow
        The microbatch that is not dimmed; None: all.
    """
    local, boxes = _local_stages(timeline, rank), list[Box]()
    parts = [(window.first_ns, window.last_ns) for window in windows]
    rows = zip(timeline.schedule.order[rank], timeline.start[rank], timeline.end[rank], strict=True)
    for k, (action, start, end) in enumerate(rows):
        if not action.kind.is_compute:
            continue
        for first, last in parts:
            if first < end and start < last:
                dim = follow is not None and follow != action.microbatch
                stage = local.get(action.stage, 0)
                boxes.append(Box(action, start, end, stage, len(local), (rank, k) in critical, dim))
                break
    held = [Box(send, start, end) for send, start, end in held_times(timeline, rank)]
    return sorted([*boxes, *held], key=lambda box: (box.start_ns, box.end_ns)) if held else boxes


def measured_boxes(timeline: Timeline, measured: Measured, rank: int, follow: int | None) -> list[Box]:
    """Return the compute actions of a rank as they ran, in order of time."""
    local = _local_stages(timeline, rank)
    return [
        Box(a, start, end, local.get(a.stage, 0), len(local), dim=follow not in (None, a.microbatch))
        for a, start, end in sorted(measured.ranks[rank], key=lambda event: event[1])
        if a.kind.is_compute
    ]


def _local_stages(timeline: Timeline, rank: int) -> dict[int, int]:
    """Return the index of each stage among those of its rank; an action may stand on another rank."""
    return {s: k for k, s in enumerate(timeline.problem.placement.stages_of(rank))}


def held_times(timeline: Timeline, rank: int) -> Iterator[tuple[Action, int, int]]:
    """Yield (post, start, end) of the times in ns in which messages of others keep a rank from computing.

    Between two compute actions that is from the end of the first until the last of the messages has arrived
    that the rank waits for there, other than those that the second computes with: its sends, and in an
    exchange receives for later. What is left until the second begins is bubble.
    """
    mode = timeline.problem.sends
    if not mode.holds_rank:
        return
    free, open_posts, due = 0, list[int](), list[int]()
    row, starts, ends = timeline.schedule.order[rank], timeline.start[rank], timeline.end[rank]
    for k, action in enumerate(row):
        if open_posts and action.kind in mode.waits_before:
            settled, open_posts = mode.due(open_posts)
            due += settled
        if action.kind in mode.awaited:
            open_posts.append(k)
        if not action.kind.is_compute:
            continue
        due = [post for post in due if not _brings(row[post], action)]
        if due:
            last = max(due, key=lambda post: ends[post])
            end = min(ends[last], starts[k])
            if end > free:
                yield row[last], free, end
        free, due = ends[k], []


def _brings(post: Action, action: Action) -> bool:
    """Return whether a post receives what an action computes with."""
    kinds = (Kind.FORWARD,) if post.kind is Kind.RECV_F else (Kind.BACKWARD_INPUT, Kind.FULL_BACKWARD)
    same = (post.stage, post.microbatch) == (action.stage, action.microbatch)
    return post.kind.is_recv and same and action.kind in kinds


def memory_steps(timeline: Timeline, rank: int) -> list[tuple[int, int]]:
    """Return (time in ns, bytes held from then on) of a rank, in order of time."""
    return [
        (
            timeline.start[rank][k] if a.kind is Kind.FORWARD else timeline.end[rank][k],
            timeline.memory[rank][k],
        )
        for k, a in enumerate(timeline.schedule.order[rank])
        if a.kind.is_compute
    ]


def transfers_of(timeline: Timeline, follow: int | None = None) -> list[list[tuple[Message, Transfer]]]:
    """Return per rank the messages that it sends, with their times; those of one microbatch if asked for."""
    if not has_messages(timeline):
        return [[] for _ in timeline.schedule.order]
    problem, times = timeline.problem, _times(timeline)
    found: list[list[tuple[Message, Transfer]]] = [[] for _ in range(problem.num_ranks)]
    for edge, message in messages_of(problem):
        if follow not in (None, message.microbatch):
            continue
        if message.send in times:
            start, end = times[message.send]
        else:
            lag = problem.lag_ns(problem.edge_of(edge, message.microbatch), backward=message.backward)
            ready = _ready(message, times)
            if lag == 0 or ready is None:
                continue
            start, end = ready, ready + lag
        rank = problem.placement.rank_of[message.source]
        found[rank].append((message, Transfer(message.backward, start, end)))
    return found


def has_messages(timeline: Timeline) -> bool:
    """Return whether a message of an order takes time, or is sent by an action of its own."""
    problem = timeline.problem
    return timeline.schedule.has_communication or any(
        problem.lag_ns(edge, backward=backward)
        for edge in problem.profile.edges
        for backward in (False, edge.has_gradient)
    )


def _times(timeline: Timeline) -> dict[Action, tuple[int, int]]:
    """Return start and end of every action."""
    return {a: (timeline.start[r][k], timeline.end[r][k]) for r, k, a in timeline.schedule.actions()}


def _ready(message: Message, times: Mapping[Action, tuple[int, int]]) -> int | None:
    """Return when the action that makes a message ends, or None where the order lacks it."""
    kinds = (Kind.BACKWARD_INPUT, Kind.FULL_BACKWARD) if message.backward else (Kind.FORWARD,)
    made_by = (Action(kind, message.source, message.microbatch) for kind in kinds)
    return next((times[a][1] for a in made_by if a in times), None)
