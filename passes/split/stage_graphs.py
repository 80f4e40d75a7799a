"""What the passes hand to the runtime: one stage as F, B, W and BW graphs, and how to call them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import GraphModule

from zbcompile.passes.collectives import code_for_peers
from zbcompile.passes.split.recompute import Recompute, titled

__all__ = ["CallLayout", "GraphCall", "Graphs", "Port", "Saved", "StageGraphs"]

_DEVICE_NUMBER = re.compile(r"(?<=device\(type='cuda'), index=\d+")

Saved = list[object]
"""What one phase leaves for the next: tensors, and numbers where a size depends on data.

Owned by the caller; ``run_*`` take it over and empty it.
"""

GraphCall = Callable[[list[object]], Sequence[Any]]
"""A graph as it is run: takes one list, which it empties, and returns its results."""


@dataclass(frozen=True, slots=True)
class Port:
    """One tensor that enters or leaves a stage.

    Attributes
    ----------
    name
        Name of the value in the captured graph; the two ends of an edge have the same name.
    shape, stride, dtype, device
        Of the tensor.
    has_gradient
        For an input: B returns a gradient for it. For an output: B takes one, the sum over those targets
        whose input of this name has a gradient, or 1 for the loss.
    source
        ``("batch", flat index)`` or ``("stage", producer)``; for an output, its own stage.
    targets
        The stages that use an output.
    is_result, is_loss
        Whether an output is part of the model's result, and whether it is the loss.
    grad_stride
        Strides of the gradient, as it was traced.
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
    """The four graphs of a stage; each is called with one list, which it empties."""

    forward: GraphModule
    backward_input: GraphModule
    backward_weight: GraphModule
    full_backward: GraphModule


@dataclass(frozen=True, slots=True)
class CallLayout:
    """Which argument of one graph is which value of the one before. All are positions.

    ::

        forward:          arguments  = parameters + buffers + constants + inputs
                          results    = outputs + mutated buffers + saved
                          Saved      = saved results + ``forward_kept`` of the arguments
        backward_input:   pool       = gradients of the outputs that have one + Saved
                          arguments  = ``input_uses`` of the pool
                          results    = input gradients + values for W
                          Saved      = values for W + ``input_kept`` of the pool
        backward_weight:  arguments  = ``weight_uses`` of Saved
                          results    = the gradients that W itself makes
        full_backward:    arguments  = ``full_uses`` of the pool
                          results    = input gradients + parameter gradients

    Attributes
    ----------
    early
        Name of a parameter and the position in Saved where B left its gradient.
    late
        Names of the parameters of W's results.
    full
        Names of the parameters of BW's results.
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
    """One stage, compiled. It holds no parameters: they come in as ``state`` at every forward.

    Every ``run_*`` works without autograd and must be called under ``torch.no_grad``. Every list that is
    handed in is taken over and emptied.

    Attributes
    ----------
    index
        Position of the stage.
    inputs, outputs
        What enters and leaves it.
    parameters, buffers
        Names in the original model, the canonical one where tied.
    trainable
        Those parameters that require a gradient, and get one in this stage or another, in order.
    mutated
        Those buffers that F changes.
    constants
        Tensors that the model's code made.
    graphs
        F, B, W and BW. Stages of equal structure share them.
    call_layout
        How the graphs' arguments and results fit together.
    saved_bytes
        Held from F to B: exact, counted by storage, without parameters, buffers, constants and batch inputs.
    saved_for_weight_bytes
        Held from B to W, counted in the same way.
    calls
        What runs the graphs, in the order of `Graphs`: as a backend compiled them.
    recompute
        Level that the stage was split at: a policy, or a price in bytes per second.
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
    call_layout: CallLayout
    saved_bytes: int
    saved_for_weight_bytes: int
    calls: tuple[GraphCall, ...]
    recompute: Recompute = "none"

    @property
    def title(self) -> str:
        """Its name in a profile."""
        return titled(f"stage {self.index}", self.recompute)

    def run_forward(self, state: Mapping[str, Tensor], inputs: list[Tensor]) -> tuple[list[Tensor], Saved]:
        """Run F: return outputs in port order and what the backward needs.

        Changed buffers are copied into ``state``. What other stages read has the strides of its port: those
        of a kernel's real result may be others than torch foretold.
        """
        arguments: list[object] = [state[name] for name in self.parameters]
        arguments += [state[name] for name in self.buffers]
        arguments += self.constants
        arguments += inputs
        inputs.clear()
        kept = [arguments[i] for i in self.call_layout.forward_kept]
        results = self.calls[0](arguments)
        count, end = len(self.outputs), len(self.outputs) + len(self.mutated)
        for name, value in zip(self.mutated, results[count:end], strict=True):
            state[name].copy_(value)
        outputs = [_as_sent(port, value) for port, value in zip(self.outputs, results[:count], strict=True)]
        return outputs, [*results[end:], *kept]

    def run_backward_input(
        self, saved: Saved, output_grads: list[Tensor | None]
    ) -> tuple[list[Tensor | None], Saved]:
        """Run B: return one gradient per input (None where the port has none) and what W needs.

        Parameters
        ----------
        saved
            What F left.
        output_grads
            One entry per output. Those of ports without a gradient are ignored; None for a port with a
            gradient counts as zero.
        """
        pool = self._pool(saved, output_grads)
        arguments = [pool[i] for i in self.call_layout.input_uses]
        kept = [pool[i] for i in self.call_layout.input_kept]
        pool.clear()
        results = self.calls[1](arguments)
        count, grads = self._input_grads(results)
        return grads, [*results[count:], *kept]

    def run_backward_weight(self, saved: Saved) -> dict[str, Tensor]:
        """Run W: return the gradient of every trainable parameter that has one, each in its own storage."""
        layout = self.call_layout
        arguments = [saved[i] for i in layout.weight_uses]
        early = {name: cast("Tensor", saved[i]) for name, i in layout.early}
        saved.clear()
        grads = dict(zip(layout.late, self.calls[2](arguments), strict=True))
        grads.update(early)
        return {name: grads[name] for name in layout.full}

    def run_full_backward(
        self, saved: Saved, output_grads: list[Tensor | None]
    ) -> tuple[list[Tensor | None], dict[str, Tensor]]:
        """Run BW, B and W in one graph: return the gradients of inputs and of parameters."""
        pool = self._pool(saved, output_grads)
        arguments = [pool[i] for i in self.call_layout.full_uses]
        pool.clear()
        results = self.calls[3](arguments)
        count, grads = self._input_grads(results)
        return grads, dict(zip(self.call_layout.full, results[count:], strict=True))

    def signature_hash(self) -> str:
        """Return SHA-256 over ports, names and code: equal on two ranks iff they run the same graphs.

        Each rank traces on a device of its own: the kind of device counts, its number does not.
        """
        digest = hashlib.sha256()
        names = (self.parameters, self.buffers, self.mutated)
        for part in (self.inputs, self.outputs, *names, self.call_layout):
            digest.update(_DEVICE_NUMBER.sub("", repr(part)).encode())
        graphs = self.graphs
        for graph in (graphs.forward, graphs.backward_input, graphs.backward_weight, graphs.full_backward):
            digest.update(_DEVICE_NUMBER.sub("", code_for_peers(graph)).encode())
        return digest.hexdigest()

    def _pool(self, saved: Saved, output_grads: list[Tensor | None]) -> list[object]:
        """Return what B and BW take their arguments from; both lists are emptied."""
        pool: list[object] = [
            _as_traced(port, grad)
            for port, grad in zip(self.outputs, output_grads, strict=True)
            if port.has_gradient
        ]
        pool += saved
        output_grads.clear()
        saved.clear()
        return pool

    def _input_grads(self, results: Sequence[Any]) -> tuple[int, list[Tensor | None]]:
        """Return how many results are gradients of inputs, and one gradient or None per input."""
        grads: list[Tensor | None] = []
        count = 0
        for port in self.inputs:
            grads.append(results[count] if port.has_gradient else None)
            count += port.has_gradient
        return count, grads


def _as_sent(port: Port, value: Tensor) -> Tensor:
    """Return a value for other stages with the strides that they were traced with.

    A value that repeats elements, or whose size depends on data, stays as it is.
    """
    stride = value.stride()
    if not port.targets or 0 in stride or not all(type(n) is int for n in port.stride):
        return value
    sizes = zip(value.shape, stride, port.stride, strict=True)
    if all(now == traced or size <= 1 for size, now, traced in sizes):
        return value
    dense = torch.empty_strided(value.shape, port.stride, dtype=value.dtype, device=value.device)
    return dense.copy_(value)


def _as_traced(port: Port, grad: Tensor | None) -> Tensor:
    """Return the incoming gradient with the strides that were traced; zeros for None."""
    if grad is not None and grad.stride() == port.grad_stride:
        return grad
    dense = torch.empty_strided(port.shape, port.grad_stride, dtype=port.dtype, device=port.device)
    return dense.zero_() if grad is None else dense.copy_(grad)
