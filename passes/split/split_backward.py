"""Split the backward: each stage's graph -> F, B, W and BW graphs that equal autograd to the bit.

``tuple[StageSource, ...] --> tuple[StageGraphs, ...]``. Contract in: the stages of one captured model.
Contract out: F is what outputs and buffer changes need, B what the gradients of inputs need, W the rest, BW
is B and W in one graph (Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 2; there by
hand for each kind of layer, here on the joint graph)::

    y = x.mm(w)   -->   F:  y = x.mm(w)
                        B:  dx = dy.mm(w.t())
                        W:  dw = x.t().mm(dy)

What is kept between them is decided in `phase_cuts`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from torch.fx import Node

from zbcompile.errors import SplitError
from zbcompile.passes.capture.captured import Captured
from zbcompile.passes.joint.joint_pass import Observer, unobserved
from zbcompile.passes.joint.trace import JointStage
from zbcompile.passes.op_costs import nominal_device
from zbcompile.passes.partition.partition import StageSource
from zbcompile.passes.split.assemble import assemble
from zbcompile.passes.split.phase_cuts import kept_for_backward, kept_for_weight
from zbcompile.passes.split.recompute import Recompute, check_recompute, recompute_price
from zbcompile.passes.split.rewrites import check_known
from zbcompile.passes.split.stage_graphs import StageGraphs
from zbcompile.passes.split.stage_values import StageValues
from zbcompile.passes.split.structural_hash import renamed
from zbcompile.passes.split.traces import trace_all
from zbcompile.schedule.devices import Device

__all__ = ["Recompute", "split_backward"]


def split_backward(
    captured: Captured,
    sources: Sequence[StageSource],
    *,
    recompute: Recompute = "none",
    backend: str = "eager",
    share: bool = True,
    skip: Collection[str] = (),
    observer: Observer = unobserved,
    device: Device | None = None,
) -> tuple[StageGraphs, ...]:
    """Differentiate and split every stage.

    Parameters
    ----------
    captured, sources
        The model and its stages.
    recompute
        What may be computed again in the backward instead of being kept (see `Recompute`).
    backend
        Says what recomputing costs; `backends.with_backend` compiles.
    share
        Whether stages of equal structure are split once.
    skip
        Names of rewrites to leave out (see `rewrites`).
    observer
        Called after each rewrite of a joint graph.
    device
        On which a recomputed call takes its counted time; by default as for `partition`.

    Raises
    ------
    SplitError
        A value that should have a gradient lost it, or an operator has no derivative.
    UsageError
        ``recompute`` is unknown.
    """
    check_recompute(recompute)
    check_known(skip)
    price = recompute_price(recompute, backend, device or nominal_device(captured.device))
    traced = trace_all(captured, sources, share=share, skip=skip, observer=observer)
    split: dict[int, tuple[StageSource, StageGraphs]] = {}
    for stage in traced:
        if id(stage.joint) not in split:
            split[id(stage.joint)] = stage.source, _split_stage(captured, stage, price)
    stages = []
    for stage in traced:
        first, graphs = split[id(stage.joint)]
        stages.append(renamed(graphs, first, stage.source, captured))
    _check_gradients(stages, traced)
    strides = {port.name: port.grad_stride for graphs in stages for port in graphs.outputs}
    trained = {name for graphs in stages for name in graphs.call_layout.full}
    return tuple(_with_gradient_strides(_of_trained(graphs, trained), strides) for graphs in stages)


def _of_trained(stage: StageGraphs, trained: Collection[str]) -> StageGraphs:
    """Return the stage without trainable parameters that get no gradient in any stage: nothing sums them."""
    return replace(stage, trainable=tuple(name for name in stage.trainable if name in trained))


def _split_stage(captured: Captured, stage: JointStage, price: Callable[[Node], int | None]) -> StageGraphs:
    """Cut one joint graph twice and copy its four parts out."""
    values = StageValues.of(stage)
    for_weight = kept_for_weight(values, price)
    for_backward = kept_for_backward(values, for_weight, price)
    return assemble(captured, values, for_backward, for_weight)


def _check_gradients(stages: Collection[StageGraphs], traced: Sequence[JointStage]) -> None:
    """Raise SplitError for an output without a gradient that is the loss or whose users want one."""
    wanted = {
        (stage.source.inputs[position].name, stage.source.index)
        for stage in traced
        for position in stage.gradient_inputs
    }
    for stage in stages:
        for port in stage.outputs:
            asked = port.is_loss or any((port.name, target) in wanted for target in port.targets)
            if asked and not port.has_gradient:
                raise SplitError(
                    f"stage {stage.index}: {port.name} should have a gradient and lost it in tracing"
                )


def _with_gradient_strides(stage: StageGraphs, strides: Mapping[str, tuple[int, ...]]) -> StageGraphs:
    """Return the stage with inputs that know how their producers want the gradients."""
    inputs = (
        replace(port, grad_stride=strides[port.name]) if port.has_gradient else port for port in stage.inputs
    )
    return replace(stage, inputs=tuple(inputs))
