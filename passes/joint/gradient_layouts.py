"""Gradients at a cut in the layout that they have without it.

A sum over a gradient rounds in the order of its memory, and autograd's gradient of a value seldom has the
value's own layout (attention hands transposed ones back). The tracer wants gradients laid out like the
outputs. So an output whose gradient comes back otherwise is traced as a copy in the layout of its gradient,
and the copy is taken out of the joint graph again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from zbcompile.passes.torch_private import JointGraph

__all__ = ["Order", "copies_removed", "laid_out", "order_of_gradient"]

Order = tuple[int, ...]
"""Dimensions from the slowest to the fastest in memory."""

_PERMUTE = torch.ops.aten.permute.default
_CLONE = torch.ops.aten.clone.default


def order_of_gradient(traced: Tensor, arriving: Sequence[Tensor]) -> Order | None:
    """The order of the sum of ``arriving`` (one per use, in the order in which they are added); None where
    that is the layout of ``traced``, the gradient as the tracer had it, or repeats elements."""
    if not arriving or not all(isinstance(n, int) for n in traced.shape):
        return None
    total = _bare(arriving[0])
    for other in arriving[1:]:
        total = total + _bare(other)
    wanted = total.stride()
    if any(step == 0 and n > 1 for step, n in zip(wanted, traced.shape, strict=True)):
        return None
    order = tuple(sorted(range(traced.dim()), key=lambda k: (-wanted[k], k)))
    dense = laid_out(_bare(traced), order)
    big = [k for k in range(traced.dim()) if traced.shape[k] > 1]
    return order if any(dense.stride(k) != traced.stride(k) for k in big) else None


def laid_out(value: Tensor, order: Order) -> Tensor:
    """A copy of ``value`` that is dense in ``order``; the tracer then wants its gradient like that."""
    copy = value.permute(order).clone(memory_format=torch.contiguous_format)
    return copy.permute(_inverse(order))


def copies_removed(joint: JointGraph, orders: Mapping[int, Order]) -> None:
    """Take the copies of `laid_out` (output -> order) out of the joint graph, in place."""
    for position in orders:
        value: Any = joint.outputs[position]
        while value.target is not _CLONE:
            value = value.args[0]
        joint.outputs[position] = value.args[0].args[0]
    for node in list(joint.module.graph.nodes):
        source = node.args[0] if node.target is _PERMUTE else None
        if isinstance(source, Node) and source.target is _PERMUTE and _undoes(node.args[1], source.args[1]):
            before: Any = source.args[0]
            node.replace_all_uses_with(before)
            for role in (joint.outputs, joint.mutations, joint.gradients):
                role.update({key: before for key, value in role.items() if value is node})


def _undoes(second: Any, first: Any) -> bool:
    return list(_inverse(first)) == list(second)


def _inverse(order: Sequence[int]) -> Order:
    return tuple(sorted(range(len(order)), key=lambda k: order[k]))


def _bare(value: Tensor) -> Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
