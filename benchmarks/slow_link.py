"""A slow link between two ranks: channels over gloo whose messages between them leave late."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from torch import Tensor
from torch.distributed.distributed_c10d import Work

from zbcompile.runtime import distributed_runner
from zbcompile.runtime.channels import gloo
from zbcompile.runtime.channels.channel import Key, Ticket
from zbcompile.runtime.channels.gloo import GlooChannels
from zbcompile.runtime.group import PipelineGroup
from zbcompile.runtime.wire_format import WireFormat

__all__ = ["slow_down"]


def slow_down(one: int, other: int, delay_s: float) -> None:
    """Let every message between two ranks take longer by ``delay_s`` in channels that this process makes.

    Messages do not wait for each other: each leaves ``delay_s`` after it was posted, in order.
    """
    pair = {one, other}

    class SlowChannels(GlooChannels):
        def __init__(self, group: PipelineGroup) -> None:
            super().__init__(group)
            self._rank = group.rank
            self._late = ThreadPoolExecutor(1, "slow link")

        def post_send(
            self, peer: int, key: Key, wire_formats: Sequence[WireFormat], tensors: list[Tensor]
        ) -> Ticket:
            if {self._rank, peer} != pair:
                return super().post_send(peer, key, wire_formats, tensors)
            packed = [form.pack(tensor) for form, tensor in zip(wire_formats, tensors, strict=True)]
            due = time.monotonic() + delay_s
            transfers: list[gloo._Transfer] = [
                gloo._SentByThread(self._late.submit(self._send, due, message, peer, gloo._is_large(form)))
                for form, message in zip(wire_formats, packed, strict=True)
                if form.num_bytes
            ]
            return gloo._GlooTicket(key, peer, transfers, packed, wire_formats, self._open)

        def _send(self, due: float, message: Tensor, peer: int, large: bool) -> Work:
            time.sleep(max(0.0, due - time.monotonic()))
            return self._joined().send([message], peer, gloo._LARGE if large else gloo._SMALL)

        def close(self) -> None:
            self._late.shutdown(wait=True)
            super().close()

    distributed_runner.GlooChannels = SlowChannels  # type: ignore[misc]
