"""The area bound: bytes times time.

Every microbatch holds M_B of a stage at least from the start of its F to the end of its B, which takes the
longest path from F to B plus TB, and M_W at least while its W runs. The sum over the stages and microbatches
of a rank, in byte ns, cannot exceed the rank's headroom times its span: span >= area / headroom.
"""

from __future__ import annotations

from collections.abc import Iterator

from zbcompile.planner.bounds.bound import Bound
from zbcompile.planner.core.instance import Instance
from zbcompile.planner.core.paths import Paths

__all__ = ["area_bounds"]


def area_bounds(instance: Instance, paths: Paths) -> Iterator[Bound]:
    """Yield the area bound of every rank that has headroom."""
    for rank, stages in enumerate(instance.stages_of):
        area = instance.num_microbatches * sum(
            (paths.f_to_b(s, s) + instance.backward[s]) * instance.saved[s]
            + instance.weight[s] * instance.pending[s]
            for s in stages
        )
        if instance.headroom[rank] > 0:
            yield Bound(
                -(-area // instance.headroom[rank]),
                "area",
                "span",
                {"rank": rank, "byte_ns": area, "headroom_bytes": instance.headroom[rank]},
            )
