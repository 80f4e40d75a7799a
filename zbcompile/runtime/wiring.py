"""What the runtime needs of a stage, and the tables that say which tensor goes where.

`zbcompile.passes.split.stage_graphs.StageGraphs` satisfies `RunnableStage`; so do the sleeping stages of
`zbcompile.runtime.rehearse`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["PortLike", "RunnableStage", "Saved", "StageTable", "Wiring", "zeros_of"]

Saved = list[object]
"""What one phase of a stage leaves for the next. The runtime holds it and never looks into it."""


class PortLike(Protocol):
    """One tensor that enters or leaves a stage; see `zbcompile.passes.split.stage_graphs.Port`."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def stride(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def has_gradient(self) -> bool: ...
    @property
    def grad_stride(self) -> tuple[int, ...]:
        """Strides of the gradient; empty if it lies in memory as the tensor does."""

    @property
    def source(self) -> tuple[str, int]: ...
    @property
    def targets(self) -> tuple[int, ...]: ...
    @property
    def is_result(self) -> bool: ...
    @property
    def is_loss(self) -> bool: ...


def zeros_of(port: PortLike) -> Tensor:
    """Return a tensor, or a gradient, such as passes through a port, of zeros."""
    return torch.zeros(port.shape, dtype=port.dtype, device=port.device)


class RunnableStage(Protocol):
    """One stage: its ports and its four ways to run; see `zbcompile.passes.split.stage_graphs.StageGraphs`.

    The gradients that B and BW return have one entry per input, a tensor where the port has a gradient.
    A stage without a backward returns None instead of saved values.
    """

    @property
    def inputs(self) -> Sequence[PortLike]: ...
    @property
    def outputs(self) -> Sequence[PortLike]: ...
    @property
    def trainable(self) -> tuple[str, ...]: ...
    def run_forward(
        self, state: Mapping[str, Tensor], inputs: list[Tensor]
    ) -> tuple[list[Tensor], Saved | None]: ...
    def run_backward_input(
        self, saved: Saved, output_grads: list[Tensor | None]
    ) -> tuple[list[Tensor | None], Saved]: ...
    def run_backward_weight(self, saved: Saved) -> dict[str, Tensor]: ...
    def run_full_backward(
        self, saved: Saved, output_grads: list[Tensor | None]
    ) -> tuple[list[Tensor | None], dict[str, Tensor]]: ...


@dataclass(frozen=True, slots=True)
class StageTable:
    """Which tensor of one stage comes from where and goes where. All are positions in its ports.

    Attributes
    ----------
    batch
        (input, flat index of the microbatch's tensors).
    forward_from, forward_to
        Per other stage, the inputs that it makes; the outputs that it takes.
    backward_from
        Per other stage, the outputs that it returns gradients of; from later stages to earlier ones, as
        autograd sums.
    backward_to
        Per other stage, the inputs that it wants the gradients of.
    results
        Outputs that belong to the model's result.
    loss
        The output that is the loss, or None.
    """

    batch: tuple[tuple[int, int], ...]
    forward_from: tuple[tuple[int, tuple[int, ...]], ...]
    forward_to: tuple[tuple[int, tuple[int, ...]], ...]
    backward_from: tuple[tuple[int, tuple[int, ...]], ...]
    backward_to: tuple[tuple[int, tuple[int, ...]], ...]
    results: tuple[int, ...]
    loss: int | None


@dataclass(frozen=True)
class Wiring:
    """Which tensor goes where in a whole pipeline.

    Attributes
    ----------
    tables
        Per stage, its table.
    ports
        (backward, source stage, target stage) -> the ports whose tensors, or whose gradients if ``backward``,
        the message carries; in the same order at both ends.
    """

    tables: tuple[StageTable, ...]
    ports: Mapping[tuple[bool, int, int], tuple[PortLike, ...]]

    @staticmethod
    def of(stages: Sequence[RunnableStage]) -> Wiring:
        """Match the outputs of all stages with their inputs, by name."""
        inputs = [{port.name: k for k, port in enumerate(stage.inputs)} for stage in stages]
        tables = tuple(_table(index, stages, inputs) for index in range(len(stages)))
        ports: dict[tuple[bool, int, int], tuple[PortLike, ...]] = {}
        for index, (stage, table) in enumerate(zip(stages, tables, strict=True)):
            for target, positions in table.forward_to:
                ports[False, index, target] = tuple(stage.outputs[k] for k in positions)
            for source, positions in table.backward_to:
                ports[True, index, source] = tuple(stage.inputs[k] for k in positions)
        return Wiring(tables, ports)


def _table(index: int, stages: Sequence[RunnableStage], inputs: Sequence[Mapping[str, int]]) -> StageTable:
    """Return the table of one stage; ``inputs`` are the input positions by name, per stage."""
    stage = stages[index]
    forward_from, backward_to = [], []
    for source in sorted({p.source[1] for p in stage.inputs if p.source[0] == "stage"}):
        positions = tuple(inputs[index][p.name] for p in stages[source].outputs if index in p.targets)
        forward_from.append((source, positions))
        with_gradient = tuple(k for k in positions if stage.inputs[k].has_gradient)
        if with_gradient:
            backward_to.append((source, with_gradient))
    forward_to, backward_from = [], []
    for target in sorted({t for p in stage.outputs for t in p.targets}):
        positions = tuple(k for k, p in enumerate(stage.outputs) if target in p.targets)
        forward_to.append((target, positions))
        users = [stages[target].inputs[inputs[target][stage.outputs[k].name]] for k in positions]
        with_gradient = tuple(k for k, user in zip(positions, users, strict=True) if user.has_gradient)
        if with_gradient:
            backward_from.append((target, with_gradient))
    return StageTable(
        tuple((k, p.source[1]) for k, p in enumerate(stage.inputs) if p.source[0] == "batch"),
        tuple(forward_from),
        tuple(forward_to),
        tuple(reversed(backward_from)),
        tuple(backward_to),
        tuple(k for k, p in enumerate(stage.outputs) if p.is_result),
        next((k for k, p in enumerate(stage.outputs) if p.is_loss), None),
    )
