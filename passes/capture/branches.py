"""Follow the branches that the example takes (``compile(..., fixed_branches=True)``).

``if mask.any(): ...  -->  the side that the example takes, and zbcompile::check(mask.any(), side, ...)``.
Contract out: the untouched model runs once on the example and tells what its code asked of tensors; the trace
gets the same answers. Every answer is checked in F: a microbatch that takes another side ends its step with a
`DataError`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from types import CodeType, FrameType

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from zbcompile.errors import UsageError
from zbcompile.passes.capture.state_guards import attributes_kept, buffers_kept, random_kept
from zbcompile.passes.torch_patches import compiled_code_as_eager
from zbcompile.passes.torch_private import tree_map_only

__all__ = ["Answers", "FixedBranches", "answers_of"]

_Place = tuple[CodeType, int]
"""Code, and the instruction of it that asks."""
Answers = Mapping[_Place, Sequence[bool]]
"""Place of a question -> the answers that it got, in order."""

_ASKS: tuple[Callable[..., object], ...] = (
    Tensor.__bool__, Tensor.item, torch.equal, Tensor.equal, torch.allclose, Tensor.allclose,
    torch.is_nonzero,
)  # fmt: skip


class FixedBranches:
    """The answers of the example, handed out in their order; one for each trace."""

    def __init__(self, answers: Answers) -> None:
        self._left = {place: list(found) for place, found in answers.items()}

    def next(self, frame: FrameType) -> bool | None:
        """Return what the example answers where ``frame`` asks now; None where it did not come by."""
        left = self._left.get((frame.f_code, frame.f_lasti))
        return left.pop(0) if left else None


class _Listener(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.answers: dict[_Place, list[bool]] = {}

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        if func in _ASKS and isinstance(result, bool):
            frame = sys._getframe(1)
            self.answers.setdefault((frame.f_code, frame.f_lasti), []).append(result)
        return result


def answers_of(
    model: nn.Module,
    whole: nn.Module,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    target: object,
    loss_fn: Callable[..., Tensor] | None,
) -> Answers:
    """Run the untouched model and its loss once; return what their code asked of tensors.

    Parameters
    ----------
    model, args, kwargs, target, loss_fn
        As for `capture`.
    whole
        The model with its loss. Attributes, buffers and random numbers are put back.

    Raises
    ------
    UsageError
        The model has no values, or fails on the example.
    """
    if any(tensor.is_meta for tensor in (*whole.parameters(), *whole.buffers())):
        raise UsageError(
            "fixed_branches=True runs the model on the example, and a model on the meta device has no values",
            fix="give the model weights before it is compiled",
        )
    given, more, wanted = tree_map_only(Tensor, Tensor.clone, (tuple(args), dict(kwargs), target))
    devices = sorted({p.device.index or 0 for p in whole.parameters() if p.is_cuda})
    kept = attributes_kept(model, whole), buffers_kept(whole), random_kept()
    drawn, eager = torch.random.fork_rng(devices=devices), compiled_code_as_eager()
    with kept[0], kept[1], kept[2], drawn, eager, torch.enable_grad(), _Listener() as heard:
        try:
            value = model(*given, **more)
            if loss_fn is not None:
                loss_fn(value, wanted)
        except (RuntimeError, TypeError, ValueError) as error:
            raise UsageError(
                f"the model itself fails on the example: {type(error).__name__}: {error}"
            ) from error
    answers: Answers = heard.answers
    return answers
