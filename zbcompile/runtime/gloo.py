"""Messages over gloo: one process group for the pipeline, a first-in-first-out channel per directed pair.

A send is a rendezvous at every size and keeps its tensor until the peer has received it; a receive is posted
with its buffer. gloo matches by sender and tag, so the two directions of a pair never mix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zbcompile.runtime.group import PipelineGroup
from zbcompile.runtime.layout import Layout
from zbcompile.runtime.transport import Key, Ticket, describe

__all__ = ["BrokenChannelError", "GlooTransport"]

_TAG = 0


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
        layouts: Sequence[Layout],
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
        except RuntimeError as error:
            raise BrokenChannelError(self.peer, self.key, error) from error
        self._works = []
        self._open.pop(id(self), None)

    def tensors(self) -> list[Tensor]:
        buffers, self._buffers = self._buffers, []
        return [layout.from_bytes(flat) for layout, flat in zip(self._layouts, buffers, strict=True)]

    def drop(self) -> None:
        """Forget the transfer, so that its connection can close."""
        self._works = []


class GlooTransport:
    """One rank's end. ``abandon`` closes its connections: peers that wait for this rank fail at once."""

    def __init__(self, group: PipelineGroup) -> None:
        self._process_group = group.new_group("gloo")
        self._open: dict[int, _GlooTicket] = {}

    def post_send(self, peer: int, key: Key, layouts: Sequence[Layout], tensors: list[Tensor]) -> Ticket:
        """One transfer per tensor that has elements; the ticket keeps their memory."""
        flats = [layout.as_bytes(tensor) for layout, tensor in zip(layouts, tensors, strict=True)]
        send = self._process_group.send
        works = [send([flat], peer, _TAG) for flat in flats if flat.numel()]
        return _GlooTicket(key, peer, works, flats, layouts, self._open)

    def post_recv(self, peer: int, key: Key, layouts: Sequence[Layout]) -> Ticket:
        """Buffers of the sizes that were compiled for."""
        flats = [torch.empty(layout.num_bytes, dtype=torch.uint8) for layout in layouts]
        receive = self._process_group.recv
        works = [receive([flat], peer, _TAG) for flat in flats if flat.numel()]
        return _GlooTicket(key, peer, works, flats, layouts, self._open)

    def flush(self) -> None:
        """Transfers start when they are posted."""

    def abandon(self) -> None:
        """Close the connections. May be called from another thread; a wait of the main thread goes on
        until its peer has closed too."""
        for ticket in list(self._open.values()):
            ticket.drop()
        self._open.clear()
        group, self._process_group = self._process_group, None
        if group is not None:
            torch.distributed.destroy_process_group(group)
