"""The eager backend's calls: element-wise results are written over an argument that dies there.

``GraphModule --> GraphModule`` with the same kernels and bits, and less memory touched; autograd itself does
this only where it adds up gradients. An argument is written over if the graph made its storage, the result
fills it in the same layout, and nothing reads it afterwards.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from zbcompile.passes.joint.rewrites import storage_root
from zbcompile.passes.torch_private import OpOverload, schema, storage_bytes

__all__ = ["written_in_place"]

aten = torch.ops.aten
_COMMUTING = (aten.add.Tensor, aten.mul.Tensor)
_INTO = {
    aten.silu_backward.default: aten.silu_backward.grad_input,
    aten.sigmoid_backward.default: aten.sigmoid_backward.grad_input,
    aten.tanh_backward.default: aten.tanh_backward.grad_input,
    aten.threshold_backward.default: aten.threshold_backward.grad_input,
}
"""Element-wise calls without an in-place form --> the form that writes into a given tensor."""
_MAKERS = ("mm", "addmm", "bmm", "baddbmm", "cat", "clone", "sum", "mean", "convolution")
_TUPLE_MAKERS = ("native_layer_norm_backward", "_scaled_dot_product_flash_attention_for_cpu_backward")

Storage = tuple[Node, Any]
"""The value that owns it and, of a call with several results, which of them."""


def written_in_place(module: GraphModule) -> GraphModule:
    """A copy of one of a stage's graphs whose element-wise calls reuse the storage of what they read last."""
    graph = copy.deepcopy(module.graph)
    nodes = list(graph.nodes)
    uses = _Uses(nodes)
    for position, node in enumerate(nodes):
        if not _is_elementwise(node):
            continue
        may_overwrite = partial(uses.may_overwrite, node, position)
        _ = (
            _over_first(node, may_overwrite)
            or _over_second(node, may_overwrite)
            or _into(node, may_overwrite)
        )
    return GraphModule(module, graph, class_name=type(module).__name__)


class _Uses:
    """Per storage of a graph: whether a call of the graph made it, and where it is read last."""

    def __init__(self, nodes: list[Node]) -> None:
        self._storage = {node: _storage(node) for node in nodes}
        self._last: dict[Storage, int] = {}
        for position, user in enumerate(nodes):
            end = position if _is_known(user) else len(nodes)
            for node in user.all_input_nodes:
                self._last[self._storage[node]] = max(self._last.get(self._storage[node], 0), end)
        self._made = {storage for storage in self._storage.values() if _is_made(*storage)}

    def may_overwrite(self, node: Node, position: int, value: Any) -> bool:
        """Whether the result of ``node``, the call at ``position``, may be written over its argument."""
        if not isinstance(value, Node) or not _same_form(value.meta.get("val"), node.meta["val"]):
            return False
        storage = self._storage[value]
        others = [other for other in node.all_input_nodes if other is not value]
        return (
            storage in self._made
            and self._last[storage] == position
            and all(self._storage[other] != storage for other in others)
        )


def _over_first(node: Node, may_overwrite: Callable[[Any], bool]) -> bool:
    """``f(a, b)`` --> ``a.f_(b)``."""
    target = _in_place_form(node.target)
    if target is None or not node.args or not may_overwrite(node.args[0]):
        return False
    node.target = target
    return True


def _over_second(node: Node, may_overwrite: Callable[[Any], bool]) -> bool:
    """``a + b`` --> ``b.add_(a)``, ``a * b`` --> ``b.mul_(a)``; complex products are rounded by order."""
    if node.target not in _COMMUTING or len(node.args) != 2 or node.kwargs or node.meta["val"].is_complex():
        return False
    if not isinstance(node.args[0], Node) or not may_overwrite(node.args[1]):
        return False
    node.args = (node.args[1], node.args[0])
    node.target = _in_place_form(node.target)
    return True


def _into(node: Node, may_overwrite: Callable[[Any], bool]) -> bool:
    """``f_backward(g, x)`` --> ``f_backward(g, x, grad_input=g)``."""
    over = next((a for a in node.args if may_overwrite(a)), None) if node.target in _INTO else None
    if over is None:
        return False
    node.target = _INTO[node.target]  # type: ignore[index]
    node.kwargs = {**node.kwargs, "grad_input": over}
    return True


def _in_place_form(target: Any) -> Any:
    """The overload that writes its first argument and takes the same arguments, or None."""
    packet, overload = str(target).removeprefix("aten.").rsplit(".", 1)
    found = getattr(getattr(aten, f"{packet}_", None), overload, None)
    if found is None or [a.name for a in schema(found).arguments] != [
        a.name for a in schema(target).arguments
    ]:
        return None
    return found


def _is_elementwise(node: Node) -> bool:
    target = node.target
    return (
        isinstance(target, OpOverload)
        and str(target).startswith("aten.")
        and torch.Tag.pointwise in target.tags
        and not schema(target).is_mutable
        and isinstance(node.meta.get("val"), Tensor)
    )


def _storage(node: Node) -> Storage:
    root = storage_root(node)
    if root.target is operator.getitem:
        return root.args[0], root.args[1]  # type: ignore[return-value]
    return root, None


def _is_made(owner: Node, position: Any) -> bool:
    """Whether a result of ``owner`` is a new tensor for certain; an argument, whatever its name, is not."""
    if owner.op != "call_function":
        return False
    if position is not None:
        return _name(owner) in _TUPLE_MAKERS
    return _is_elementwise(owner) or _name(owner) in _MAKERS


def _is_known(user: Node) -> bool:
    """A call that keeps no hold on what it reads but where its schema says so."""
    if user.target is operator.getitem:
        return True
    known = isinstance(user.target, OpOverload) and str(user.target).startswith(("aten.", "prims."))
    return known and not _name(user).startswith("unsafe_")


def _name(node: Node) -> str:
    return str(node.target).removeprefix("aten.").split(".")[0]


def _same_form(value: Any, result: Tensor) -> bool:
    """A tensor of static shape with the form of ``result`` that fills its storage."""
    if not isinstance(value, Tensor) or not all(isinstance(n, int) for n in (*value.shape, *value.stride())):
        return False
    return (
        (value.shape, value.stride(), value.dtype) == (result.shape, result.stride(), result.dtype)
        and value.device == result.device
        and storage_bytes(value) == value.numel() * value.element_size()
    )
