"""Gradients at a cut in the memory layout that they have without the cut.

A sum over a gradient rounds in the order of the gradient's memory, and autograd's gradient of a value seldom
has the layout of the value (attention hands transposed ones back). The tracer wants gradients laid out like
the outputs. So an output whose gradient arrives otherwise is traced as a copy in the layout of its gradient,
and the copies are then removed from the joint graph::

    output = x.permute(layout).clone().permute(inverse)   -->   output = x

    g.permute(inverse).permute(layout)                    -->   g
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor
from torch.fx import Node

from zbcompile.passes.joint.graph_facts import node_argument
from zbcompile.passes.ops import facts
from zbcompile.passes.torch_private import JointGraph

__all__ = ["GradientLayout", "arriving_layout", "in_layout", "remove_layout_copies"]

GradientLayout = tuple[int, ...]
"""Dimensions from the slowest to the fastest in memory."""


def arriving_layout(traced: Tensor, arriving: Sequence[Tensor]) -> GradientLayout | None:
    """Return the layout of the gradient that arrives at an output, where the tracer expected another.

    Parameters
    ----------
    traced
        The gradient as the tracer had it.
    arriving
        What is added up to the true gradient: one per use, in the order in which they are added.

    Returns
    -------
    GradientLayout or None
        None if the layout is that of ``traced``, or repeats elements, or depends on data.
    """
    if not arriving or not all(isinstance(n, int) for n in traced.shape):
        return None
    total = _without_data(arriving[0])
    for other in arriving[1:]:
        total = total + _without_data(other)
    wanted = total.stride()
    if any(step == 0 and n > 1 for step, n in zip(wanted, traced.shape, strict=True)):
        return None
    layout = tuple(sorted(range(traced.dim()), key=lambda k: (-wanted[k], k)))
    dense = in_layout(_without_data(traced), layout)
    big = [k for k in range(traced.dim()) if traced.shape[k] > 1]
    return layout if any(dense.stride(k) != traced.stride(k) for k in big) else None


def in_layout(value: Tensor, layout: GradientLayout) -> Tensor:
    """Return a copy that is dense in ``layout``; the tracer then wants its gradient in that layout."""
    copy = value.permute(layout).clone(memory_format=torch.contiguous_format)
    return copy.permute(_inverse(layout))


def remove_layout_copies(joint: JointGraph, layouts: Mapping[int, GradientLayout]) -> None:
    """Remove from the joint graph, in place, what `in_layout` did to the outputs in ``layouts``."""
    for position in layouts:
        value = joint.outputs[position]
        while facts(value.target).form != "copy":
            value = node_argument(value, 0)
        joint.outputs[position] = node_argument(node_argument(value, 0), 0)
    for node in list(joint.module.graph.nodes):
        source = node.args[0] if _is_permute(node) else None
        if isinstance(source, Node) and _is_permute(source) and _undoes(node, source):
            before = node_argument(source, 0)
            node.replace_all_uses_with(before)
            for role in (joint.outputs, joint.mutations, joint.gradients):
                role.update({key: before for key, value in role.items() if value is node})


def _is_permute(node: Node) -> bool:
    return facts(node.target).form == "permute"


def _undoes(second: Node, first: Node) -> bool:
    """Return whether one call of ``permute`` undoes another."""
    return _inverse(_dimensions(first)) == _dimensions(second)


def _dimensions(permute: Node) -> tuple[int, ...]:
    return tuple(cast("Sequence[int]", permute.args[1]))


def _inverse(order: Sequence[int]) -> GradientLayout:
    return tuple(sorted(range(len(order)), key=lambda k: order[k]))


def _without_data(value: Tensor) -> Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
