"""What the runtime needs of a stage, and the tables that say which tensor goes where.

The front end's ``StageGraphs`` satisfies `RunnableStage`; so do the sleeping stages of `rehearse`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["PortLike", "RunnableStage", "StageTable", "Wiring"]


class PortLike(Protocol):
    """One tensor that enters or leaves a stage; see ``zbcompile.passes.split.stage_graphs.Port``."""

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
    def source(self) -> tuple[str, int]: ...
    @property
    def targets(self) -> tuple[int, ...]: ...
    @property
    def is_result(self) -> bool: ...
    @property
    def is_loss(self) -> bool: ...


class RunnableStage(Protocol):
    """One stage: its boundary and its four ways to run. See ``zbcompile.passes.split.stage_graphs.StageGraphs``.

    A stage without a backward gives None instead of saved values.
    """

    @property
    def inputs(self) -> tuple[Any, ...]: ...
    @property
    def outputs(self) -> tuple[Any, ...]: ...
    @property
    def trainable(self) -> tuple[str, ...]: ...
    def run_forward(
        self, state: Mapping[str, Tensor], inputs: list[Tensor]
    ) -> tuple[list[Tensor], list[Any] | None]: ...
    def run_backward_input(
        self, saved: list[Any], output_grads: list[Tensor | None]
    ) -> tuple[list[Tensor | None], list[Any]]: ...
    def run_backward_weight(self, saved: list[Any]) -> dict[str, Tensor]: ...
    def run_full_backward(
        self, saved: list[Any], output_grads: list[Tensor | None]
    ) -> tuple[list[Tensor | None], dict[str, Tensor]]: ...
    def signature_hash(self) -> str: ...


@dataclass(frozen=True, slots=True)
class StageTable:
    """Which tensor of one stage comes from where and goes where. All are positions in its ports.

    batch : (input, flat index of the microbatch's tensors).
    forward_from, forward_to : per other stage, the inputs it makes / the outputs it takes.
    backward_from, backward_to : per other stage, the outputs it returns gradients of / the inputs it wants
        the gradients of. ``backward_from`` goes from later stages to earlier ones, as autograd sums.
    results : outputs that belong to the model's result. loss : the output that is the loss, or None.
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
    """Tables of all stages, and the ports that each message carries, equal on both of its ends."""

    tables: tuple[StageTable, ...]
    ports: Mapping[tuple[bool, int, int], tuple[PortLike, ...]]

    @staticmethod
    def of(stages: Sequence[RunnableStage]) -> Wiring:
        """Match outputs with inputs by name."""
        ports: dict[tuple[bool, int, int], tuple[PortLike, ...]] = {}
        wanted = [{p.name: k for k, p in enumerate(stage.inputs)} for stage in stages]
        tables = []
        for index, stage in enumerate(stages):
            forward_from, backward_to = [], []
            for source in sorted({p.source[1] for p in stage.inputs if p.source[0] == "stage"}):
                names = [p.name for p in stages[source].outputs if index in p.targets]
                positions = tuple(wanted[index][name] for name in names)
                forward_from.append((source, positions))
                with_gradient = tuple(k for k in positions if stage.inputs[k].has_gradient)
                if with_gradient:
                    backward_to.append((source, with_gradient))
                    ports[True, index, source] = tuple(_of_gradient(stage.inputs[k]) for k in with_gradient)
            forward_to, backward_from = [], []
            for target in sorted({t for p in stage.outputs for t in p.targets}):
                positions = tuple(k for k, p in enumerate(stage.outputs) if target in p.targets)
                forward_to.append((target, positions))
                ports[False, index, target] = tuple(stage.outputs[k] for k in positions)
                back = tuple(
                    k
                    for k in positions
                    if stages[target].inputs[wanted[target][stage.outputs[k].name]].has_gradient
                )
                if back:
                    backward_from.append((target, back))
            tables.append(
                StageTable(
                    tuple((k, p.source[1]) for k, p in enumerate(stage.inputs) if p.source[0] == "batch"),
                    tuple(forward_from),
                    tuple(forward_to),
                    tuple(reversed(backward_from)),
                    tuple(backward_to),
                    tuple(k for k, p in enumerate(stage.outputs) if p.is_result),
                    next((k for k, p in enumerate(stage.outputs) if p.is_loss), None),
                )
            )
        return Wiring(tuple(tables), ports)


def _of_gradient(port: Any) -> Any:
    """The port as its gradient lies in memory; stages that tell of no such layout have one for both."""
    stride = getattr(port, "grad_stride", ())
    return replace(port, stride=stride) if stride else port
