"""Run all stages in sequence on one microbatch: F of each stage, then B and W from the last to the first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from zbcompile.passes.split.stage_graphs import Port, Saved, StageGraphs

__all__ = ["run_backward", "run_forward"]


def run_forward(
    stages: Sequence[StageGraphs], state: Mapping[str, Tensor], batch: Sequence[Tensor]
) -> tuple[list[list[Tensor]], list[Saved]]:
    """Run F of every stage; random calls draw from the current random state in order.

    Parameters
    ----------
    stages
        All stages of a model, in order.
    state
        Parameters and buffers by name. Buffers that the model changes are changed here.
    batch
        The flat inputs of one microbatch.

    Returns
    -------
    tuple
        Per stage, its outputs and what its backward needs.
    """
    values: dict[str, Tensor] = {}
    outputs, saves = [], []
    with torch.no_grad():
        for stage in stages:
            inputs = [batch[p.source[1]] if p.source[0] == "batch" else values[p.name] for p in stage.inputs]
            made, saved = stage.run_forward(state, inputs)
            values.update((port.name, value) for port, value in zip(stage.outputs, made, strict=True))
            outputs.append(made)
            saves.append(saved)
    return outputs, saves


def run_backward(
    stages: Sequence[StageGraphs], saves: list[Saved], *, fused: bool = False
) -> dict[str, Tensor]:
    """Run B and W of every stage, or its BW; ``saves`` is emptied.

    The gradient of the loss is 1. The gradient of a value or parameter that several stages use is summed from
    the last to the first, as autograd does.

    Returns
    -------
    dict
        Gradient of every trainable parameter that has one, by name.
    """
    pending: dict[str, dict[int, Tensor]] = {}
    total: dict[str, Tensor] = {}
    with torch.no_grad():
        for stage in reversed(stages):
            grads = [_arriving(port, pending.pop(port.name, {})) for port in stage.outputs]
            if fused:
                back, weights = stage.run_full_backward(saves.pop(), grads)
            else:
                back, after = stage.run_backward_input(saves.pop(), grads)
                weights = stage.run_backward_weight(after)
            for port, grad in zip(stage.inputs, back, strict=True):
                if grad is not None and port.source[0] == "stage":
                    pending.setdefault(port.name, {})[stage.index] = grad
            for name, grad in weights.items():
                total[name] = total[name] + grad if name in total else grad
    return total


def _arriving(port: Port, parts: Mapping[int, Tensor]) -> Tensor | None:
    """Return the gradient of an output, given what each stage that uses it returned."""
    grad = torch.ones(port.shape, dtype=port.dtype, device=port.device) if port.is_loss else None
    for stage in sorted(parts, reverse=True):
        grad = parts[stage] if grad is None else grad + parts[stage]
    return grad
