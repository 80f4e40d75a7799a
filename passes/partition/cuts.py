"""Choose the cuts that balance the stages best, among those where a graph may be cut."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

from zbcompile.errors import CutError, UsageError
from zbcompile.passes.nodes import value_of
from zbcompile.passes.partition.cut_points import CallOrder, CutPoint, has_known_layout
from zbcompile.passes.provenance import module_path_of, source_of

__all__ = ["balanced_cuts", "named_cuts"]

BUCKETS_PER_STAGE = 48
TOLERANCE = 0.05
"""A stage may exceed the best possible largest stage by this share if that makes messages smaller."""


def balanced_cuts(order: CallOrder, num_stages: int) -> tuple[CutPoint, ...]:
    """Return the cuts with the smallest messages among those whose largest stage is near the best.

    Near means within `TOLERANCE`. Every stage gets a call that costs something (a view alone is no stage).

    Raises
    ------
    CutError
        There are fewer such cuts than needed; names the largest indivisible call.
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
            fix="ask for fewer stages" + _sizes_from_data(order),
        )
    cuts = _thinned(distinct, total, num_stages)
    ends = [0.0, *(cut.seconds_before for cut in cuts), total]
    smallest = _smallest_cap(ends, num_stages)
    return _least_bytes(cuts, ends, num_stages, smallest * (1 + TOLERANCE))


def _distinct(cuts: Sequence[CutPoint], total: float) -> list[CutPoint]:
    """Return one cut, the best, per cost before it; leave out those without work on both sides."""
    inner = [cut for cut in cuts if 0.0 < cut.seconds_before < total]
    return _best_per(inner, lambda cut: cut.seconds_before)


def _thinned(cuts: list[CutPoint], total: float, num_stages: int) -> list[CutPoint]:
    """Return the best cut of every slice of the cost axis: keeps the search small on long graphs."""
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
    """Return the smallest possible cost of the largest stage, by bisection (no stage is empty)."""

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
    """Return the cuts of least (bytes, depth, squared stage cost), by dynamic programming over stages."""
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


def named_cuts(order: CallOrder, split_points: Sequence[str], num_stages: int) -> tuple[CutPoint, ...]:
    """Return one cut before the first call of each named module, in model order.

    Raises
    ------
    UsageError
        A name without calls, or a wrong number or order of names.
    CutError
        A cut is not legal; names the nearest ones.
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
        first = next((i for i, node in enumerate(order.nodes) if _under(module_path_of(node), name)), None)
        if first is None:
            raise UsageError(
                f"no call of the captured graph belongs to the module {name!r}", fix=_known(order)
            )
        if first not in legal:
            where = source_of(order.nodes[first])
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


def _known(order: CallOrder) -> str:
    names = sorted({module_path_of(node) for node in order.nodes} - {""})
    return "use one of: " + ", ".join(names[:12]) + (" ..." if len(names) > 12 else "")


def _nearest(order: CallOrder, position: int) -> str:
    """Name the nearest legal cuts that a name can ask for: before the first call of a module."""
    first: dict[str, int] = {}
    for i, node in enumerate(order.nodes):
        parts = module_path_of(node).split(".")
        for depth in range(1, len(parts) + 1):
            first.setdefault(".".join(parts[:depth]), i)
    names = {i: name for name, i in reversed(first.items()) if name}  # the outermost that starts there
    near = sorted(
        (cut for cut in order.cuts if cut.position in names), key=lambda c: abs(c.position - position)
    )
    if near:
        found = [f"{names[cut.position]} ({cut.source})" for cut in near[:3]]
        return "the nearest legal cuts are before " + "; ".join(found) + _sizes_from_data(order)
    if order.cuts:
        return "no module starts at a legal cut: give a function that chooses among the cuts (docs/split.md)"
    return "there is no legal cut" + _sizes_from_data(order)


def _sizes_from_data(order: CallOrder) -> str:
    """Return what helps where tensors have sizes that depend on data: none of them may cross a cut."""
    for node in order.nodes:
        value = value_of(node)
        if value is not None and not has_known_layout(value):
            return (
                f"; no tensor whose size depends on data may cross a cut, and {source_of(node)} makes the "
                "first: name an argument that it comes from, and that has one value in all steps, in "
                "compile(..., constant=[its name]), or give sizes as Python numbers"
            )
    return ""


def _largest(order: CallOrder) -> str:
    """Name the most expensive span between two legal cuts by its most expensive call."""
    if not order.nodes:
        return "the graph has no calls"
    cost, node = max(zip(order.costs, order.nodes, strict=True), key=lambda pair: pair[0])
    target = str(node.target).removesuffix(".default").removesuffix(".input")
    return f"the largest indivisible op is {target} in {module_path_of(node)!r}"
