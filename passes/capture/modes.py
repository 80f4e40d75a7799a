"""Modes of torch that a traced forward would pass over without a word: given their meaning, or refused.

``inference_mode`` becomes ``no_grad`` (the tracer does not see it, and gradients would flow). TorchScript
functions are interpreted call by call (their own autodiff hides from the tracer). Hooks that pack what
autograd saves are refused: no stage would run them. Argument checks of ``torch.distributions`` look at
values, so they rest.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from zbcompile.errors import CaptureError
from zbcompile.passes import torch_private
from zbcompile.passes.provenance import place_of_caller

__all__ = ["modes_seen"]


@contextlib.contextmanager
def modes_seen() -> Iterator[None]:
    """Active while the model's forward is traced; everything is put back afterwards."""
    jit: Any = torch.jit
    with (
        _replaced(torch.inference_mode, "__enter__", _enter_no_grad),
        _replaced(torch.inference_mode, "__exit__", _leave_no_grad),
        _replaced(saved_tensors_hooks, "__enter__", _enter_hooks(saved_tensors_hooks.__enter__)),
        jit.optimized_execution(False),
        torch_private.distributions_unchecked(),
    ):
        yield


@contextlib.contextmanager
def _replaced(owner: Any, name: str, function: Any) -> Iterator[None]:
    given = owner.__dict__[name]
    setattr(owner, name, function)
    try:
        yield
    finally:
        setattr(owner, name, given)


def _enter_no_grad(mode: Any) -> None:
    mode.grad_before = torch.is_grad_enabled()
    if mode.mode:
        torch.set_grad_enabled(False)


def _leave_no_grad(mode: Any, *_: Any) -> None:
    torch.set_grad_enabled(mode.grad_before)


def _enter_hooks(given: Any) -> Any:
    def enter(hooks: Any) -> Any:
        if type(hooks) is saved_tensors_hooks or not type(hooks).__module__.startswith("torch."):
            raise CaptureError(
                "cannot capture hooks on the tensors that autograd saves: no stage would run them",
                where=place_of_caller(),
                fix="leave them out, and choose what to hold with compile(..., recompute=...)",
            )
        return given(hooks)

    return enter
