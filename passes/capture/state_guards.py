"""Guard state that a forward changes outside of parameters and buffers while it is traced.

A graph would keep the first value of such state for ever, so it is refused, or the forward is traced once
more where that settles it. Capturing itself leaves modules and random numbers as they were.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import cast

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from zbcompile.errors import CaptureError
from zbcompile.passes import torch_private

__all__ = [
    "AttributeChanges",
    "attributes_kept",
    "buffers_kept",
    "gradients_kept",
    "random_kept",
    "state_guarded",
    "trace_until_settled",
]

_PLAIN_NUMBERS = (bool, int, float)


class AttributeChanges:
    """What the forward assigned to attributes of modules.

    Attributes
    ----------
    tensors
        Paths of plain tensors that were replaced.
    numbers
        (path of the module, name of a plain number) -> the value before and after.
    """

    def __init__(self) -> None:
        self.tensors: set[str] = set()
        self.numbers: dict[tuple[str, str], tuple[float, float]] = {}


@contextlib.contextmanager
def state_guarded(root: nn.Module, changes: AttributeChanges) -> Iterator[None]:
    """Refuse a block that replaces modules or draws random numbers outside of torch.

    Attributes that the block gives another tensor or number are noted in ``changes``.

    Raises
    ------
    CaptureError
        Names the module path, or the source of random numbers.
    """
    before = {(path, name): value for path, name, value in _attributes(root)}
    modules = dict(root.named_modules())
    changes.numbers.clear()
    states = _random_states()
    yield
    for kind, state in _random_states().items():
        if state != states[kind]:
            raise CaptureError(
                f"the forward draws or seeds random numbers with {kind}: the graph would repeat the first",
                fix="draw with torch functions; the pipeline seeds them for every step and microbatch",
            )
    for path, module in root.named_modules():
        if modules.get(path) is not module:
            raise CaptureError(
                f"the forward replaces or adds the module {type(module).__name__}",
                where=path,
                fix="run the model once on such a batch before it is compiled",
            )
    for path, name, value in _attributes(root):
        old = before.get((path, name))
        if old is value or old is None:
            continue
        if isinstance(value, Tensor):
            changes.tensors.add(f"{path}.{name}".lstrip("."))
        elif not isinstance(old, Tensor) and old != value:
            changes.numbers[path, name] = (old, value)


def trace_until_settled(
    root: nn.Module, changes: AttributeChanges, trace: Callable[[], ExportedProgram]
) -> ExportedProgram:
    """Trace a forward; where it sets plain attributes, trace it again as it would set them again.

    Parameters
    ----------
    root
        The traced module.
    changes
        What `state_guarded` notes during each trace.
    trace
        Traces the forward once.

    Raises
    ------
    CaptureError
        The second trace changes attributes too, or differs; names the module path.
    """
    first = trace()
    found = dict(changes.numbers)
    if not found:
        return first
    for (path, name), (_, value) in found.items():
        setattr(root.get_submodule(path), name, value)
    second = trace()
    if not changes.numbers and str(second.graph) == str(first.graph):
        return second
    (path, name), (old, value) = next(iter((changes.numbers or found).items()))
    old, value = found.get((path, name), (old, value))
    raise CaptureError(
        f"the forward changes attribute {name!r} from {old} to {value}: the graph would keep {old}",
        where=f"{path}.{name}".lstrip("."),
        fix="count in a buffer, or change it outside of the forward",
    )


@contextlib.contextmanager
def random_kept() -> Iterator[None]:
    """Give Python's and numpy's random numbers back the state that they had."""
    numpy = sys.modules.get("numpy")
    states = random.getstate(), numpy.random.get_state() if numpy is not None else None
    try:
        yield
    finally:
        random.setstate(states[0])
        if numpy is not None:
            numpy.random.set_state(states[1])


@contextlib.contextmanager
def attributes_kept(*roots: nn.Module) -> Iterator[None]:
    """Give all modules below ``roots`` back the attributes that they had.

    Attributes that are dicts (caches, hooks, submodules) get their entries back. A dict whose entries are as
    before is not written to: it may refuse that.
    """
    tables: list[dict[object, object]] = [
        cast("dict[object, object]", vars(module)) for root in roots for module in root.modules()
    ]
    tables += [item for table in tables for item in table.values() if isinstance(item, dict)]
    before = [(table, _entries(table)) for table in tables]
    try:
        yield
    finally:
        for table, entries in before:
            now = _entries(table)
            if len(now) != len(entries) or any(
                a is not c or b is not d for (a, b), (c, d) in zip(now, entries, strict=True)
            ):
                kind = _kind(table)
                kind.clear(table)
                for key, value in entries:
                    kind.__setitem__(table, key, value)


def _kind(table: dict[object, object]) -> type[dict[object, object]]:
    """Return the plain class below a dict: what a subclass forbids or adds is left out."""
    return OrderedDict if isinstance(table, OrderedDict) else dict


def _entries(table: dict[object, object]) -> list[tuple[object, object]]:
    return list(_kind(table).items(table))


@contextlib.contextmanager
def buffers_kept(root: nn.Module) -> Iterator[None]:
    """Give the buffers of a model back their tensors and values."""
    held = torch_private.assigned_buffers(root)
    before = [(*place, buffer, buffer.detach().clone()) for place, buffer in held.items()]
    try:
        yield
    finally:
        with torch.no_grad():
            for module, name, buffer, value in before:
                torch_private.set_buffer(module, name, buffer)
                buffer.resize_(value.shape).copy_(value)


@contextlib.contextmanager
def gradients_kept(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Give tensors back the ``.grad`` that they had: what a trace leaves there is no gradient."""
    before = [(tensor, tensor.grad) for tensor in tensors if tensor.grad_fn is None]
    try:
        yield
    finally:
        for tensor, grad in before:
            if tensor.grad is not grad:
                tensor.grad = grad


def _attributes(root: nn.Module) -> Iterator[tuple[str, str, Tensor | float]]:
    """Yield (path of the module, name, value) of every plain tensor and plain number."""
    for path, module in root.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, (Tensor, *_PLAIN_NUMBERS)) and name != "training":
                yield path, name, value


def _random_states() -> dict[str, object]:
    states: dict[str, object] = {"the random module": random.getstate()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        states["numpy.random"] = (kind, keys.tobytes(), *rest)
    states["torch.manual_seed"] = torch_private.random_state()
    return states
