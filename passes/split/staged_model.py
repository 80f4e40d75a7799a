"""What the passes make of a model before anything is planned: its stages, and what they were made from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from zbcompile.passes.capture.captured import Captured
from zbcompile.passes.capture.nested_values import Spec, flatten, unflatten
from zbcompile.passes.partition.partition import StageSource
from zbcompile.passes.split.backends import with_backend
from zbcompile.passes.split.recompute import Recompute
from zbcompile.passes.split.split_backward import TracedStages
from zbcompile.passes.split.stage_graphs import StageGraphs

__all__ = ["CutReport", "StagedModel"]


@dataclass(frozen=True, slots=True)
class CutReport:
    """What a stage holds and what crosses its borders; as text, one line.

    Attributes
    ----------
    index
        Position of the stage.
    modules
        Paths of the modules whose calls it holds, in order.
    num_parameters, parameter_bytes
        Elements and bytes of its parameters.
    seconds
        Time of F, B and W of a microbatch, counted from shapes (see `call_costs`).
    received_bytes, sent_bytes
        What a microbatch brings from other stages and takes to them, each target counted.
    saved_bytes, saved_for_weight_bytes
        Held from F to B and from B to W, per microbatch.
    """

    index: int
    modules: tuple[str, ...]
    num_parameters: int
    parameter_bytes: int
    seconds: float
    received_bytes: int
    sent_bytes: int
    saved_bytes: int
    saved_for_weight_bytes: int

    def __str__(self) -> str:
        first, last = (self.modules[0], self.modules[-1]) if self.modules else ("-", "-")
        return (
            f"stage {self.index}: {first} .. {last} | {self.num_parameters} parameters, "
            f"{self.parameter_bytes} B | counted F, B and W {self.seconds * 1e3:.3f} ms | "
            f"in {self.received_bytes} B, out {self.sent_bytes} B | "
            f"held F to B {self.saved_bytes} B, B to W {self.saved_for_weight_bytes} B"
        )


@dataclass(frozen=True)
class StagedModel:
    """A model as stages, with what is needed to run them and to look into them.

    Attributes
    ----------
    stages
        The stages, in order.
    captured, sources
        The graph of the model and its parts, which the stages were made from.
    input_spec
        How the flat inputs of a microbatch sit in (args, kwargs, target).
    result_spec
        How the result's tensors sit in the result.
    result_ports
        For every tensor of the result: the stage and the position among its outputs.
    loss
        Position of the loss among the result's tensors, or None.
    reports
        One per stage.
    backend
        What runs the graphs (see `backends`).
    traced
        Splits the stages at other levels of recompute; None once it is settled what runs.
    """

    stages: tuple[StageGraphs, ...]
    captured: Captured
    sources: tuple[StageSource, ...]
    input_spec: Spec
    result_spec: Spec
    result_ports: tuple[tuple[int, int], ...]
    loss: int | None
    reports: tuple[CutReport, ...]
    backend: str = "eager"
    traced: TracedStages | None = None

    @staticmethod
    def of(
        captured: Captured,
        sources: tuple[StageSource, ...],
        stages: tuple[StageGraphs, ...],
        backend: str,
        traced: TracedStages | None = None,
    ) -> StagedModel:
        """Return the stages as a model: where its results come from, and what every stage holds."""
        place = {
            port.name: (s.index, i) for s in stages for i, port in enumerate(s.outputs) if port.is_result
        }
        return StagedModel(
            stages,
            captured,
            sources,
            captured.input_spec,
            captured.result_spec,
            tuple(place[name] for name in captured.results),
            captured.loss,
            tuple(_report(captured, source, stage) for source, stage in zip(sources, stages, strict=True)),
            backend,
            traced,
        )

    @property
    def levels(self) -> tuple[Recompute, ...]:
        """Per stage the level of recompute that it was split at."""
        return tuple(stage.recompute for stage in self.stages)

    def stages_at(self, levels: Sequence[Recompute]) -> tuple[StageGraphs, ...]:
        """Return the stages at other levels, as the backend runs them. Not once it is settled what runs."""
        assert self.traced is not None
        stages = self.traced.split(levels)
        return with_backend(stages, self.backend, self.traced.skip, self.traced.compiled)

    def settled(self, levels: Sequence[Recompute] | None = None) -> StagedModel:
        """Return the model with its stages at levels, or as they are, for good."""
        stages = self.stages if levels is None else self.stages_at(levels)
        reports = (_report(self.captured, *pair) for pair in zip(self.sources, stages, strict=True))
        return replace(self, stages=stages, reports=tuple(reports), traced=None)

    @property
    def metrics(self) -> tuple[int, ...]:
        """Positions, among the result's tensors, of what the loss function returns beside the loss."""
        return self.captured.metrics

    def flat_inputs(
        self, args: Sequence[object], kwargs: Mapping[str, object] | None = None, target: object = None
    ) -> list[Tensor]:
        """Return the tensors of a call like the captured one; a ``("batch", i)`` port reads entry i."""
        return flatten((tuple(args), dict(kwargs or {}), target))[0]

    def rebuild(self, leaves: Sequence[object]) -> Any:
        """Return the model's own result type from its tensors; with a loss function {"loss", "output"}."""
        return unflatten(self.result_spec, leaves)


def _report(captured: Captured, source: StageSource, stage: StageGraphs) -> CutReport:
    own = [captured.state[name] for name in stage.parameters]
    return CutReport(
        stage.index,
        source.modules,
        sum(p.numel() for p in own),
        sum(p.numel() * p.element_size() for p in own),
        source.seconds,
        sum(port.num_bytes for port in stage.inputs if port.source[0] == "stage"),
        sum(port.num_bytes * len(port.targets) for port in stage.outputs),
        stage.saved_bytes,
        stage.saved_for_weight_bytes,
    )
