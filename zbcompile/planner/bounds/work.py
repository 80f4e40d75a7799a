"""The work bound: a rank's span is at least its work plus its unavoidable idle time.

The method is named after the idle time that counts: ``work`` for none, ``memory_windows`` on a rank with one
stage, ``start_end_idle`` on a rank with several (`zbcompile.planner.bounds.rank_idle`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from zbcompile.planner.bounds.bound import Bound
from zbcompile.planner.bounds.rank_idle import RankIdle
from zbcompile.planner.core.instance import Instance

__all__ = ["work_bounds"]


def work_bounds(instance: Instance, idles: Sequence[RankIdle]) -> Iterator[Bound]:
    """Yield the bound of every rank."""
    for idle in idles:
        rank, work = idle.rank, instance.work(idle.rank)
        method = "memory_windows" if len(instance.stages_of[rank]) == 1 else "start_end_idle"
        if idle.idle_ns == 0:
            method = "work"
        yield Bound(
            work + idle.idle_ns,
            method,
            "span",
            {"rank": rank, "work_ns": work, "idle_ns": idle.idle_ns, **idle.terms},
        )
