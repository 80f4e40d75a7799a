"""The runner for one process: every rank of the pipeline, one step at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from zbcompile.runtime.calls import LocalCall
from zbcompile.runtime.channels.local import LocalChannels
from zbcompile.runtime.executor import run_together
from zbcompile.runtime.program import Program
from zbcompile.runtime.recorder import TimedAction
from zbcompile.runtime.runner import Runner
from zbcompile.runtime.spec import PipelineSpec, Step
from zbcompile.runtime.verbs import Rank
from zbcompile.schedule.ir import Kind

__all__ = ["LocalRunner"]


class LocalRunner(Runner):
    """Runs the programs of all ranks in this process.

    Parameters
    ----------
    spec
        The pipeline.
    texts
        Per rank, the text of its program.
    predicted
        Planned start of every compute action; decides whose turn it is, never results.
    device
        Where the stages run.
    """

    rank: int | None = None

    def __init__(
        self,
        spec: PipelineSpec,
        texts: Sequence[str],
        predicted: Mapping[tuple[Kind, int, int], int],
        device: torch.device,
    ) -> None:
        self.spec, self.predicted, self.device = spec, predicted, device
        self.programs = [Program.load(text, rank) for rank, text in enumerate(texts)]
        self.ranks: list[Rank] = []

    def connect(self) -> None:
        """Do nothing: nothing stays between two steps."""

    def run(self, step: Step, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run one step of all ranks, as `Runner.run` says."""
        ends = LocalChannels.connect(self.spec.placement.num_ranks)
        self.ranks = [Rank(r, self.spec, state, end, self.device) for r, end in enumerate(ends)]
        run_together(self.ranks, self.programs, step, self.predicted)
        gradients: dict[str, Tensor] = {}
        for rank in self.ranks:
            for name, total in rank.let_go().items():
                gradients.setdefault(name, total)
        return gradients

    def actions(self) -> list[list[TimedAction]]:
        """Return per rank what the last step did and when. Ranks took turns: their times never overlap."""
        return [rank.recorder.actions() for rank in self.ranks]

    def call(self, words: str) -> LocalCall:
        """Return a step or an evaluation of all ranks, to be entered."""
        return LocalCall()

    def synchronize(self) -> None:
        """Return at once: all ranks have finished when `run` returns."""

    def close(self) -> None:
        """Nothing to close."""
