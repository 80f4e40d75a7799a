"""How a pipeline is called: one batch's arguments, and the form that every later call is held against."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from zbcompile.errors import UsageError
from zbcompile.passes.capture.nested_values import Spec, flatten, unflatten
from zbcompile.runtime.batches import BatchPlan

__all__ = ["Batch", "CallForm"]


@dataclass(frozen=True)
class Batch:
    """The arguments of one call of `Pipeline.step` or `Pipeline.eval`, or one microbatch of them."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    target: Any = None

    def flat(self) -> tuple[list[Tensor], Spec]:
        """Return the tensors, and how they are nested in (args, kwargs, target)."""
        return flatten((self.args, dict(self.kwargs), self.target))

    @property
    def size(self) -> int:
        """Dimension 0 of the first tensor that has dimensions; 1 where none has."""
        return next((t.shape[0] for t in self.flat()[0] if t.dim()), 1)

    def most_microbatches(self, limit: int) -> int:
        """Return the largest divisor of the batch's size that is at most ``limit``.

        Raises
        ------
        UsageError
            The batch is empty.
        """
        size = self.size
        if size == 0:
            raise UsageError("the batch is empty", where="dimension 0", fix="leave the call out")
        return next(k for k in range(min(limit, size), 0, -1) if size % k == 0)


class CallForm:
    """The form of a call: how its arguments are nested, and which tensors are cut into microbatches.

    Parameters
    ----------
    batch
        The example that the model is captured with.
    whole
        Tensors that every microbatch gets whole: positions of args, names of kwargs.
    num_microbatches
        How many microbatches a batch is cut into.

    Attributes
    ----------
    example
        The first microbatch, flat and as it was nested.
    """

    def __init__(self, batch: Batch, whole: Sequence[str | int], num_microbatches: int) -> None:
        tensors, self.spec = batch.flat()
        names = [_name(path) for path in self.spec.paths()]
        kept = [_is_whole(name, whole) for name in names]
        self.plan = BatchPlan(names, tensors, num_microbatches, kept)
        self.num_microbatches = num_microbatches
        self.flat_example = self.plan.split(tensors)[0]
        self.example = Batch(*unflatten(self.spec, self.flat_example))

    def microbatches(self, batch: Batch) -> list[list[Tensor]]:
        """Return the flat tensors of each microbatch.

        Raises
        ------
        ShapeError, UsageError
            The call has another form than the example.
        """
        order, kwargs = self.spec.children[1].keys, batch.kwargs
        if set(order) == set(kwargs):
            kwargs = {str(key): kwargs[str(key)] for key in order}
        tensors, spec = Batch(batch.args, kwargs, batch.target).flat()
        found = _difference(self.spec, spec, "")
        if found is not None:
            path, old, new = found
            where = _name(path) or "the arguments"
            if old.kind == new.kind == "constant":
                raise UsageError(
                    "an argument that is no tensor has another value than the one that was compiled",
                    where=where,
                    needed=f"{reprlib.repr(old.value)}, as compiled",
                    given=reprlib.repr(new.value),
                    fix="pass a tensor if its value changes from call to call, or compile another pipeline",
                )
            raise UsageError(
                "the call differs from the one that was compiled",
                where=where,
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


def _difference(old: Spec, new: Spec, path: str) -> tuple[str, Spec, Spec] | None:
    """Return (path, old, new) of the first place where nesting or a constant differs."""
    if old.kind != new.kind or old.keys != new.keys or len(old.children) != len(new.children):
        return path or "[0]", old, new
    if old.kind == "constant":
        same = old.value is new.value or bool(old.value == new.value)
        return None if same else (path, old, new)
    for key, left, right in zip(old.keys, old.children, new.children, strict=True):
        step = f".{key}" if isinstance(key, str) else f"[{key}]"
        found = _difference(left, right, path + step)
        if found is not None:
            return found
    return None
