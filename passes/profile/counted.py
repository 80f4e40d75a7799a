"""Count what stages cost on a device: FLOPs and bytes of every operator, put against the device's roofline.

``tuple[StageGraphs] + Device --> Profile``. Contract in: graphs whose nodes carry fake values, of any device.
Contract out: times from the roofline, exact bytes; nothing is run. A size that depends on data counts as its
upper bound.

    mm [1024, 512] x [512, 512]  -->  0.54 GFLOP, 5.2 MB  -->  max(flops / peak, bytes / bandwidth) + launch
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from zbcompile.passes.op_costs import depends_on_data, graph_ns
from zbcompile.passes.profile.measure import OPTIMIZER_SLOTS, cost_of, edges_of
from zbcompile.passes.split.stage_graphs import Graphs, StageGraphs
from zbcompile.schedule.costs import Link, Profile
from zbcompile.schedule.devices import Device, device_named

__all__ = ["counted_profile"]


def counted_profile(
    stages: Sequence[StageGraphs],
    device: Device | str,
    link: Link | None = None,
    *,
    optimizer_bytes: int | None = None,
    others: Sequence[Sequence[StageGraphs]] | None = None,
) -> Profile:
    """Return the costs of stages that nobody has run: times by roofline on their graphs, bytes exact.

    Stages that share their graphs are counted once.

    Parameters
    ----------
    stages
        In order.
    device
        A `Device` or a name of the table.
    link
        Between neighbouring ranks; the device's own if not given.
    optimizer_bytes
        Optimizer state per trainable element; by default two tensors like the parameter (AdamW).
    others
        Per stage the same stage at other levels of recompute: its variants.

    Raises
    ------
    UsageError
        An unknown device, or a dtype for which it has no rate.
    """
    chosen = device_named(device) if isinstance(device, str) else device
    times: dict[int, tuple[int, int, int, int]] = {}
    costs = []
    for k, stage in enumerate(stages):
        ways = (stage, *(others[k] if others else ()))
        for way in ways:
            if id(way.graphs) not in times:
                f, b, w, full = (graph_ns(getattr(way.graphs, name), chosen) for name in Graphs.__slots__)
                times[id(way.graphs)] = f, b, w, full
        costs.append(
            cost_of(
                ways,
                [times[id(way.graphs)] for way in ways],
                _static_bytes(stage, optimizer_bytes),
                _gradient_bytes(stage),
            )
        )
    source = f"counted for {chosen.name}: {chosen.source}"
    if any(depends_on_data(stage.graphs.forward) for stage in stages):
        source += "; sizes that depend on data at their upper bound"
    return Profile(tuple(costs), edges_of(stages), link or chosen.link, source=source)


def _static_bytes(stage: StageGraphs, optimizer_bytes: int | None) -> int:
    """Return the bytes of parameters, buffers, gradients and optimizer state, from the forward graph."""
    total = 0
    for name, value in _state(stage):
        total += value.nbytes
        if name in stage.trainable:
            kept = OPTIMIZER_SLOTS * value.nbytes
            total += value.nbytes + (kept if optimizer_bytes is None else optimizer_bytes * value.numel())
    return total


def _gradient_bytes(stage: StageGraphs) -> int:
    """Return the bytes of one gradient for each trainable parameter."""
    return sum(value.nbytes for name, value in _state(stage) if name in stage.trainable)


def _state(stage: StageGraphs) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and values of parameters and buffers, from the forward graph."""
    placeholders = stage.graphs.forward.graph.find_nodes(op="placeholder")
    for name, placeholder in zip((*stage.parameters, *stage.buffers), placeholders, strict=False):
        yield name, placeholder.meta["val"]
