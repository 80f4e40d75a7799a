"""Where a call of a graph comes from: module path, source line and code, kept on emitted nodes.

``{nn_module_stack, stack_trace} --> {module_path, source, stack_trace}``: the stack shrinks to its last
frame with the module path as its function, so that ``print_readable()`` prints

    # File: torch/nn/modules/linear.py:134 in transformer.h.2.attn.c_attn, code: return F.linear(...)
"""

from __future__ import annotations

import os
import re
import sys
from types import FrameType
from typing import Any

import torch

__all__ = ["is_own_file", "is_torch_file", "place_of_caller", "with_place"]

_MODEL = "model"
_TORCH = os.path.dirname(torch.__file__) + os.sep
_OWN = os.path.dirname(os.path.realpath(__file__)) + os.sep
_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+), in \S+$')


def with_place(meta: dict[str, Any]) -> dict[str, Any]:
    """A copy of a node's ``meta`` with its place; unchanged where nothing is known."""
    made = dict(meta)
    path = meta.get("module_path") or _module_path(
        meta.get("nn_module_stack") or meta.get("fwd_nn_module_stack")
    )
    file, line, code = _last_frame(str(meta.get("stack_trace") or ""))
    made["module_path"] = path
    if file:
        made["source"] = f"{file}:{line}"
        made["stack_trace"] = f'  File "{file}", line {line}, in {path or "model"}\n    {code}'
    return made


def _module_path(stack: Any) -> str:
    """The innermost module's path in the user's model (the traced wrapper calls it ``model``)."""
    if not stack:
        return ""
    path = str(list(stack.values())[-1][0])
    return "" if path == _MODEL else path.removeprefix(_MODEL + ".")


def _last_frame(trace: str) -> tuple[str, str, str]:
    lines = trace.splitlines()
    for number in reversed(range(len(lines))):
        found = _FRAME.match(lines[number])
        if found:
            code = lines[number + 1].strip() if number + 1 < len(lines) else ""
            return _short(found["file"]), found["line"], code
    return "", "", ""


def _short(file: str) -> str:
    """The file inside its package: without the folder that packages are installed in."""
    return file.replace("\\", "/").rpartition("site-packages/")[2].rpartition("dist-packages/")[2]


def is_torch_file(file: str) -> bool:
    """Whether a path lies inside the installed torch."""
    return file.startswith(_TORCH)


def is_own_file(file: str) -> bool:
    """Whether a path is one of this package's passes."""
    return os.path.realpath(file).startswith(_OWN)


def place_of_caller() -> str:
    """file:line of the innermost running frame outside of torch and this package, or an empty string."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not (file.startswith("<") or is_torch_file(file) or is_own_file(file)):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
