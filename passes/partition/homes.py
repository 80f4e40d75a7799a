"""Cut a model where the trained one was cut, so that each rank has the parameters of what it runs."""

from __future__ import annotations

from collections.abc import Sequence

from zbcompile.errors import CutError
from zbcompile.passes.aliasing import StorageGroups
from zbcompile.passes.capture.captured import Captured
from zbcompile.passes.partition.auxiliary import auxiliary_nodes
from zbcompile.passes.partition.cut_points import CutPoint

__all__ = ["SameHomes"]


class SameHomes:
    """A cut policy: behind all uses of earlier stages' parameters, before all uses of later stages'.

    Among the cuts that keep this, the one with the fewest bytes crossing is taken.

    Parameters
    ----------
    captured
        The model in another mode, or for another shape.
    held
        Per trained stage, the names of its parameters and buffers.

    Attributes
    ----------
    end
        Number of calls that can stand on either side of a cut.
    uses
        Per use of a parameter or buffer: the first and the last trained stage that hold it, and the position
        of the call.
    """

    def __init__(self, captured: Captured, held: Sequence[Sequence[str]]) -> None:
        graph = captured.module.graph
        auxiliary = auxiliary_nodes(captured, StorageGroups(graph))
        main = [n for n in graph.nodes if n.op == "call_function" and n not in auxiliary]
        self.end = len(main)
        position = {node: k for k, node in enumerate(main)}
        homes: dict[str, list[int]] = {}
        for stage, names in enumerate(held):
            for name in names:
                homes.setdefault(name, []).append(stage)
        self.uses: list[tuple[int, int, int]] = []
        for hole in graph.find_nodes(op="placeholder"):
            role = captured.roles[hole.name]
            if role.kind in ("parameter", "buffer") and role.name in homes:
                at = homes[role.name]
                self.uses += [(min(at), max(at), position[u]) for u in hole.users if u in position]

    def __call__(self, cuts: tuple[CutPoint, ...], num_stages: int) -> list[CutPoint]:
        """Return the chosen cut points; raises CutError where none fits."""
        chosen: list[CutPoint] = []
        for border in range(num_stages - 1):
            low = max([p + 1 for _, last, p in self.uses if last <= border], default=1)
            high = min([p for first, _, p in self.uses if first > border], default=self.end)
            low = max(low, chosen[-1].position + 1 if chosen else 1)
            fitting = [cut for cut in cuts if low <= cut.position <= high]
            if not fitting:
                raise CutError(
                    "the model in this mode or for this shape cannot be cut where the trained one was",
                    where=f"between stages {border} and {border + 1}",
                    fix="run the model itself on it, or choose split_points between modules",
                )
            chosen.append(min(fitting, key=lambda cut: (cut.live_bytes, cut.position)))
        return chosen
