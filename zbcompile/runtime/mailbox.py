"""The messages of one rank in one step: made, sent, awaited, taken.

A message is dropped when it is taken or sent, so that what is held is what was planned.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from zbcompile.errors import ShapeError
from zbcompile.runtime.channels.channel import Channels, MessageKey, Ticket, describe
from zbcompile.runtime.recorder import Recorder
from zbcompile.runtime.spec import PipelineSpec
from zbcompile.runtime.wait import Wait, Waits
from zbcompile.schedule.ir import Kind

__all__ = ["Mailbox"]


class _Sent(NamedTuple):
    """A posted send; ``posted_ns`` is when, on the monotonic clock."""

    key: MessageKey
    ticket: Ticket
    posted_ns: int


class Mailbox:
    """One rank's messages of a step, between stages of this rank and to and from other ranks.

    Parameters
    ----------
    rank
        The rank that the mailbox belongs to.
    spec
        The pipeline.
    channels
        The rank's end of its channels.
    recorder
        Notes when sends were posted and seen done.
    send_slots
        Messages that may be on their way per channel before a send waits; None: any number.
    """

    def __init__(
        self, rank: int, spec: PipelineSpec, channels: Channels, recorder: Recorder, send_slots: int | None
    ) -> None:
        self._rank, self._rank_of, self._wire_formats = rank, spec.placement.rank_of, spec.wire_formats
        self._channels, self._recorder, self._send_slots = channels, recorder, send_slots
        self._made: dict[MessageKey, list[Tensor]] = {}
        self._arriving: dict[MessageKey, Ticket] = {}
        self._sent: dict[int, deque[_Sent]] = {}
        self._unsettled: list[Ticket] = []
        self._unsettled_sends: list[Ticket] = []

    def put(self, key: MessageKey, tensors: list[Tensor]) -> None:
        """Keep a message that a stage of this rank has made until it is sent or taken."""
        self._made[key] = tensors

    def take(self, key: MessageKey, positions: Sequence[int], into: list[Tensor | None]) -> None:
        """Put the tensors of a message at ``positions`` of ``into``, added to what is there already."""
        ticket = self._arriving.pop(key, None)
        tensors = self._made.pop(key) if ticket is None else ticket.tensors()
        for position, tensor in zip(positions, tensors, strict=True):
            held = into[position]
            into[position] = tensor if held is None else held + tensor

    def awaited(
        self, backward: bool, sources: Sequence[tuple[int, Sequence[int]]], stage: int, microbatch: int
    ) -> list[Ticket]:
        """Return the tickets of what ``stage`` needs from other ranks; ``sources`` as in `StageTable`."""
        return [
            self._arriving[backward, source, stage, microbatch]
            for source, _ in sources
            if self._rank_of[source] != self._rank
        ]

    def post_recv(self, key: MessageKey) -> None:
        """Post the receive of a message."""
        ticket = self._channels.post_recv(self._rank_of[key[1]], key, self._wire_formats[key[:3]])
        self._arriving[key] = ticket
        self._unsettled.append(ticket)

    def send(self, key: MessageKey) -> Waits:
        """Post the send of a message; wait only while all send slots of the channel are taken."""
        backward, stage, target, microbatch = key
        peer = self._rank_of[target]
        sent = self._sent.setdefault(peer, deque())
        if self._send_slots is not None and len(sent) >= self._send_slots:
            yield Wait((sent[0].ticket,), _send_kind(key), stage, microbatch)
            self._note_done(sent.popleft())
        begin = time.perf_counter_ns()
        wire_formats = self._wire_formats[backward, stage, target]
        try:
            ticket = self._channels.post_send(peer, key, wire_formats, self._made.pop(key))
        except ShapeError as error:
            error.where = f"rank {self._rank}, {describe(key)}"
            raise
        sent.append(_Sent(key, ticket, begin))
        self._unsettled.append(ticket)
        self._unsettled_sends.append(ticket)

    def settle(self, under_way: int = 0) -> Waits:
        """Wait until all unsettled sends and receives have arrived, but for the newest ``under_way``."""
        due = max(0, len(self._unsettled) - under_way)
        tickets, self._unsettled, self._unsettled_sends = self._unsettled[:due], self._unsettled[due:], []
        yield Wait(tickets)

    def settle_sends(self, under_way: int = 0) -> Waits:
        """Wait until all unsettled sends have arrived, but for the newest ``under_way``."""
        due = max(0, len(self._unsettled_sends) - under_way)
        sends, self._unsettled = self._unsettled_sends, []
        self._unsettled_sends = sends[due:]
        yield Wait(sends[:due])

    def wait_sent(self) -> Waits:
        """Wait until every send of this rank has arrived."""
        for sent in self._sent.values():
            while sent:
                yield Wait((sent[0].ticket,))
                self._note_done(sent.popleft())

    def leftovers(self) -> list[MessageKey]:
        """Return the messages that nobody has taken or sent."""
        return [*self._made, *self._arriving]

    def _note_done(self, sent: _Sent) -> None:
        _, stage, target, microbatch = sent.key
        end = time.perf_counter_ns()
        self._recorder.note(_send_kind(sent.key), stage, microbatch, target, sent.posted_ns, end)


def _send_kind(key: MessageKey) -> Kind:
    return Kind.SEND_B if key[0] else Kind.SEND_F
