"""A profile from a step that ran: real durations of every action and real times of every link.

``Measured step + its order and problem --> Profile``. No torch is loaded. A time of a stage is the median
over the microbatches. The time of a link is that from the post of a send to the start of the action that
waited for the message: a rank that did nothing else meanwhile started when the message came. A link for which
nobody waited is as planned, or as fast as its messages show that it must be.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from zbcompile.errors import UsageError
from zbcompile.formats.measured_json import Measured
from zbcompile.schedule.costs import Link, Profile, StageCost
from zbcompile.schedule.ir import Action, Kind, Schedule
from zbcompile.schedule.microbatches import MILLION
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.spread import unsteady

__all__ = ["profile_of"]

_F, _B, _W, _BW = Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT, Kind.FULL_BACKWARD
_Row = Sequence[tuple[Action, int, int]]

_SHORTEST_WAIT_NS = 50_000
"""Pauses up to this are never taken for a wait."""


@dataclass(frozen=True)
class _Start:
    """A compute action as it began.

    Attributes
    ----------
    action, start
        What began when, in ns.
    pause
        How long its rank had been free for it, in ns; None for the rank's first action.
    """

    action: Action
    start: int
    pause: int | None


@dataclass(frozen=True)
class _Message:
    """A message from another rank, at the action that took it.

    Attributes
    ----------
    link
        Source rank and target rank.
    took
        From its post to the start of the action, in ns, without the time for its size.
    pause
        Of the action that took it, if it took no other message: how much of ``took`` its rank was free.
    """

    link: tuple[int, int]
    took: int
    pause: int | None


def profile_of(measured: Measured, schedule: Schedule, problem: Problem, *, links: bool) -> Profile:
    """Return the costs of a step that ran; bytes and edges are those of the problem.

    Parameters
    ----------
    measured
        The step.
    schedule, problem
        Its order, and what that was planned for.
    links
        Whether the ranks ran beside each other, so that links can be measured, too.

    Raises
    ------
    UsageError
        The step is not a whole one of this order.
    """
    _check_whole(measured, schedule)
    starts = [list(_starts(row)) for row in measured.ranks]
    host = _median([s.pause for row in starts for s in row if s.pause is not None], 0)
    measured_links: dict[tuple[int, int], Link] = {}
    if links:
        messages = _messages(measured, starts, problem)
        measured_links = _links(messages, max(_SHORTEST_WAIT_NS, 2 * host), problem.profile)
    times = _times(measured, problem)
    stages = enumerate(problem.profile.stages)
    return replace(
        problem.profile,
        stages=tuple(_stage(cost, times, s) for s, cost in stages),
        links=tuple(sorted((dict(problem.profile.links) | measured_links).items(), key=lambda item: item[0])),
        overhead_ns=host,
        source=f"{measured.source}: a step that ran",
        unsteady=unsteady({(f"stage {s}", kind.letter): row for (kind, s), row in times.items()}),
    )


def _check_whole(measured: Measured, schedule: Schedule) -> None:
    for rank, row in enumerate(schedule.compute_only().order):
        ran = {a for a, _, _ in measured.ranks[rank]} if rank < len(measured.ranks) else set()
        missing = next((a for a in row if a not in ran), None)
        if missing is not None:
            raise UsageError(
                "no step of the present order has been measured",
                where=f"rank {rank}",
                needed=str(missing),
                fix="call it after a step whose whole batch has the size and shape of the example",
            )


def _times(measured: Measured, problem: Problem) -> dict[tuple[Kind, int], list[int]]:
    """Return the times by kind and stage, without the factors of microbatches that differ."""
    times: dict[tuple[Kind, int], list[int]] = {}
    costs = problem.microbatch_costs
    for row in measured.ranks:
        for action, start, end in row:
            if action.kind.is_compute:
                factor = costs[action.microbatch].time_of(action.stage) if costs else MILLION
                if factor:
                    plain = (end - start) * MILLION // factor
                    times.setdefault((action.kind, action.stage), []).append(plain)
    return times


def _stage(cost: StageCost, times: Mapping[tuple[Kind, int], Sequence[int]], stage: int) -> StageCost:
    """Return a stage's cost with the medians of its times.

    A kind that never ran keeps its ratio to those that did.
    """
    old = {
        _F: cost.forward_ns,
        _B: cost.backward_input_ns,
        _W: cost.backward_weight_ns,
        _BW: cost.full_backward_ns,
    }
    now = {kind: _median(times[kind, stage], 0) if (kind, stage) in times else None for kind in old}
    ran = [kind for kind in (_B, _W, _BW) if now[kind] is not None]
    before = sum(old[kind] for kind in ran)
    after = sum(value for kind in ran if (value := now[kind]) is not None)

    def time(kind: Kind) -> int:
        value = now[kind]
        if value is not None:
            return value
        return old[kind] * after // before if ran and before and kind is not _F else old[kind]

    return replace(
        cost,
        forward_ns=time(_F),
        backward_input_ns=time(_B),
        backward_weight_ns=time(_W),
        full_backward_ns=time(_BW),
    )


def _links(messages: Sequence[_Message], shortest: int, profile: Profile) -> dict[tuple[int, int], Link]:
    """Return the links that messages went over, by (source rank, target rank).

    Parameters
    ----------
    shortest
        Pauses from this on are waits, in ns; shorter ones are the host's.
    """
    by_link: dict[tuple[int, int], list[_Message]] = {}
    for message in messages:
        by_link.setdefault(message.link, []).append(message)
    return {pair: _link(profile.link_between(*pair), found, shortest) for pair, found in by_link.items()}


def _link(old: Link, messages: Sequence[_Message], shortest: int) -> Link:
    """Return a link's latency: the median of the messages that were waited for.

    No message was faster than the fastest. So a rank that was free for one earlier than that waited for it.
    """
    fastest = min(m.took for m in messages)
    waited = [
        m.took for m in messages if m.pause is not None and m.pause > shortest and m.took - m.pause < fastest
    ]
    latency = _median(waited, min(old.latency_ns, fastest))
    return replace(old, latency_ns=max(0, latency))


def _messages(measured: Measured, starts: Sequence[Sequence[_Start]], problem: Problem) -> list[_Message]:
    profile, rank_of = problem.profile, problem.placement.rank_of
    sizes = {(e.source, e.target): (e.forward_bytes, e.backward_bytes) for e in profile.edges}
    posted = _posted(measured)
    found = []
    for rank, row in enumerate(starts):
        for begun in row:
            action, sources = begun.action, _sources(begun.action, problem)
            for backward, source in sources:
                pair = (rank_of[source], rank)
                edge = (action.stage, source) if backward else (source, action.stage)
                link = profile.link_between(*pair)
                by_size = link.transfer_ns(sizes[edge][backward]) - link.latency_ns
                left = posted[backward, source, action.microbatch, action.stage]
                alone = begun.pause if len(sources) == 1 else None
                found.append(_Message(pair, begun.start - left - by_size, alone))
    return found


def _starts(row: _Row) -> Iterator[_Start]:
    """Yield how the compute actions of a rank began.

    The rank was free for one when the action before had ended and the sends in between were posted (a send
    waits for a slot).
    """
    sends = sorted(start for a, start, _ in row if a.kind.is_message)
    free: int | None = None
    for action, start, end in sorted((e for e in row if e[0].kind.is_compute), key=lambda e: e[1]):
        pause = None
        if free is not None:
            pause = start - max([free, *(s for s in sends if free < s < start)])
        yield _Start(action, start, pause)
        free = end


def _sources(action: Action, problem: Problem) -> list[tuple[bool, int]]:
    """Return the (backward, stage) on other ranks whose messages an action waits for."""
    rank_of = problem.placement.rank_of
    mine = rank_of[action.stage]
    if action.kind is _F:
        found = [(False, e.source) for e in problem.profile.edges if e.target == action.stage]
    elif action.kind in (_B, _BW):
        found = [
            (True, e.target) for e in problem.profile.edges if e.source == action.stage and e.has_gradient
        ]
    else:
        found = []
    return [(backward, stage) for backward, stage in found if rank_of[stage] != mine]


def _posted(measured: Measured) -> dict[tuple[bool, int, int, int], int]:
    """Return when each message left: (backward, its stage, microbatch, target stage) -> ns."""
    return {
        (action.kind is Kind.SEND_B, action.stage, action.microbatch, action.peer): start
        for row in measured.ranks
        for action, start, _ in row
        if action.kind in (Kind.SEND_F, Kind.SEND_B) and action.peer is not None
    }


def _median(values: Sequence[int], otherwise: int) -> int:
    return int(statistics.median(values)) if values else otherwise
