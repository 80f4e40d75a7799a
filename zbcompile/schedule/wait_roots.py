"""Follows a wait back to its root: what was waited for, what made it, what that waited for, and so on.

A root is one of these::

    start    an action that begins with the step
    order    a rank that was busy with other work, which the order puts first
    room     a rank that had no room under its cap for an action, until another action ended
    held     a rank that a blocking send held
    receive  a message whose buffer was posted late
    channel  a message behind another one on its channel
    gather   the parameters of a sharded stage, which are gathered
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from zbcompile.schedule.ir import Action, Kind
from zbcompile.schedule.waits import Waits

__all__ = ["Link", "Stretch", "chain", "stretches"]


@dataclass(frozen=True, slots=True)
class Link:
    """One step back from a wait to its root.

    Attributes
    ----------
    kind
        ``made``: the action made what was waited for. The others are in the head of this file; of them
        ``room`` may be followed by more, the rest are roots.
    rank, action
        The action and where it runs: what made the value, began with the step, was put off, had no room.
    start_ns, end_ns
        When it ran.
    until
        ``room``: the action whose end makes room. ``held``, ``channel``: the send that is waited for.
    until_rank
        The rank of that action.
    until_ns
        When the wait is over; for ``made``, when the value arrives.
    first
        ``order``: what the rank runs before it, while its data is there. ``held``: what the receiver runs
        before it receives; empty where the message was on its way all the time.
    since_ns
        ``order``, ``room``: since when the rank has computed without a pause.
    """

    kind: str
    rank: int
    action: Action
    start_ns: int
    end_ns: int
    until: Action | None = None
    until_rank: int = 0
    until_ns: int = 0
    first: tuple[Action, ...] = ()
    since_ns: int = 0


@dataclass(frozen=True, slots=True)
class Stretch:
    """A part of the critical path on one rank: actions that follow each other without a pause."""

    rank: int
    start_ns: int
    end_ns: int
    first: Action
    last: Action


def chain(waits: Waits, rank: int, position: int) -> list[Link]:
    """Follow what an action waits for back to the root.

    Parameters
    ----------
    rank, position
        The compute action that ends a pause.

    Returns
    -------
    list of Link
        From what it waits for to the root; the last is the root.
    """
    node, links = waits.graph.node_of[rank][position], list[Link]()
    while True:
        reached, by = waits.reached(waits.before(node), node)
        if by is not None and reached > waits.ready[node]:
            return [*links, _held(waits, node, by, reached)]
        root, maker = _arrival(waits, node)
        links += root
        if maker is None:
            return links
        links.append(_link(waits, "made", maker, until_ns=waits.ready[node]))
        further, node = _why_then(waits, maker)
        links += further
        if node < 0:
            return links


def stretches(waits: Waits, places: Sequence[tuple[int, int]]) -> Iterator[Stretch]:
    """Join the actions of a path that follow each other on a rank without a pause.

    Parameters
    ----------
    places
        Rank and position of every action, as `zbcompile.schedule.critical_path` gives them.
    """
    nodes = [waits.graph.node_of[rank][position] for rank, position in places]
    first = nodes[0] if nodes else -1
    for node, after in pairwise([*nodes, -1]):
        if after < 0 or waits.rank_of(after) != waits.rank_of(node) or waits.start[after] > waits.end(node):
            rank = waits.rank_of(node)
            yield Stretch(rank, waits.start[first], waits.end(node), waits.action(first), waits.action(node))
            first = after


def _link(waits: Waits, kind: str, node: int, until_ns: int = 0) -> Link:
    return Link(
        kind, waits.rank_of(node), waits.action(node), waits.start[node], waits.end(node), until_ns=until_ns
    )


def _held(waits: Waits, node: int, transfer: int, until_ns: int) -> Link:
    """Say which message holds the rank of an action, and what its receiver runs first."""
    send = waits.graph.carried[transfer - waits.num_actions]
    assert send.peer is not None
    to = waits.problem.placement.rank_of[send.peer]
    posted, receive = waits.graph.positions.number(send), _receive(waits, send)
    link = replace(_link(waits, "held", node, until_ns), until=send, until_rank=to)
    if posted is None or receive is None or waits.start[receive] <= waits.start[posted]:
        return link
    busy = _last_compute(waits, receive)
    return link if busy < 0 else replace(link, first=(waits.action(busy),))


def _arrival(waits: Waits, node: int) -> tuple[list[Link], int | None]:
    """Return what kept the value that an action waits for, and what made it, if that is further back."""
    source = waits.source[node]
    if source < 0:
        return [_link(waits, "start", node)], None
    if source < waits.num_actions:
        if waits.graph.transfer_of[source] < 0:
            return [], source
        return [_link(waits, "receive", node, until_ns=waits.start[source])], None
    send = waits.graph.carried[source - waits.num_actions]
    if send.kind.is_of_stage:
        return [_link(waits, "gather", node, until_ns=waits.end(source))], None
    kind = Kind.FORWARD if send.kind is Kind.SEND_F else Kind.BACKWARD_INPUT
    positions, left = waits.graph.positions, waits.start[source]
    posted = positions.number(send)
    maker = positions.made(kind, send.stage)[send.microbatch]
    assert posted is not None
    if waits.start[posted] < left:
        behind = waits.behind.get(source)
        if behind is not None and _leaves(waits, behind, source) == left:
            other = waits.graph.carried[behind - waits.num_actions]
            link = _link(waits, "channel", node, left)
            return [replace(link, until=other, until_rank=waits.rank_of(maker))], None
        return [_link(waits, "receive", node, until_ns=left)], None
    if waits.start[posted] > waits.end(maker):
        reached, by = waits.reached(waits.before(posted), posted)
        if by is not None:
            return [_held(waits, maker, by, reached)], None
    return [], maker


def _leaves(waits: Waits, behind: int, transfer: int) -> int:
    """Return when a transfer lets the next one of its channel go."""
    return waits.start[behind] + max(w for n, w in waits.graph.successors[behind] if n == transfer)


def _why_then(waits: Waits, node: int) -> tuple[list[Link], int]:
    """Return why an action ran no sooner, and the action at which to go on; -1 at a root."""
    links = list[Link]()
    while True:
        begin, before, local = waits.start[node], waits.before(node), waits.local(node)
        if begin == 0:
            return [*links, _link(waits, "start", node)], -1
        if waits.ready[node] == begin:
            return links, node
        if local < 0 or waits.end(local) < begin:
            break
        links.append(_link(waits, "made", local, until_ns=begin))
        node = local
    reached, by = waits.reached(before, node)
    if by is not None:
        return [*links, _held(waits, node, by, reached)], -1
    since, cap = waits.needed(node), waits.problem.caps[waits.rank_of(node)]
    blocker = None if cap is None else waits.blocker(node, cap, since)
    if blocker is None:
        return [*links, _busy(waits, node, since)], -1
    room, rank = _link(waits, "room", node, waits.end(blocker)), waits.rank_of(node)
    since_ns = waits.start[_block(waits, node)]
    links.append(replace(room, until=waits.action(blocker), until_rank=rank, since_ns=since_ns))
    if blocker != before:
        return [*links, _busy(waits, node, waits.end(blocker))], -1
    return links, blocker if waits.start[blocker] > waits.free(waits.before(blocker)) else -1


def _busy(waits: Waits, node: int, since_ns: int) -> Link:
    """Say what a rank runs before an action that could run since some time."""
    row = waits.computes[waits.rank_of(node)]
    place = first = bisect_right(row, node) - 1
    while first and waits.end(row[first - 1]) > since_ns:
        first -= 1
    found = tuple(map(waits.action, row[first:place]))
    return replace(_link(waits, "order", node), first=found, since_ns=waits.start[_block(waits, node)])


def _block(waits: Waits, node: int) -> int:
    """Return the first of the actions that a rank runs up to one without a pause."""
    row = waits.computes[waits.rank_of(node)]
    place = bisect_right(row, node) - 1
    while place and waits.end(row[place - 1]) == waits.start[row[place]]:
        place -= 1
    return row[place]


def _receive(waits: Waits, send: Action) -> int | None:
    kind = Kind.RECV_F if send.kind is Kind.SEND_F else Kind.RECV_B
    assert send.peer is not None
    return waits.graph.positions.number(Action(kind, send.peer, send.microbatch, send.stage))


def _last_compute(waits: Waits, node: int) -> int:
    """Return the last compute action of a rank before a send or receive, or -1."""
    row = waits.computes[waits.rank_of(node)]
    place = bisect_right(row, node) - 1
    return row[place] if place >= 0 else -1
