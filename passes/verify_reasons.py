"""Why a split model may round differently from plain autograd, and by how much."""

from __future__ import annotations

from collections.abc import Callable

import torch

from zbcompile.passes.constant_masks import is_mask_of_transformers
from zbcompile.passes.frontend import FrontEndResult

__all__ = ["INDUCTOR", "MASK", "TIED", "UNNAMED", "reasons_of", "tolerance_of"]

TIED = "a parameter used by several stages: the order of a sum"
MASK = "transformers builds the attention mask as a tensor under export"
REUSED = "a parameter used several times in a stage: the order of a sum"
INDUCTOR = "inductor fuses operations and rounds once where eager rounds twice"
UNNAMED = "the order of rounding"

FLOAT32_TOLERANCE = 1e-6
INDUCTOR_TOLERANCE = 1e-5


def tolerance_of(front: FrontEndResult) -> float:
    """The largest relative error that the order of rounding may explain: by backend and narrowest dtype."""
    base = INDUCTOR_TOLERANCE if front.backend != "eager" else FLOAT32_TOLERANCE
    found = {
        value.dtype
        for node in front.captured.module.graph.nodes
        if isinstance(value := node.meta.get("val"), torch.Tensor)
    }
    widths = [torch.finfo(dtype).eps for dtype in found if dtype.is_floating_point]
    narrow = [eps for eps in widths if eps > torch.finfo(torch.float32).eps]
    return max([base, *(2 * eps for eps in narrow)])


def reasons_of(front: FrontEndResult) -> Callable[[str, str], str]:
    """(kind, name) -> why that value may differ in its last bits."""
    holders: dict[str, int] = {}
    for stage in front.stages:
        for name in stage.trainable:
            holders[name] = holders.get(name, 0) + 1
    uses = {
        front.captured.roles[node.name].name: len(node.users)
        for node in front.captured.module.graph.find_nodes(op="placeholder")
    }
    masked = _has_built_mask(front)
    inductor = front.backend != "eager"

    def reason(kind: str, name: str) -> str:
        if inductor:
            return INDUCTOR
        if kind == "gradient" and holders.get(name, 0) > 1:
            return TIED
        if masked:
            return MASK
        return REUSED if kind == "gradient" and uses.get(name, 0) > 1 else UNNAMED

    return reason


def _has_built_mask(front: FrontEndResult) -> bool:
    return any(is_mask_of_transformers(node) for node in front.captured.module.graph.nodes)
