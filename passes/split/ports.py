"""The ports of a stage: what enters and leaves it, described for the runtime."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from zbcompile.passes.joint.trace import JointStage
from zbcompile.passes.partition.partition import Wire
from zbcompile.passes.split.stage_graphs import Port

__all__ = ["input_port", "output_port", "port_of"]


def port_of(wire: Wire, value: Tensor, *, has_gradient: bool = False) -> Port:
    """Return the port of a wire that carries tensors like ``value``."""
    return Port(
        name=wire.name,
        shape=tuple(value.shape),
        stride=tuple(value.stride()),
        dtype=value.dtype,
        device=value.device,
        has_gradient=has_gradient,
        source=wire.source,
        targets=wire.targets,
        is_result=wire.is_result,
        is_loss=wire.is_loss,
    )


def input_port(stage: JointStage, position: int) -> Port:
    """Return the port of an input; how its producer wants the gradient is filled in later."""
    value = stage.values[stage.num_state + position]
    return port_of(stage.source.inputs[position], value, has_gradient=position in stage.gradient_inputs)


def output_port(stage: JointStage, position: int) -> Port:
    """Return the port of an output.

    An output that repeats elements is sent with the strides of its gradient, which is dense.
    """
    wire, value = stage.source.outputs[position], stage.joint.outputs[position].meta["val"]
    tangent = stage.joint.tangents.get(position)
    if tangent is None:
        return port_of(wire, value)
    gradient: Tensor = tangent.meta["val"]
    repeats = any(step == 0 and n > 1 for step, n in zip(value.stride(), value.shape, strict=True))
    port = port_of(wire, gradient if repeats else value, has_gradient=True)
    return replace(port, grad_stride=tuple(gradient.stride()))
