"""Let a view take any memory layout, where torch does not foretell the layout of what it views.

``joint graph --> joint graph``. Contract in: a traced graph with fake values. Contract out: the same values,
and no view that fails when it runs::

    softplus_backward(g, x).view(shape)   -->   softplus_backward(g, x).reshape(shape)

An element-wise call on arguments of different layouts may give another layout than it gives for fake tensors
(for instance ``softplus_backward`` of a transposed and a dense tensor), and a traced ``view`` of it then
fails. ``reshape`` copies only where it must.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import Graph, Node

from zbcompile.passes.joint.graph_facts import has_static_shape
from zbcompile.passes.nodes import value_of
from zbcompile.passes.ops import facts

__all__ = ["flexible_views"]


def flexible_views(graph: Graph) -> int:
    """Change the graph in place and return how many views were changed."""
    uncertain: set[Node] = set()
    changed = 0
    for node in graph.nodes:
        if node.op != "call_function" or facts(node.target).dense:
            continue
        if not _layouts_differ(node) and not any(argument in uncertain for argument in node.all_input_nodes):
            continue
        uncertain.add(node)
        if facts(node.target).form == "view" and node.args[0] in uncertain:
            node.target = torch.ops.aten.reshape.default
            changed += 1
    return changed


def _layouts_differ(node: Node) -> bool:
    """Return whether tensors of one shape come in with different strides, or one that the kernel may copy.

    Strides that depend on data count as different.
    """
    values = [value_of(argument) for argument in node.all_input_nodes]
    tensors = [v for v in values if v is not None and v.layout is torch.strided and v.dim() > 1]
    first = next(iter(tensors), None)
    if facts(node.target).own_layout:
        return any(not _is_contiguous(t) for t in tensors)
    if first is None or not all(map(has_static_shape, tensors)):
        return False
    alike = [t for t in tensors if t.shape == first.shape]
    if len(alike) > 1 and not all(has_static_shape(t) for t in alike):
        return True
    return any(t.stride() != first.stride() for t in alike)


def _is_contiguous(value: Tensor) -> bool:
    return has_static_shape(value) and value.is_contiguous()
