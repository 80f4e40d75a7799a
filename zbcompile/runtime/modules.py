"""Stages as modules: the model's own parameters under their own names, and a stage's forward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from zbcompile.runtime.stages import RunnableStage

__all__ = ["Stage", "StateReader"]


class Stage(nn.Module):
    """One stage of a pipeline: a module that holds the model's own parameters and buffers, under their names.

    Calling it runs the stage's forward graph without autograd: inputs and outputs in the order of its ports.
    ``graphs`` are its F, B, W and BW graphs (``stage.graphs.forward.print_readable()``).
    """

    def __init__(self, index: int, stage: RunnableStage, state: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.index, self.compiled = index, stage
        for name in dict.fromkeys([*getattr(stage, "parameters", ()), *getattr(stage, "buffers", ())]):
            _attach(self, name, state[name])

    @property
    def graphs(self) -> object:
        """The stage's graphs; ``None`` for a stage that has none."""
        return getattr(self.compiled, "graphs", None)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Outputs of the stage for one microbatch, in port order."""
        state = dict(self.named_parameters()) | dict(self.named_buffers())
        with torch.no_grad():
            outputs, _ = self.compiled.run_forward(state, list(inputs))
        return tuple(outputs)

    def extra_repr(self) -> str:
        """What goes in and out."""
        ins = ", ".join(p.name for p in self.compiled.inputs)
        outs = ", ".join(p.name for p in self.compiled.outputs)
        return f"stage {self.index}: ({ins}) -> ({outs})"


def _attach(root: nn.Module, name: str, value: Tensor) -> None:
    """Register under a dotted name, through empty modules that spell out the path."""
    *path, leaf = name.split(".")
    holder = root
    for part in path:
        child = holder._modules.get(part)
        if child is None:
            child = nn.Module()
            holder.add_module(part, child)
        holder = child
    if isinstance(value, nn.Parameter):
        holder.register_parameter(leaf, value)
    else:
        holder.register_buffer(leaf, value)


class StateReader:
    """The model's present tensors by name: read anew at each step, so that ``.to`` and swaps are seen."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        modules = dict(model.named_modules(remove_duplicate=False))
        self._places = {name: (modules[name.rpartition(".")[0]], name.rpartition(".")[2]) for name in names}

    def read(self) -> dict[str, Tensor]:
        """Name -> tensor."""
        return {name: getattr(module, leaf) for name, (module, leaf) in self._places.items()}
