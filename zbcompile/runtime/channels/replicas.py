"""Sums of gradients over replicas: processes that run the same stages, with the same weights, on other rows.

Sums go through a communicator of their own, so that they wait for no message of the pipeline. Gradients of a
stage are put together in buckets, one dtype in each: one sum for many small tensors. gloo adds on threads of
its own, while the rank computes; with two replicas a sum is one addition, and has its bits.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import ProcessGroup, Work

from zbcompile.runtime.channels.channel import Key, ReducedKey
from zbcompile.runtime.channels.gloo import BrokenChannelError
from zbcompile.runtime.connections import FOREVER, break_connections, leave_group
from zbcompile.runtime.doing import ANY_RANK
from zbcompile.runtime.group import PipelineGroup
from zbcompile.runtime.wire_format import is_dense

__all__ = ["BUCKET_BYTES", "Reduced", "Replicas"]

BUCKET_BYTES = 25 << 20
"""The most that a bucket of several tensors holds. A tensor that is larger is summed where it is."""


class Replicas:
    """The replicas of a rank.

    Parameters
    ----------
    group
        All ranks; those that are replicas of each other come here at the same time.
    device
        Where gradients are.

    Attributes
    ----------
    count
        How many there are, this rank included.
    """

    def __init__(self, group: PipelineGroup, device: torch.device) -> None:
        self._is_gloo = device.type != "cuda"
        backend = "gloo" if self._is_gloo else "nccl"
        self._group: ProcessGroup | None = group.new_group(backend, group.replicas)
        self.count = len(group.replicas)
        self._next_peer = group.replicas[(group.replica + 1) % self.count]
        self._open: dict[Key, Reduced] = {}

    def start(self, key: ReducedKey, gradients: dict[str, Tensor]) -> Reduced:
        """Begin to sum gradients over the replicas, which all start the same sums in the same order.

        Parameters
        ----------
        key
            What is summed, in errors.
        gradients
            By name. They are replaced by tensors of the same form, which hold the sums when the ticket has
            been waited for.
        """
        works = [self._sum(_together(gradients, names)) for names in _buckets(gradients)]
        ticket = Reduced(key, self._next_peer, works, self._is_gloo, self._open)
        self._open[key] = ticket
        return ticket

    def _sum(self, flat: Tensor) -> Work:
        options = dist.AllreduceOptions()
        options.timeout = FOREVER  # the watchdog ends what lasts too long
        group = self._group
        if group is None:
            raise RuntimeError("the sums over replicas of this rank are closed")
        return group.allreduce([torch.view_as_real(flat) if flat.is_complex() else flat], options)

    def abandon(self) -> None:
        """Break all connections, from any thread: every wait for a sum ends with an error."""
        group = self._group
        if group is None:
            return
        if self._is_gloo:
            break_connections(group)
        else:
            group.abort()

    def close(self) -> None:
        """Leave the communicator. Called by the main thread, between two calls."""
        for ticket in self._open.values():
            ticket.drop()
        self._open.clear()
        group, self._group = self._group, None
        if group is not None:
            leave_group(group)


class Reduced:
    """Sums that were begun together.

    Attributes
    ----------
    begun_ns, ended_ns
        When they were begun, and when the last one was seen to be done, in ns of the monotonic clock.
    """

    def __init__(
        self,
        key: Key,
        peer: int,
        works: Sequence[Work],
        is_gloo: bool,
        open_tickets: dict[Key, Reduced],
    ) -> None:
        self.key, self.peer, self._works = key, peer, works
        self._is_gloo, self._open = is_gloo, open_tickets
        self.begun_ns = self.ended_ns = time.perf_counter_ns()
        if is_gloo:
            for work in works:
                work.get_future().add_done_callback(self._note_end)

    def _note_end(self, future: object) -> None:
        self.ended_ns = max(self.ended_ns, time.perf_counter_ns())

    def ready(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def wait(self) -> None:
        """Return when the sums are there; on a GPU, when all that is queued behind them will find them."""
        try:
            for work in self._works:
                if self._is_gloo:
                    work.wait(FOREVER)
                else:
                    work.wait()
        except RuntimeError as error:
            raise BrokenChannelError(ANY_RANK, self.key, error) from error
        if not self._is_gloo:
            self.ended_ns = time.perf_counter_ns()
        self.drop()
        self._open.pop(self.key, None)

    def tensors(self) -> list[Tensor]:
        return []

    def drop(self) -> None:
        """Forget the transfers, so that their connections can close."""
        self._works = ()


def _buckets(gradients: Mapping[str, Tensor]) -> Iterable[list[str]]:
    """Yield names of gradients of one dtype, together not larger than a bucket; larger ones by themselves."""
    filled: dict[torch.dtype, list[str]] = {}
    sizes: dict[torch.dtype, int] = {}
    for name, gradient in gradients.items():
        dtype, size = gradient.dtype, gradient.nbytes
        if size and sizes.get(dtype, 0) + size > BUCKET_BYTES and filled.get(dtype):
            yield filled.pop(dtype)
            sizes[dtype] = 0
        if size:
            filled.setdefault(dtype, []).append(name)
            sizes[dtype] = sizes.get(dtype, 0) + size
    yield from filled.values()


def _together(gradients: dict[str, Tensor], names: Sequence[str]) -> Tensor:
    """Return a flat tensor of gradients, which are replaced by parts of it."""
    first = gradients[names[0]]
    marked = first.is_conj() or first.is_neg()
    if len(names) == 1 and is_dense(first.shape, first.stride()) and not marked:
        return first.as_strided((first.numel(),), (1,))
    flat = first.new_empty(sum(gradients[name].numel() for name in names))
    begin = 0
    for name in names:
        old = gradients[name]
        part = flat[begin : begin + old.numel()]
        dense = is_dense(old.shape, old.stride())
        new = part.as_strided(old.shape, old.stride()) if dense else part.view(old.shape)
        gradients[name] = new.copy_(old)
        begin += old.numel()
    return flat
