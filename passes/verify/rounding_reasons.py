"""Why a split model may round differently from plain autograd, and by how much."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from zbcompile.passes.capture.constant_masks import is_mask_of_transformers
from zbcompile.passes.split.staged_model import StagedModel

__all__ = ["ATOMIC", "GAPS", "INDUCTOR", "MASK", "SHARED", "TIED", "reasons_of", "tolerance_of"]

TIED = "a parameter used by several stages: the order of a sum"
SHARED = "a value used by several stages, several times by one that is not the last: the order of a sum"
MASK = "transformers builds the attention mask as a tensor under export"
GAPS = "a value or a gradient with gaps in memory crosses a cut, and arrives without them: sums go by layout"
INDUCTOR = "inductor fuses operations and rounds once where eager rounds twice"
ATOMIC = "a kernel of the accelerator that adds in no fixed order"

FLOAT32_TOLERANCE = 1e-6
INDUCTOR_TOLERANCE = 1e-5
_ATOMIC = (
    "embedding_dense_backward", "embedding_bag", "index_add", "index_put", "index_reduce", "scatter_add",
    "scatter_reduce", "grid_sampler", "upsample", "max_pool3d", "adaptive_avg_pool", "cumsum",
    "scaled_dot_product", "flash_attention", "efficient_attention", "convolution_backward", "ctc_loss",
)  # fmt: skip
"""What ``torch.use_deterministic_algorithms`` documents as nondeterministic on CUDA, by part of its name."""


def tolerance_of(front: StagedModel) -> float:
    """The largest relative error that a named reason may explain: by backend and narrowest dtype."""
    base = INDUCTOR_TOLERANCE if front.backend != "eager" else FLOAT32_TOLERANCE
    found = {
        value.dtype
        for node in front.captured.module.graph.nodes
        if isinstance(value := node.meta.get("val"), torch.Tensor)
    }
    widths = [torch.finfo(dtype).eps for dtype in found if dtype.is_floating_point]
    narrow = [eps for eps in widths if eps > torch.finfo(torch.float32).eps]
    return max([base, *(2 * eps for eps in narrow)])


def reasons_of(front: StagedModel) -> Callable[[str, str], str]:
    """(kind, name) -> why that value may differ in its last bits; "" where it must be equal."""
    holders: dict[str, list[int]] = {}
    for stage in front.stages:
        for name in stage.trainable:
            holders.setdefault(name, []).append(stage.index)
    everywhere = INDUCTOR if front.backend != "eager" else MASK if _has_built_mask(front) else ""
    everywhere = everywhere or (ATOMIC if _adds_in_no_order(front) else "")
    everywhere = everywhere or (GAPS if _crosses_with_gaps(front) else "")
    shared = _last_shared(front)

    def reason(kind: str, name: str) -> str:
        if everywhere or kind != "gradient":
            return everywhere
        held = holders.get(name, [])
        if len(held) > 1:
            return TIED
        return SHARED if held and held[0] <= shared else ""

    return reason


def _last_shared(front: StagedModel) -> int:
    """The last stage with an output whose gradient is a sum that autograd takes in other parts; else -1.

    Autograd adds use by use, from the last to the first; here each stage adds its own uses first. That is
    the same sum unless a stage before the last user uses the value more than once.
    """
    found = -1
    for stage in front.stages:
        for port in stage.outputs:
            early = port.targets[:-1] if port.has_gradient else ()
            if any(_uses(front, target, port.name) > 1 for target in early):
                found = stage.index
    return found


def _uses(front: StagedModel, stage: int, name: str) -> int:
    graph = front.sources[stage].module.graph
    hole = next(node for node in graph.find_nodes(op="placeholder") if node.name == name)
    return sum(user.all_input_nodes.count(hole) or 1 for user in hole.users)


def _has_built_mask(front: StagedModel) -> bool:
    return any(is_mask_of_transformers(node) for node in front.captured.module.graph.nodes)


def _crosses_with_gaps(front: StagedModel) -> bool:
    """Whether some value is sent in other strides than it was traced with where it arrives, or a gradient
    (of a value with one user: sums have no gaps) in others than it was made with."""
    outputs = {port.name: port for stage in front.stages for port in stage.outputs}
    for stage in front.stages:
        results: Any = stage.graphs.backward_input.graph.output_node().args[0]
        made = iter(results)
        for port in stage.inputs:
            grad = next(made) if port.has_gradient else None
            if port.source[0] != "stage":
                continue
            sent = outputs[port.name]
            if _steps(port.shape, port.stride) != _steps(port.shape, sent.stride):
                return True
            value = None if grad is None else grad.meta.get("val")
            if isinstance(value, torch.Tensor) and len(sent.targets) == 1:
                steps = _steps(port.shape, tuple(value.stride()))
                if 0 not in steps and steps != _steps(port.shape, sent.grad_stride):
                    return True
    return False


def _steps(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of the dimensions that have more than one element."""
    return tuple(step for size, step in zip(shape, stride, strict=True) if size > 1)


def _adds_in_no_order(front: StagedModel) -> bool:
    if all(port.device.type == "cpu" for stage in front.stages for port in (*stage.inputs, *stage.outputs)):
        return False
    graphs = (graph for stage in front.stages for graph in (stage.graphs.forward, stage.graphs.full_backward))
    names = (str(node.target) for graph in graphs for node in graph.graph.nodes)
    return any(part in name for name in names for part in _ATOMIC)
