"""The optimizers' step on all ranks: clipped by their common norm, left out where that is not finite.

With a barrier, ranks exchange their norms and then step. Without, a rank steps at once, as if nothing were
due, begins its next step, and learns the norm of all gradients before its first backward. Where clipping or a
gradient that is not finite was due, it puts back what the step had changed, steps as with the barrier, and
runs its forwards again.

Source: Qi et al., Zero Bubble Pipeline Parallelism (arXiv 2401.10241), section 4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.optim import Optimizer

from zbcompile.compiler.norms import (
    clip,
    clip_factor,
    in_order,
    norms_of_texts,
    norms_text,
    own_norms,
    pieces_of,
    total_norm,
)
from zbcompile.compiler.optimizer_snapshot import Options, Snapshot
from zbcompile.compiler.parts import Parts
from zbcompile.compiler.sharding import local
from zbcompile.errors import PipelineError, UsageError, ZBCompileError
from zbcompile.passes.torch_private import version_of
from zbcompile.runtime.group import PipelineGroup
from zbcompile.runtime.spec import Trial

__all__ = ["Asked", "Outcome", "PostValidation", "Update", "step_now"]


@dataclass(frozen=True)
class Outcome:
    """What the norm of all gradients decides.

    Attributes
    ----------
    norm
        The norm of the gradients of all ranks, before clipping.
    clips
        Whether gradients are to be clipped.
    skips
        Whether the step is left out: the norm is not finite.
    """

    norm: Tensor
    clips: bool
    skips: bool

    @property
    def is_plain(self) -> bool:
        """Whether the optimizers step with the gradients as they are."""
        return not self.clips and not self.skips


@dataclass(frozen=True)
class Asked:
    """How `Pipeline.optimizer_step` was called, the same on all ranks.

    Attributes
    ----------
    max_norm
        What gradients are clipped to; None: they are not.
    norm_type, error_if_nonfinite
        As there.
    """

    max_norm: float | None
    norm_type: float
    error_if_nonfinite: bool

    def __post_init__(self) -> None:
        if self.max_norm is not None and not self.max_norm >= 0:
            raise UsageError("max_norm must be None or a number from 0 on", given=self.max_norm)

    def decide(self, norms: Mapping[str, Tensor]) -> Outcome:
        """Return what the norms of gradients decide, by name in the order of the model."""
        total = total_norm(list(norms.values()), self.norm_type)
        finite = bool(total.isfinite())
        clips = finite and self.max_norm is not None and float(clip_factor(self.max_norm, total)) != 1.0
        return Outcome(total, clips, not finite)

    def error(self, outcome: Outcome) -> PipelineError | None:
        """Return the error that was asked for where the norm is not finite."""
        if not (outcome.skips and self.error_if_nonfinite):
            return None
        return PipelineError(
            f"the norm of order {self.norm_type:g} of all gradients is {float(outcome.norm):g}",
            fix="no weight was changed and the gradients are gone: go on with the next batch, or leave "
            "error_if_nonfinite out",
        )


class Update:
    """What came of `Pipeline.optimizer_step`.

    Parameters
    ----------
    known
        Returns whether the outcome is known here.
    outcome
        Returns it, and waits for it where it is not.
    error
        Returns the error of the step, once its outcome is known.
    """

    def __init__(
        self,
        known: Callable[[], bool],
        outcome: Callable[[], Outcome],
        error: Callable[[], ZBCompileError | None],
    ) -> None:
        self._known, self._outcome, self._error = known, outcome, error

    @property
    def known(self) -> bool:
        """Whether `wait` and the attributes return at once."""
        return self._known()

    @property
    def norm(self) -> Tensor:
        """The norm of the gradients of all ranks before clipping, a scalar; waits until it is known."""
        return self._outcome().norm

    @property
    def clipped(self) -> bool:
        """Whether the gradients were clipped; waits until it is known."""
        return self._outcome().clips

    @property
    def skipped(self) -> bool:
        """Whether the step was left out because the norm is not finite; waits until it is known."""
        return self._outcome().skips

    def wait(self) -> Update:
        """Return when the weights are those that stay; return self.

        Raises
        ------
        PipelineError
            A rank is lost; or the norm is not finite and ``error_if_nonfinite``.
        UsageError
            The ranks called `Pipeline.optimizer_step` with different arguments. No weight was changed.
        """
        self._outcome()
        error = self._error()
        if error is not None:
            raise error
        return self


def step_now(
    optimizers: Sequence[Optimizer],
    own: Mapping[str, nn.Parameter],
    asked: Asked,
    norms: Mapping[str, Tensor],
) -> Update:
    """Step by the norms of the gradients of all ranks; the gradients are used up.

    Parameters
    ----------
    optimizers
        Of this process.
    own
        The parameters of this process.
    asked, norms
        The call, and the norms in the order of the model.

    Raises
    ------
    PipelineError
        The norm is not finite, and that was asked to be an error. No weight was changed.
    """
    outcome = asked.decide(norms)
    if not outcome.skips:
        _clip(own.values(), asked, outcome)
        for optimizer in optimizers:
            optimizer.step()
    for parameter in own.values():
        parameter.grad = None
    error = asked.error(outcome)
    if error is not None:
        raise error
    return Update(lambda: True, lambda: outcome, lambda: None)


def _state_of(parameter: nn.Parameter) -> tuple[int, ...]:
    """Return numbers that change with every change of a parameter in place, and with its memory."""
    own = local(parameter)
    return version_of(parameter), version_of(own), own.data_ptr()


def _clip(parameters: Iterable[nn.Parameter], asked: Asked, outcome: Outcome) -> None:
    if outcome.clips and asked.max_norm is not None:
        clip(parameters, asked.max_norm, outcome.norm)


class PostValidation(Trial):
    """An optimizers' step that is made at once and validated later.

    Parameters
    ----------
    optimizers
        Of this process, checked by `check_reversible`.
    own
        The parameters of this process. Their gradients are taken: ``param.grad`` is None afterwards.
    trained
        What owns all parameters.
    asked, words
        The call, and the call in words.
    number
        How many steps of optimizers the ranks have begun, this one included.
    group
        The ranks.
    parts
        Which parameters are parts of larger ones.

    Attributes
    ----------
    outcome
        What the norm of all gradients decides; None where it is not known yet.
    settled
        Whether the weights are those that stay.
    fault
        Why nothing was done at all: the ranks were asked for different things; else None.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        own: Mapping[str, nn.Parameter],
        trained: nn.Module,
        asked: Asked,
        words: str,
        number: int,
        group: PipelineGroup,
        parts: Parts,
    ) -> None:
        self._optimizers, self._trained = tuple(optimizers), trained
        self._asked, self._words, self.number = asked, words, number
        self.outcome: Outcome | None = None
        self.settled = False
        self.fault: UsageError | None = None
        norms = own_norms(own, asked.norm_type)
        self._meeting = group.late_meeting(words, number, norms_text(norms, words, pieces_of(own, parts)))
        self._norms, self._options = norms, Options(optimizers)
        # Where the own gradients say already that more is due, the step waits for the norm of all.
        self._stepped = asked.decide(norms).is_plain
        self._snapshot = Snapshot(optimizers) if self._stepped else None
        if self._stepped:
            for optimizer in optimizers:
                optimizer.step()
        self._gradients = [(p, p.grad) for p in own.values() if p.grad is not None]
        for parameter, _ in self._gradients:
            parameter.grad = None
        self._versions = {name: (p, _state_of(p)) for name, p in own.items()}
        self._groups = [optimizer.param_groups for optimizer in optimizers]

    def void(self, wait: bool) -> bool:
        """Return whether the weights do not stand, as `Trial.void` says."""
        if self.outcome is None:
            if not wait and not self._meeting.done():
                return False
            self._learn()
        assert self.outcome is not None
        return not self.outcome.is_plain

    def before_forward(self) -> None:
        """Let a rank that has not stepped yet know what is due, and step if nothing more is."""
        if not self._stepped and not self.void(wait=True):
            self.settle()

    def check_untouched(self) -> None:
        """Refuse to go on where a parameter or an optimizer has been changed since: it might be put back.

        Raises
        ------
        UsageError
            Names it. What is written into ``param.data`` cannot be seen; that it was replaced can.
        """
        if self.settled:
            return
        for name, (parameter, version) in self._versions.items():
            if _state_of(parameter) != version:
                raise UsageError(
                    "a parameter was changed while the optimizer's step was not validated",
                    where=name,
                    fix="call update.wait(), of what optimizer_step() returned, before changing parameters",
                )

        for optimizer, groups in zip(self._optimizers, self._groups, strict=True):
            if optimizer.param_groups is not groups:
                raise UsageError(
                    "a state was loaded into an optimizer while its step was not validated",
                    where=type(optimizer).__name__,
                    fix="call update.wait(), of what optimizer_step() returned, before loading it",
                )

    def settle(self) -> None:
        """Bring the weights to what a step with a barrier leaves; the outcome must be known."""
        if self.settled:
            return
        outcome = self.outcome
        assert outcome is not None
        if not (outcome.is_plain and self._stepped):
            if self._snapshot is not None:
                self._snapshot.roll_back()
            if not outcome.skips:
                self._step_again(outcome)
        self._let_go()

    def error(self) -> ZBCompileError | None:
        """Return the error of the step; None where there is none, or nothing is known yet."""
        if self.fault is not None or self.outcome is None:
            return self.fault
        return self._asked.error(self.outcome)

    def _learn(self) -> None:
        """Wait for the norms of all ranks; where they change nothing, drop what could undo the step."""
        texts = self._meeting.texts()
        try:
            found = norms_of_texts(texts, self._norms, self._words, self._asked.norm_type)
        except UsageError as error:
            self.fault = error
            self.outcome = Outcome(total_norm(list(self._norms.values()), self._asked.norm_type), False, True)
            return
        self.outcome = self._asked.decide(in_order(self._trained, found))
        if self.outcome.is_plain and self._stepped:
            self._let_go()

    def _let_go(self) -> None:
        self.settled = True
        self._snapshot, self._gradients, self._versions = None, [], {}

    def _step_again(self, outcome: Outcome) -> None:
        """Step with the gradients and options of the time of the call, clipped."""
        held = [(parameter, parameter.grad) for parameter, _ in self._gradients]
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        _clip([parameter for parameter, _ in self._gradients], self._asked, outcome)
        with self._options.applied():
            for optimizer in self._optimizers:
                optimizer.step()
        for parameter, present in held:
            parameter.grad = present
