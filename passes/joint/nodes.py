"""Walks over a graph that several passes take."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.fx import Node

__all__ = ["past"]


def past(values: Iterable[Any]) -> set[Node]:
    """The nodes among ``values`` and everything that they are computed from."""
    found: set[Node] = set()
    waiting = [value for value in values if isinstance(value, Node)]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += node.all_input_nodes
    return found
