"""Take nested Python values apart into a flat list of tensors, and put them together again.

``{"a": [x, None], "b": Point(y, 3)} --> [x, y] + Spec``. The nested values are the user's arguments and
results: tuples, dicts, dataclasses, model outputs, objects.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn, cast

import torch
from torch import Tensor

from zbcompile.errors import UsageError
from zbcompile.passes.capture.plain_values import (
    PLAIN,
    attributes_of,
    first_difference,
    held_beside,
    snapshot,
    step_to,
)

__all__ = ["Microbatches", "NotCarried", "Spec", "flatten", "unflatten"]

_Build = Callable[[tuple[object, ...], list[object]], object]


class NotCarried:
    """Replaces an object in a result that no stage can send (a key-value cache, for instance).

    Reading an attribute raises `UsageError`, which names the type.
    """

    def __init__(self, kind: str) -> None:
        self.__dict__["kind"] = kind

    def __repr__(self) -> str:
        return f"<{self.__dict__['kind']}: not carried through the pipeline>"

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UsageError(
            f"the result's {self.__dict__['kind']} is not carried through the pipeline",
            fix="call the model itself where it is needed, or return its tensors in a tuple or dict",
        )


class Microbatches:
    """An argument of a step that is cut already: one tensor for each microbatch, in order.

    ``pipeline.step(Microbatches([x0, x1, x2]), target=Microbatches([y0, y1, y2]))``

    Parameters
    ----------
    pieces
        The tensors. They may differ in size; a microbatch then counts by its number of rows.

    Raises
    ------
    UsageError
        There is none, one is no tensor, or they differ in dtype or in their number of dimensions.
    """

    def __init__(self, pieces: Iterable[Tensor]) -> None:
        self.pieces = tuple(pieces)
        kinds = {(piece.dtype, piece.dim()) if isinstance(piece, Tensor) else None for piece in self.pieces}
        if len(kinds) != 1 or None in kinds:
            raise UsageError(
                "Microbatches takes one tensor for each microbatch, alike in dtype and number of dimensions",
                given=[
                    f"{list(p.shape)} {p.dtype}" if isinstance(p, Tensor) else type(p).__name__
                    for p in self.pieces
                ],
            )

    def __len__(self) -> int:
        return len(self.pieces)

    @property
    def dtype(self) -> torch.dtype:
        """Of every piece."""
        return self.pieces[0].dtype

    def dim(self) -> int:
        """Return the number of dimensions of every piece."""
        return self.pieces[0].dim()


@dataclass(frozen=True)
class Spec:
    """One level of a nested value.

    Attributes
    ----------
    kind
        ``"tensor"``: the next of the flat list. ``"constant"``: ``value`` itself. ``"container"``: what
        ``build`` makes of the children. ``"object"``: a copy of ``value`` whose attributes ``keys`` are the
        children.
    value
        A constant, the type of a container, or an object.
    keys
        Keys, indices or attribute names of the children.
    children
        The levels below.
    build
        Makes a container from the keys and the children's values.
    seen
        A constant as it was, or what an object held beside its children.
    """

    kind: Literal["tensor", "constant", "container", "object"]
    value: object = None
    keys: tuple[object, ...] = ()
    children: tuple[Spec, ...] = ()
    build: _Build | None = None
    seen: object = field(default=None, compare=False)

    @property
    def num_tensors(self) -> int:
        """Tensor leaves below this level, itself included."""
        return int(self.kind == "tensor") + sum(child.num_tensors for child in self.children)

    def paths(self, prefix: str = "") -> Iterator[str]:
        """Yield a readable path (``.logits``, ``[0]``) for every tensor leaf, in flat order."""
        if self.kind == "tensor":
            yield prefix
        for key, child in zip(self.keys, self.children, strict=True):
            yield from child.paths(prefix + step_to(key))

    def changes(self, prefix: str = "") -> Iterator[tuple[str, object, object]]:
        """Yield where objects were changed in place since they were taken apart, with both values."""
        if self.kind in ("constant", "object"):
            now = snapshot(self.value) if self.kind == "constant" else held_beside(self.value, self.keys)
            if found := first_difference(self.seen, now, prefix):
                yield found
        for key, child in zip(self.keys, self.children, strict=True):
            yield from child.changes(prefix + step_to(key))


def flatten(value: object, *, results: bool = False) -> tuple[list[Tensor], Spec]:
    """Take a nested value apart.

    Tuples, named tuples, lists, dicts (ModelOutput too), dataclasses and plain objects that hold tensors are
    looked into.

    Parameters
    ----------
    value
        Any value.
    results
        Whether it is a result: then an unknown object that holds tensors becomes a `NotCarried`.

    Returns
    -------
    list of Tensor, Spec
        The tensors in a fixed order, and how to put them back. `Microbatches` count as one tensor.

    Raises
    ------
    UsageError
        An argument is a set or deque of tensors.
    """
    tensors: list[Tensor] = []
    return tensors, _walk(value, tensors, results)


def unflatten(spec: Spec, tensors: Sequence[object]) -> Any:
    """Return the nested value of ``spec`` with ``tensors`` (or what replaces them) as its leaves."""
    return _rebuild(spec, iter(tensors))


def _walk(value: object, tensors: list[Tensor], results: bool) -> Spec:
    if isinstance(value, Tensor | Microbatches):
        tensors.append(cast(Tensor, value))
        return Spec("tensor")
    if isinstance(value, PLAIN):
        return Spec("constant", value, seen=value)
    if isinstance(value, Mapping):
        keys = tuple(value)
        children = tuple(_walk(value[key], tensors, results) for key in keys)
        return Spec("container", type(value), keys, children, _mapping_builder(type(value)))
    if isinstance(value, tuple | list):
        children = tuple(_walk(item, tensors, results) for item in value)
        return Spec(
            "container", type(value), tuple(range(len(value))), children, _sequence_builder(type(value))
        )
    return _walk_object(value, tensors, results)


def _walk_object(value: object, tensors: list[Tensor], results: bool) -> Spec:
    """Return the spec of a dataclass or simple object; its tensor-holding attributes are the children."""
    if isinstance(value, torch.nn.Module | type) or callable(value):
        return Spec("constant", value, seen=value)
    if isinstance(value, set | frozenset | deque) and not results and any(map(_holds_tensor, value)):
        raise UsageError(f"a {type(value).__name__} of tensors cannot be passed", fix="pass a list")
    fields = attributes_of(value)
    keys = tuple(key for key, item in fields.items() if _holds_tensor(item))
    if results and not dataclasses.is_dataclass(value):
        return Spec("constant", NotCarried(type(value).__name__))
    if not keys:
        return Spec("constant", value, seen=snapshot(value))
    children = tuple(_walk(fields[key], tensors, results) for key in keys)
    return Spec("object", value, keys, children, seen=held_beside(value, keys))


def _holds_tensor(value: object, depth: int = 4) -> bool:
    if isinstance(value, Tensor | Microbatches):
        return True
    if depth == 0 or isinstance(value, torch.nn.Module):
        return False
    if isinstance(value, Mapping):
        return any(_holds_tensor(item, depth - 1) for item in value.values())
    if isinstance(value, tuple | list | set | frozenset | deque):
        return any(_holds_tensor(item, depth - 1) for item in value)
    if not isinstance(value, type) and not callable(value) and not isinstance(value, PLAIN):
        return any(_holds_tensor(item, depth - 1) for item in attributes_of(value).values())
    return False


def _rebuild(spec: Spec, tensors: Iterator[object]) -> object:
    if spec.kind == "tensor":
        return next(tensors)
    if spec.kind == "constant":
        return spec.value
    children = [_rebuild(child, tensors) for child in spec.children]
    if spec.build is not None:
        return spec.build(spec.keys, children)
    other = _like(spec.value)
    for name, item in zip(cast("tuple[str, ...]", spec.keys), children, strict=True):
        object.__setattr__(other, name, item)
    return other


def _like(value: object) -> object:
    """Return an object of the same type that has the same attributes."""
    try:
        other = object.__new__(type(value))
    except TypeError:  # a type with a layout of its own, such as SimpleNamespace
        return copy.copy(value)
    for name, item in attributes_of(value).items():
        object.__setattr__(other, name, item)
    return other


def _mapping_builder(kind: Callable[..., object]) -> _Build:
    def build(keys: tuple[object, ...], items: list[object]) -> object:
        pairs = dict(zip(keys, items, strict=True))
        if kind is dict:
            return pairs
        if dataclasses.is_dataclass(kind):
            return kind(**cast("dict[str, object]", pairs))
        return kind(pairs)

    return build


def _sequence_builder(kind: Callable[..., object]) -> _Build:
    if hasattr(kind, "_fields"):
        return lambda keys, items: kind(*items)
    return lambda keys, items: kind(items)
