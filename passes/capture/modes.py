"""Give modes of torch that a tracer would ignore their meaning in the traced forward, or refuse them.

``inference_mode`` becomes ``no_grad``: the tracer does not see it, and gradients would flow. TorchScript
functions are interpreted call by call: their own autodiff hides from the tracer. Hooks that pack what
autograd saves are refused: no stage would run them. Calls inside ``torch.utils.checkpoint`` are marked, so
that a change of a buffer there can be refused: eager changes it again when it recomputes. The argument
checks of ``torch.distributions`` are off: they look at values. A cast of a module that changes nothing is
left out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import checkpoint

from zbcompile.errors import CaptureError
from zbcompile.passes import torch_patches, torch_private
from zbcompile.passes.capture.draws import compared_draws
from zbcompile.passes.provenance import caller_source

__all__ = ["traced_modes"]

_BLOCK = "_checkpoint_without_reentrant_generator"
"""What runs a block of ``torch.utils.checkpoint``; that of reentrant ones is in `custom_functions`."""

_Enter = Callable[[saved_tensors_hooks], None]


@contextlib.contextmanager
def traced_modes() -> Iterator[None]:
    """Put the modes' traced meaning in place while the model's forward is traced."""
    replaced = torch_patches.attribute_replaced
    with (
        replaced(torch.inference_mode, "__enter__", _enter_no_grad),
        replaced(torch.inference_mode, "__exit__", _leave_no_grad),
        replaced(checkpoint, _BLOCK, _marked(vars(checkpoint)[_BLOCK])),
        replaced(saved_tensors_hooks, "__enter__", _enter_hooks(saved_tensors_hooks.__enter__)),
        torch.jit.optimized_execution(False),  # type: ignore[attr-defined]
        torch_patches.distributions_unchecked(),
        torch_patches.idle_casts_skipped(),
        compared_draws(),
        torch_patches.indices_as_calls(),
    ):
        yield


def _marked(given: Callable[..., Iterator[None]]) -> Callable[..., Iterator[None]]:
    def block(*args: object, **kwargs: object) -> Iterator[None]:
        with torch_private.checkpoint_marked() if torch.is_grad_enabled() else contextlib.nullcontext():
            yield from given(*args, **kwargs)

    return block


class _InferenceMode(Protocol):
    """A ``torch.inference_mode`` whose methods are replaced."""

    mode: bool
    grad_before: bool


def _enter_no_grad(mode: _InferenceMode) -> None:
    mode.grad_before = torch.is_grad_enabled()
    if mode.mode:
        torch.set_grad_enabled(False)


def _leave_no_grad(mode: _InferenceMode, *_: object) -> None:
    torch.set_grad_enabled(mode.grad_before)


def _enter_hooks(given: _Enter) -> _Enter:
    def enter(hooks: saved_tensors_hooks) -> None:
        if type(hooks) is saved_tensors_hooks or not type(hooks).__module__.startswith("torch."):
            raise CaptureError(
                "cannot capture hooks on the tensors that autograd saves: no stage would run them",
                where=caller_source(),
                fix="leave them out, and choose what to hold with compile(..., recompute=...)",
            )
        return given(hooks)

    return enter
