"""Calls whose microbatches have one shape and number: what graphs and programs are made for."""

from __future__ import annotations

import reprlib

import torch
from torch import Tensor

from zbcompile.compiler.runs import Run, Shapes
from zbcompile.compiler.signature import Signature
from zbcompile.errors import UsageError

__all__ = ["CallForm"]


class CallForm:
    """Calls whose microbatches have one shape and number: what programs and graphs are made for.

    Parameters
    ----------
    signature
        Of the pipeline.
    run
        Example microbatches, with every tensor.

    Attributes
    ----------
    signature
        As given.
    rows, shapes, num_microbatches
        Of the run.
    flat_example, example
        The first microbatch, flat and as it was nested.
    constants
        Flat index of a constant tensor -> its value.

    Raises
    ------
    UsageError
        The microbatches differ in a constant, or an object of the example was changed in place.
    """

    def __init__(self, signature: Signature, run: Run) -> None:
        self.signature, self.rows, self.shapes = signature, run.rows, run.shapes
        self.num_microbatches = len(run.pieces)
        self.flat_example = [_present(piece) for piece in run.pieces[0]]
        self.example = signature.nested(self.flat_example)
        self._strides = [tensor.stride() for tensor in self.flat_example]
        self.constants = {k: self.flat_example[k].clone() for k in sorted(signature.constant)}
        self._check_constants(run, "of the first microbatch")

    @property
    def key(self) -> tuple[int, Shapes]:
        """Number and shapes of the microbatches."""
        return self.num_microbatches, self.shapes

    def fits(self, run: Run) -> bool:
        """Return whether a run has this form, as far as this process has its tensors."""
        same = (a is None or a == b for a, b in zip(run.shapes, self.shapes, strict=True))
        return len(run.pieces) == self.num_microbatches and all(same)

    def microbatches(self, run: Run) -> list[list[Tensor | None]]:
        """Return the flat tensors of each microbatch, without history, with the strides compiled for.

        Raises
        ------
        UsageError
            A constant has another value than was compiled for.
        """
        self._check_constants(run, "as compiled")
        return [[self._strided(k, tensor) for k, tensor in enumerate(piece)] for piece in run.pieces]

    def _strided(self, k: int, tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        tensor = tensor.detach()
        stride = self._strides[k]
        if tensor.stride() == stride:
            return tensor
        copy = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device)
        return copy.copy_(tensor)

    def _check_constants(self, run: Run, words: str) -> None:
        """Refuse microbatches with other values of constants than were compiled for."""
        for k, value in self.constants.items():
            for microbatch, tensors in enumerate(run.pieces if self.signature.cut[k] else run.pieces[:1]):
                given = tensors[k]
                if given is not None and not torch.equal(given, value):
                    raise UsageError(
                        "a constant argument has another value than the one that is compiled",
                        where=f"{self.signature.names[k]}, microbatch {microbatch}",
                        needed=f"{reprlib.repr(value.tolist())}, {words}",
                        given=reprlib.repr(given.tolist()),
                        fix="give microbatches that agree in it, compile another pipeline for other values, "
                        "or take it out of constant=[...]",
                    )


def _present(tensor: Tensor | None) -> Tensor:
    assert tensor is not None, "a form is made from whole microbatches"
    return tensor
