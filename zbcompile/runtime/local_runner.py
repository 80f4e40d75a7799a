"""The runner for one process: every rank of the pipeline, one step at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from zbcompile.runtime.channels.channel import LocalChannels
from zbcompile.runtime.executor import run_together
from zbcompile.runtime.program import Program
from zbcompile.runtime.verbs import PipelineSpec, Rank, Step
from zbcompile.schedule.ir import Action, Kind

__all__ = ["LocalRunner"]


class LocalRunner:
    """Runs programs of all ranks in this process. ``rank`` is None: this process is no single rank."""

    rank: int | None = None

    def __init__(
        self,
        setup: PipelineSpec,
        texts: Sequence[str],
        predicted: Mapping[tuple[Kind, int, int], int],
        device: torch.device,
    ) -> None:
        self.setup, self.predicted, self.device = setup, predicted, device
        self.programs = [Program.load(text, rank) for rank, text in enumerate(texts)]
        self.ranks: list[Rank] = []

    def run(self, step: Step, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """One step; gradient sums by parameter name. Raises `PipelineError`; then nothing is handed over."""
        ends = LocalChannels.connect(self.setup.placement.num_ranks)
        self.ranks = [Rank(r, self.setup, state, end, self.device) for r, end in enumerate(ends)]
        run_together(self.ranks, self.programs, step, self.predicted)
        gradients: dict[str, Tensor] = {}
        for rank in self.ranks:
            for name, total in rank.gradients.items():
                gradients.setdefault(name, total)
        return gradients

    def actions(self) -> list[list[tuple[Action, int, int]]]:
        """Per rank what the last step did and when. Ranks took turns: their times never overlap."""
        return [rank.recorder.actions() for rank in self.ranks]

    def reporting(self) -> contextlib.AbstractContextManager[None]:
        """Where another runner tells the other ranks of an error."""
        return contextlib.nullcontext()

    def synchronize(self) -> None:
        """All ranks have finished when `run` returns."""

    def close(self) -> None:
        """Nothing to close."""
