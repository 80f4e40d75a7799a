"""Name the rewrite behind a wrong gradient: compile without one after the other, and compare with autograd.

``model + example --> Bisection``. Every trial cuts and splits the captured model anew, without some of the
rewrites of `passes.split.rewrites`, and compares one microbatch with the untouched model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from zbcompile.compiler.stages import captured_with_loss, split_into_stages
from zbcompile.errors import SplitError, ZBCompileError
from zbcompile.passes.capture.captured import Captured
from zbcompile.passes.capture.constant_masks import fold_constant_masks
from zbcompile.passes.partition.partition import Policy
from zbcompile.passes.split.recompute import Recompute
from zbcompile.passes.split.rewrites import FOLD_MASKS, required_rewrites, rewrite_names
from zbcompile.passes.split.staged_model import StagedModel
from zbcompile.passes.verify.deviations import VerifyReport
from zbcompile.passes.verify.verify import compare, place_of

__all__ = ["Bisection", "Fault", "bisect"]


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong, of several values the worst.

    Attributes
    ----------
    what
        Which value: ``gradient of layers.2.weight``; or the error that the compile or the run ended with.
    where
        Stage and module, as far as known.
    size
        How far the value is off, in words; empty for an error.
    relative_error
        Norm of the difference over the norm of autograd's value; infinite where nothing can be compared.
    count
        How many values are wrong.
    """

    what: str
    where: str = ""
    size: str = ""
    relative_error: float = float("inf")
    count: int = 1

    def __str__(self) -> str:
        details = ", ".join(part for part in (self.where, self.size) if part)
        more = f", and {self.count - 1} more values" if self.count > 1 else ""
        return f"the {self.what} ({details}){more}" if details else self.what


@dataclass(frozen=True, slots=True)
class Bisection:
    """The outcome; ``str`` of it is what the command line prints.

    Attributes
    ----------
    fault
        What is wrong with all rewrites; None: nothing.
    rewrites
        The rewrites without any one of which everything is right.
    first_wrong
        If there is none such: the last of the shortest row of rewrites, from the first on, that is wrong.
        Those that are required run in any case.
    in_required
        Whether it is wrong with the required rewrites alone, and right without any rewrite.
    num_trials
        How often the model was compiled.
    """

    fault: Fault | None
    rewrites: tuple[str, ...]
    first_wrong: str | None
    in_required: bool
    num_trials: int

    def __str__(self) -> str:
        if self.fault is None:
            return "nothing is wrong: outputs, gradients and buffers agree with plain autograd"
        if self.rewrites:
            without = "without it" if len(self.rewrites) == 1 else "without any one of them"
            return f"{', '.join(self.rewrites)}: {without} everything is right; with it, wrong: {self.fault}"
        if self.first_wrong is not None:
            return (
                f"no rewrite alone; the first ones up to {self.first_wrong} are wrong together: {self.fault}"
            )
        if self.in_required:
            return f"in the required rewrites ({', '.join(required_rewrites())}), wrong: {self.fault}"
        return f"not in the rewrites: it is wrong without all of them, too: {self.fault}"


def bisect(
    model: nn.Module,
    num_stages: int,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    target: Any = None,
    loss_fn: Callable[..., Tensor] | None = None,
    split_points: Sequence[str] | Policy | None = None,
    recompute: Recompute = "none",
    backend: str = "eager",
    report: Callable[[tuple[str, ...], Fault | None], None] = lambda skipped, fault: None,
) -> Bisection:
    """Find the rewrite that makes a value wrong.

    First all rewrites run; if a value is then wrong, each is left out alone; if that never helps, they are
    added one by one.

    Parameters
    ----------
    model, num_stages, args, kwargs, target, loss_fn, split_points, recompute, backend
        As for `build_stages`.
    report
        Called after each trial with the rewrites that it left out and what was wrong.

    Raises
    ------
    CaptureError, CutError, UsageError
        The model cannot be captured or cut, or its example not be run: no rewrite has run by then.
    """
    trials = _Trials(
        partial(captured_with_loss, model, args, kwargs, target=target, loss_fn=loss_fn),
        partial(
            split_into_stages,
            num_stages=num_stages,
            split_points=split_points,
            recompute=recompute,
            backend=backend,
        ),
        lambda staged: compare(model, staged, args, kwargs, target, loss_fn),
        report,
    )
    fault = trials.without(())
    if fault is None:
        return Bisection(None, (), None, False, trials.count)
    alone = tuple(name for name in rewrite_names() if trials.without({name}) is None)
    if alone:
        return Bisection(fault, alone, None, False, trials.count)
    last, found = _first_wrong(trials, fault)
    in_required = last is None and trials.without(rewrite_names()) is None
    return Bisection(found, (), last, in_required, trials.count)


class _Trials:
    """Compiles a model without some rewrites and compares it; the model is captured at most twice.

    Parameters
    ----------
    captured
        Captures the model.
    split
        Cuts and splits a captured model without the rewrites in ``skip``.
    compared
        Compares stages with the model.
    report
        As for `bisect`.

    Attributes
    ----------
    count
        How many trials there were.
    """

    def __init__(
        self,
        captured: Callable[[], Captured],
        split: Callable[..., StagedModel],
        compared: Callable[[StagedModel], VerifyReport],
        report: Callable[[tuple[str, ...], Fault | None], None],
    ) -> None:
        self._captured, self._split, self._compared, self._report = captured, split, compared, report
        self._folded: dict[bool, Captured] = {}
        self.count = 0

    def without(self, skip: Collection[str]) -> Fault | None:
        """Return what is wrong without some rewrites; None: nothing."""
        self.count += 1
        skipped = tuple(name for name in rewrite_names() if name in skip)
        fault = self._fault(skipped)
        self._report(skipped, fault)
        return fault

    def _fault(self, skipped: tuple[str, ...]) -> Fault | None:
        try:
            staged = self._split(self._source(fold=FOLD_MASKS not in skipped), skip=skipped)
            values = self._compared(staged)
        except SplitError as error:
            return Fault(error.what, error.where)
        except ZBCompileError:
            raise
        except Exception as error:  # what a broken rewrite leads to may be anything
            return Fault(f"{type(error).__name__}: {error}")
        if not values.wrong:
            return None
        worst = values.wrong[0]
        return Fault(worst.words, place_of(staged, worst), worst.size, worst.error, len(values.wrong))

    def _source(self, *, fold: bool) -> Captured:
        if fold not in self._folded:
            captured = self._captured()
            if fold:
                fold_constant_masks(captured)
            self._folded[fold] = captured
        return self._folded[fold]


def _first_wrong(trials: _Trials, fault: Fault) -> tuple[str | None, Fault]:
    """Return the last rewrite of the shortest row that is wrong, and what is wrong with it.

    None stands for the required rewrites alone. ``fault`` is that of the whole list.
    """
    for last, skipped in _prefixes():
        found = trials.without(skipped) if skipped else fault
        if found is not None:
            return last, found
    return None, fault


def _prefixes() -> Iterator[tuple[str | None, frozenset[str]]]:
    """Yield (last rewrite that runs, rewrites to skip), from the required ones alone to the whole list."""
    optional = [name for name in rewrite_names() if name not in required_rewrites()]
    for count in range(len(optional) + 1):
        yield (optional[count - 1] if count else None), frozenset(optional[count:])
