"""The eager backend's calls: element-wise results are written over an argument that dies there.

``GraphModule --> GraphModule``. Contract out: the same kernels and bits, and less memory touched; autograd
itself does this only where it adds up gradients::

    f(a, b)                  -->   a.f_(b)
    a + b, a * b             -->   b.add_(a), b.mul_(a)
    tanh_backward(g, y)      -->   tanh_backward(g, y, grad_input=g)

An argument is written over if the graph made its storage, the result fills that in the same layout, and
nothing reads it afterwards.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import cast

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import Argument

from zbcompile.passes.joint.graph_facts import has_static_shape, is_elementwise, node_argument, storage_root
from zbcompile.passes.nodes import is_getitem, value_of
from zbcompile.passes.ops import facts, namespace
from zbcompile.passes.torch_private import OpOverload, schema, storage_bytes

__all__ = ["written_in_place"]

Storage = tuple[Node, Argument]
"""The value that owns it and, of a call with several results, which of them; otherwise None."""


def written_in_place(module: GraphModule) -> GraphModule:
    """Return a copy of a stage's graph whose element-wise calls reuse the storage of what they read last."""
    graph = copy.deepcopy(module.graph)
    nodes = list(graph.nodes)
    uses = _Uses(nodes)
    for position, node in enumerate(nodes):
        if not _is_pure_elementwise(node):
            continue
        may_overwrite = partial(uses.may_overwrite, node, position)
        _ = (
            _over_first(node, may_overwrite)
            or _over_second(node, may_overwrite)
            or _into(node, may_overwrite)
        )
    return GraphModule(module, graph, class_name=type(module).__name__)


class _Uses:
    """For every storage of a graph: whether a call of the graph made it, and where it is read last."""

    def __init__(self, nodes: list[Node]) -> None:
        self._storage = {node: _storage(node) for node in nodes}
        self._last: dict[Storage, int] = {}
        for position, user in enumerate(nodes):
            end = position if _is_known(user) else len(nodes)
            for node in user.all_input_nodes:
                self._last[self._storage[node]] = max(self._last.get(self._storage[node], 0), end)
        self._made = {storage for storage in self._storage.values() if _is_made(*storage)}

    def may_overwrite(self, node: Node, position: int, value: Argument) -> bool:
        """Return whether the result of ``node``, the call at ``position``, may be written over ``value``."""
        if not isinstance(value, Node) or not _same_form(value.meta.get("val"), node.meta["val"]):
            return False
        storage = self._storage[value]
        others = [other for other in node.all_input_nodes if other is not value]
        return (
            storage in self._made
            and self._last[storage] == position
            and all(self._storage[other] != storage for other in others)
        )


def _over_first(node: Node, may_overwrite: Callable[[Argument], bool]) -> bool:
    """``f(a, b)`` --> ``a.f_(b)``."""
    target = _in_place_form(cast("OpOverload", node.target))
    if target is None or not node.args or not may_overwrite(node.args[0]):
        return False
    node.target = target
    return True


def _over_second(node: Node, may_overwrite: Callable[[Argument], bool]) -> bool:
    """``a + b`` --> ``b.add_(a)``, ``a * b`` --> ``b.mul_(a)``; complex products are rounded by order."""
    if not facts(node.target).commutes or len(node.args) != 2 or node.kwargs or node.meta["val"].is_complex():
        return False
    target = _in_place_form(cast("OpOverload", node.target))
    if target is None or not isinstance(node.args[0], Node) or not may_overwrite(node.args[1]):
        return False
    node.args = (node.args[1], node.args[0])
    node.target = target
    return True


def _into(node: Node, may_overwrite: Callable[[Argument], bool]) -> bool:
    """``f_backward(g, x)`` --> ``f_backward(g, x, grad_input=g)``."""
    into = facts(node.target).into
    over = next((a for a in node.args if may_overwrite(a)), None) if into else None
    if over is None:
        return False
    node.target = getattr(cast("OpOverload", node.target).overloadpacket, into)
    node.kwargs = {**node.kwargs, "grad_input": over}
    return True


def _in_place_form(target: OpOverload) -> OpOverload | None:
    """Return the overload that writes its first argument and takes the same arguments, or None."""
    packet, overload = str(target).split(".")[-2:]
    found: OpOverload | None = getattr(getattr(torch.ops.aten, f"{packet}_", None), overload, None)
    if found is None or _argument_names(found) != _argument_names(target):
        return None
    return found


def _argument_names(target: OpOverload) -> list[str]:
    return [argument.name for argument in schema(target).arguments]


def _is_pure_elementwise(node: Node) -> bool:
    """Return whether a call is element-wise, one of aten's, and writes to no argument."""
    return (
        is_elementwise(node)
        and namespace(node.target) == "aten"
        and not schema(cast("OpOverload", node.target)).is_mutable
        and value_of(node) is not None
    )


def _storage(node: Node) -> Storage:
    root = storage_root(node)
    if is_getitem(root):
        return node_argument(root, 0), root.args[1]
    return root, None


def _is_made(owner: Node, position: Argument) -> bool:
    """Return whether a result of ``owner`` is a new tensor for certain; an argument is not, however named."""
    if owner.op != "call_function":
        return False
    if position is not None:
        return facts(owner.target).fresh_tuple
    return _is_pure_elementwise(owner) or facts(owner.target).fresh


def _is_known(user: Node) -> bool:
    """Return whether a call keeps no hold on what it reads but where its schema says so."""
    if is_getitem(user):
        return True
    known = namespace(user.target) in ("aten", "prims")
    return known and not facts(user.target).keeps_hold


def _same_form(value: object, result: Tensor) -> bool:
    """Return whether ``value`` is a tensor with the form of ``result`` that fills its storage."""
    return (
        has_static_shape(value)
        and has_static_shape(result)
        and (value.shape, value.stride(), value.dtype) == (result.shape, result.stride(), result.dtype)
        and value.device == result.device
        and storage_bytes(value) == value.numel() * value.element_size()
    )
