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
    """One line per stage: what it holds and what crosses its borders."""

    index: int
    modules: tuple[str, ...]
    num_parameters: int
    parameter_bytes: int
    forward_seconds: float
    received_bytes: int
    sent_bytes: int
    saved_bytes: int
    saved_for_weight_bytes: int

    def __str__(self) -> str:
        first, last = (self.modules[0], self.modules[-1]) if self.modules else ("-", "-")
        return (
            f"stage {self.index}: {first} .. {last} | {self.num_parameters} parameters, "
            f"{self.parameter_bytes} B | counted F {self.forward_seconds * 1e3:.3f} ms | "
            f"in {self.received_bytes} B, out {self.sent_bytes} B | "
            f"held F to B {self.saved_bytes} B, B to W {self.saved_for_weight_bytes} B"
        )


@dataclass(frozen=True)
class StagedModel:
    """Everything the runtime needs to run the model as stages.

    stages : the compiled stages, in order. captured, sources : what they were made from.
    input_spec : how the flat microbatch inputs sit in (args, kwargs, target).
    result_ports : for every tensor leaf of the result (stage, output position).
    loss : position of the loss among those leaves, or None. reports : one per stage.
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

    def flat_inputs(
        self, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None, target: Any = None
    ) -> list[Tensor]:
        """The flat batch inputs of a call like the captured one; a ``("batch", i)`` port reads entry i."""
        return flatten((tuple(args), dict(kwargs or {}), target))[0]

    def rebuild(self, leaves: Sequence[Any]) -> Any:
        """The model's own result type from its tensor leaves; with a loss function {"loss", "output"}."""
        return unflatten(self.result_spec, leaves)
