"""The kinds of hooks of torch, and what becomes of each: the one table that every check of hooks reads.

A new kind is one row here and, if torch has no public name for it, its table in `torch_private`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from zbcompile.passes import torch_private

__all__ = ["HOOK_KINDS", "HookKind", "has_hooks", "module_hooks", "refused_hook", "refused_kinds"]

Fate = Literal["captured", "refused", "called after the step"]


@dataclass(frozen=True, slots=True)
class HookKind:
    """One kind of hook.

    Attributes
    ----------
    name
        What errors call it.
    on
        What it is registered on.
    table
        (module or parameter) -> its hooks; None: it never had one.
    fate
        ``captured``: its calls are part of the graphs, and one that is added later is refused, unless the
        forward registers hooks itself. ``refused``: no graph would call it. ``called after the step``: with
        the sum of the gradients, by `runtime.gradients.run_hooks`.
    fix
        For a refused one: what to do instead.
    """

    name: str
    on: Literal["module", "parameter"]
    table: Callable[[Any], Mapping[int, object] | None]
    fate: Fate
    fix: str = ""


_BACKWARD_FIX = "remove the hook, or do its work in an autograd.Function or on param.grad after the step"

HOOK_KINDS = (
    HookKind("forward pre-hook", "module", torch_private.forward_pre_hooks, "captured"),
    HookKind("forward hook", "module", torch_private.forward_hooks, "captured"),
    HookKind("backward pre-hook", "module", torch_private.backward_pre_hooks, "refused", _BACKWARD_FIX),
    HookKind("backward hook", "module", torch_private.backward_hooks, "refused", _BACKWARD_FIX),
    HookKind(
        "gradient hook",
        "parameter",
        torch_private.gradient_hooks,
        "refused",
        "do its work in register_post_accumulate_grad_hook, or on param.grad after the step",
    ),
    HookKind(
        "post-accumulate hook", "parameter", torch_private.post_accumulate_hooks, "called after the step"
    ),
)


def module_hooks(module: nn.Module) -> Iterator[tuple[HookKind, Mapping[int, object]]]:
    """Yield (kind, its live table) of every kind of hook on a module."""
    for kind in HOOK_KINDS:
        table = kind.table(module) if kind.on == "module" else None
        if table is not None:
            yield kind, table


def has_hooks(parameter: Tensor) -> bool:
    """Return whether the user asked for code to run in or after the backward of this parameter."""
    return any(kind.table(parameter) for kind in HOOK_KINDS if kind.on == "parameter")


def refused_kinds(on: Literal["module", "parameter"]) -> list[HookKind]:
    """Return the kinds that no graph would call."""
    return [kind for kind in HOOK_KINDS if kind.on == on and kind.fate == "refused"]


def refused_hook(parameters: Sequence[Tensor]) -> tuple[HookKind, Tensor] | None:
    """Return the first hook on a parameter that no graph would call; None: no parameter has one.

    About 0.05 us for each parameter.
    """
    for kind in refused_kinds("parameter"):
        if any(map(kind.table, parameters)):
            return kind, next(parameter for parameter in parameters if kind.table(parameter))
    return None
