"""Nested Python values as a flat list of tensors and a description to rebuild them."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MemberDescriptorType
from typing import Any

import torch
from torch import Tensor

from zbcompile.errors import UsageError

__all__ = ["NotCarried", "Spec", "flatten", "unflatten"]

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, slice)


class NotCarried:
    """Stands in a result for an object that no stage can send (a key-value cache, for instance).

    Touching an attribute raises UsageError that names the type.
    """

    def __init__(self, kind: str) -> None:
        self.__dict__["kind"] = kind

    def __repr__(self) -> str:
        return f"<{self.__dict__['kind']}: not carried through the pipeline>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UsageError(
            f"the result's {self.__dict__['kind']} is not carried through the pipeline",
            fix="call the model itself where it is needed, or return its tensors in a tuple or dict",
        )


@dataclass(frozen=True)
class Spec:
    """One level of a nested value.

    kind : "tensor" (the next of the flat list), "constant" (``value``), "container" (``build`` makes it
        from the children's values) or "object" (a copy of ``value`` whose tensor attributes ``keys``
        are the children).
    """

    kind: str
    value: Any = None
    keys: tuple[Any, ...] = ()
    children: tuple[Spec, ...] = ()
    build: Callable[[tuple[Any, ...], list[Any]], Any] | None = None

    @property
    def num_tensors(self) -> int:
        """Tensor leaves below this level, itself included."""
        return int(self.kind == "tensor") + sum(child.num_tensors for child in self.children)

    def paths(self, prefix: str = "") -> Iterator[str]:
        """A readable path (``.logits``, ``[0]``) for every tensor leaf, in flat order."""
        if self.kind == "tensor":
            yield prefix
        for key, child in zip(self.keys, self.children, strict=True):
            yield from child.paths(f"{prefix}.{key}" if isinstance(key, str) else f"{prefix}[{key}]")


def flatten(value: Any, *, results: bool = False) -> tuple[list[Tensor], Spec]:
    """Tensors of ``value`` in a fixed order, and how to put them back.

    Looks into tuples, named tuples, lists, dicts (ModelOutput too), dataclasses and plain objects that
    hold tensors. With ``results`` an unknown object that holds tensors becomes a `NotCarried`.
    """
    tensors: list[Tensor] = []
    return tensors, _walk(value, tensors, results)


def unflatten(spec: Spec, tensors: Sequence[Any]) -> Any:
    """The nested value of ``spec`` with ``tensors`` as its leaves."""
    return _build(spec, iter(tensors))


def _walk(value: Any, tensors: list[Tensor], results: bool) -> Spec:
    if isinstance(value, Tensor):
        tensors.append(value)
        return Spec("tensor")
    if isinstance(value, _PLAIN):
        return Spec("constant", value)
    if isinstance(value, Mapping):
        keys = tuple(value)
        children = tuple(_walk(value[key], tensors, results) for key in keys)
        return Spec("container", type(value), keys, children, _rebuild_mapping(type(value)))
    if isinstance(value, tuple | list):
        children = tuple(_walk(item, tensors, results) for item in value)
        kind = type(value)
        build = _rebuild_named if hasattr(kind, "_fields") else _rebuild_sequence
        return Spec("container", kind, tuple(range(len(value))), children, build(kind))
    return _walk_object(value, tensors, results)


def _walk_object(value: Any, tensors: list[Tensor], results: bool) -> Spec:
    """Dataclasses and simple objects: a shallow copy whose tensor-holding attributes are replaced."""
    if isinstance(value, torch.nn.Module | type) or callable(value):
        return Spec("constant", value)
    unordered = isinstance(value, set | frozenset | deque)
    if unordered and not results and any(_holds_tensor(item) for item in value):
        raise UsageError(f"a {type(value).__name__} of tensors cannot be passed", fix="pass a list")
    fields = _attributes(value)
    keys = tuple(key for key, item in fields.items() if _holds_tensor(item))
    if not keys:
        return Spec("constant", value)
    if results and not dataclasses.is_dataclass(value):
        return Spec("constant", NotCarried(type(value).__name__))
    children = tuple(_walk(fields[key], tensors, results) for key in keys)
    return Spec("object", value, keys, children)


def _attributes(value: Any) -> dict[str, Any]:
    """The attributes of an instance, whether they sit in its ``__dict__`` or in slots."""
    names = (
        name
        for kind in type(value).__mro__
        for name, member in vars(kind).items()
        if isinstance(member, MemberDescriptorType) and hasattr(value, name)
    )
    return {name: getattr(value, name) for name in names} | getattr(value, "__dict__", {})


def _holds_tensor(value: Any, depth: int = 4) -> bool:
    if isinstance(value, Tensor):
        return True
    if depth == 0 or isinstance(value, torch.nn.Module):
        return False
    if isinstance(value, Mapping):
        return any(_holds_tensor(item, depth - 1) for item in value.values())
    if isinstance(value, tuple | list):
        return any(_holds_tensor(item, depth - 1) for item in value)
    if isinstance(value, set | frozenset | deque):
        return any(_holds_tensor(item, depth - 1) for item in value)
    if not isinstance(value, type) and not callable(value) and not isinstance(value, _PLAIN):
        return any(_holds_tensor(item, depth - 1) for item in _attributes(value).values())
    return False


def _build(spec: Spec, tensors: Iterator[Any]) -> Any:
    if spec.kind == "tensor":
        return next(tensors)
    if spec.kind == "constant":
        return spec.value
    children = [_build(child, tensors) for child in spec.children]
    if spec.build is not None:
        return spec.build(spec.keys, children)
    copy = object.__new__(type(spec.value))
    for name, item in (_attributes(spec.value) | dict(zip(spec.keys, children, strict=True))).items():
        object.__setattr__(copy, name, item)
    return copy


def _rebuild_mapping(kind: type) -> Callable[[tuple[Any, ...], list[Any]], Any]:
    def build(keys: tuple[Any, ...], items: list[Any]) -> Any:
        pairs = dict(zip(keys, items, strict=True))
        if kind is dict:
            return pairs
        return kind(**pairs) if dataclasses.is_dataclass(kind) else kind(pairs)

    return build


def _rebuild_named(kind: Any) -> Callable[[tuple[Any, ...], list[Any]], Any]:
    return lambda keys, items: kind(*items)


def _rebuild_sequence(kind: Any) -> Callable[[tuple[Any, ...], list[Any]], Any]:
    return lambda keys, items: kind(items)
