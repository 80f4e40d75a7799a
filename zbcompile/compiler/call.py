"""The form of a call of a pipeline: what every later call is held against, and how a batch is cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from zbcompile.errors import UsageError
from zbcompile.passes.capture.nested_values import Spec, flatten
from zbcompile.runtime.batches import BatchPlan

__all__ = ["Call"]


class Call:
    """The form of a call: how its arguments are nested, which tensors are cut into microbatches."""

    def __init__(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        target: Any,
        whole: Sequence[str | int],
        count: int,
    ) -> None:
        tensors, self.spec = flatten((args, kwargs, target))
        names = [_name(path) for path in self.spec.paths()]
        kept = [_is_whole(name, whole) for name in names]
        self.plan = BatchPlan(names, tensors, count, kept)
        self.example = self.plan.split(tensors)[0]

    def microbatches(self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any) -> list[list[Tensor]]:
        """The flat tensors of each microbatch. Raises `ShapeError` or `UsageError` for another form of
        call."""
        order = self.spec.children[1].keys
        if set(order) == set(kwargs):
            kwargs = {key: kwargs[key] for key in order}
        tensors, spec = flatten((args, kwargs, target))
        difference = _difference(self.spec, spec, "")
        if difference is not None:
            raise UsageError(
                "the call differs from the one that was compiled",
                where=_name(difference) or "the arguments",
                fix="pass the same arguments, or compile another pipeline for this form",
            )
        return self.plan.split(tensors)


def _name(path: str) -> str:
    for prefix, word in (("[0]", "args"), ("[1].", ""), ("[1]", "kwargs"), ("[2]", "target")):
        if path.startswith(prefix):
            return word + path.removeprefix(prefix)
    return path


def _is_whole(name: str, whole: Sequence[str | int]) -> bool:
    keys = [f"args[{key}]" if isinstance(key, int) else key for key in whole]
    return any(name == key or name.startswith((f"{key}.", f"{key}[")) for key in keys)


def _difference(old: Spec, new: Spec, path: str) -> str | None:
    """Path of the first place where two calls are nested differently or a constant differs."""
    if old.kind != new.kind or old.keys != new.keys or len(old.children) != len(new.children):
        return path or "[0]"
    if old.kind == "constant":
        return None if old.value is new.value or bool(old.value == new.value) else path
    for key, left, right in zip(old.keys, old.children, new.children, strict=True):
        step = f".{key}" if isinstance(key, str) else f"[{key}]"
        found = _difference(left, right, path + step)
        if found is not None:
            return found
    return None
