"""The optimizers' steps of a pipeline, and which of them is not validated yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn
from torch.optim import Optimizer

from zbcompile.compiler.checkpoint import names_of
from zbcompile.compiler.norms import gradient_norms
from zbcompile.compiler.optimizer_snapshot import check_reversible, check_steps
from zbcompile.compiler.parts import Parts
from zbcompile.compiler.update import Asked, Outcome, PostValidation, Update, step_now
from zbcompile.errors import UsageError
from zbcompile.runtime.group import PipelineGroup
from zbcompile.signals import deferred_signals

__all__ = ["Updates"]


class Updates:
    """Steps of optimizers without a barrier, one under way at most.

    Attributes
    ----------
    count
        How many were begun, the same on all ranks.
    current
        The last one, until all ranks are known to have settled it: the next step is run on trial. A rank that
        has settled it by itself still does what the others do.
    """

    def __init__(self) -> None:
        self.count = 0
        self.current: PostValidation | None = None

    @property
    def state(self) -> list[int]:
        """What must be equal on all ranks when a step begins."""
        return [self.count, 0 if self.current is None else self.current.number]

    def step(
        self,
        optimizers: Sequence[Optimizer],
        own: Mapping[str, nn.Parameter],
        trained: nn.Module,
        group: PipelineGroup | None,
        parts: Parts,
        asked: Asked,
        loss_scale: float,
        post_validation: bool,
    ) -> Update:
        """Do what `Pipeline.optimizer_step` says; ``own`` are this process's parameters, by name."""
        parts.require("optimizer_step()")
        if loss_scale != 1.0:
            raise UsageError(
                "gradients are those of a scaled loss",
                given=f"loss_scale={loss_scale:g}",
                fix="call unscale_, clip_grad_norm_, step and update of pipeline.scaler() instead",
            )
        for optimizer in optimizers:
            names_of(trained, optimizer)
        if post_validation:
            check_reversible(optimizers)
        check_steps(optimizers)
        self.settle_all(group)
        words = f"optimizer_step({asked.max_norm}, {asked.norm_type}, {asked.error_if_nonfinite})"
        if group is None or not post_validation:
            return step_now(
                optimizers, own, asked, gradient_norms(trained, own, asked.norm_type, group, parts, words)
            )
        self.count += 1
        with deferred_signals():
            update = self.current = PostValidation(
                optimizers, own, trained, asked, words, self.count, group, parts
            )

        def outcome() -> Outcome:
            self._settle(update, group)
            if update.fault is not None:
                raise update.fault
            assert update.outcome is not None
            return update.outcome

        return Update(lambda: update.settled, outcome, update.error)

    def settle(self, group: PipelineGroup | None) -> None:
        """Return when the weights of this process are those that stay; other ranks need not come here.

        Raises
        ------
        PipelineError
            A rank is lost.
        """
        if self.current is not None and group is not None:
            self._settle(self.current, group)
            self._raise(self.current)

    def settle_all(self, group: PipelineGroup | None) -> None:
        """Do the same where all ranks come here, before a call of all of them: nothing is on trial then."""
        update = self.current
        if update is not None and group is not None:
            self._settle(update, group)
            self.current = None
            self._raise(update)

    def settle_within_call(self) -> None:
        """Do the same within a call of all ranks, which goes on whatever came of the update."""
        if self.current is not None:
            self.current.void(wait=True)
            self.current.settle()

    def leave(self) -> None:
        """Forget the update that a step has settled on all ranks; raise its error."""
        update, self.current = self.current, None
        if update is not None:
            self._raise(update)

    @staticmethod
    def _settle(update: PostValidation, group: PipelineGroup) -> None:
        if update.settled:
            return
        with group.calls.waiting_alone("the validation of optimizer_step()") as call:
            update.void(wait=True)
            call.finish(update.settle)

    @staticmethod
    def _raise(update: PostValidation) -> None:
        error = update.error()
        if error is not None:
            raise error
