"""Say why a stage could not be differentiated: the operator, its module and its source line."""

from __future__ import annotations

import re

from torch.fx import Node

from zbcompile.errors import SplitError, ZBCompileError
from zbcompile.passes.joint.replay import Replay
from zbcompile.passes.ops import aten_name
from zbcompile.passes.provenance import module_path_of, source_of

__all__ = ["explain_split"]

_NO_FORMULA = re.compile(r"derivative for '?([\w:]+)")


def explain_split(error: BaseException, stage: int, replay: Replay) -> ZBCompileError:
    """Return the error to raise for one that the trace of a stage ended with.

    Parameters
    ----------
    error
        What the trace raised. An error of this package is returned as it is.
    stage
        Index of the stage.
    replay
        What was traced; it knows the call that failed, and which call made each step backwards.

    Returns
    -------
    ZBCompileError
        A `SplitError` that names stage, module path, source line and operator.
    """
    if isinstance(error, ZBCompileError):
        return error
    text = str(error).strip() or type(error).__name__
    found = _NO_FORMULA.search(text)
    node, fix = replay.running, ""
    if found:
        name = found[1].split(":")[0]
        steps = (made for step, made in replay.steps.items() if _is_step_of(step, name))
        node = node or next(steps, None)
        what = f"torch has no derivative for {_plain_name(node) if node else name}"
        fix = "wrap it in a torch.autograd.Function with a backward, or run it under torch.no_grad()"
    else:
        what = f"{_plain_name(node) if node else 'its backward'}: {text.splitlines()[0][:300]}"
    return SplitError(f"stage {stage} cannot be differentiated: {what}", where=_place(node), fix=fix)


def _is_step_of(step: str, name: str) -> bool:
    """Return whether a step is one of an operator: ``IgammaBackward0`` is a step of ``igamma``."""
    return step.rstrip("0123456789").lower().endswith(name.replace("_", "").lower() + "backward")


def _plain_name(node: Node) -> str:
    """``aten.linalg_solve.default --> linalg_solve``."""
    return aten_name(node.target) or getattr(node.target, "__name__", str(node.target))


def _place(node: Node | None) -> str:
    """Return ``module.path, file.py:12`` of a captured call, as far as known."""
    if node is None:
        return ""
    return ", ".join(part for part in (module_path_of(node), source_of(node)) if part)
