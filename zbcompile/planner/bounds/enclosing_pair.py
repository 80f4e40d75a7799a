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
from zbcompile.planner.core.instance import Instance
from zbcompile.planner.core.paths import NO_PATH, Paths

__all__ = ["enclosing_pair_bounds"]


def enclosing_pair_bounds(instance: Instance, paths: Paths, idles: Sequence[RankIdle]) -> Iterator[Bound]:
    """Yield the bound of every pair of ranks for which both paths exist."""
    for outer in idles:
        x, z = outer.first, outer.last
        for inner in idles:
            y, q = inner.first, inner.last
            if x is None or y is None or z is None or q is None or outer is inner:
                continue
            down, up = paths.f_to_f(x, y), paths.b_to_b(q, z)
            if down == NO_PATH or up == NO_PATH:
                continue
            busy = instance.work(inner.rank) + inner.idle_ns - inner.trailing_ns
            back = up - instance.backward[q] + instance.backward[z] + instance.weight[z]
            yield Bound(
                down + busy + back,
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
