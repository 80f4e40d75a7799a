"""Gradients of tied parameters: summed over the stages that hold them, equal on all of their ranks."""

from __future__ import annotations

from collections.abc import Generator, Mapping

import torch
from torch import Tensor

from zbcompile.runtime.channels.channel import Channels, Ticket, TiedKey
from zbcompile.runtime.gradients import GradientSums, sum_dtype
from zbcompile.runtime.spec import PipelineSpec
from zbcompile.runtime.wait import Wait
from zbcompile.runtime.wire_format import WireFormat

__all__ = ["sum_tied"]


def sum_tied(
    spec: PipelineSpec, rank: int, sums: GradientSums, state: Mapping[str, Tensor], channels: Channels
) -> Generator[Wait, None, dict[str, Tensor]]:
    """Exchange the sums of tied parameters; every holder adds them up in the order of the stages.

    Parameters
    ----------
    spec
        The pipeline.
    rank
        This rank.
    sums
        Its own sums of the step; a stage without a gradient counts as zeros.
    state
        Parameters by name.
    channels
        The rank's end of its channels.

    Returns
    -------
    dict
        Name -> gradient, for the tied parameters that this rank holds.
    """
    rank_of = spec.placement.rank_of
    mine = [name for name, stages in spec.tied.items() if rank in {rank_of[s] for s in stages}]
    arriving: dict[tuple[str, int], Ticket] = {}
    sending: list[Ticket] = []
    for name in mine:
        stages = spec.tied[name]
        wire_formats = (WireFormat.contiguous(_zeros(spec, name, state)),)
        others = sorted({rank_of[s] for s in stages} - {rank})
        for stage in stages:
            key: TiedKey = ("tied", name, stage)
            if rank_of[stage] != rank:
                arriving[name, stage] = channels.post_recv(rank_of[stage], key, wire_formats)
                continue
            total = _own_total(spec, sums, stage, name, state)
            for peer in others:
                sending.append(channels.post_send(peer, key, wire_formats, [total]))
    yield Wait([*arriving.values(), *sending])
    gradients = {}
    for name in mine:
        parts = [
            arriving[name, stage].tensors()[0]
            if (name, stage) in arriving
            else _own_total(spec, sums, stage, name, state)
            for stage in spec.tied[name]
        ]
        total = parts[0].clone()
        for part in parts[1:]:
            total.add_(part)
        gradients[name] = total
    return gradients


def _own_total(
    spec: PipelineSpec, sums: GradientSums, stage: int, name: str, state: Mapping[str, Tensor]
) -> Tensor:
    total = sums.totals.get(stage, {}).get(name)
    return _zeros(spec, name, state) if total is None else total


def _zeros(spec: PipelineSpec, name: str, state: Mapping[str, Tensor]) -> Tensor:
    return torch.zeros_like(state[name], dtype=sum_dtype(state[name], spec.gradient_dtype))
