"""The enclosing-pair bound: the span of one rank encloses the work of another.

Let x be the stage whose F(1) is the first action of rank u, z the stage whose B(m) is the last B of rank u,
and y and q the same for rank d, where each is forced. Rank u's span reaches from F(1) of x to W(m) of z at
least. In between, F's lead from x to y; then rank d runs all of its work and its unavoidable idle time up
to its last B (all but the W's that may be left when that B ends); then B's lead from q back to z, and z's
last W follows. The sum of the three parts is a lower bound of rank u's span.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from zbcompile.planner.bounds.bound import Bound
from zbcompile.planner.bounds.rank_idle import RankIdle
from zbcompile.planner.core.instance import Instance, is_path
from zbcompile.planner.core.paths import NO_PATH, Paths

__all__ = ["best_enclosing_pair", "enclosing_pair_bounds"]


def enclosing_pair_bounds(instance: Instance, paths: Paths, idles: Sequence[RankIdle]) -> Iterator[Bound]:
    """Yield the bound of every pair of ranks for which both paths exist."""
    for outer in idles:
        for inner in idles:
            bound = _bound(instance, paths, outer, inner)
            if bound is not None:
                yield bound


def _bound(instance: Instance, paths: Paths, outer: RankIdle, inner: RankIdle) -> Bound | None:
    """Return the bound of a pair, None if a path is missing."""
    ways = _ways(instance, paths, outer, inner)
    if ways is None:
        return None
    down, back = ways
    return Bound(
        down + _busy(instance, inner) + back,
        "enclosing_pair",
        "span",
        {
            "outer_rank": outer.rank,
            "inner_rank": inner.rank,
            "way_there_ns": down,
            "work_ns": instance.work(inner.rank),
            "idle_ns": inner.idle_ns,
            "trailing_weight_ns": inner.trailing_ns,
            "way_back_ns": back,
            **inner.terms,
        },
    )


def _busy(instance: Instance, inner: RankIdle) -> int:
    """Return the inner rank's time from its first F to its last B."""
    return instance.work(inner.rank) + inner.idle_ns - inner.trailing_ns


def _ways(instance: Instance, paths: Paths, outer: RankIdle, inner: RankIdle) -> tuple[int, int] | None:
    """Return the times of the ways there and back, None if a path is missing."""
    x, z, y, q = outer.first, outer.last, inner.first, inner.last
    if x is None or y is None or z is None or q is None or outer is inner:
        return None
    down, up = paths.f_to_f(x, y), paths.b_to_b(q, z)
    if down == NO_PATH or up == NO_PATH:
        return None
    return down, up - instance.backward[q] + instance.backward[z] + instance.weight[z]


def best_enclosing_pair(instance: Instance, paths: Paths, idles: Sequence[RankIdle]) -> Bound | None:
    """Return the first of the strongest of `enclosing_pair_bounds`, None if there is none.

    Along a plain chain of stages the value is a sum of a term of the outer and one of the inner rank, so that
    one pass over the ranks finds the pair.
    """
    pair = _best_along_chain(instance, paths, idles) if is_path(instance) else None
    if pair is None:
        busy = [_busy(instance, inner) for inner in idles]
        best = -1
        for outer in idles:
            for inner, between in zip(idles, busy, strict=True):
                ways = _ways(instance, paths, outer, inner)
                if ways is not None and sum(ways) + between > best:
                    best, pair = sum(ways) + between, (outer, inner)
    return None if pair is None else _bound(instance, paths, *pair)


def _best_along_chain(
    instance: Instance, paths: Paths, idles: Sequence[RankIdle]
) -> tuple[RankIdle, RankIdle] | None:
    """Return the pair of a chain: the first and the last stage of a rank are both its lowest one.

    Ranks with higher lowest stages can be the inner one. Against rank e, whose lowest stage is the highest of
    all, a pair has the value of (outer, e) + (e, inner) whatever is in between.
    """
    lowest = sorted(idles, key=lambda idle: idle.first or 0)
    end = lowest[-1].first
    assert end is not None
    best: tuple[int, int, int] | None = None
    inside: tuple[int, int] | None = None
    for outer in reversed(lowest):
        s = outer.first
        assert s is not None
        if inside is not None:
            around = paths.f_to_f(s, end) + paths.b_to_b(end, s) + instance.backward[s] + instance.weight[s]
            candidate = (inside[0] - around, outer.rank, inside[1])
            best = candidate if best is None else min(best, candidate)
        here = paths.f_to_f(s, end) + paths.b_to_b(end, s) + instance.backward[s] - _busy(instance, outer)
        inside = (here, outer.rank) if inside is None else min(inside, (here, outer.rank))
    return None if best is None else (idles[best[1]], idles[best[2]])
