"""Find where the linear order of a captured graph may be cut.

``calls in graph order --> CallOrder``. A cut is legal if only tensors of known shape and strides cross it,
and if it separates neither a value from its in-place changes, nor the uses of a changed buffer, nor the calls
of a torch.func transform, nor a collective from its wait.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile

import torch
from torch import Tensor
from torch.fx import Node

from zbcompile.passes.aliasing import StorageGroups, tensor_bytes
from zbcompile.passes.nodes import value_of
from zbcompile.passes.ops import facts
from zbcompile.passes.partition.balance import Work
from zbcompile.passes.provenance import module_path_of, source_of
from zbcompile.passes.torch_private import functorch_nesting

__all__ = ["CallOrder", "CutPoint", "call_order", "has_known_layout"]


@dataclass(frozen=True, slots=True)
class CutPoint:
    """A legal cut.

    Attributes
    ----------
    position
        Index in the order of the first call after the cut.
    live_bytes
        Bytes of the forward messages across the cut.
    work_before
        Counted times of F, B and W of everything before it.
    module_path, source
        Of the first call after it.
    depth
        How deep in the module tree the cut lies; 0 between top-level modules.
    trained_before
        Calls before it that read a parameter which takes a gradient.
    divided_bytes
        Bytes of such parameters with uses on both sides: their gradients are sums over stages.
    """

    position: int
    live_bytes: int
    work_before: Work
    module_path: str
    source: str
    depth: int
    trained_before: int = 0
    divided_bytes: int = 0

    @property
    def seconds_before(self) -> float:
        """Counted time of everything before it, F, B and W together."""
        return 1e-9 * self.work_before.total_ns


@dataclass(frozen=True)
class CallOrder:
    """Calls in graph order, and the legal cuts between them.

    Attributes
    ----------
    nodes
        The calls.
    works
        Counted times of each.
    cuts
        The legal cuts, in order.
    total
        Counted times of all.
    trained
        Calls that read a parameter which takes a gradient.
    """

    nodes: tuple[Node, ...]
    works: tuple[Work, ...]
    cuts: tuple[CutPoint, ...]
    total: Work
    trained: int = 0


def call_order(
    nodes: Sequence[Node],
    groups: StorageGroups,
    work_of: Callable[[Node], Work],
    trained: Collection[Node] = (),
) -> CallOrder:
    """Return all legal cuts between calls.

    Parameters
    ----------
    nodes
        The calls that are not auxiliary, in graph order.
    groups
        Of the whole graph.
    work_of
        Counts the times of a call.
    trained
        The parameters that take a gradient.
    """
    position = {node: i for i, node in enumerate(nodes)}
    count = len(nodes)
    illegal, live = [0] * (count + 1), [0] * (count + 1)
    for node, first in position.items():
        last = max((position[user] for user in node.users if user in position), default=first)
        value = value_of(node)
        if value is not None and has_known_layout(value) and not facts(node.target).collective:
            _span(live, first, last, tensor_bytes(value))
        else:
            _span(illegal, first, last, 1)
    for first, last in [*_inseparable(nodes, position, groups), *_transforms(nodes)]:
        _span(illegal, first, last, 1)
    works = [work_of(node) for node in nodes]
    before = [Work(0, 0, 0), *accumulate(works)]
    blocked, crossing = list(accumulate(illegal)), list(accumulate(live))
    reading = [0, *accumulate(int(any(a in trained for a in node.all_input_nodes)) for node in nodes)]
    divided = list(accumulate(_divided(trained, position, count)))
    cuts = tuple(
        CutPoint(
            i,
            crossing[i],
            before[i],
            module_path_of(nodes[i]),
            source_of(nodes[i]),
            _depth(nodes, i),
            reading[i],
            divided[i],
        )
        for i in range(1, count)
        if not blocked[i]
    )
    return CallOrder(tuple(nodes), tuple(works), cuts, before[-1], reading[-1])


def _divided(trained: Collection[Node], position: Mapping[Node, int], count: int) -> list[int]:
    """Return differences, per cut, of the bytes of parameters that have uses on both sides."""
    differences = [0] * (count + 1)
    for hole in trained:
        uses = [position[user] for user in hole.users if user in position]
        if uses:
            _span(differences, min(uses), max(uses), tensor_bytes(value_of(hole)))
    return differences


def _span(differences: list[int], first: int, last: int, amount: int) -> None:
    """Add ``amount`` to every cut after ``first`` up to the one before ``last``."""
    differences[first + 1] += amount
    differences[last + 1] -= amount


def _inseparable(
    nodes: Sequence[Node], position: dict[Node, int], groups: StorageGroups
) -> list[tuple[int, int]]:
    """Return spans that stay in one stage: a value and its in-place changes, all uses of a changed buffer."""
    spans = []
    for root, changes in groups.changes.items():
        touching = [p for member in groups.members[root] for p in _touches(member, position)]
        touching += [position[node] for node in changes if node in position]
        if touching and any(node in position for node in changes):
            last_change = max(position[node] for node in changes if node in position)
            if any(member.op == "placeholder" for member in groups.members[root]):
                last_change = max(touching)
            spans.append((min(touching), last_change))
    return spans


def has_known_layout(value: Tensor) -> bool:
    """Return whether no size and no stride of a value depends on data."""
    strides = value.stride() if value.layout is torch.strided else ()
    return all(isinstance(n, int) for n in (*value.shape, *strides))


def _transforms(nodes: Sequence[Node]) -> list[tuple[int, int]]:
    """Return the spans of torch.func transforms, from the call that opens one to the call that closes it."""
    spans, depth, first = [], 0, 0
    for i, node in enumerate(nodes):
        step = functorch_nesting(node)
        first = i if step > 0 and depth == 0 else first
        depth += step
        if step < 0 and depth == 0:
            spans.append((first, i))
    return spans


def _touches(member: Node, position: dict[Node, int]) -> list[int]:
    own = [position[member]] if member in position else []
    return own + [position[user] for user in member.users if user in position]


def _depth(nodes: Sequence[Node], position: int) -> int:
    """Return how many module levels the calls on both sides of a cut share."""
    left, right = (module_path_of(nodes[i]).split(".") for i in (position - 1, position))
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))
