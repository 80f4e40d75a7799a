"""Messages between ranks: what a transport offers, and the one that needs no processes.

A channel is a directed pair of ranks, first in, first out. A send or receive is posted and gives a `Ticket`;
nothing is waited for until somebody asks the ticket. The k-th send of a channel meets the k-th receive:
`zbcompile.schedule.check` has proved that both are the same message.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from zbcompile.errors import PipelineError
from zbcompile.runtime.wire_format import WireFormat

__all__ = ["Key", "LocalChannels", "Ticket", "Channels", "describe"]

Key = tuple[object, ...]
"""What a message is: (backward, source stage, target stage, microbatch), or ("tied", name, stage)."""


class Ticket(Protocol):
    """A posted send or receive."""

    key: Key
    peer: int

    def ready(self) -> bool:
        """Whether `wait` would return at once. Only asked in one process."""

    def wait(self) -> None:
        """Return when the message has arrived. Only called with one process per rank."""

    def tensors(self) -> list[Tensor]:
        """The arrived tensors, handed out once. Only for receives."""


class Channels(Protocol):
    """One rank's end of all its channels."""

    def post_send(self, peer: int, key: Key, layouts: Sequence[WireFormat], tensors: list[Tensor]) -> Ticket:
        """Hand a message to the transport, which keeps its tensors until it has arrived."""

    def post_recv(self, peer: int, key: Key, layouts: Sequence[WireFormat]) -> Ticket:
        """Make room for the channel's next message."""

    def flush(self) -> None:
        """Start what was only collected (transports that exchange in batches)."""


def describe(key: Key) -> str:
    """A message in words."""
    if key[0] == "tied":
        return f"stage {key[2]}'s gradient of the tied parameter {key[1]}"
    backward, source, target, microbatch = key
    what = "gradient" if backward else "activation"
    return f"the {what} of microbatch {microbatch} from stage {source} to stage {target}"


class _LocalTicket:
    """Ready once send and receive have met. The receive's side holds the tensors."""

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
        self._tensors, send._tensors = send._tensors, None
        self.done = send.done = True


class LocalChannels:
    """All ranks in one process: a message is handed over, not copied, when its receive is posted.

    ``LocalTransport.connect(p)`` makes the ends of p ranks. As on a network without buffers, a send is done
    only when its receive is posted.
    """

    def __init__(self, rank: int, channels: dict[tuple[int, int], _LocalChannel]) -> None:
        self.rank = rank
        self._channels = channels

    @staticmethod
    def connect(num_ranks: int) -> list[LocalChannels]:
        """One end per rank, joined."""
        channels: dict[tuple[int, int], _LocalChannel] = {}
        return [LocalChannels(rank, channels) for rank in range(num_ranks)]

    def post_send(self, peer: int, key: Key, layouts: Sequence[WireFormat], tensors: list[Tensor]) -> Ticket:
        """Hand over; what the receiver gets has the strides that were compiled for."""
        moved = [layout.unpack(layout.pack(t)) for layout, t in zip(layouts, tensors, strict=True)]
        ticket = _LocalTicket(key, peer, moved)
        self._channel(self.rank, peer).add(self._channel(self.rank, peer).sends, ticket)
        return ticket

    def post_recv(self, peer: int, key: Key, layouts: Sequence[WireFormat]) -> Ticket:
        """Post a receive; it is ready at once when its send is already there."""
        ticket = _LocalTicket(key, peer, None)
        self._channel(peer, self.rank).add(self._channel(peer, self.rank).receives, ticket)
        return ticket

    def flush(self) -> None:
        """Nothing is collected here."""

    def _channel(self, source: int, target: int) -> _LocalChannel:
        return self._channels.setdefault((source, target), _LocalChannel(source, target))


class _LocalChannel:
    def __init__(self, source: int, target: int) -> None:
        self.source, self.target = source, target
        self.sends: deque[_LocalTicket] = deque()
        self.receives: deque[_LocalTicket] = deque()

    def add(self, side: deque[_LocalTicket], ticket: _LocalTicket) -> None:
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
