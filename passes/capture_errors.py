"""Why a capture failed, in the reader's terms: the module, the line, the reason, what to change."""

from __future__ import annotations

import os
from types import FrameType, TracebackType

import torch
from torch import nn

from zbcompile.errors import CaptureError, ZBCompileError
from zbcompile.passes import torch_private

__all__ = ["explain", "is_own_file", "is_torch_file", "refuse_wrappers"]

_TORCH = os.path.dirname(torch.__file__) + os.sep
_OWN = os.path.dirname(os.path.realpath(__file__)) + os.sep
_DATA_DEPENDENT = (
    "data-dependent",
    "Could not guard",
    "GuardOnDataDependent",
    "DataDependent",
    "_local_scalar_dense",
)


def explain(model: nn.Module, error: BaseException) -> ZBCompileError:
    """A CaptureError that names source line and module path; errors of this package pass through."""
    if isinstance(error, ZBCompileError):
        return error
    line, path = _locate(model, error)
    text = f"{type(error).__name__}: {error}"
    reason, fix = _reason(text)
    at = f" at {line}" if line else ""
    return CaptureError(f"cannot capture {type(model).__name__}: {reason}{at}", where=path, fix=fix)


def _reason(text: str) -> tuple[str, str]:
    if any(mark in text for mark in _DATA_DEPENDENT):
        return (
            "a Python branch or loop depends on tensor data",
            "replace it by torch.where or another tensor operation, or by a flag fixed before training",
        )
    first = text.strip().splitlines()[0] if text.strip() else "unknown reason"
    return first[:300], ""


def _locate(model: nn.Module, error: BaseException) -> tuple[str, str]:
    """(file:line of the last frame outside torch, path of the innermost module) along the traceback."""
    names = {id(module): name for name, module in model.named_modules()}
    line, path = "", ""
    for frame, number in _frames(error.__traceback__):
        file = frame.f_code.co_filename
        owner = frame.f_locals.get("self")
        if id(owner) in names:
            path = names[id(owner)]
        if not file.startswith("<") and not is_torch_file(file) and not is_own_file(file):
            line = f"{file}:{number}"
    return line, path


def is_torch_file(file: str) -> bool:
    """Whether a path lies inside the installed torch."""
    return file.startswith(_TORCH)


def is_own_file(file: str) -> bool:
    """Whether a path is one of this package's passes."""
    return os.path.realpath(file).startswith(_OWN)


def _frames(traceback: TracebackType | None) -> list[tuple[FrameType, int]]:
    found = []
    while traceback is not None:
        found.append((traceback.tb_frame, traceback.tb_lineno))
        traceback = traceback.tb_next
    return found


def refuse_wrappers(model: nn.Module) -> None:
    """Name the wrappers and parameter kinds that cannot be captured, with what works instead.

    Raises CaptureError for DistributedDataParallel, DataParallel, FSDP, DTensor parameters, lazy
    parameters, scripted modules, and hooks on gradients (nothing would call them).
    """
    for name, module in model.named_modules():
        kind = torch_private.wrapper_kind(module)
        if kind:
            raise CaptureError(
                f"cannot capture a module wrapped by {kind}",
                where=name or type(module).__name__,
                fix="compile the plain model; parallelism over data or shards comes after, on the stages",
            )
        if torch_private.backward_hooks(module):
            raise CaptureError(
                "cannot capture a module with backward hooks: they would not run",
                where=name or type(module).__name__,
                fix="remove the hook, or do its work in an autograd.Function or on param.grad after the step",
            )
    for name, parameter in model.named_parameters():
        if torch_private.has_hooks(parameter):
            raise CaptureError(
                "cannot capture a parameter with gradient hooks: they would not run",
                where=name,
                fix="remove the hook and do its work on param.grad after the step",
            )
        kind = torch_private.parameter_kind(parameter)
        if kind:
            raise CaptureError(
                f"cannot capture a parameter that is a {kind}",
                where=name,
                fix="compile the model before it is sharded, or initialise it first",
            )
