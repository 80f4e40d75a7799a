"""Where the linear order of a captured graph may be cut, and which cuts balance the stages best."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch.fx import Node

from zbcompile.errors import CutError, UsageError
from zbcompile.passes.aliasing import StorageGroups, tensor_bytes
from zbcompile.passes.op_costs import seconds
from zbcompile.passes.torch_private import functorch_nesting

__all__ = ["CutPoint", "Order", "balanced_cuts", "named_cuts", "order_of"]

BUCKETS_PER_STAGE = 48
TOLERANCE = 0.05
"""A stage may exceed the best possible largest stage by this share if that makes messages smaller."""


@dataclass(frozen=True, slots=True)
class CutPoint:
    """A legal cut: the stage after it starts with the call at ``position`` of the order.

    live_bytes : forward message bytes across the cut; seconds_before : counted forward time of
    everything before; module_path, source : of the first call after it; depth : how deep in the
    module tree the cut lies (0 between top-level modules).
    """

    position: int
    live_bytes: int
    seconds_before: float
    module_path: str
    source: str
    depth: int


@dataclass(frozen=True)
class Order:
    """The calls to place, their counted seconds and the legal cuts between them."""

    nodes: tuple[Node, ...]
    costs: tuple[float, ...]
    cuts: tuple[CutPoint, ...]
    total: float


def order_of(nodes: Sequence[Node], groups: StorageGroups, costs: Callable[[Node], float] = seconds) -> Order:
    """All legal cuts between ``nodes`` (the calls that are not auxiliary, in graph order)."""
    position = {node: i for i, node in enumerate(nodes)}
    count = len(nodes)
    illegal, live = [0] * (count + 1), [0] * (count + 1)
    for node, first in position.items():
        last = max((position[user] for user in node.users if user in position), default=first)
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and all(isinstance(n, int) for n in value.shape):
            _span(live, first, last, tensor_bytes(value))
        else:
            _span(illegal, first, last, 1)
    for first, last in [*_inseparable(nodes, position, groups), *_transforms(nodes)]:
        _span(illegal, first, last, 1)
    prices = [costs(node) for node in nodes]
    before = [0.0, *accumulate(prices)]
    blocked, crossing = list(accumulate(illegal)), list(accumulate(live))
    cuts = tuple(
        CutPoint(
            i, crossing[i], before[i], _path(nodes[i]), nodes[i].meta.get("source", ""), _depth(nodes, i)
        )
        for i in range(1, count)
        if not blocked[i]
    )
    return Order(tuple(nodes), tuple(prices), cuts, before[-1])


def _span(differences: list[int], first: int, last: int, amount: int) -> None:
    """Add ``amount`` to every cut after ``first`` up to the one before ``last``."""
    differences[first + 1] += amount
    differences[last + 1] -= amount


def _inseparable(
    nodes: Sequence[Node], position: dict[Node, int], groups: StorageGroups
) -> list[tuple[int, int]]:
    """Spans that stay in one stage: a value and its in-place changes, all uses of a changed buffer."""
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


def _transforms(nodes: Sequence[Node]) -> list[tuple[int, int]]:
    """Spans of torch.func transforms, from the call that opens one to the call that closes it."""
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


def balanced_cuts(order: Order, num_stages: int) -> tuple[CutPoint, ...]:
    """Cuts with the smallest messages among those whose largest stage is within TOLERANCE of the best.

    Every stage gets a call that costs something (a view alone is no stage). Raises CutError when there
    are fewer such cuts than needed; names the largest indivisible call.
    """
    if num_stages == 1:
        return ()
    total = order.total
    distinct = _distinct(order.cuts, total)
    if len(distinct) < num_stages - 1:
        raise CutError(
            f"{num_stages} stages wanted, {len(distinct)} legal cut points; {_largest(order)}",
            needed=num_stages - 1,
            given=len(distinct),
            fix="ask for fewer stages",
        )
    cuts = _thinned(distinct, total, num_stages)
    ends = [0.0, *(cut.seconds_before for cut in cuts), total]
    smallest = _smallest_cap(ends, num_stages)
    return _least_bytes(cuts, ends, num_stages, smallest * (1 + TOLERANCE))


def _distinct(cuts: Sequence[CutPoint], total: float) -> list[CutPoint]:
    """The best of the cuts that have the same cost before them; none without work on both sides."""
    inner = [cut for cut in cuts if 0.0 < cut.seconds_before < total]
    return _best_per(inner, lambda cut: cut.seconds_before)


def _thinned(cuts: list[CutPoint], total: float, num_stages: int) -> list[CutPoint]:
    """The best cut of every slice of the cost axis: keeps the search small on long graphs."""
    limit = BUCKETS_PER_STAGE * num_stages
    if len(cuts) <= max(limit, 200):
        return cuts
    thinned = _best_per(cuts, lambda cut: int(limit * cut.seconds_before / total))
    return thinned if len(thinned) >= num_stages - 1 else cuts


def _best_per(cuts: Sequence[CutPoint], key: Callable[[CutPoint], float]) -> list[CutPoint]:
    best: dict[float, CutPoint] = {}
    for cut in cuts:
        old = best.setdefault(key(cut), cut)
        if (cut.live_bytes, cut.depth) < (old.live_bytes, old.depth):
            best[key(cut)] = cut
    return [best[value] for value in sorted(best)]


def _smallest_cap(ends: list[float], num_stages: int) -> float:
    """The smallest possible cost of the largest stage, by bisection (each stage gets at least one cut)."""

    def fits(cap: float) -> bool:
        at, stages = 0, 0
        while at < len(ends) - 1 and stages < num_stages:
            reach = bisect_left(ends, ends[at] + cap * (1 + 1e-12) + 1e-15, at + 1)
            reach -= reach == len(ends) or ends[reach] > ends[at] + cap * (1 + 1e-12) + 1e-15
            remaining = num_stages - stages - 1
            reach = min(reach, len(ends) - 1 - remaining)
            if reach <= at:
                return False
            at, stages = reach, stages + 1
        return at == len(ends) - 1

    low, high = 0.0, ends[-1]
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def _least_bytes(
    cuts: list[CutPoint], ends: list[float], num_stages: int, cap: float
) -> tuple[CutPoint, ...]:
    """Dynamic program over (stages used, last cut): least total (bytes, depth, squared stage cost)."""
    last = len(ends) - 1
    slack = cap * (1 + 1e-9) + 1e-15
    scores: list[dict[int, tuple[int, int, float]]] = [{0: (0, 0, 0.0)}]
    back: list[dict[int, int]] = [{}]
    for stage in range(1, num_stages + 1):
        row: dict[int, tuple[int, int, float]] = {}
        came: dict[int, int] = {}
        for start, (size, depth, square) in scores[-1].items():
            for end in range(start + 1, last + 1 if stage == num_stages else last):
                cost = ends[end] - ends[start]
                if cost > slack:
                    break
                if stage == num_stages and end != last:
                    continue
                cut = cuts[end - 1] if end < last else None
                score = (
                    size + (cut.live_bytes if cut else 0),
                    depth + (cut.depth if cut else 0),
                    square + cost * cost,
                )
                if end not in row or score < row[end]:
                    row[end], came[end] = score, start
        scores.append(row)
        back.append(came)
    chosen, end = [], last
    for stage in range(num_stages, 0, -1):
        end = back[stage][end]
        if end:
            chosen.append(cuts[end - 1])
    return tuple(reversed(chosen))


def named_cuts(order: Order, split_points: Sequence[str], num_stages: int) -> tuple[CutPoint, ...]:
    """One cut before the first call of each named module, in model order.

    Raises UsageError for a name without calls or a wrong count, CutError where a cut is not legal.
    """
    if len(split_points) != num_stages - 1:
        raise UsageError(
            "split_points must name one module less than there are stages",
            needed=num_stages - 1,
            given=len(split_points),
        )
    legal = {cut.position: cut for cut in order.cuts}
    chosen = []
    for name in split_points:
        first = next((i for i, node in enumerate(order.nodes) if _under(_path(node), name)), None)
        if first is None:
            raise UsageError(
                f"no call of the captured graph belongs to the module {name!r}", fix=_known(order)
            )
        if first not in legal:
            where = order.nodes[first].meta.get("source", "")
            raise CutError(
                f"the model cannot be cut before {name!r}", where=where, fix=_nearest(order, first)
            )
        chosen.append(legal[first])
    if sorted({cut.position for cut in chosen}) != [cut.position for cut in chosen]:
        raise UsageError(
            "split_points are not in the order in which the model calls them", given=split_points
        )
    return tuple(chosen)


def _under(path: str, name: str) -> bool:
    return path == name or path.startswith(name + ".")


def _known(order: Order) -> str:
    names = sorted({_path(node) for node in order.nodes} - {""})
    return "use one of: " + ", ".join(names[:12]) + (" ..." if len(names) > 12 else "")


def _nearest(order: Order, position: int) -> str:
    near = sorted(order.cuts, key=lambda cut: abs(cut.position - position))[:3]
    names = [f"{cut.module_path} ({cut.source})" for cut in near]
    return "the nearest legal cuts are before " + "; ".join(names) if near else "there is no legal cut"


def _largest(order: Order) -> str:
    """Name the most expensive span between two legal cuts by its most expensive call."""
    if not order.nodes:
        return "the graph has no calls"
    cost, node = max(zip(order.costs, order.nodes, strict=True), key=lambda pair: pair[0])
    target = str(node.target).removesuffix(".default").removesuffix(".input")
    return f"the largest indivisible op is {target} in {_path(node)!r}"


def _path(node: Node) -> str:
    return str(node.meta.get("module_path", ""))


def _depth(nodes: Sequence[Node], position: int) -> int:
    """How many module levels the calls on both sides of a cut share."""
    left, right = _path(nodes[position - 1]).split("."), _path(nodes[position]).split(".")
    return sum(1 for _ in _common(left, right))


def _common(left: list[str], right: list[str]) -> list[str]:
    shared = []
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        shared.append(a)
    return shared
