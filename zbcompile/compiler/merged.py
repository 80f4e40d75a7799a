"""All weights of a model in one safetensors file: what other programs read."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from zbcompile.compiler.compiled import CompiledPipeline
from zbcompile.compiler.parts import Part, Parts
from zbcompile.compiler.saved import Own, checked, on_first
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
            mine = checked(own(), compiled, "save_merged()")
            names = list(mine.trained.state_dict(keep_vars=True))  # a freed tensor cannot be detached
            whole, same = _without_copies(mine.tensors)
            if group is not None:
                group.agree({"file": target})
        if group is not None and any(map(is_sharded, whole.values())):
            parts = whole
            whole = group.alone(lambda: {n: gathered(t) for n, t in parts.items()}, "gathers its weights")
        if group is not None:
            whole, same = _gathered(group, whole, same, mine.parts)
        ordered = {name: whole[name] for name in names if name in whole}
        on_first(group, lambda: write_tensors(target, ordered, same), target)


def _without_copies(own: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return tensors by their first name, and the other names of the same tensors with their first."""
    first: dict[int, str] = {}
    same = {name: first[id(t)] for name, t in own.items() if first.setdefault(id(t), name) != name}
    return {name: tensor.detach() for name, tensor in own.items() if name not in same}, same


def _gathered(
    group: PipelineGroup, own: Mapping[str, Tensor], same: Mapping[str, str], parts: Parts
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return on rank 0 the tensors of all ranks, and the other names of the same ones with their first."""
    mine = [asdict(_Row.of(name, tensor, parts.of.get(name))) for name, tensor in own.items()]
    told = [json.loads(text) for text in group.gather(json.dumps([mine, same]), "save_merged()")]
    whole: dict[str, Tensor] = {}
    seen: set[tuple[str, int]] = set()
    for rank, (rows, _) in enumerate(told):
        for row in (_Row(**{**row, "sizes": tuple(row["sizes"])}) for row in rows):
            if (row.name, row.number) in seen:
                continue
            seen.add((row.name, row.number))
            if group.rank in (0, rank):
                value = _moved(group, rank, row, own)
                if group.rank == 0:
                    row.put(whole, value)
    return whole, {name: first for _, others in told for name, first in others.items()}


@dataclass(frozen=True)
class _Row:
    """What a rank has of a tensor: its form, and which part of the whole one it is."""

    name: str
    dtype: str
    shape: list[int]
    dim: int = 0
    blocks: int = 1
    sizes: tuple[int, ...] = ()
    number: int = 0

    @staticmethod
    def of(name: str, tensor: Tensor, part: Part | None) -> _Row:
        """Return the row of a tensor of this process."""
        form = name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)
        return _Row(*form) if part is None else _Row(*form, part.dim, part.blocks, part.sizes, part.number)

    def put(self, whole: dict[str, Tensor], value: Tensor) -> None:
        """Add a tensor, or a part of one, to those that are there."""
        if not self.sizes:
            whole[self.name] = value
            return
        part = Part(self.dim, self.blocks, self.sizes, self.number)
        if self.name not in whole:
            whole[self.name] = torch.empty(part.whole_shape(self.shape), dtype=value.dtype)
        part.put(whole[self.name], value)


def _moved(group: PipelineGroup, rank: int, row: _Row, own: Mapping[str, Tensor]) -> Tensor:
    """Return a tensor of a rank, which sends it to rank 0."""
    here = rank == group.rank
    value = own[row.name].cpu() if here else torch.empty(row.shape, dtype=getattr(torch, row.dtype))
    data = value.contiguous().reshape(-1).view(torch.uint8)
    if rank and data.numel() and group.rank == 0:
        group.receive(data, rank)
    elif rank and data.numel():
        group.send(data, 0)
    return value
