"""Whether messages of the NCCL channels travel while the GPU computes, with streams and events as in a step.

The channel is the runtime's own. In place of NCCL, whose two ends need two GPUs, a group of this process
copies what is sent to the host, and back from there what is received.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from zbcompile.runtime.channels.nccl import StreamChannel, Transfer
from zbcompile.selftest.machine import device_of, timed_ns
from zbcompile.selftest.settings import Found, Settings

__all__ = ["copies_and_compute"]

_LEAST = 0.5
"""Share of the shorter of copies and compute that has to be hidden."""


class _Copied:
    """A transfer on the stream that was current when it was posted."""

    def __init__(self) -> None:
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._done.record()

    def wait(self) -> None:
        self._done.wait()

    def is_completed(self) -> bool:
        return bool(self._done.query())  # type: ignore[no-untyped-call]


class HostLoop:
    """A group whose other end is this process: messages go to pinned host memory and come back from there."""

    def __init__(self) -> None:
        self._under_way: deque[Tensor] = deque()

    def send(self, tensors: list[Tensor], other: int, tag: int) -> _Copied:
        """Copy a message to the host, on the current stream."""
        held = torch.empty(tensors[0].shape, dtype=tensors[0].dtype, pin_memory=True)
        held.copy_(tensors[0], non_blocking=True)
        self._under_way.append(held)
        return _Copied()

    def recv(self, tensors: list[Tensor], other: int, tag: int) -> _Copied:
        """Copy the oldest message back, on the current stream."""
        tensors[0].copy_(self._under_way.popleft(), non_blocking=True)
        return _Copied()

    def abort(self) -> None:
        """Forget what is under way."""
        self._under_way.clear()


def copies_and_compute(rank: int, settings: Settings) -> Found:
    """Time copies and matrix products alone and together, and compare what arrived with what was sent."""
    if settings.device != "cuda":
        return Found.skipped("not applicable: a CPU has no streams")
    found, device = Found(), device_of(settings.device)
    side = 4096 if settings.size == "full" else 64
    a = torch.randn(side, side, device=device, dtype=getattr(torch, settings.dtype))
    message = torch.arange(settings.copy_bytes // 4, device=device, dtype=torch.int32)
    group = HostLoop()
    outgoing, incoming = (
        StreamChannel(group, sends, 0, device, torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
        for sends in (True, False)
    )
    arrived = torch.empty_like(message)

    def compute() -> None:
        y = a
        for _ in range(settings.products):
            y = torch.mm(a, y)

    def post() -> list[Transfer]:
        made = message + 1  # by the compute stream, just before it is sent
        outgoing.start([made])
        incoming.stream.wait_stream(outgoing.stream)
        return incoming.start([arrived])

    def copies() -> None:
        for work in post():
            work.wait()

    def both() -> None:
        works = post()
        compute()
        for work in works:
            work.wait()

    for call in (compute, copies, both):
        call()
    alone, copied, together = (min(timed_ns(device, c) for _ in range(5)) for c in (compute, copies, both))
    hidden = (alone + copied - together) / min(alone, copied)
    found.figures |= {
        "compute alone: ns": alone,
        "copies alone: ns": copied,
        "together: ns": together,
        "share of the shorter one that is hidden": round(hidden, 4),
        "message: bytes": settings.copy_bytes,
    }
    arrived.zero_()
    both()
    if not torch.equal(arrived, message + 1):
        found.fail("what arrived differs from what was sent")
    if settings.size == "full" and hidden < _LEAST:
        found.fail(f"only {hidden:.0%} of the shorter of copies and compute is hidden")
    return found
