"""What passes read from a node of a graph.

A node's ``meta["val"]`` holds the fake value that the call makes: shape, strides, dtype and device, no data.
"""

from __future__ import annotations

import operator

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import Argument

__all__ = ["is_getitem", "nodes_in", "value_of"]


def value_of(node: Node) -> Tensor | None:
    """Return the fake tensor that a node makes; None for a tuple, a number or no result."""
    value = node.meta.get("val")
    return value if isinstance(value, Tensor) else None


def is_getitem(node: Node) -> bool:
    """Return whether a call takes one entry of a tuple or list."""
    return node.op == "call_function" and node.target is operator.getitem


def nodes_in(argument: Argument) -> list[Node]:
    """Return the nodes in an argument (nested lists and dicts included), in order, with repetitions."""
    found: list[Node] = []

    def collect(node: Node) -> Node:
        found.append(node)
        return node

    torch.fx.map_arg(argument, collect)
    return found
