"""Follow tensors whose values are known while a model is traced, so that Python may read them.

A pinned argument (``compile(..., constant=...)``), a small buffer of whole numbers, what ``torch.arange`` and
its kind make of Python numbers, and whatever is computed from such tensors alone has the same value in every
step: one with another value of an argument, or of a buffer that was read, is refused. Each call on them is
made twice: into the graph, as any other, and with the real values beside it::

    grid.prod(-1).tolist()   -->   [64, 16], and the graph goes on with these numbers

A result whose shape depends on values, and that no graph could hold, is the real tensor: a constant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from zbcompile.passes import torch_private

__all__ = ["KnownValues"]

_Function = Callable[..., object]

LARGEST = 1 << 16
"""Elements of the largest tensor whose value is followed."""
_MAKES: tuple[_Function, ...] = (
    torch.tensor, torch.as_tensor, torch.arange, torch.linspace, torch.zeros, torch.ones, torch.full,
    torch.eye,
)  # fmt: skip
_READS: tuple[_Function, ...] = (
    Tensor.item, Tensor.tolist, Tensor.__int__, Tensor.__float__, Tensor.__index__, Tensor.__contains__,
    Tensor.numpy, torch.equal, Tensor.equal, torch.allclose, Tensor.allclose, torch.is_nonzero,
)  # fmt: skip
"""Functions that hand values to Python."""
_SHAPED_BY_VALUE: tuple[_Function, ...] = (
    *_MAKES, torch.nonzero, Tensor.nonzero, torch.argwhere, torch.repeat_interleave,
    Tensor.repeat_interleave, torch.unique, Tensor.unique, torch.unique_consecutive,
    Tensor.unique_consecutive, torch.masked_select, Tensor.masked_select, torch.bincount, Tensor.bincount,
    F.one_hot,
)  # fmt: skip
"""Functions whose results may have another shape for other values."""
_TAKES_SIZES: tuple[_Function, ...] = (
    Tensor.__getitem__, Tensor.__setitem__, Tensor.view, Tensor.reshape, torch.reshape, Tensor.expand,
    Tensor.repeat, torch.split, Tensor.split, Tensor.split_with_sizes, torch.narrow, Tensor.narrow,
    torch.zeros, torch.ones, torch.full, torch.empty, Tensor.new_zeros, Tensor.new_ones, Tensor.new_full,
    torch.linspace, torch.arange, torch.multinomial, F.pad, F.interpolate,
)  # fmt: skip
"""Functions that take sizes or places among their arguments: a known number may stand there as a tensor."""


@dataclass
class _Known:
    """A tensor of the trace, its value, and the count of its changes that the value is up to date with."""

    traced: Tensor
    real: Tensor
    version: int
    buffers: frozenset[str]


class KnownValues:
    """The known values of one trace.

    Parameters
    ----------
    pinned
        Real tensors that the model gets as arguments.
    buffers
        Name of a buffer -> its tensor in the trace, and its value.

    Attributes
    ----------
    read
        Names of the buffers that Python code has read.
    """

    def __init__(
        self, pinned: Sequence[Tensor] = (), buffers: Mapping[str, tuple[Tensor, Tensor]] | None = None
    ) -> None:
        self._known: dict[int, _Known] = {}
        self.read: set[str] = set()
        for tensor in pinned:
            self._put(tensor, tensor, frozenset())
        for name, (traced, real) in (buffers or {}).items():
            self._put(traced, real, frozenset((name,)))

    def of(self, tensor: Tensor) -> Tensor | None:
        """Return the value of a tensor of the trace, or None where it is not known."""
        found = self._known.get(id(tensor))
        return found.real if found is not None and found.version == torch_private.version_of(tensor) else None

    def handed_out(self, tensors: Sequence[Tensor]) -> frozenset[str]:
        """Note that known values leave the trace; return the buffers that they come from."""
        buffers = self._buffers_of(tensors)
        self.read |= buffers
        return buffers

    def _buffers_of(self, tensors: Sequence[Tensor]) -> frozenset[str]:
        none = frozenset[str]()
        return none.union(*(self._known[id(t)].buffers for t in tensors if self.of(t) is not None))

    def call(
        self, func: _Function, args: tuple[object, ...], kwargs: Mapping[str, object], run: _Function
    ) -> object:
        """Return what a torch function gives, and follow it where all its tensors are known.

        Parameters
        ----------
        func, args, kwargs
            The call.
        run
            Makes the call in the trace.
        """
        tensors = list(_tensors((*args, *kwargs.values())))
        if not tensors and func not in _MAKES:
            return run(*args, **kwargs)
        values = [self.of(tensor) for tensor in tensors]
        if func in _TAKES_SIZES and any(value is not None for value in values):
            args = tuple(self._as_number(value, k) for k, value in enumerate(args))
            kwargs = {name: self._as_number(value, name != "input") for name, value in kwargs.items()}
        if any(value is None for value in values):
            return run(*args, **kwargs)
        real, buffers = self._with_values(func, args, kwargs), self._buffers_of(tensors)
        if func in _READS:
            self.handed_out(tensors)
            return real()
        if tensors and (func in _SHAPED_BY_VALUE or (func is Tensor.__getitem__ and _has_mask(args[1]))):
            self.handed_out(tensors)
            made = real()
            for part in _tensors((made,)):
                self._put(part, part, buffers)
            return made
        before = [torch_private.version_of(tensor) for tensor in tensors]
        traced = run(*args, **kwargs)
        if _may_follow(func, traced) and self._follow(real, traced, buffers):
            for tensor, version in zip(tensors, before, strict=True):
                self._changed(tensor, torch_private.version_of(tensor) - version, buffers)
        return traced

    def _with_values(
        self, func: _Function, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> Callable[[], object]:
        """Return a call with the values that its tensors have now."""
        real = tuple(self._value(value) for value in args)
        given = {name: self._value(value) for name, value in kwargs.items()}

        def call() -> object:
            with torch_private.outside_the_trace():
                return func(*real, **given)

        return call

    def _follow(self, call: Callable[[], object], traced: object, buffers: frozenset[str]) -> bool:
        """Make a call with the real values; return whether its results, and what it changes, stay known."""
        try:
            with torch_private.draws_seen() as drew:
                real = call()
        except (RuntimeError, TypeError, ValueError, NotImplementedError, IndexError):
            return False
        if drew():  # another value in every step
            return False
        pairs = list(zip(_tensors((traced,)), _tensors((real,)), strict=False))
        if all(one.shape == other.shape and one.dtype == other.dtype for one, other in pairs):
            for one, other in pairs:
                if id(one) not in self._known:
                    self._put(one, other, buffers)
        return True

    def _changed(self, tensor: Tensor, count: int, buffers: frozenset[str]) -> None:
        """Take over a change in place that was made to the value, too, for all that share its storage."""
        if count == 0:
            return
        storage = torch_private.storage_key(self._known[id(tensor)].real)
        for known in self._known.values():
            shared = torch_private.storage_key(known.real) == storage
            if shared and known.version == torch_private.version_of(known.traced) - count:
                known.version += count
                known.buffers |= buffers

    def _put(self, traced: Tensor, real: Tensor, buffers: frozenset[str]) -> None:
        self._known[id(traced)] = _Known(traced, real, torch_private.version_of(traced), buffers)

    def _value(self, argument: object) -> object:
        """Return an argument with known values in the place of tensors."""
        if isinstance(argument, Tensor):
            found = self.of(argument)
            return argument if found is None else found
        if isinstance(argument, tuple | list):
            items = [self._value(item) for item in argument]
            return items if isinstance(argument, list) else tuple(items)
        if isinstance(argument, slice):
            return slice(*map(self._value, (argument.start, argument.stop, argument.step)))
        return argument

    def _as_number(self, argument: object, position: int) -> object:
        """Return an argument with numbers in the place of known whole numbers, as sizes and places are."""
        if isinstance(argument, Tensor):
            value = self.of(argument) if position > 0 and argument.dim() == 0 else None
            whole = value is not None and not value.is_floating_point() and value.dtype != torch.bool
            if value is None or not whole:
                return argument
            self.handed_out([argument])
            return self._item(value)
        if isinstance(argument, tuple | list):
            items = [self._as_number(item, 1) for item in argument]
            return items if isinstance(argument, list) else tuple(items)
        if isinstance(argument, slice):
            return slice(*(self._as_number(a, 1) for a in (argument.start, argument.stop, argument.step)))
        return argument

    def _item(self, value: Tensor) -> int:
        with torch_private.outside_the_trace():
            return int(value)


def _tensors(values: Sequence[object]) -> Iterator[Tensor]:
    """Yield the tensors in nested tuples, lists and slices."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from _tensors(value)
        elif isinstance(value, slice):
            yield from _tensors((value.start, value.stop, value.step))


def _has_mask(index: object) -> bool:
    return any(tensor.dtype in (torch.bool, torch.uint8) for tensor in _tensors((index,)))


def _may_follow(func: _Function, traced: object) -> bool:
    """Return whether a call makes or changes tensors that are small and of a shape that is known."""
    made = list(_tensors((traced,)))
    if not all(isinstance(n, int) for part in made for n in part.shape):
        return False
    return (bool(made) or func is Tensor.__setitem__) and sum(part.numel() for part in made) <= LARGEST
