"""All weights of a model in one safetensors file: what other programs read."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from zbcompile.compiler.compiled import CompiledPipeline
from zbcompile.compiler.peers import refuse_shards
from zbcompile.compiler.saved import Own, on_first
from zbcompile.compiler.sharding import is_sharded
from zbcompile.compiler.sharding import whole as gathered
from zbcompile.runtime.group import PipelineGroup
from zbcompile.runtime.tensor_files import write_tensors

__all__ = ["save_merged"]


def save_merged(compiled: CompiledPipeline, own: Callable[[], Own], path: str | os.PathLike[str]) -> None:
    """Write all tensors of the model to one safetensors file, on rank 0; all ranks come here."""
    target, group = os.path.realpath(path), compiled.group
    with compiled.runner.call("save_merged()") as call:
        with call.checks():
            refuse_shards(group, "save_merged()")
            mine = own()
            names = list(mine.trained.state_dict())
            whole, same = _without_copies(mine.tensors)
            if group is not None:
                group.agree({"file": target})
        if group is not None and any(map(is_sharded, whole.values())):
            parts = whole
            whole = group.alone(lambda: {n: gathered(t) for n, t in parts.items()}, "gathers its weights")
        if group is not None:
            whole, same = _gathered(group, whole, same)
        ordered = {name: whole[name] for name in names if name in whole}
        on_first(group, lambda: write_tensors(target, ordered, same), target)


def _without_copies(own: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return tensors by their first name, and the other names of the same tensors with their first."""
    first: dict[int, str] = {}
    same = {name: first[id(t)] for name, t in own.items() if first.setdefault(id(t), name) != name}
    return {name: tensor.detach() for name, tensor in own.items() if name not in same}, same


def _gathered(
    group: PipelineGroup, own: Mapping[str, Tensor], same: Mapping[str, str]
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return on rank 0 the tensors of all ranks, and the other names of the same ones with their first."""
    mine = [(name, str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in own.items()]
    parts = [json.loads(text) for text in group.gather(json.dumps([mine, same]), "save_merged()")]
    whole: dict[str, Tensor] = {}
    seen: set[str] = set()
    for rank, (rows, _) in enumerate(parts):
        for name, dtype, shape in rows:
            if name in seen:
                continue
            seen.add(name)
            if group.rank not in (0, rank):
                continue
            value = torch.empty(shape, dtype=getattr(torch, dtype)) if rank != group.rank else own[name].cpu()
            data = value.contiguous().reshape(-1).view(torch.uint8)
            if rank and data.numel() and group.rank == 0:
                group.receive(data, rank)
            elif rank and data.numel():
                group.send(data, 0)
            whole[name] = value
    return whole, {name: first for _, others in parts for name, first in others.items()}
