"""Which values of a captured graph share storage, and which calls change a value in place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from zbcompile.passes.torch_private import OpOverload, schema, storage_bytes

__all__ = [
    "StorageGroups",
    "changed_arguments",
    "is_random",
    "owned_bytes",
    "tensor_bytes",
    "viewed_arguments",
]

_NORMS_WITH_STATISTICS = ("aten.batch_norm.", "aten.instance_norm.")
_NO_DATA_WRITTEN = ("aten.detach_.",)
_UNANNOTATED_VIEWS = (
    "aten._unsafe_view.", "aten._reshape_alias.", "aten.broadcast_tensors.", "aten.meshgrid.",
    "aten.type_as.", "aten.atleast_",
)  # fmt: skip
_IDENTITY_IN_EVAL = ("aten.dropout.", "aten.feature_dropout.", "aten.alpha_dropout.")


def changed_arguments(node: Node) -> list[Node]:
    """Nodes whose storage ``node`` writes to: schema annotations, and statistics of norms in training."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return []
    name = str(node.target)
    if name.startswith(_NO_DATA_WRITTEN):
        return []
    if name.startswith(_NORMS_WITH_STATISTICS):
        return _nodes(node.args[3:5]) if node.args[5] else []
    return [
        found
        for argument, value in _bound(node)
        if argument.alias_info is not None and argument.alias_info.is_write
        for found in _nodes(value)
    ]


def viewed_arguments(node: Node) -> list[Node]:
    """Nodes whose storage a result of ``node`` may share."""
    if node.op != "call_function":
        return []
    if getattr(node.target, "__name__", "") == "getitem":
        return _nodes(node.args[0])
    if not isinstance(node.target, OpOverload):
        return []
    found = [
        inner
        for argument, value in _bound(node)
        if argument.alias_info is not None
        for inner in _nodes(value)
    ]
    name = str(node.target)
    if name.startswith(_UNANNOTATED_VIEWS) or (name.startswith(_IDENTITY_IN_EVAL) and not node.args[2]):
        found += _nodes(node.args[0])
    return found


def is_random(node: Node) -> bool:
    """True for a call that draws from the random state."""
    target = node.target
    if not isinstance(target, OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    if str(target).startswith(_IDENTITY_IN_EVAL):
        return bool(node.args[2])
    if str(target).startswith("aten.scaled_dot_product_attention."):
        rate = node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
        return bool(rate != 0.0)
    return True


def tensor_bytes(value: Any) -> int:
    """Bytes of a dense tensor like ``value``; 0 for anything else or an unknown size."""
    if not isinstance(value, torch.Tensor):
        return 0
    count = value.numel()
    return count * value.element_size() if isinstance(count, int) else 0


class StorageGroups:
    """Nodes of a graph grouped by (possibly) shared storage; ``changes`` lists in-place calls per group."""

    def __init__(self, graph: Graph) -> None:
        self._parent: dict[Node, Node] = {}
        for node in graph.nodes:
            for other in viewed_arguments(node):
                self._parent[self.root(node)] = self.root(other)
        self.changes: dict[Node, list[Node]] = {}
        self.members: dict[Node, list[Node]] = {}
        for node in graph.nodes:
            self.members.setdefault(self.root(node), []).append(node)
            for changed in changed_arguments(node):
                self.changes.setdefault(self.root(changed), []).append(node)

    def root(self, node: Node) -> Node:
        """The representative of the group of ``node``."""
        while (parent := self._parent.get(node, node)) is not node:
            node = parent
        return node


def _bound(node: Node) -> Iterator[tuple[Any, Any]]:
    target: Any = node.target
    for position, argument in enumerate(schema(target).arguments):
        if position < len(node.args):
            yield argument, node.args[position]
        elif argument.name in node.kwargs:
            yield argument, node.kwargs[argument.name]


def _nodes(value: Any) -> list[Node]:
    found: list[Node] = []
    torch.fx.map_arg(value, lambda node: found.append(node))
    return found


def owned_bytes(node: Node) -> int | None:
    """Bytes of the storage that ``node`` owns; None for views and tuples, which are never kept."""
    if viewed_arguments(node) and not _picks_owner(node):
        return None
    value = node.meta.get("val")
    if isinstance(value, Tensor):
        return _extent(value) if node.op == "placeholder" else storage_bytes(value)
    return 8 if isinstance(value, int | float | torch.SymInt | torch.SymFloat) else None


def _extent(value: Tensor) -> int:
    """Bytes from the first to the last element: what an argument of these strides needs at least."""
    if value.numel() == 0:
        return 0
    last = sum((n - 1) * step for n, step in zip(value.shape, value.stride(), strict=True))
    return (last + 1) * value.element_size()


def _picks_owner(node: Node) -> bool:
    """A getitem of a call that makes several new tensors (not views)."""
    return getattr(node.target, "__name__", "") == "getitem" and not viewed_arguments(node.args[0])  # type: ignore[arg-type]
