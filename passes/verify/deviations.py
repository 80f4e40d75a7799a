"""Compare values with autograd's: how far each one is off, and a report of all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

__all__ = ["Deviation", "Values", "VerifyReport", "deviations"]

FLOOR = 0.1
"""A gradient below this share of the typical one (root mean square over parameters) is scaled by that
share instead of its own norm: some gradients are zero but for rounding."""

Kind = Literal["output", "gradient", "buffer"]
_KINDS: tuple[Kind, ...] = ("output", "gradient", "buffer")
Values = Mapping[Kind, Mapping[str, Tensor | None]]
"""Values by kind and name."""


@dataclass(frozen=True, slots=True)
class Deviation:
    """How one value compares with autograd's.

    Attributes
    ----------
    kind, name
        Which value.
    error
        Norm of the difference over the norm of autograd's value; 0.0 if and only if equal to the bit.
    reason
        Why it may differ; empty when it is equal.
    largest
        The largest difference of one element.
    phase
        ``"BW"`` for a gradient that the fused backward computes otherwise than B and W do.
    """

    kind: Kind
    name: str
    error: float
    reason: str = ""
    largest: float = 0.0
    phase: str = ""

    @property
    def words(self) -> str:
        """Which value, in words: ``gradient of layers.2.weight, computed by BW,``."""
        through = f", computed by {self.phase}," if self.phase else ""
        return f"{self.kind} of {self.name.lstrip('.') or 'the result'}{through}"

    @property
    def size(self) -> str:
        """How far it is off, in words."""
        if self.error == float("inf"):
            return "nothing comparable"
        return f"relative error {self.error:.1e}, largest difference {self.largest:.1e}"


@dataclass(frozen=True)
class VerifyReport:
    """What was compared; ``str`` of it is one line.

    Attributes
    ----------
    values
        One `Deviation` per output, parameter gradient and buffer; one more per gradient that differs by BW.
    tolerance
        The relative error that was allowed.
    needs_reason
        Whether a value that is not equal to the bit is wrong without a reason, however small the error.
    """

    values: tuple[Deviation, ...]
    tolerance: float
    needs_reason: bool = True

    @property
    def wrong(self) -> tuple[Deviation, ...]:
        """The values that differ by more than is allowed: outputs first, the largest error first."""
        found = [
            value
            for value in self.values
            if not value.error <= self.tolerance or (self.needs_reason and value.error and not value.reason)
        ]
        return tuple(sorted(found, key=lambda value: (value.kind != "output", -value.error)))

    @property
    def exact(self) -> bool:
        """Everything equal to the bit."""
        return all(value.error == 0.0 for value in self.values)

    @property
    def worst(self) -> Deviation:
        """The value with the largest error (the first of equals)."""
        return max(self.values, key=lambda value: value.error)

    def __str__(self) -> str:
        grads = sum(value.kind == "gradient" for value in self.values)
        if self.exact:
            return f"{grads} gradients and {len(self.values) - grads} other values equal autograd to the bit"
        worst, count = self.worst, sum(value.error > 0 for value in self.values)
        reasons = "; ".join(dict.fromkeys(value.reason for value in self.values if value.reason))
        return (
            f"{count} of {len(self.values)} values differ from autograd, at most {worst.error:.1e} "
            f"({worst.kind} {worst.name}; allowed {self.tolerance:.0e}): {reasons}"
        )


def deviations(
    found: Values, expected: Values, reason_of: Callable[[str, str], str]
) -> tuple[Deviation, ...]:
    """Compare values by kind and name.

    Parameters
    ----------
    found, expected
        What the stages and the model made.
    reason_of
        (kind, name) of a value that differs -> why it may.

    Returns
    -------
    tuple of Deviation
        Outputs, then gradients, then buffers.
    """
    return tuple(
        deviation for kind in _KINDS for deviation in _compare(kind, found[kind], expected[kind], reason_of)
    )


def _compare(
    kind: Kind,
    found: Mapping[str, Tensor | None],
    expected: Mapping[str, Tensor | None],
    reason_of: Callable[[str, str], str],
) -> Iterator[Deviation]:
    norms = {name: _norm(value) for name, value in expected.items() if value is not None}
    typical = (sum(norm**2 for norm in norms.values()) / max(1, len(norms))) ** 0.5
    floor = FLOOR * typical if kind == "gradient" else 0.0
    for name in dict.fromkeys([*expected, *found]):
        mine, theirs = found.get(name), expected.get(name)
        error = _error(mine, theirs, max(norms.get(name, 0.0), floor))
        reason = reason_of(kind, name) if error else ""
        yield Deviation(kind, name, error, reason, _largest(mine, theirs) if error else 0.0)


def _error(mine: Tensor | None, theirs: Tensor | None, scale: float) -> float:
    """Return the relative error: 0.0 iff equal to the bit, inf where nothing can be compared.

    A missing gradient counts as zero.
    """
    if mine is None and theirs is None:
        return 0.0
    if mine is None or theirs is None:
        one = theirs if mine is None else mine
        difference = 0.0 if one is None else _norm(one)
    elif mine.shape != theirs.shape or mine.dtype != theirs.dtype:
        return float("inf")
    elif torch.equal(mine, theirs) or bool(((mine == theirs) | (mine.isnan() & theirs.isnan())).all()):
        return 0.0
    else:
        difference = _norm(_wide(mine) - _wide(theirs))
    if difference == 0.0:
        return 0.0
    return difference / scale if scale > 0.0 else float("inf")


def _largest(mine: Tensor | None, theirs: Tensor | None) -> float:
    """Return the largest difference of one element; a missing gradient counts as zero."""
    if mine is None or theirs is None:
        one = theirs if mine is None else mine
        return 0.0 if one is None or not one.numel() else float(_wide(one.detach()).abs().max())
    if mine.shape != theirs.shape or not mine.numel():
        return float("inf")
    return float((_wide(mine.detach()) - _wide(theirs.detach())).abs().max())


def _wide(value: Tensor) -> Tensor:
    return value.to(torch.complex128 if value.is_complex() else torch.float64)


def _norm(value: Tensor) -> float:
    return float(torch.linalg.vector_norm(_wide(value.detach())))
