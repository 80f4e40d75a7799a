"""The joint graphs of all stages: which outputs take a gradient, in which layout, and who shares a trace.

``tuple[StageSource, ...] --> list[JointStage]``. Contract out: an output takes a gradient exactly if one
comes back to it, in the memory layout in which it comes; stages of equal structure share one joint graph.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from zbcompile.passes.capture.captured import Captured
from zbcompile.passes.capture.state_guards import gradients_kept
from zbcompile.passes.joint.gradient_layouts import GradientLayout, arriving_layout
from zbcompile.passes.joint.joint_pass import Observer, unobserved
from zbcompile.passes.joint.trace import JointStage, trace_stage
from zbcompile.passes.partition.partition import StageSource
from zbcompile.passes.split.structural_hash import structural_hash

__all__ = ["trace_all"]


def trace_all(
    captured: Captured,
    sources: Sequence[StageSource],
    *,
    share: bool,
    skip: Collection[str] = (),
    observer: Observer = unobserved,
) -> list[JointStage]:
    """Trace every stage, at most twice.

    The first round goes in stage order and learns which values require a gradient. The second goes from the
    last stage to the first; it traces again, without the outputs that no gradient comes back to and for
    gradients in the layout in which they come, the stages for which that differs.

    Parameters
    ----------
    captured, sources
        The model and its stages.
    share
        Whether stages of equal structure share a trace.
    skip, observer
        As for `trace_stage`. A stage that is traced twice is observed twice.
    """
    with torch.inference_mode(False), torch.enable_grad(), gradients_kept(captured.state.values()):
        tracer = _Tracer(captured, share, skip, observer)
        traced = [tracer.first_round(source) for source in sources]
        return list(reversed([tracer.second_round(stage) for stage in reversed(traced)]))


class _Tracer:
    """Traces stages and remembers what later traces need to know.

    Attributes
    ----------
    differentiable
        Output -> whether the first round found that it requires a gradient.
    returned
        Output -> its gradients from the stages that use it, in the order in which they are added.
    known
        Structural hash -> the trace.
    """

    def __init__(self, captured: Captured, share: bool, skip: Collection[str], observer: Observer) -> None:
        self.captured, self.share = captured, share
        self.skip, self.observer = skip, observer
        self.differentiable: dict[str, bool] = {}
        self.returned: dict[str, list[Tensor]] = {}
        self.known: dict[str, JointStage] = {}

    def first_round(self, source: StageSource) -> JointStage:
        """Trace with a gradient for every output that a stage uses and for the loss."""
        live = frozenset(i for i, wire in enumerate(source.outputs) if wire.targets or wire.is_loss)
        stage = self._trace(source, live, {})
        for position, wire in enumerate(source.outputs):
            self.differentiable[wire.name] = position in stage.joint.tangents
        return stage

    def second_round(self, stage: JointStage) -> JointStage:
        """Trace again if fewer outputs take a gradient, or one in another layout; later stages come first."""
        wires, tangents = stage.source.outputs, stage.joint.tangents
        live = frozenset(i for i in tangents if wires[i].name in self.returned or wires[i].is_loss)
        found = {
            i: arriving_layout(node.meta["val"], self.returned.get(wires[i].name, ()))
            for i, node in tangents.items()
        }
        layouts = {i: layout for i, layout in found.items() if layout is not None}
        if live != frozenset(tangents) or layouts:
            stage = self._trace(stage.source, live, layouts)
        for i in stage.gradient_inputs:
            made = stage.joint.gradients[stage.num_state + i].meta["val"]
            self.returned.setdefault(stage.source.inputs[i].name, []).append(made)
        return stage

    def _trace(
        self, source: StageSource, live: frozenset[int], layouts: Mapping[int, GradientLayout]
    ) -> JointStage:
        """Return the trace of this stage, or that of an equal stage."""
        needs = [wire.source[0] == "stage" and self.differentiable[wire.name] for wire in source.inputs]
        if self.share:
            key = structural_hash(source, self.captured, needs, live)
        else:
            key = f"{source.index} {sorted(live)}"
        key += str(sorted(layouts.items())) if layouts else ""
        if key not in self.known:
            self.known[key] = trace_stage(
                self.captured, source, needs, live, layouts, skip=self.skip, observer=self.observer
            )
        return replace(self.known[key], source=source)
