"""What passes over joint graphs ask: an argument, what values come from, who owns a storage."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeGuard

import torch
from torch import Tensor
from torch.fx import Node

from zbcompile.passes.aliasing import viewed_arguments
from zbcompile.passes.nodes import is_getitem
from zbcompile.passes.torch_private import OpOverload

__all__ = ["ancestors", "has_static_shape", "is_elementwise", "node_argument", "storage_root"]


def node_argument(call: Node, position: int) -> Node:
    """Return the positional argument of a call that its schema lets be nothing but a node.

    Raises
    ------
    TypeError
        The argument is a constant.
    """
    argument = call.args[position]
    if not isinstance(argument, Node):
        raise TypeError(f"argument {position} of {call.format_node()} is not a node")
    return argument


def ancestors(values: Iterable[object]) -> set[Node]:
    """Return the nodes among ``values`` and every node that they are computed from."""
    found: set[Node] = set()
    waiting = [value for value in values if isinstance(value, Node)]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += node.all_input_nodes
    return found


def storage_root(node: Node) -> Node:
    """Return the node that owns the storage that a chain of views ends in.

    Where a view may be of several arguments, the first one is followed.
    """
    while True:
        viewed = viewed_arguments(node)
        if not viewed or (is_getitem(node) and not viewed_arguments(viewed[0])):
            return node
        node = viewed[0]


def is_elementwise(node: Node) -> bool:
    """Return whether torch tags the operator that ``node`` calls as element-wise."""
    return isinstance(node.target, OpOverload) and torch.Tag.pointwise in node.target.tags


def has_static_shape(value: object) -> TypeGuard[Tensor]:
    """Return whether ``value`` is a tensor whose shape and strides do not depend on data."""
    return isinstance(value, Tensor) and all(isinstance(n, int) for n in (*value.shape, *value.stride()))
