"""Random draws that a forward compares with a rate: what is known of them without drawing.

``torch.rand([]) < 0.0`` is false whatever is drawn, so a layer that is dropped at a rate of 0 always runs;
the draw stays in the graph, because it moves the random state. Any other rate makes a branch at random.
A draw of Python's or numpy's own random numbers is nothing but such a comparison, or it is refused.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

import torch
from torch import Tensor

from zbcompile.errors import CaptureError
from zbcompile.passes.provenance import caller_source
from zbcompile.passes.torch_patches import Patch, applied

__all__ = ["Draws", "compared_draws"]

_Function = Callable[..., object]

_UNIFORM: tuple[_Function, ...] = (torch.rand, torch.rand_like)
"""Functions that draw from [0, 1)."""
_LESS: tuple[_Function, ...] = (torch.lt, torch.Tensor.lt, torch.Tensor.__lt__)
_LESS_EQUAL: tuple[_Function, ...] = (torch.le, torch.Tensor.le, torch.Tensor.__le__)
_MORE: tuple[_Function, ...] = (torch.gt, torch.Tensor.gt, torch.Tensor.__gt__)
_MORE_EQUAL: tuple[_Function, ...] = (torch.ge, torch.Tensor.ge, torch.Tensor.__ge__)


class Draws:
    """The uniform draws of one trace, and the comparisons of them with numbers."""

    def __init__(self) -> None:
        self._drawn: dict[int, Tensor] = {}
        self._compared: dict[int, tuple[Tensor, bool | None]] = {}

    def note(self, func: _Function, args: Sequence[object], result: object) -> None:
        """Remember a call and its result if it draws, or compares what was drawn."""
        if not isinstance(result, Tensor):
            return
        if func in _UNIFORM:
            self._drawn[id(result)] = result
        elif self._drawn and len(args) == 2 and id(args[0]) in self._drawn:
            self._compared[id(result)] = result, _known(func, args[1])

    def truth(self, tensor: Tensor) -> bool | None:
        """Return whether a comparison is true for every draw; None for what is no comparison of a draw.

        Raises
        ------
        CaptureError
            It is true for some draws.
        """
        if id(tensor) not in self._compared:
            return None
        return _decided(self._compared[id(tensor)][1])


def _decided(known: bool | None) -> bool:
    if known is None:
        raise CaptureError(
            "a random draw decides which part of the forward runs: a graph would repeat the first choice",
            where=caller_source(),
            fix="set the rate to 0 (layerdrop=0.0 in a configuration of transformers), or use a mask",
        )
    return known


def _known(func: _Function, rate: object) -> bool | None:
    """Return what a comparison of a number in [0, 1) with a rate is; None where that depends on the draw."""
    if not isinstance(rate, int | float):
        return None
    if func in _LESS or func in _MORE_EQUAL:
        never, always = rate <= 0, rate >= 1
    elif func in _LESS_EQUAL or func in _MORE:
        never, always = rate < 0, rate >= 1
    else:
        return None
    if never or always:
        return always is (func in _LESS or func in _LESS_EQUAL)
    return None


class _Drawn:
    """A number in [0, 1) that is not drawn: it may be compared with a rate, and nothing else."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __lt__(self, rate: float) -> bool:
        return _decided(_known(torch.lt, rate))

    def __le__(self, rate: float) -> bool:
        return _decided(_known(torch.le, rate))

    def __gt__(self, rate: float) -> bool:
        return _decided(_known(torch.gt, rate))

    def __ge__(self, rate: float) -> bool:
        return _decided(_known(torch.ge, rate))

    def _refuse(self, *_: object) -> NoReturn:
        raise CaptureError(
            f"the forward draws random numbers with {self._kind}: the graph would repeat the first",
            where=caller_source(),
            fix="draw with torch functions; the pipeline seeds them for every step and microbatch",
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __pow__ = __rpow__ = __neg__ = __abs__ = __float__ = __int__ = __index__ = __bool__ = _refuse
    __round__ = __floor__ = __ceil__ = __format__ = __getattr__ = _refuse


@contextlib.contextmanager
def compared_draws() -> Iterator[None]:
    """Let code compare uniform draws of Python and numpy with a rate of 0 while it is traced."""
    with applied(_PATCHES):
        yield


def _drawing(given: _Function, kind: str) -> _Function:
    def draw(*args: object, **kwargs: object) -> object:
        is_unit = args in ((), (0, 1), (0.0, 1.0)) and not kwargs
        return _Drawn(kind) if is_unit else given(*args, **kwargs)

    return draw


def _numpy_random() -> object:
    numpy = sys.modules.get("numpy")
    return None if numpy is None else numpy.random


_WHY = "what is drawn while a model is traced would be the same in every step"
_PATCHES = tuple(
    Patch("forward", where, name, lambda given, _, kind=kind: _drawing(given, kind), _WHY)  # type: ignore[misc]
    for where, kind, names in (
        (lambda: random, "the random module", ("random", "uniform")),
        (_numpy_random, "numpy.random", ("random", "rand", "uniform")),
    )
    for name in names
)
