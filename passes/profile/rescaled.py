"""Costs of stages for another shape: measured times scaled by counted ones, bytes exact.

``Profile + stages it was made for + stages of another shape --> Profile``. Nothing is run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch.fx import GraphModule

from zbcompile.passes.op_costs import node_ns
from zbcompile.passes.profile.measure import edges_of
from zbcompile.passes.split.stage_graphs import Graphs, StageGraphs
from zbcompile.schedule.costs import Profile, StageCost
from zbcompile.schedule.devices import Device

__all__ = ["rescaled_profile"]


def rescaled_profile(
    profile: Profile, old: Sequence[StageGraphs], new: Sequence[StageGraphs], device: Device
) -> Profile:
    """Return the costs of stages whose shapes differ from those of a profile.

    Parameters
    ----------
    profile
        Costs of ``old``.
    old, new
        The same stages for two shapes.
    device
        Whose counted times scale the costs.
    """
    costs = tuple(
        _rescaled(cost, before, after, device)
        for cost, before, after in zip(profile.stages, old, new, strict=True)
    )
    source = f"{profile.source}; scaled by counted times to another shape".removeprefix("; ")
    return replace(profile, stages=costs, edges=edges_of(new), source=source)


def _rescaled(cost: StageCost, old: StageGraphs, new: StageGraphs, device: Device) -> StageCost:
    forward, backward_input, backward_weight, full = (
        _ns(getattr(new.graphs, name), device) / (_ns(getattr(old.graphs, name), device) or 1)
        for name in Graphs.__slots__
    )
    return replace(
        cost,
        forward_ns=round(cost.forward_ns * forward),
        backward_input_ns=round(cost.backward_input_ns * backward_input),
        backward_weight_ns=round(cost.backward_weight_ns * backward_weight),
        full_backward_ns=round(cost.full_backward_ns * full),
        saved_bytes=max(0, cost.saved_bytes + new.saved_bytes - old.saved_bytes),
        saved_for_weight_bytes=max(
            0, cost.saved_for_weight_bytes + new.saved_for_weight_bytes - old.saved_for_weight_bytes
        ),
        variants=(),
    )


def _ns(module: GraphModule, device: Device) -> int:
    return sum(node_ns(node, device) for node in module.graph.nodes)
