"""Microbatches of one shape, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

__all__ = ["Counted", "Run", "Shapes", "shapes_of"]

Shapes = tuple[tuple[int, ...] | None, ...]
"""Shape of every tensor of a microbatch; None for one that this process does not have."""


Counted = tuple[int, int, Shapes]
"""Neighbouring microbatches of one shape: their number, rows of each, shapes of its tensors."""


@dataclass(frozen=True)
class Run:
    """Neighbouring microbatches of one shape.

    Attributes
    ----------
    rows
        Of each microbatch.
    pieces
        Per microbatch the flat tensors; None where this process does not have one.
    """

    rows: int
    pieces: Sequence[Sequence[Tensor | None]]

    @property
    def shapes(self) -> Shapes:
        """Of every microbatch."""
        return shapes_of(self.pieces[0])


def shapes_of(tensors: Sequence[Tensor | None]) -> Shapes:
    """Return the shapes of the tensors of a microbatch."""
    return tuple(None if tensor is None else tuple(tensor.shape) for tensor in tensors)
