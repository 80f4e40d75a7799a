"""Sums of steps with ``reduce=False``: they wait in the pipeline for a step that reduces them."""

from __future__ import annotations

from dataclasses import dataclass, field

from zbcompile.errors import UsageError
from zbcompile.runtime.gradients import GradientSums

__all__ = ["Unreduced"]


@dataclass
class Unreduced:
    """What has been summed and not been reduced over replicas yet.

    Attributes
    ----------
    steps
        How many steps.
    sums
        Rank of the pipeline -> its sums.
    form
        Microbatches and loss scale of each of them.
    """

    steps: int = 0
    sums: dict[int, GradientSums] = field(default_factory=dict)
    form: tuple[int, float] = (0, 0.0)

    def check(self, num_microbatches: int, loss_scale: float) -> None:
        """Refuse a step that cannot be summed with these: sums are divided once, when all are there.

        Raises
        ------
        UsageError
            It has another number of microbatches, or another scale of the loss.
        """
        form = (num_microbatches, loss_scale)
        if self.steps and form != self.form:
            raise UsageError(
                "steps that are reduced together have the same number of microbatches and loss_scale",
                needed=f"{self.form[0]} microbatches at loss_scale {self.form[1]}",
                given=f"{num_microbatches} at {loss_scale}",
                fix="give such batches, or reduce before (leave reduce=False out of the step before)",
            )

    def after(self, sums: dict[int, GradientSums], num_microbatches: int, loss_scale: float) -> Unreduced:
        """Return what waits when one more step is in ``sums``."""
        return Unreduced(self.steps + 1, sums, (num_microbatches, loss_scale))
