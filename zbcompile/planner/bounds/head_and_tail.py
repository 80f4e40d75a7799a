"""Bounds of the makespan: what comes before and after a rank's own work.

``head_and_work``: before a rank's first F can start, the F's of earlier stages must run (the head); then all
of the rank's work and its unavoidable idle time follow.

``head_work_and_tail``: after the rank's last B, at least the B's of the stages before it must run, and the
last one's W (the tail). The rank's own W's may run beside the tail, so those that can be left when its last
B ends do not count. The stage of the last B must be forced.

``one_microbatch``: the longest path of a single microbatch from the begin of the step to its end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from zbcompile.planner.bounds.bound import Bound
from zbcompile.planner.bounds.rank_idle import RankIdle
from zbcompile.planner.core.instance import Instance
from zbcompile.planner.core.paths import Paths

__all__ = ["makespan_bounds"]


def makespan_bounds(instance: Instance, paths: Paths, idles: Sequence[RankIdle]) -> Iterator[Bound]:
    """Yield the bounds of every rank, then that of one microbatch."""
    for idle in idles:
        rank, work = idle.rank, instance.work(idle.rank)
        head = min(paths.head[s] for s in instance.stages_of[rank])
        common = {"rank": rank, "head_ns": head, "work_ns": work, "idle_ns": idle.idle_ns, **idle.terms}
        yield Bound(head + work + idle.idle_ns, "head_and_work", "makespan", common)
        if idle.last is not None:
            after = paths.tail[instance.num_stages + idle.last] - instance.backward[idle.last]
            yield Bound(
                head + work + idle.idle_ns - idle.trailing_ns + after,
                "head_work_and_tail",
                "makespan",
                {**common, "trailing_weight_ns": idle.trailing_ns, "tail_ns": after},
            )
    through = max(paths.tail)
    yield Bound(through, "one_microbatch", "makespan", {"path_ns": through})
