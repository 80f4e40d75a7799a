"""Choose the cuts that balance the stages best, among those where a graph may be cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from zbcompile.errors import CutError, UsageError
from zbcompile.passes.nodes import value_of
from zbcompile.passes.partition.balance import Line
from zbcompile.passes.partition.cut_points import CallOrder, CutPoint, has_known_layout
from zbcompile.passes.provenance import module_path_of, source_of
from zbcompile.schedule.costs import Link

__all__ = ["balanced_cuts", "named_cuts", "piece_cuts"]

BUCKETS_PER_STAGE = 48
MOST_CUTS = 400
TOLERANCE = 0.05
"""A step may exceed the best possible span by this share of a rank's mean work for smaller messages."""


def balanced_cuts(
    order: CallOrder, num_stages: int, link: Link | None = None, num_microbatches: int | None = None
) -> tuple[CutPoint, ...]:
    """Return the cuts for which ranks exchange the least among those whose span is near the best.

    Near means within `TOLERANCE`. Every stage gets a call that costs something (a view alone is no stage)
    and, where the cuts allow it, a parameter to train: a rank without any has nothing for an optimizer.

    Parameters
    ----------
    order
        The calls and where they may be cut.
    num_stages
        At least 1.
    link
        Between neighbouring stages; None: messages take no time.
    num_microbatches
        Of a step, if every stage has a rank of its own; None balances the work of the stages alone.

    Raises
    ------
    CutError
        There are fewer such cuts than needed; names the largest indivisible call.
    """
    if num_stages == 1:
        return ()
    distinct = _distinct(order)
    if len(distinct) < num_stages - 1:
        raise CutError(
            f"{num_stages} stages wanted, {len(distinct)} legal cut points; {_largest(order)}",
            needed=num_stages - 1,
            given=len(distinct),
            fix="ask for fewer stages" + _sizes_from_data(order),
        )
    cuts = _thinned(distinct, order.total.total_ns, num_stages)
    line = Line(
        [*(cut.work_before for cut in cuts), order.total],
        [link.transfer_ns(cut.live_bytes) if link else 0 for cut in cuts],
        [_price(cut) for cut in cuts],
        num_stages,
        num_microbatches,
        [*(cut.trained_before for cut in cuts), order.trained],
    )
    return tuple(cuts[position] for position in line.cuts(TOLERANCE))


def piece_cuts(order: CallOrder, most: int, least: int = 1) -> tuple[CutPoint, ...]:
    """Return cuts that part the calls into at most ``most`` pieces of about equal cost, at little to send.

    Around each of the places that part the cost evenly it is the cut with the smallest messages. Every piece
    has a parameter to train, unless that leaves fewer pieces than ``least``. Where the model has fewer cuts,
    all are returned.
    """
    cuts = every = _distinct(order)
    if len(cuts) >= most:
        cuts = _evenly(cuts, order.total.total_ns, most)
    kept: list[CutPoint] = []
    for cut in cuts:
        before = kept[-1].trained_before if kept else 0
        if before < cut.trained_before < order.trained:
            kept.append(cut)
    return tuple(next((some for some in (kept, cuts) if len(some) + 1 >= least), every))


def _evenly(cuts: Sequence[CutPoint], total_ns: int, parts: int) -> list[CutPoint]:
    """Return of the cuts around each of the places that make equal parts the cheapest, then the nearest."""
    near: dict[int, list[tuple[tuple[int, int], int, CutPoint]]] = {}
    for cut in cuts:
        place = (2 * parts * cut.work_before.total_ns + total_ns) // (2 * total_ns)
        off = abs(parts * cut.work_before.total_ns - place * total_ns)
        near.setdefault(place, []).append((_price(cut), off, cut))
    return [min(near[k], key=lambda entry: entry[:2])[2] for k in range(1, parts) if k in near]


def _distinct(order: CallOrder) -> list[CutPoint]:
    """Return one cut, the best, per cost before it; leave out those without work on both sides."""
    inner = [cut for cut in order.cuts if 0 < cut.work_before.total_ns < order.total.total_ns]
    return _best_per(inner, lambda cut: cut.work_before.total_ns)


def _thinned(cuts: list[CutPoint], total_ns: int, num_stages: int) -> list[CutPoint]:
    """Return the best cut of every slice of the cost axis: keeps the search small on long graphs."""
    limit = BUCKETS_PER_STAGE * num_stages
    if len(cuts) <= max(limit, MOST_CUTS):
        return cuts
    thinned = _best_per(cuts, lambda cut: limit * cut.work_before.total_ns // total_ns)
    return thinned if len(thinned) >= num_stages - 1 else cuts


def _best_per(cuts: Sequence[CutPoint], key: Callable[[CutPoint], int]) -> list[CutPoint]:
    best: dict[int, CutPoint] = {}
    for cut in cuts:
        old = best.setdefault(key(cut), cut)
        if _price(cut) < _price(old):
            best[key(cut)] = cut
    return [best[value] for value in sorted(best)]


def _price(cut: CutPoint) -> tuple[int, int]:
    """Return what ranks exchange for a cut in bytes, and its depth.

    A parameter whose uses are divided counts once: its gradients are summed over ranks once a step.
    """
    return cut.live_bytes + cut.divided_bytes, cut.depth


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
        return (
            "no module starts at a legal cut: give a function that chooses among the cuts"
            " (split_points=, docs/reference/split.md)"
        )
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
    _, node = max(zip(order.works, order.nodes, strict=True), key=lambda pair: pair[0].total_ns)
    target = str(node.target).removesuffix(".default").removesuffix(".input")
    return f"the largest indivisible op is {target} in {module_path_of(node)!r}"
