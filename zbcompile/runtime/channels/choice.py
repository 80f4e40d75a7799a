"""Which channels a rank gets: NCCL where every rank has a GPU of its own, else gloo."""

from __future__ import annotations

import warnings

import torch

from zbcompile.runtime.channels.gloo import GlooChannels
from zbcompile.runtime.channels.nccl import NcclChannels
from zbcompile.runtime.group import PipelineGroup
from zbcompile.runtime.spec import PipelineSpec

__all__ = ["make_channels", "sharing_ranks"]


def make_channels(
    group: PipelineGroup, spec: PipelineSpec, device: torch.device
) -> GlooChannels | NcclChannels:
    """Make the channels of this rank; all ranks come here in the same call.

    NCCL refuses two ranks on one GPU. There, messages go through the host's memory over gloo, which is slow:
    rank 0 warns and names the ranks.
    """
    if device.type != "cuda":
        return GlooChannels(group)
    shared = sharing_ranks(group.gather(_identity(device), "the devices"))
    if not shared:
        return NcclChannels(group, spec, device)
    if group.rank == 0:
        names = ", ".join(map(str, shared))
        warnings.warn(
            f"ranks {names} share a GPU: messages go through the host's memory over gloo, because NCCL "
            "needs a GPU for each rank",
            stacklevel=2,
        )
    return GlooChannels(group)


def sharing_ranks(devices: list[str]) -> list[int]:
    """Return the ranks whose device another rank has, too; ``devices`` has one name per rank."""
    return [rank for rank, name in enumerate(devices) if devices.count(name) > 1]


def _identity(device: torch.device) -> str:
    """Return what tells a GPU from all others, on any machine."""
    return str(torch.cuda.get_device_properties(device).uuid)
