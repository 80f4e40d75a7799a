"""One call of a pipeline: its arguments, their names, and what options may name of them."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from zbcompile.errors import UsageError
from zbcompile.passes.capture.nested_values import Microbatches, Spec, flatten

__all__ = [
    "Batch",
    "check_named",
    "constant_values",
    "name_of",
    "named",
    "names_a_tensor",
    "pieces_of",
    "places_of",
]


@dataclass(frozen=True)
class Batch:
    """The arguments of one call of `Pipeline.step` or `Pipeline.eval`, or one microbatch of them."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    target: Any = None

    def flat(self) -> tuple[list[Tensor], Spec]:
        """Return the tensors, and how they are nested in (args, kwargs, target)."""
        return flatten((self.args, dict(self.kwargs), self.target))


def places_of(keys: Iterable[str | int], model: nn.Module, batch: Batch) -> tuple[str | int, ...]:
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
    for key in keys:
        if not names_a_tensor(key, model, batch):
            names = [name_of(path) for path in batch.flat()[1].paths()]
            raise UsageError(
                f"{option}={key!r} names no tensor of the call",
                needed=f"one of {', '.join(names)}",
                given=repr(key),
                fix="give positions of args and names of the forward's arguments",
            )


def names_a_tensor(key: str | int, model: nn.Module, batch: Batch) -> bool:
    """Return whether a position of args or a name of an argument stands for a tensor of a call."""
    places = places_of((key,), model, batch)
    return any(named(name_of(path), places) for path in batch.flat()[1].paths())


def constant_values(constant: Sequence[str | int], model: nn.Module, batch: Batch) -> list[object]:
    """Return the values of the arguments named in ``constant=``, of the whole batch."""
    if not constant:
        return []
    tensors, spec = batch.flat()
    places = places_of(constant, model, batch)
    return [
        [piece.tolist() for piece in pieces_of(tensor)]
        for tensor, path in zip(tensors, spec.paths(), strict=True)
        if named(name_of(path), places)
    ]


def pieces_of(value: Tensor | Microbatches) -> tuple[Tensor, ...]:
    """Return the microbatches that the user has cut, or the one tensor."""
    return value.pieces if isinstance(value, Microbatches) else (value,)


def name_of(path: str) -> str:
    """Return the name of a place in (args, kwargs, target): ``args[0]``, ``mask``, ``target[1]``."""
    for prefix, word in (("[0]", "args"), ("[1].", ""), ("[1]", "kwargs"), ("[2]", "target")):
        if path.startswith(prefix):
            return word + path.removeprefix(prefix)
    return path


def named(name: str, keys: Sequence[str | int]) -> bool:
    """Return whether a tensor is one of the arguments ``keys`` (positions, names), or inside of one."""
    keys = [f"args[{key}]" if isinstance(key, int) else key for key in keys]
    return any(name == key or name.startswith((f"{key}.", f"{key}[")) for key in keys)
