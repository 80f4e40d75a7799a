"""Channels over gloo: one process group for the pipeline, a first-in-first-out channel per directed pair.

A send is a rendezvous at every size and keeps its tensor until the peer has received it; a receive is posted
with its buffer. gloo matches by sender and tag, so the two directions of a pair never mix.

gloo copies the payload inside the call that sends. Large messages are therefore sent by a thread of the
channels, so that the rank computes meanwhile; they have a tag of their own, because small messages of the
same channel may overtake them.

gloo sends host memory alone. What lies on a device is copied there before it is sent, and back when it is
used: slow, and the only way between two ranks on one GPU, which NCCL refuses.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Protocol

from torch import Tensor
from torch.distributed.distributed_c10d import ProcessGroup, Work

from zbcompile.runtime.channels.channel import Key, Ticket, describe
from zbcompile.runtime.connections import FOREVER, break_connections, leave_group
from zbcompile.runtime.group import PipelineGroup
from zbcompile.runtime.wire_format import WireFormat

__all__ = ["BrokenChannelError", "GlooChannels"]

_SMALL, _LARGE = 0, 1
"""Tags of messages by size."""

_LARGE_BYTES = 256 << 10


class BrokenChannelError(Exception):
    """The connection to a rank broke while a message was awaited.

    Attributes
    ----------
    peer
        The rank at the other end.
    key
        The message that was awaited.
    """

    def __init__(self, peer: int, key: Key, cause: Exception) -> None:
        self.peer, self.key = peer, key
        super().__init__(f"{describe(key)}: {cause}")


@contextlib.contextmanager
def _named(peer: int, key: Key) -> Iterator[None]:
    """Raise an error of the connection as one that names the message."""
    try:
        yield
    except (RuntimeError, CancelledError) as error:
        raise BrokenChannelError(peer, key, error) from error


class _Transfer(Protocol):
    """One tensor on its way."""

    def wait(self, timeout: timedelta, /) -> object:
        """Return when the transfer is done."""


class _SentByThread:
    """A transfer that the channels' thread starts."""

    def __init__(self, posted: Future[Work]) -> None:
        self._posted = posted

    def wait(self, timeout: timedelta, /) -> None:
        """Return when the peer has the message."""
        self._posted.result().wait(timeout)


class _GlooTicket:
    __slots__ = ("_buffers", "_open", "_transfers", "_wire_formats", "key", "peer")

    def __init__(
        self,
        key: Key,
        peer: int,
        transfers: list[_Transfer],
        buffers: list[Tensor],
        wire_formats: Sequence[WireFormat],
        open_tickets: dict[int, _GlooTicket],
    ) -> None:
        self.key, self.peer, self._transfers = key, peer, transfers
        self._buffers, self._wire_formats, self._open = buffers, wire_formats, open_tickets
        open_tickets[id(self)] = self

    def ready(self) -> bool:
        return not self._transfers

    def wait(self) -> None:
        with _named(self.peer, self.key):
            for transfer in self._transfers:
                transfer.wait(FOREVER)
        self._transfers = []
        self._open.pop(id(self), None)

    def tensors(self) -> list[Tensor]:
        buffers, self._buffers = self._buffers, []
        pairs = zip(self._wire_formats, buffers, strict=True)
        return [form.unpack(buffer.to(form.device)) for form, buffer in pairs]

    def drop(self) -> None:
        """Forget the transfers, so that their connection can close."""
        self._transfers = []


def _is_large(wire_format: WireFormat) -> bool:
    return wire_format.num_bytes >= _LARGE_BYTES


class GlooChannels:
    """One rank's end of its channels over gloo.

    Parameters
    ----------
    group
        The pipeline's ranks, all of which make their channels at the same time.
    """

    def __init__(self, group: PipelineGroup) -> None:
        self._ranks = group.pipeline
        self._process_group: ProcessGroup | None = group.new_pipeline_group("gloo")
        self._broken = False
        self._open: dict[int, _GlooTicket] = {}
        self._sender = ThreadPoolExecutor(1, "zbcompile sender")

    def post_send(
        self, peer: int, key: Key, wire_formats: Sequence[WireFormat], tensors: list[Tensor]
    ) -> Ticket:
        """Start one transfer per tensor that has elements; the ticket keeps their memory."""
        packed = [form.pack(tensor).cpu() for form, tensor in zip(wire_formats, tensors, strict=True)]
        with _named(self._ranks[peer], key):
            send = self._joined().send
            transfers: list[_Transfer] = []
            for form, message in zip(wire_formats, packed, strict=True):
                if _is_large(form):
                    transfers.append(_SentByThread(self._sender.submit(send, [message], peer, _LARGE)))
                elif form.num_bytes:
                    transfers.append(send([message], peer, _SMALL))
        return _GlooTicket(key, self._ranks[peer], transfers, packed, wire_formats, self._open)

    def post_recv(self, peer: int, key: Key, wire_formats: Sequence[WireFormat]) -> Ticket:
        """Receive into buffers of the sizes that were compiled for."""
        buffers = [form.buffer("cpu") for form in wire_formats]
        with _named(self._ranks[peer], key):
            receive = self._joined().recv
            transfers: list[_Transfer] = [
                receive([buffer], peer, _LARGE if _is_large(form) else _SMALL)
                for form, buffer in zip(wire_formats, buffers, strict=True)
                if form.num_bytes
            ]
        return _GlooTicket(key, self._ranks[peer], transfers, buffers, wire_formats, self._open)

    def abandon(self) -> None:
        """Break all connections: every wait on them ends with an error, on this rank and on its peers.

        May be called from any thread.
        """
        self._broken = True
        self._sender.shutdown(wait=False, cancel_futures=True)
        group = self._process_group
        if group is not None:
            break_connections(group)

    def close(self) -> None:
        """Leave the group. Called by the main thread, between two calls."""
        self._broken = True
        self._sender.shutdown(wait=False, cancel_futures=True)
        for ticket in list(self._open.values()):
            ticket.drop()
        self._open.clear()
        group, self._process_group = self._process_group, None
        if group is not None:
            leave_group(group)

    def _joined(self) -> ProcessGroup:
        group = self._process_group
        if self._broken or group is None:
            raise RuntimeError("the channels of this rank are closed")
        return group
