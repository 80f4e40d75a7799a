"""Values of a call that are no tensors, as they were: objects may be changed in place from call to call.

``Config(scale=1.0) --> Fields(Config, {"scale": 1.0})``
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MemberDescriptorType

import torch

__all__ = ["PLAIN", "Fields", "attributes_of", "first_difference", "held_beside", "snapshot", "step_to"]

PLAIN = (
    type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, slice, Enum,
)  # fmt: skip
"""Types whose values cannot be changed in place."""

_DEPTH = 4
"""Levels of an object that are looked into; what lies deeper is compared by ``==``."""


@dataclass(frozen=True)
class Fields:
    """What an object or a container held.

    Attributes
    ----------
    kind
        Its type.
    values
        By attribute, key or index.
    """

    kind: type
    values: Mapping[object, object]


def attributes_of(value: object) -> dict[str, object]:
    """Return the attributes of an instance, whether they sit in its ``__dict__`` or in slots."""
    names = (
        name
        for kind in type(value).__mro__
        for name, member in vars(kind).items()
        if isinstance(member, MemberDescriptorType) and name != "__dict__" and hasattr(value, name)
    )
    return {name: getattr(value, name) for name in names} | getattr(value, "__dict__", {})


def snapshot(value: object, depth: int = _DEPTH) -> object:
    """Return what a value holds now, to be compared with what it holds later."""
    if depth == 0 or callable(value) or isinstance(value, (torch.Tensor, type, *PLAIN)):
        return value
    if isinstance(value, Mapping):
        return Fields(type(value), {key: snapshot(item, depth - 1) for key, item in value.items()})
    if isinstance(value, tuple | list | deque):
        return Fields(type(value), {k: snapshot(item, depth - 1) for k, item in enumerate(value)})
    fields = attributes_of(value)
    if fields or hasattr(value, "__dict__"):
        return Fields(type(value), {name: snapshot(item, depth - 1) for name, item in fields.items()})
    return _copied(value)


def held_beside(value: object, names: Collection[object]) -> Fields:
    """Return what an object holds now in attributes other than ``names``."""
    others = {name: item for name, item in attributes_of(value).items() if name not in names}
    return Fields(type(value), {name: snapshot(item) for name, item in others.items()})


def first_difference(old: object, new: object, path: str = "") -> tuple[str, object, object] | None:
    """Return where two snapshots first differ, and both values there; None where they are equal."""
    if old is new:
        return None
    if not isinstance(old, Fields) or not isinstance(new, Fields):
        return None if _equal(old, new) else (path, old, new)
    if old.kind is not new.kind:
        return path, old.kind.__name__, new.kind.__name__
    if list(old.values) != list(new.values):
        return path, list(old.values), list(new.values)
    for key, value in old.values.items():
        if found := first_difference(value, new.values[key], path + step_to(key)):
            return found
    return None


def step_to(key: object) -> str:
    """Return how a readable path goes on to an attribute, key or index."""
    return f".{key}" if isinstance(key, str) else f"[{key}]"


def _copied(value: object) -> object:
    """Return a copy that is equal, such as an array's or a set's; else the value itself."""
    try:
        other = copy.copy(value)
    except Exception:  # a lock, a generator
        return value
    return other if _equal(value, other) else value


def _equal(old: object, new: object) -> bool:
    if old is new:
        return True
    if type(old) is not type(new) or isinstance(old, torch.Tensor):
        return False
    try:
        equal = old == new
        return bool(equal.all() if hasattr(equal, "all") else equal) or bool(old != old and new != new)
    except Exception:  # arrays of other shapes, objects that refuse to be compared
        return False
