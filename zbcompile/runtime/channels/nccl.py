"""Channels over NCCL: one communicator and one CUDA stream per directed pair of ranks.

The host never waits: a send's stream waits for an event after the action that made the tensor; the compute
stream waits for the receive just before the action that uses it. A communicator is a serial queue, so each
direction of each pair has its own, and no message waits behind one that it has nothing to do with.
A posted receive occupies the GPU until its message comes; the program posts it no earlier than it must.

Written against the documentation; not yet run on GPU (docs/limits.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from zbcompile.runtime.channels.channel import Key, Ticket
from zbcompile.runtime.group import PipelineGroup
from zbcompile.runtime.spec import PipelineSpec
from zbcompile.runtime.wire_format import WireFormat

__all__ = ["NcclChannels", "StreamChannel", "Transfer", "directed_pairs"]


def directed_pairs(spec: PipelineSpec) -> list[tuple[int, int]]:
    """Return every (source rank, target rank) that exchanges messages, tied parameters included, in order."""
    rank_of = spec.placement.rank_of
    pairs = {(rank_of[source], rank_of[target]) for _, source, target in spec.wire_formats}
    for stages in spec.tied.values():
        ranks = {rank_of[s] for s in stages}
        pairs |= {(a, b) for a in ranks for b in ranks}
    return sorted(pair for pair in pairs if pair[0] != pair[1])


class Transfer(Protocol):
    """What a communicator returns for one tensor."""

    def wait(self) -> object: ...
    def is_completed(self) -> bool: ...


class Communicator(Protocol):
    """The part of a process group that a channel uses."""

    def send(self, tensors: list[Tensor], other: int, tag: int, /) -> Transfer: ...
    def recv(self, tensors: list[Tensor], other: int, tag: int, /) -> Transfer: ...
    def abort(self) -> None: ...


class StreamChannel:
    """A communicator and its stream on this rank's device; ``other`` is the peer's rank in it."""

    def __init__(
        self,
        group: Communicator,
        is_source: bool,
        other: int,
        device: torch.device,
        stream: torch.cuda.Stream,
    ) -> None:
        self.group, self.is_source, self.other = group, is_source, other
        self.device, self.stream = device, stream

    def start(self, flats: list[Tensor]) -> list[Transfer]:
        """Queue the transfers behind what the compute stream has queued so far."""
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        works: list[Transfer] = []
        with torch.cuda.stream(self.stream):
            for flat in flats:
                if flat.numel() == 0:
                    continue
                flat.record_stream(self.stream)
                call = self.group.send if self.is_source else self.group.recv
                # As bytes: NCCL does not know every dtype.
                works.append(call([flat.view(-1).view(torch.uint8)], self.other, 0))
        return works


class _NcclTicket:
    __slots__ = ("_channel", "_flats", "_wire_formats", "_works", "key", "peer")

    def __init__(
        self,
        key: Key,
        peer: int,
        channel: StreamChannel,
        flats: list[Tensor],
        wire_formats: Sequence[WireFormat],
    ) -> None:
        self.key, self.peer, self._channel = key, peer, channel
        self._wire_formats, self._flats = wire_formats, flats
        self._works = channel.start(flats)

    def ready(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def wait(self) -> None:
        """Make the compute stream wait for a receive. The memory of a send is guarded by `record_stream`."""
        if not self._channel.is_source:
            for work in self._works:
                work.wait()

    def tensors(self) -> list[Tensor]:
        flats, self._flats = self._flats, []
        current = torch.cuda.current_stream(self._channel.device)
        for flat in flats:
            flat.record_stream(current)
        return [form.unpack(flat) for form, flat in zip(self._wire_formats, flats, strict=True)]


class NcclChannels:
    """One rank's end of its channels over NCCL.

    Communicators are made and warmed up in the constructor, in the same order on all ranks.
    """

    def __init__(self, group: PipelineGroup, spec: PipelineSpec, device: torch.device) -> None:
        self._rank, self._ranks = group.pipeline_rank, group.pipeline
        self._channels: dict[tuple[int, int], StreamChannel] = {}
        self._open: list[_NcclTicket] = []
        if spec.one_communicator:
            self._share_one(group, spec, device)
            return
        for source, target in directed_pairs(spec):
            pair = group.new_pair("nccl", source, target)
            if pair is not None:
                peer = target if self._rank == source else source
                stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
                channel = StreamChannel(pair, self._rank == source, int(peer > self._rank), device, stream)
                channel.start([torch.zeros(1, dtype=torch.uint8, device=device)])
                self._channels[source, target] = channel
        torch.cuda.synchronize(device)

    def _share_one(self, group: PipelineGroup, spec: PipelineSpec, device: torch.device) -> None:
        """The fallback: all channels are one communicator and one stream."""
        everyone = group.new_pipeline_group("nccl")
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        for source, target in directed_pairs(spec):
            if self._rank in (source, target):
                peer = target if self._rank == source else source
                self._channels[source, target] = StreamChannel(
                    everyone, self._rank == source, peer, device, stream
                )

    def post_send(
        self, peer: int, key: Key, wire_formats: Sequence[WireFormat], tensors: list[Tensor]
    ) -> Ticket:
        """Queue a send; the tensors' memory is not reused before it is done."""
        flats = [form.pack(tensor) for form, tensor in zip(wire_formats, tensors, strict=True)]
        return self._post(key, peer, self._channels[self._rank, peer], flats, wire_formats)

    def post_recv(self, peer: int, key: Key, wire_formats: Sequence[WireFormat]) -> Ticket:
        """Queue a receive into fresh memory."""
        flats = [form.buffer() for form in wire_formats]
        return self._post(key, peer, self._channels[peer, self._rank], flats, wire_formats)

    def abandon(self) -> None:
        """Abort every communicator: kernels that wait on this rank and its peers end with an error."""
        for channel in self._channels.values():
            channel.group.abort()

    def close(self) -> None:
        """Abort every communicator, which nobody waits for any more."""
        self.abandon()
        self._open = []

    def _post(
        self,
        key: Key,
        peer: int,
        channel: StreamChannel,
        flats: list[Tensor],
        wire_formats: Sequence[WireFormat],
    ) -> Ticket:
        """Queue a transfer, and let go of those that are done and of their memory."""
        ticket = _NcclTicket(key, self._ranks[peer], channel, flats, wire_formats)
        self._open = [other for other in self._open if not other.ready()]
        self._open.append(ticket)
        return ticket
