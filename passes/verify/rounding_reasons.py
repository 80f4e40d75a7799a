"""Say why a split model may round differently from plain autograd, and by how much."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch.fx import Node

from zbcompile.passes.capture.constant_masks import is_mask_of_transformers
from zbcompile.passes.nodes import value_of
from zbcompile.passes.ops import facts
from zbcompile.passes.split.staged_model import StagedModel

__all__ = [
    "ATOMIC", "GAPS", "INDUCTOR", "MASK", "SHARED", "SMOOTHED", "TIED", "reasons_of", "tolerance_of",
]  # fmt: skip

TIED = "a parameter used by several stages: the order of a sum"
SHARED = "a value used by several stages, several times by one that is not the last: the order of a sum"
MASK = "transformers builds the attention mask as a tensor under export"
GAPS = "a value or a gradient not dense in memory crosses a cut, and arrives dense: kernels go by layout"
SMOOTHED = "torch sums the class weights of a smoothed cross entropy otherwise while it traces"
INDUCTOR = "inductor fuses operations and rounds once where eager rounds twice"
ATOMIC = "a kernel of the accelerator that adds in no fixed order"

FLOAT32_TOLERANCE = 1e-6
INDUCTOR_TOLERANCE = 1e-5

_CROSS_ENTROPY = ("self", "target", "weight", "reduction", "ignore_index", "label_smoothing")


def tolerance_of(staged: StagedModel) -> float:
    """Return the largest relative error that a named reason may explain: by backend and narrowest dtype."""
    base = INDUCTOR_TOLERANCE if staged.backend != "eager" else FLOAT32_TOLERANCE
    nodes = staged.captured.module.graph.nodes
    found = {value.dtype for node in nodes if (value := value_of(node)) is not None}
    widths = [torch.finfo(dtype).eps for dtype in found if dtype.is_floating_point]
    narrow = [eps for eps in widths if eps > torch.finfo(torch.float32).eps]
    return max([base, *(2 * eps for eps in narrow)])


def reasons_of(staged: StagedModel) -> Callable[[str, str], str]:
    """Return why values may differ in their last bits.

    Returns
    -------
    callable
        (kind, name) of a value -> the reason; an empty string where it must be equal.
    """
    holders: dict[str, list[int]] = {}
    for stage in staged.stages:
        for name in stage.trainable:
            holders.setdefault(name, []).append(stage.index)
    everywhere = INDUCTOR if staged.backend != "eager" else MASK if _has_built_mask(staged) else ""
    everywhere = everywhere or (ATOMIC if _adds_in_no_order(staged) else "")
    everywhere = everywhere or (GAPS if _crosses_with_gaps(staged) else "")
    everywhere = everywhere or (SMOOTHED if _has_smoothed_weights(staged) else "")
    shared = _last_shared(staged)

    def reason(kind: str, name: str) -> str:
        if everywhere or kind != "gradient":
            return everywhere
        held = holders.get(name, [])
        if len(held) > 1:
            return TIED
        return SHARED if held and held[0] <= shared else ""

    return reason


def _last_shared(staged: StagedModel) -> int:
    """Return the last stage with an output whose gradient autograd sums in other parts than we do; else -1.

    Autograd adds use by use, from the last to the first; here each stage adds its own uses first. The sum is
    the same unless a stage before the last user uses the value more than once.
    """
    found = -1
    for stage in staged.stages:
        for port in stage.outputs:
            early = port.targets[:-1] if port.has_gradient else ()
            if any(_uses(staged, target, port.name) > 1 for target in early):
                found = stage.index
    return found


def _uses(staged: StagedModel, stage: int, name: str) -> int:
    graph = staged.sources[stage].module.graph
    placeholder = next(node for node in graph.find_nodes(op="placeholder") if node.name == name)
    return sum(user.all_input_nodes.count(placeholder) or 1 for user in placeholder.users)


def _has_built_mask(staged: StagedModel) -> bool:
    return any(is_mask_of_transformers(node) for node in staged.captured.module.graph.nodes)


def _has_smoothed_weights(staged: StagedModel) -> bool:
    """Return whether a cross entropy takes the mean with class weights and label smoothing.

    Eager adds the weights of the targets that count; under a tensor subclass torch adds zeros for the others.
    """
    for call in staged.captured.module.graph.nodes:
        if not facts(call.target).sums_weights_traced:
            continue
        given = dict(zip(_CROSS_ENTROPY, call.args, strict=False)) | call.kwargs
        is_mean = given.get("reduction", 1) == 1
        if is_mean and given.get("weight") is not None and given.get("label_smoothing", 0.0) != 0.0:
            return True
    return False


def _crosses_with_gaps(staged: StagedModel) -> bool:
    """Return whether a value or a gradient arrives in other strides than it was traced with.

    A value is compared with the stage that it is sent to, a gradient with the stage that made it. Gradients
    of values with several users do not count: sums have no gaps.
    """
    outputs = {port.name: port for stage in staged.stages for port in stage.outputs}
    for stage in staged.stages:
        results = stage.graphs.backward_input.graph.output_node().args[0]
        made = iter(cast("Sequence[Node]", results))
        for port in stage.inputs:
            grad = next(made) if port.has_gradient else None
            if port.source[0] != "stage":
                continue
            sent = outputs[port.name]
            if _steps(port.shape, port.stride) != _steps(port.shape, sent.stride):
                return True
            value = None if grad is None else value_of(grad)
            if value is not None and len(sent.targets) == 1:
                steps = _steps(port.shape, tuple(value.stride()))
                if any(steps) and steps != _steps(port.shape, sent.grad_stride):  # one broadcast number fits
                    return True
    return False


def _steps(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of the dimensions that have more than one element."""
    return tuple(step for size, step in zip(shape, stride, strict=True) if size > 1)


def _adds_in_no_order(staged: StagedModel) -> bool:
    if all(port.device.type == "cpu" for stage in staged.stages for port in (*stage.inputs, *stage.outputs)):
        return False
    graphs = (
        graph for stage in staged.stages for graph in (stage.graphs.forward, stage.graphs.full_backward)
    )
    return any(facts(node.target).any_order for graph in graphs for node in graph.graph.nodes)
