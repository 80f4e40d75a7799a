"""Where a call of a graph comes from: module path, source line and code, kept on emitted nodes.

``{nn_module_stack, stack_trace} --> {module_path, source, stack_trace}``: the stack shrinks to its last
frame with the module path as its function, so that ``print_readable()`` prints

    # File: torch/nn/modules/linear.py:134 in transformer.h.2.attn.c_attn, code: return F.linear(...)
"""

from __future__ import annotations

import re
from typing import Any

__all__ = ["with_place"]

_MODEL = "model"
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
