"""What both runners offer to the rest: the one of this process's rank, and the one of all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from zbcompile.runtime.calls import Call
from zbcompile.runtime.recorder import TimedAction
from zbcompile.runtime.spec import Step

__all__ = ["Runner"]


class Runner(Protocol):
    """Runs the programs of a pipeline, one step at a time.

    Attributes
    ----------
    rank
        The rank of this process; None if it runs all of them.
    """

    rank: int | None

    def connect(self) -> None:
        """Connect the ranks, if they are not; all of them come here in the same call."""

    def run(self, step: Step, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run one step.

        Parameters
        ----------
        step
            Its inputs; losses and results are filled in.
        state
            Parameters and buffers by name, as the stages ask for them.

        Returns
        -------
        dict
            Parameter name -> sum of its gradients, for the stages of this process.

        Raises
        ------
        PipelineError
            A rank failed or the ranks deadlocked. No gradient is then returned on any rank.
        """

    def actions(self) -> list[list[TimedAction]]:
        """Return per rank what its last step did and when. All ranks call it."""

    def call(self, words: str) -> Call:
        """Return a step or an evaluation of all ranks, to be entered; ``words`` name it."""

    def synchronize(self) -> None:
        """Return when every rank has come here. Raises `PipelineError` if one has failed."""

    def close(self) -> None:
        """Release what the runner holds."""
