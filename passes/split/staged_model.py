"""What the passes make of a model before anything is planned: its stages, and what they were made from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from zbcompile.passes.capture.captured import Captured
from zbcompile.passes.capture.nested_values import Spec, flatten, unflatten
from zbcompile.passes.partition.partition import StageSource
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
