"""Split the backward: each stage's graph -> F, B, W and BW graphs that equal autograd to the bit.

``tuple[StageSource, ...] --> tuple[StageGraphs, ...]``. Contract in: the stages of one captured model.
Contract out: F is what outputs and buffer changes need, B what the gradients of inputs need, W the rest, BW
is B and W in one graph (Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 2; there by
hand for each kind of layer, here on the joint graph)::

    y = x.mm(w)   -->   F:  y = x.mm(w)
                        B:  dx = dy.mm(w.t())
                        W:  dw = x.t().mm(dy)

What is kept between them is decided in `phase_cuts`. A stage is traced once, and can be split again at
another level of recompute (`TracedStages`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial

from torch.fx import Node

from zbcompile.errors import SplitError
from zbcompile.passes.capture.captured import Captured
from zbcompile.passes.joint.joint_pass import Observer, unobserved
from zbcompile.passes.joint.trace import JointStage
from zbcompile.passes.op_costs import nominal_device
from zbcompile.passes.partition.partition import StageSource
from zbcompile.passes.split.assemble import assemble, weigh
from zbcompile.passes.split.levels import worthwhile
from zbcompile.passes.split.phase_cuts import kept_for_backward, kept_for_weight
from zbcompile.passes.split.recompute import (
    POLICIES,
    Recompute,
    check_recompute,
    is_gathered,
    level_text,
    recompute_price,
    recompute_seconds,
)
from zbcompile.passes.split.rewrites import check_known
from zbcompile.passes.split.stage_graphs import GraphCall, StageGraphs
from zbcompile.passes.split.stage_values import StageValues
from zbcompile.passes.split.structural_hash import renamed
from zbcompile.passes.split.traces import trace_all
from zbcompile.schedule.devices import Device

__all__ = ["Recompute", "TracedStages", "split_backward"]


def split_backward(
    captured: Captured,
    sources: Sequence[StageSource],
    *,
    recompute: Recompute = "none",
    backend: str = "eager",
    share: bool = True,
    skip: Collection[str] = (),
    observer: Observer = unobserved,
    device: Device | None = None,
) -> tuple[StageGraphs, ...]:
    """Differentiate and split every stage at one level.

    Parameters
    ----------
    captured, sources
        The model and its stages.
    recompute
        What may be computed again in the backward instead of being kept (see `Recompute`).
    backend, share, skip, observer, device
        As for `TracedStages`.

    Raises
    ------
    SplitError, UsageError
        As `TracedStages` and `TracedStages.split`.
    """
    check_recompute(recompute)
    traced = TracedStages(
        captured, sources, backend=backend, share=share, skip=skip, observer=observer, device=device
    )
    return traced.split([recompute] * len(sources))


class TracedStages:
    """The joint graphs of all stages, to be split at any level; nothing is traced or split twice.

    Stages of equal structure share a joint graph, and with it the graphs of each level.

    Parameters
    ----------
    captured, sources
        The model and its stages.
    backend
        Says what recomputing costs; `backends.with_backend` compiles.
    share
        Whether stages of equal structure are split once.
    skip
        Names of rewrites to leave out (see `rewrites`).
    observer
        Called after each rewrite of a joint graph.
    device
        On which a recomputed call takes its counted time; by default as for `partition`.

    Attributes
    ----------
    skip
        As given.
    compiled
        What a backend made of graphs, by their identity: these stages keep both alive.

    Raises
    ------
    SplitError
        An operator has no derivative, or a stage changes what is no buffer.
    """

    def __init__(
        self,
        captured: Captured,
        sources: Sequence[StageSource],
        *,
        backend: str = "eager",
        share: bool = True,
        skip: Collection[str] = (),
        observer: Observer = unobserved,
        device: Device | None = None,
    ) -> None:
        check_known(skip)
        self._captured, self.skip = captured, skip
        self._stages = trace_all(captured, sources, share=share, skip=skip, observer=observer)
        device = device or nominal_device(captured.device)
        self._seconds = cache(partial(recompute_seconds, backend=backend, device=device))
        self._values: dict[int, StageValues] = {}
        for stage in self._stages:
            if id(stage.joint) not in self._values:
                self._values[id(stage.joint)] = StageValues.of(stage)
        self._known: dict[tuple[int, str], StageGraphs] = {}
        self._levels: dict[int, tuple[Recompute, ...]] = {}
        self.compiled: dict[int, tuple[GraphCall, ...]] = {}

    def split(self, levels: Sequence[Recompute]) -> tuple[StageGraphs, ...]:
        """Return all stages, each at its level.

        Raises
        ------
        SplitError
            A value that should have a gradient lost it.
        UsageError
            A level is unknown.
        """
        stages = [self._at(stage, level) for stage, level in zip(self._stages, levels, strict=True)]
        _check_gradients(stages, self._stages)
        strides = {port.name: port.grad_stride for graphs in stages for port in graphs.outputs}
        trained = {name for graphs in stages for name in graphs.call_layout.full}
        return tuple(_with_gradient_strides(_of_trained(graphs, trained), strides) for graphs in stages)

    def worthwhile(self) -> tuple[tuple[Recompute, ...], ...]:
        """Return per stage its levels that no other one beats, "none" first (`levels.worthwhile`)."""
        for stage in self._stages:
            key = id(stage.joint)
            if key not in self._levels:
                values = self._values[key]
                gathers = any(is_gathered(node) for node in values.nodes)
                named = [level for level in POLICIES if gathers or level != "regather"]
                self._levels[key] = worthwhile(partial(self._weigh, values), named)
        return tuple(self._levels[id(stage.joint)] for stage in self._stages)

    def _at(self, stage: JointStage, level: Recompute) -> StageGraphs:
        check_recompute(level)
        values = self._values[id(stage.joint)]
        key = id(stage.joint), level_text(level)
        if key not in self._known:
            graphs = assemble(self._captured, values, *self._cuts(values, level))
            self._known[key] = replace(graphs, recompute=level)
        return renamed(self._known[key], values.stage.source, stage.source, self._captured)

    def _weigh(self, values: StageValues, level: Recompute) -> tuple[int, ...]:
        return weigh(values, *self._cuts(values, level), self._seconds)

    def _cuts(self, values: StageValues, level: Recompute) -> tuple[set[Node], set[Node]]:
        """Return what is kept for B and for W."""
        price = recompute_price(level, self._seconds)
        for_weight = kept_for_weight(values, price)
        return kept_for_backward(values, for_weight, price), for_weight


def _of_trained(stage: StageGraphs, trained: Collection[str]) -> StageGraphs:
    """Return the stage without trainable parameters that get no gradient in any stage: nothing sums them."""
    return replace(stage, trainable=tuple(name for name in stage.trainable if name in trained))


def _check_gradients(stages: Collection[StageGraphs], traced: Sequence[JointStage]) -> None:
    """Raise SplitError for an output without a gradient that is the loss or whose users want one."""
    wanted = {
        (stage.source.inputs[position].name, stage.source.index)
        for stage in traced
        for position in stage.gradient_inputs
    }
    for stage in stages:
        for port in stage.outputs:
            asked = port.is_loss or any((port.name, target) in wanted for target in port.targets)
            if asked and not port.has_gradient:
                raise SplitError(
                    f"stage {stage.index}: {port.name} should have a gradient and lost it in tracing"
                )


def _with_gradient_strides(stage: StageGraphs, strides: Mapping[str, tuple[int, ...]]) -> StageGraphs:
    """Return the stage with inputs that know how their producers want the gradients."""
    inputs = (
        replace(port, grad_stride=strides[port.name]) if port.has_gradient else port for port in stage.inputs
    )
    return replace(stage, inputs=tuple(inputs))
