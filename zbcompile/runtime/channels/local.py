"""Channels inside one process: a message is handed over, not copied, when its receive is posted."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from torch import Tensor

from zbcompile.errors import PipelineError
from zbcompile.runtime.channels.channel import Key, Ticket, describe
from zbcompile.runtime.wire_format import WireFormat

__all__ = ["LocalChannels"]


class LocalChannels:
    """One rank's end, in a process that holds all ranks. ``connect(p)`` makes the ends of p ranks.

    As on a network without buffers, a send is done only when its receive is posted.
    """

    def __init__(self, rank: int, channels: dict[tuple[int, int], _Channel]) -> None:
        self.rank = rank
        self._channels = channels

    @staticmethod
    def connect(num_ranks: int) -> list[LocalChannels]:
        """Return one end per rank, joined with each other."""
        channels: dict[tuple[int, int], _Channel] = {}
        return [LocalChannels(rank, channels) for rank in range(num_ranks)]

    def post_send(
        self, peer: int, key: Key, wire_formats: Sequence[WireFormat], tensors: list[Tensor]
    ) -> Ticket:
        """Hand over the tensors; the receiver gets them with the strides that were compiled for."""
        moved = [form.unpack(form.pack(t)) for form, t in zip(wire_formats, tensors, strict=True)]
        ticket = _LocalTicket(key, peer, moved)
        channel = self._channel(self.rank, peer)
        channel.add(channel.sends, ticket)
        return ticket

    def post_recv(self, peer: int, key: Key, wire_formats: Sequence[WireFormat]) -> Ticket:
        """Post a receive; it is ready at once when its send is already posted."""
        ticket = _LocalTicket(key, peer, None)
        channel = self._channel(peer, self.rank)
        channel.add(channel.receives, ticket)
        return ticket

    def _channel(self, source: int, target: int) -> _Channel:
        return self._channels.setdefault((source, target), _Channel(source, target))


class _LocalTicket:
    """Ready once send and receive have met. The receive's ticket then holds the tensors."""

    __slots__ = ("_tensors", "done", "key", "peer")

    def __init__(self, key: Key, peer: int, tensors: list[Tensor] | None) -> None:
        self.key, self.peer, self._tensors, self.done = key, peer, tensors, False

    def ready(self) -> bool:
        return self.done

    def wait(self) -> None:
        if not self.done:
            raise PipelineError(f"{describe(self.key)} is not there and nobody else runs in this process")

    def tensors(self) -> list[Tensor]:
        tensors, self._tensors = self._tensors, None
        if tensors is None:
            raise PipelineError(f"{describe(self.key)} was taken twice or before it arrived")
        return tensors

    def meet(self, send: _LocalTicket) -> None:
        """Take over the tensors of the send."""
        self._tensors, send._tensors = send._tensors, None
        self.done = send.done = True


class _Channel:
    """Posted sends and receives from one rank to another; at most one of the two queues is not empty."""

    def __init__(self, source: int, target: int) -> None:
        self.source, self.target = source, target
        self.sends: deque[_LocalTicket] = deque()
        self.receives: deque[_LocalTicket] = deque()

    def add(self, side: deque[_LocalTicket], ticket: _LocalTicket) -> None:
        """Queue a ticket and match what can be matched. Raises `PipelineError` if two messages differ."""
        side.append(ticket)
        while self.sends and self.receives:
            send, receive = self.sends.popleft(), self.receives.popleft()
            if send.key != receive.key:
                raise PipelineError(
                    f"messages mixed up: {describe(send.key)} meets the receive of {describe(receive.key)}",
                    where=f"channel from rank {self.source} to rank {self.target}",
                    fix="post the receives in the order of the sends; `zbcompile check` finds the first",
                )
            receive.meet(send)
