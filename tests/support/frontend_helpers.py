"""Run stages in sequence on one process and compare with plain autograd: the oracle of the front end."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zbcompile.passes.capture.nested_values import flatten
from zbcompile.passes.split.staged_model import StagedModel

Batch = tuple[tuple[Any, ...], dict[str, Any], Any]


def run_stages(
    built: StagedModel, state: dict[str, Tensor], batches: Sequence[Batch], *, fused: bool = False
) -> tuple[list[Any], dict[str, Tensor]]:
    """All microbatches, F of every stage then B and W; gradients summed in microbatch order."""
    results, total = [], {}
    with torch.no_grad():
        for args, kwargs, target in batches:
            value, grads = _run_one(built, state, built.flat_inputs(args, kwargs, target), fused)
            results.append(value)
            for name, grad in grads.items():
                total[name] = total[name] + grad if name in total else grad.clone()
    return results, total


def _run_one(
    built: StagedModel, state: dict[str, Tensor], flat: list[Tensor], fused: bool
) -> tuple[Any, dict[str, Tensor]]:
    values: dict[str, Tensor] = {}
    saves, outputs = [], []
    for stage in built.stages:
        inputs = [flat[p.source[1]] if p.source[0] == "batch" else values[p.name] for p in stage.inputs]
        outs, saved = stage.run_forward(state, inputs)
        for port, out in zip(stage.outputs, outs, strict=True):
            assert (out.shape, out.dtype) == (port.shape, port.dtype)
        values |= {port.name: out for port, out in zip(stage.outputs, outs, strict=True)}
        saves.append(saved)
        outputs.append(outs)
    value = built.rebuild([outputs[s][i] for s, i in built.result_ports])
    pending: dict[str, dict[int, Tensor]] = {}
    weights: dict[str, list[Tensor]] = {}
    for stage, saved in zip(reversed(built.stages), reversed(saves), strict=True):
        grads: list[Tensor | None] = []
        for port in stage.outputs:
            parts = pending.get(port.name, {})
            grad = None
            for target in sorted(parts, reverse=True):
                grad = parts[target] if grad is None else grad + parts[target]
            if port.is_loss and port.has_gradient:
                one = torch.ones(port.shape, dtype=port.dtype)
                grad = one if grad is None else grad + one
            grads.append(grad)
        if fused:
            back, own = stage.run_full_backward(saved, grads)
        else:
            back, after = stage.run_backward_input(saved, grads)
            own = stage.run_backward_weight(after)
            assert not after
        assert not saved
        for port, grad in zip(stage.inputs, back, strict=True):
            assert (grad is not None) == port.has_gradient
            if grad is not None:
                pending.setdefault(port.name, {})[stage.index] = grad
        for name, grad in own.items():
            weights.setdefault(name, []).append(grad)
    summed = {}
    for name, parts in weights.items():
        summed[name] = parts[0]
        for part in parts[1:]:
            summed[name] = summed[name] + part
    return value, summed


def run_autograd(
    model: nn.Module, batches: Sequence[Batch], loss_fn: Any = None
) -> tuple[list[Any], nn.Module]:
    """The same microbatches through a copy of the untouched model; gradients land in the copy."""
    model = copy.deepcopy(model)
    results = []
    for args, kwargs, target in batches:
        value = model(*args, **kwargs)
        if loss_fn is not None:
            loss = loss_fn(value, target)
            value = {"loss": loss, "output": value}
        elif isinstance(value, Tensor):
            loss = value
        else:
            loss = value["loss"] if isinstance(value, dict) else value[0]
        loss.backward()
        results.append(value)
    return results, model


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers of a copy, by canonical name."""
    return dict(model.named_parameters()) | dict(model.named_buffers())


@dataclass(frozen=True)
class Verdict:
    """``text`` is "bitwise" or the largest relative difference; ``wrong`` names what differs."""

    text: str
    wrong: tuple[str, ...]

    def __str__(self) -> str:
        return self.text if not self.wrong else f"{self.text} in {', '.join(self.wrong[:3])}"


def compare(
    expected: list[Any], reference: nn.Module, results: list[Any], grads: dict[str, Tensor], mine: nn.Module
) -> Verdict:
    """Gradients, results and buffers against autograd of the untouched model."""
    pairs: list[tuple[str, Tensor | None, Tensor | None]] = [
        (name, parameter.grad, grads.get(name)) for name, parameter in reference.named_parameters()
    ]
    theirs, ours = flatten(expected, results=True)[0], flatten(results, results=True)[0]
    assert len(theirs) == len(ours)
    pairs += [(f"result {i}", a, b) for i, (a, b) in enumerate(zip(theirs, ours, strict=True))]
    buffers = dict(mine.named_buffers())
    pairs += [(f"buffer {name}", value, buffers[name]) for name, value in reference.named_buffers()]
    wrong, worst = [], 0.0
    for name, a, b in pairs:
        if a is None and b is None:
            continue
        if a is None or b is None:
            return Verdict("a gradient too many or too few", (name,))
        if not torch.equal(a, b):
            wrong.append(name)
            worst = max(worst, float((a - b).abs().max() / a.abs().max().clamp_min(1e-30)))
    return Verdict(f"{worst:.1e}" if wrong else "bitwise", tuple(wrong))
