"""Which values of a captured graph share storage, and which calls change a value in place.

Both are read from the operators' schemas, and from `ops` where these do not say.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import Argument

from zbcompile.passes.nodes import is_getitem, nodes_in, value_of
from zbcompile.passes.ops import facts
from zbcompile.passes.torch_private import OpOverload, schema, storage_bytes

__all__ = [
    "StorageGroups",
    "changed_arguments",
    "is_random",
    "owned_bytes",
    "tensor_bytes",
    "viewed_arguments",
]

_NUMBER_BYTES = 8


def changed_arguments(node: Node) -> list[Node]:
    """Return the nodes whose storage a call writes to.

    Read from schema annotations; norms in training also write their running statistics.
    """
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return []
    known = facts(node.target)
    if known.writes_no_data:
        return []
    if known.writes_statistics:
        return nodes_in(node.args[3:5]) if node.args[5] else []
    return [
        found
        for argument, value in _bound(node.target, node)
        if argument.alias_info is not None and argument.alias_info.is_write
        for found in nodes_in(value)
    ]


def viewed_arguments(node: Node) -> list[Node]:
    """Return the nodes whose storage a result of a call may share."""
    if is_getitem(node):
        return nodes_in(node.args[0])
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return []
    found = [
        inner
        for argument, value in _bound(node.target, node)
        if argument.alias_info is not None
        for inner in nodes_in(value)
    ]
    known = facts(node.target)
    if known.hidden_view or (known.idle_in_eval and not node.args[2]):
        found += nodes_in(node.args[0])
    return found


def is_random(node: Node) -> bool:
    """Return whether a call draws from the random state."""
    target = node.target
    if not isinstance(target, OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    known = facts(target)
    if known.idle_in_eval:
        return bool(node.args[2])
    if known.random_by_rate:
        rate = node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
        return bool(rate != 0.0)
    return True


def tensor_bytes(value: object) -> int:
    """Return the bytes of a dense tensor like ``value``; 0 for anything else or an unknown size."""
    if not isinstance(value, Tensor):
        return 0
    count = value.numel()
    return count * value.element_size() if isinstance(count, int) else 0


def owned_bytes(node: Node) -> int | None:
    """Return the bytes of the storage that a node owns; None for views and tuples, which are never kept."""
    if viewed_arguments(node) and not _picks_owner(node):
        return None
    value = value_of(node)
    if value is not None:
        return _extent(value) if node.op == "placeholder" else storage_bytes(value)
    is_number = isinstance(node.meta.get("val"), int | float | torch.SymInt | torch.SymFloat)
    return _NUMBER_BYTES if is_number else None


def _extent(value: Tensor) -> int:
    """Return the bytes from the first to the last element: what an argument of these strides needs."""
    if value.numel() == 0:
        return 0
    last = sum((n - 1) * step for n, step in zip(value.shape, value.stride(), strict=True))
    return (last + 1) * value.element_size()


def _picks_owner(node: Node) -> bool:
    """Return whether a node is one entry of a call that makes several new tensors (not views)."""
    return is_getitem(node) and isinstance(node.args[0], Node) and not viewed_arguments(node.args[0])


def _bound(target: OpOverload, node: Node) -> Iterator[tuple[torch.Argument, Argument]]:
    """Pair the arguments of the operator's schema with those that the call gives."""
    for position, argument in enumerate(schema(target).arguments):
        if position < len(node.args):
            yield argument, node.args[position]
        elif argument.name in node.kwargs:
            yield argument, node.kwargs[argument.name]


class StorageGroups:
    """Nodes of a graph, grouped by storage that they share or may share.

    Attributes
    ----------
    members
        Representative of a group -> its nodes, in graph order.
    changes
        Representative of a group -> the calls that change its storage in place, in graph order.
    """

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
        """Return the representative of a node's group."""
        while (parent := self._parent.get(node, node)) is not node:
            node = parent
        return node
