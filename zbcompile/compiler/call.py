"""How a pipeline is called: one batch's arguments, and the form that every later call is held against."""

from __future__ import annotations

import inspect
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from zbcompile.errors import UsageError
from zbcompile.passes.capture.nested_values import Spec, flatten, unflatten
from zbcompile.runtime.batches import BatchPlan

__all__ = ["Batch", "CallForm", "check_named", "constant_values"]


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
    model
        What is called: its forward names arguments that are given by position.
    num_microbatches
        How many microbatches a batch is cut into.
    whole
        Tensors that every microbatch gets whole: positions of args, names of the forward's arguments.
    constant
        Tensors whose values are the same in every microbatch: as for ``whole``.

    Attributes
    ----------
    example
        The first microbatch, flat and as it was nested.
    constants
        Flat index of a constant tensor -> its value.

    Raises
    ------
    UsageError
        The microbatches differ in a constant.
    """

    def __init__(
        self,
        batch: Batch,
        model: nn.Module,
        num_microbatches: int,
        whole: Sequence[str | int] = (),
        constant: Sequence[str | int] = (),
    ) -> None:
        tensors, self.spec = batch.flat()
        names = [_name(path) for path in self.spec.paths()]
        whole, constant = (places_of(keys, model, batch) for keys in (whole, constant))
        kept = [_is_named(name, whole) for name in names]
        self.plan = BatchPlan(names, tensors, num_microbatches, kept)
        self.num_microbatches = num_microbatches
        pieces = self.plan.split(tensors)
        self.flat_example = pieces[0]
        self.example = Batch(*unflatten(self.spec, self.flat_example))
        self.constants = {k: pieces[0][k].clone() for k, n in enumerate(names) if _is_named(n, constant)}
        self._check_constants(pieces, "of the first microbatch")

    def microbatches(self, batch: Batch) -> list[list[Tensor]]:
        """Return the flat tensors of each microbatch.

        Raises
        ------
        ShapeError, UsageError
            The call has another form than the example, or other values of constants.
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
        pieces = self.plan.split(tensors)
        self._check_constants(pieces, "as compiled")
        return pieces

    def _check_constants(self, pieces: Sequence[Sequence[Tensor]], words: str) -> None:
        """Refuse microbatches with other values of constants than were compiled for."""
        for k, value in self.constants.items():
            for microbatch, tensors in enumerate(pieces if self.plan.sliced[k] else pieces[:1]):
                if not torch.equal(tensors[k], value):
                    raise UsageError(
                        "a constant argument has another value than the one that is compiled",
                        where=f"{self.plan.names[k]}, microbatch {microbatch}",
                        needed=f"{reprlib.repr(value.tolist())}, {words}",
                        given=reprlib.repr(tensors[k].tolist()),
                        fix="give microbatches that agree in it, compile another pipeline for other values, "
                        "or take it out of constant=[...]",
                    )


def places_of(keys: Sequence[str | int], model: nn.Module, batch: Batch) -> tuple[str | int, ...]:
    """Return where named arguments stand in a call: positions of args, names of kwargs.

    A name of the forward's arguments is a position where the call gives it by position.
    """
    forward = inspect.signature(model.forward).parameters.values()
    in_order = [p.name for p in forward if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    position = {name: k for k, name in enumerate(in_order[: len(batch.args)])}
    return tuple(key if isinstance(key, int) else position.get(key, key) for key in keys)


def check_named(option: str, keys: Sequence[str | int], model: nn.Module, batch: Batch) -> None:
    """Refuse an option that names something which is no tensor of the call.

    Raises
    ------
    UsageError
        Says what could be named.
    """
    names = [_name(path) for path in batch.flat()[1].paths()]
    for key, place in zip(keys, places_of(keys, model, batch), strict=True):
        if not any(_is_named(name, (place,)) for name in names):
            raise UsageError(
                f"{option}={key!r} names no tensor of the call",
                needed=f"one of {', '.join(names)}",
                given=repr(key),
                fix="give positions of args and names of the forward's arguments",
            )


def constant_values(constant: Sequence[str | int], model: nn.Module, batch: Batch) -> list[object]:
    """Return the values of the arguments named in ``constant=``, of the whole batch."""
    if not constant:
        return []
    tensors, spec = batch.flat()
    places = places_of(constant, model, batch)
    return [t.tolist() for t, p in zip(tensors, spec.paths(), strict=True) if _is_named(_name(p), places)]


def _name(path: str) -> str:
    for prefix, word in (("[0]", "args"), ("[1].", ""), ("[1]", "kwargs"), ("[2]", "target")):
        if path.startswith(prefix):
            return word + path.removeprefix(prefix)
    return path


def _is_named(name: str, keys: Sequence[str | int]) -> bool:
    """Return whether a tensor is one of the arguments ``keys`` (positions, names), or inside of one."""
    keys = [f"args[{key}]" if isinstance(key, int) else key for key in keys]
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
