"""Messages over gloo: one process group for the pipeline, a first-in-first-out channel per directed pair.

A send is a rendezvous at every size and keeps its tensor until the peer has received it; a receive is posted
with its buffer. gloo matches by sender and tag, so the two directions of a pair never mix.

gloo copies the payload inside the call that sends. Large messages are therefore sent by a thread of the
transport, so that the rank computes meanwhile; they have a tag of their own, because they may be overtaken
by small ones of the same channel.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from zbcompile.runtime.channels.channel import Key, Ticket, describe
from zbcompile.runtime.group import PipelineGroup
from zbcompile.runtime.wire_format import WireFormat

__all__ = ["BrokenChannelError", "GlooChannels"]

_SMALL, _LARGE = 0, 1
_LARGE_BYTES = 256 << 10


class BrokenChannelError(Exception):
    """The connection to a rank broke while a message was awaited."""

    def __init__(self, peer: int, key: Key, cause: Exception) -> None:
        self.peer, self.key = peer, key
        super().__init__(f"{describe(key)}: {cause}")


class _GlooTicket:
    __slots__ = ("_buffers", "_layouts", "_open", "_works", "key", "peer")

    def __init__(
        self,
        key: Key,
        peer: int,
        works: list[Any],
        buffers: list[Tensor],
        layouts: Sequence[WireFormat],
        open_tickets: dict[int, _GlooTicket],
    ) -> None:
        self.key, self.peer, self._works = key, peer, works
        self._buffers, self._layouts, self._open = buffers, layouts, open_tickets
        open_tickets[id(self)] = self

    def ready(self) -> bool:
        return not self._works

    def wait(self) -> None:
        works = self._works
        try:
            for work in works:
                work.wait()
        except (RuntimeError, CancelledError) as error:
            raise BrokenChannelError(self.peer, self.key, error) from error
        self._works = []
        self._open.pop(id(self), None)

    def tensors(self) -> list[Tensor]:
        buffers, self._buffers = self._buffers, []
        return [layout.unpack(flat) for layout, flat in zip(self._layouts, buffers, strict=True)]

    def drop(self) -> None:
        """Forget the transfer, so that its connection can close."""
        self._works = []


def _is_large(layout: WireFormat) -> bool:
    return layout.num_bytes >= _LARGE_BYTES


class _SentByThread:
    """The work of a send that the transport's thread posts."""

    def __init__(self, posted: Future[Any]) -> None:
        self._posted = posted

    def wait(self) -> None:
        """Return when the peer has the message."""
        self._posted.result().wait()


class GlooChannels:
    """One rank's end. ``abandon`` closes its connections: peers that wait for this rank fail at once."""

    def __init__(self, group: PipelineGroup) -> None:
        self._process_group = group.new_group("gloo")
        self._open: dict[int, _GlooTicket] = {}
        self._sender = ThreadPoolExecutor(1, "zbcompile sender")

    def post_send(self, peer: int, key: Key, layouts: Sequence[WireFormat], tensors: list[Tensor]) -> Ticket:
        """One transfer per tensor that has elements; the ticket keeps their memory."""
        packed = [layout.pack(tensor) for layout, tensor in zip(layouts, tensors, strict=True)]
        send = self._process_group.send
        works: list[Any] = []
        for layout, message in zip(layouts, packed, strict=True):
            if _is_large(layout):
                works.append(_SentByThread(self._sender.submit(send, [message], peer, _LARGE)))
            elif layout.num_bytes:
                works.append(send([message], peer, _SMALL))
        return _GlooTicket(key, peer, works, packed, layouts, self._open)

    def post_recv(self, peer: int, key: Key, layouts: Sequence[WireFormat]) -> Ticket:
        """Buffers of the sizes that were compiled for."""
        buffers = [layout.buffer() for layout in layouts]
        receive = self._process_group.recv
        works = [
            receive([buffer], peer, _LARGE if _is_large(layout) else _SMALL)
            for layout, buffer in zip(layouts, buffers, strict=True)
            if layout.num_bytes
        ]
        return _GlooTicket(key, peer, works, buffers, layouts, self._open)

    def flush(self) -> None:
        """Transfers start when they are posted."""

    def abandon(self) -> None:
        """Close the connections. May be called from another thread; a wait of the main thread goes on
        until its peer has closed too."""
        self._sender.shutdown(wait=False, cancel_futures=True)
        for ticket in list(self._open.values()):
            ticket.drop()
        self._open.clear()
        group, self._process_group = self._process_group, None
        if group is not None:
            torch.distributed.destroy_process_group(group)
