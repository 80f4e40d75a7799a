"""The pauses of ranks with their reasons: what each waits for, to its root, and what else could run."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from zbcompile.errors import UsageError
from zbcompile.schedule.ir import Action, Kind
from zbcompile.schedule.wait_roots import Link, chain
from zbcompile.schedule.waits import Pause, Waits

__all__ = ["Bubble", "Moment", "Other", "longest_bubbles", "moments_at"]


@dataclass(frozen=True, slots=True)
class Other:
    """Why a rank does not run another action during a pause.

    Attributes
    ----------
    action
        The next F or B of a stage, or the first W that is due.
    count
        How many W's are due; 1 for F and B.
    why
        ``late`` (its data comes during the pause or after it), ``room`` (its bytes do not fit), ``long`` (it
        takes longer than the pause) or ``order`` (it could run).
    ready_ns, lacking_bytes
        For ``late`` and ``room``.
    """

    action: Action
    count: int
    why: str
    ready_ns: int = 0
    lacking_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Bubble:
    """A pause with its reasons: the action that ends it, the chain to its root, and what else could run."""

    pause: Pause
    before: Action
    chain: tuple[Link, ...]
    others: tuple[Other, ...]
    weights_left: bool


@dataclass(frozen=True, slots=True)
class Moment:
    """What a rank does at a time: it runs an action, or it pauses, or it is done (both None)."""

    rank: int
    running: tuple[Action, int, int] | None
    bubble: Bubble | None


def longest_bubbles(waits: Waits, ranks: Sequence[int], count: int) -> tuple[Bubble, ...]:
    """Return the longest pauses of some ranks, those before a rank's first action only for a makespan."""
    first = waits.problem.objective == "makespan"
    found = [
        pause
        for rank in ranks
        for pause in waits.pauses(rank)
        if first or pause.before != waits.graph.positions.position[waits.computes[rank][0]]
    ]
    best = heapq.nsmallest(count, found, key=lambda p: (p.start_ns - p.end_ns, p.start_ns, p.rank))
    return tuple(_bubble(waits, pause) for pause in best)


def _bubble(waits: Waits, pause: Pause) -> Bubble:
    action = waits.schedule.order[pause.rank][pause.before]
    others = tuple(_others(waits, pause))
    left = any(other.action.kind is Kind.BACKWARD_WEIGHT for other in others)
    return Bubble(pause, action, tuple(chain(waits, pause.rank, pause.before)), others, left)


def _others(waits: Waits, pause: Pause) -> Iterator[Other]:
    """Yield why the rank runs none of its later actions: the next F and B of every stage, and its W's."""
    after = waits.graph.node_of[pause.rank][pause.before]
    seen, due = {(waits.action(after).kind, waits.action(after).stage)}, list[int]()
    begin = pause.start_ns + pause.held_ns
    for node in waits.computes[pause.rank]:
        action = waits.action(node)
        key = (action.kind, action.stage)
        if node <= after:
            continue
        if action.kind is Kind.BACKWARD_WEIGHT:
            if waits.needed(node) <= begin:
                due.append(node)
        elif key not in seen:
            seen.add(key)
            yield _other(waits, pause, node, begin)
    if due:
        shortest = min(due, key=lambda node: waits.graph.duration[node])
        fits = waits.graph.duration[shortest] <= pause.idle_ns
        yield Other(waits.action(due[0]), len(due), "order" if fits else "long")


def _other(waits: Waits, pause: Pause, node: int, begin: int) -> Other:
    """Say why one later action is not run during a pause."""
    action, ready = waits.action(node), waits.needed(node)
    if ready > begin:
        return Other(action, 1, "late", ready_ns=ready)
    cap = waits.problem.caps[pause.rank]
    if cap is not None and action.kind is Kind.FORWARD:
        lacking = waits.lacking(node, pause.before, cap)
        if lacking > 0:
            return Other(action, 1, "room", ready, lacking)
    long = waits.graph.duration[node] > pause.idle_ns
    return Other(action, 1, "long" if long else "order", ready)


def _moment(waits: Waits, rank: int, at_ns: int) -> Moment:
    """Say what a rank does at a time."""
    for node in waits.computes[rank]:
        if waits.start[node] <= at_ns < waits.end(node):
            return Moment(rank, (waits.action(node), waits.start[node], waits.end(node)), None)
    for pause in waits.pauses(rank):
        if pause.start_ns <= at_ns < pause.end_ns:
            return Moment(rank, None, _bubble(waits, pause))
    return Moment(rank, None, None)


def moments_at(waits: Waits, ranks: Iterable[int], at_ns: int) -> tuple[Moment, ...]:
    """Say what some ranks do at a time.

    Raises
    ------
    UsageError
        The time lies outside the step.
    """
    last = waits.timeline.makespan_ns
    if not 0 <= at_ns < max(1, last):
        raise UsageError(
            "the step does not run at this time", needed=f"0 to {last - 1} ns", given=f"{at_ns} ns"
        )
    return tuple(_moment(waits, rank, at_ns) for rank in ranks)
