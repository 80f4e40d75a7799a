"""What the front end hands to the runtime: one stage as F, B, W and BW graphs, and how to call them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

__all__ = ["Graphs", "CallLayout", "Port", "Saved", "StageGraphs"]

Saved = list[Any]
"""What one phase leaves for the next. Owned by the caller; ``run_*`` take it over and clear it."""


@dataclass(frozen=True, slots=True)
class Port:
    """One tensor that enters or leaves a stage.

    ``source`` is ``("batch", flat index)`` or ``("stage", producer)`` (for an output: its own stage).
    ``targets`` are the stages that consume an output. An edge is matched by ``name``.
    ``has_gradient``: for an input, B returns a gradient for it; for an output, B takes one
    (the sum over those targets whose input of this name has a gradient, or the loss tangent).
    """

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    has_gradient: bool
    source: tuple[str, int]
    targets: tuple[int, ...] = ()
    is_result: bool = False
    is_loss: bool = False
    grad_stride: tuple[int, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes of a dense tensor of this shape: what a message carries."""
        size = self.dtype.itemsize
        for extent in self.shape:
            size *= extent
        return size


@dataclass(frozen=True, slots=True)
class Graphs:
    """The four graphs of a stage; each is called with ONE list, which it empties."""

    forward: GraphModule
    backward_input: GraphModule
    backward_weight: GraphModule
    full_backward: GraphModule


@dataclass(frozen=True, slots=True)
class CallLayout:
    """Which argument of one graph is which value of the one before. All are positions.

    forward:          arguments  = parameters + buffers + constants + inputs
                      results    = outputs + mutated buffers + saved
                      Saved      = saved results + ``forward_kept`` of the arguments
    backward_input:   pool       = tangents of the outputs with a gradient + Saved
                      arguments  = ``input_uses`` of the pool; results = input gradients + values for W
                      Saved      = values for W + ``input_kept`` of the pool
    backward_weight:  arguments  = ``weight_uses`` of Saved; results = the gradients W itself makes
    full_backward:    arguments  = ``full_uses`` of the pool; results = input gradients + parameter gradients

    ``early`` pairs a parameter with the position in Saved where B left its gradient;
    ``late`` names the parameters of W's results, ``full`` those of BW's.
    """

    forward_kept: tuple[int, ...]
    input_uses: tuple[int, ...]
    input_kept: tuple[int, ...]
    weight_uses: tuple[int, ...]
    full_uses: tuple[int, ...]
    early: tuple[tuple[str, int], ...]
    late: tuple[str, ...]
    full: tuple[str, ...]


@dataclass(frozen=True)
class StageGraphs:
    """One stage, compiled. Holds no parameters: they come in as ``state`` at every forward.

    ``parameters`` and ``buffers`` carry the original model's names (the canonical one where tied);
    ``trainable`` are those that require a gradient, in order. ``saved_bytes`` are held between F and B
    and ``saved_for_weight_bytes`` between B and W: exact, counted by storage, without parameters,
    buffers, constants and batch inputs. Every ``run_*`` works without autograd and must be called under
    ``torch.no_grad`` (or inference-free code); every list handed in is taken over and emptied.
    """

    index: int
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    parameters: tuple[str, ...]
    trainable: tuple[str, ...]
    buffers: tuple[str, ...]
    mutated: tuple[str, ...]
    constants: tuple[Tensor, ...]
    graphs: Graphs
    layout: CallLayout
    saved_bytes: int
    saved_for_weight_bytes: int
    calls: tuple[Callable[[list[Any]], Any], ...]

    def run_forward(self, state: Mapping[str, Tensor], inputs: list[Tensor]) -> tuple[list[Tensor], Saved]:
        """F: outputs in port order and what the backward needs; changed buffers are copied into ``state``."""
        arguments: list[Any] = [state[name] for name in self.parameters]
        arguments += [state[name] for name in self.buffers]
        arguments += self.constants
        arguments += inputs
        inputs.clear()
        kept = [arguments[i] for i in self.layout.forward_kept]
        results = self.calls[0](arguments)
        count, end = len(self.outputs), len(self.outputs) + len(self.mutated)
        for name, value in zip(self.mutated, results[count:end], strict=True):
            state[name].copy_(value)
        return list(results[:count]), [*results[end:], *kept]

    def run_backward_input(
        self, saved: Saved, output_grads: list[Tensor | None]
    ) -> tuple[list[Tensor | None], Saved]:
        """B: one gradient per input (None where the port has none) and what W needs.

        ``output_grads`` has one entry per output; entries of ports without a gradient are ignored,
        None for a port with a gradient counts as zero.
        """
        pool = self._pool(saved, output_grads)
        arguments = [pool[i] for i in self.layout.input_uses]
        kept = [pool[i] for i in self.layout.input_kept]
        pool.clear()
        results = self.calls[1](arguments)
        count, grads = self._input_grads(results)
        return grads, [*results[count:], *kept]

    def run_backward_weight(self, saved: Saved) -> dict[str, Tensor]:
        """W: the gradient of every trainable parameter that has one, each in storage of its own."""
        layout = self.layout
        arguments = [saved[i] for i in layout.weight_uses]
        early = {name: saved[i] for name, i in layout.early}
        saved.clear()
        grads = dict(zip(layout.late, self.calls[2](arguments), strict=True))
        grads.update(early)
        return {name: grads[name] for name in layout.full}

    def run_full_backward(
        self, saved: Saved, output_grads: list[Tensor | None]
    ) -> tuple[list[Tensor | None], dict[str, Tensor]]:
        """BW: B and W in one graph; returns what both return."""
        pool = self._pool(saved, output_grads)
        arguments = [pool[i] for i in self.layout.full_uses]
        pool.clear()
        results = self.calls[3](arguments)
        count, grads = self._input_grads(results)
        return grads, dict(zip(self.layout.full, results[count:], strict=True))

    def signature_hash(self) -> str:
        """SHA-256 over ports, names and code: equal on two ranks iff they would run the same graphs."""
        digest = hashlib.sha256()
        for part in (self.inputs, self.outputs, self.parameters, self.buffers, self.mutated, self.layout):
            digest.update(repr(part).encode())
        graphs = self.graphs
        for graph in (graphs.forward, graphs.backward_input, graphs.backward_weight, graphs.full_backward):
            digest.update(graph.code.encode())
        return digest.hexdigest()

    def _pool(self, saved: Saved, output_grads: list[Tensor | None]) -> list[Any]:
        pool: list[Any] = [
            _tangent(port, grad)
            for port, grad in zip(self.outputs, output_grads, strict=True)
            if port.has_gradient
        ]
        pool += saved
        output_grads.clear()
        saved.clear()
        return pool

    def _input_grads(self, results: Any) -> tuple[int, list[Tensor | None]]:
        grads: list[Tensor | None] = []
        count = 0
        for port in self.inputs:
            grads.append(results[count] if port.has_gradient else None)
            count += port.has_gradient
        return count, grads


def _tangent(port: Port, grad: Tensor | None) -> Tensor:
    """The incoming gradient with the strides that were traced; zeros for None."""
    if grad is not None and grad.stride() == port.grad_stride:
        return grad
    dense = torch.empty_strided(port.shape, port.grad_stride, dtype=port.dtype, device=port.device)
    return dense.zero_() if grad is None else dense.copy_(grad)
