"""Provenance: where a call of a graph comes from, as module path and source line on its node.

``{nn_module_stack, stack_trace} --> {module_path, source, stack_trace}``. Captured nodes carry both
(`provenance_of`); nodes of emitted graphs inherit them (`with_provenance`), and their stack trace shrinks to
its last frame with the module path as its function, so that ``print_readable()`` prints

    # File: torch/nn/modules/linear.py:134 in transformer.h.2.attn.c_attn, code: return F.linear(...)
"""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Mapping
from types import FrameType

import torch
from torch.fx import Node

__all__ = [
    "MODEL_PREFIX",
    "caller_source",
    "is_own_file",
    "is_torch_file",
    "module_path_of",
    "provenance_of",
    "short_file",
    "source_of",
    "with_provenance",
]

_MODEL = "model"
MODEL_PREFIX = _MODEL + "."
"""Every name in a traced graph starts with it: the traced module holds the user's model as ``model``."""
_TORCH = os.path.dirname(torch.__file__) + os.sep
_OWN = os.path.dirname(os.path.realpath(__file__)) + os.sep
_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+), in \S+$')


def module_path_of(node: Node) -> str:
    """Return the path of the module that a captured call belongs to; empty where unknown."""
    return str(node.meta.get("module_path", ""))


def source_of(node: Node) -> str:
    """Return ``file:line`` of a captured call; empty where unknown."""
    return str(node.meta.get("source", ""))


def provenance_of(node: Node) -> dict[str, str]:
    """Return module path and source line of a node that export made.

    The source is the last frame outside torch, or the last one at all.
    """
    lines = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines()]
    frames = [line.split(", in ")[0] for line in lines if line.startswith('File "')]
    sources = [frame.removeprefix('File "').replace('", line ', ":") for frame in frames]
    sources = [source for source in sources if not is_own_file(source) and not source.startswith("<")]
    outside = [source for source in sources if not is_torch_file(source)]
    path = _module_path(node.meta.get("nn_module_stack"))
    return {"module_path": path, "source": (outside or sources or [""])[-1]}


def with_provenance(meta: Mapping[str, object]) -> dict[str, object]:
    """Return a copy of a node's ``meta`` with its provenance; without a known source the trace stays."""
    made = dict(meta)
    stack = meta.get("nn_module_stack") or meta.get("fwd_nn_module_stack")
    path = str(meta.get("module_path") or "") or _module_path(stack)
    file, line, code = _last_frame(str(meta.get("stack_trace") or ""))
    made["module_path"] = path
    if file:
        made["source"] = f"{file}:{line}"
        made["stack_trace"] = f'  File "{file}", line {line}, in {path or _MODEL}\n    {code}'
    return made


def _module_path(stack: object) -> str:
    """Return the innermost module's path in the user's model from torch's ``nn_module_stack``."""
    if not isinstance(stack, Mapping) or not stack:
        return ""
    path = str(list(stack.values())[-1][0])
    return "" if path == _MODEL else path.removeprefix(MODEL_PREFIX)


def _last_frame(trace: str) -> tuple[str, str, str]:
    lines = trace.splitlines()
    for number in reversed(range(len(lines))):
        found = _FRAME.match(lines[number])
        if found:
            code = lines[number + 1].strip() if number + 1 < len(lines) else ""
            return _short(found["file"]), found["line"], code
    return "", "", ""


def short_file(file: str) -> str:
    """Return a file without the folder that packages are installed in; of the user's own files the name."""
    inside = _short(file)
    return inside if inside != file.replace("\\", "/") else os.path.basename(file)


def _short(file: str) -> str:
    """Return the file inside its package: without the folder that packages are installed in."""
    return file.replace("\\", "/").rpartition("site-packages/")[2].rpartition("dist-packages/")[2]


def is_torch_file(file: str) -> bool:
    """Return whether a path lies inside the installed torch."""
    return file.startswith(_TORCH)


@functools.cache
def is_own_file(file: str) -> bool:
    """Return whether a path is one of this package's passes."""
    return os.path.realpath(file).startswith(_OWN)


def caller_source() -> str:
    """Return ``file:line`` of the innermost running frame outside torch and the passes, or ""."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not (file.startswith("<") or is_torch_file(file) or is_own_file(file)):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
