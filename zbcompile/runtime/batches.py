"""A batch as microbatches: slices along dimension 0, checked against what was compiled."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zbcompile.errors import ShapeError, UsageError

__all__ = ["BatchPlan"]


class BatchPlan:
    """Which of the flat tensors of a call are sliced, and the shape of each slice.

    The batch size is dimension 0 of the first tensor that has a dimension and is not kept whole. Tensors
    whose dimension 0 is the batch size are sliced; all others, and those kept whole, go to every microbatch
    as they are.

    Parameters
    ----------
    names
        Name of each tensor, for errors.
    tensors
        The example batch.
    num_microbatches
        How many slices.
    whole
        Per tensor, whether it is kept whole.

    Attributes
    ----------
    batch_size
        Of the example.
    sliced
        Per tensor, whether it is sliced.
    shapes
        Per tensor, its shape in the example.

    Raises
    ------
    UsageError
        No tensor has a batch dimension, or the batch cannot be cut into equal microbatches.
    """

    def __init__(
        self, names: Sequence[str], tensors: Sequence[Tensor], num_microbatches: int, whole: Sequence[bool]
    ) -> None:
        self.names, self.num_microbatches = tuple(names), num_microbatches
        sizes = [t.shape[0] for t, kept in zip(tensors, whole, strict=True) if t.dim() and not kept]
        if not sizes:
            raise UsageError(
                "no tensor has a batch dimension", fix="give a tensor whose dimension 0 is the batch"
            )
        self.batch_size = sizes[0]
        if self.batch_size % num_microbatches:
            raise UsageError(
                f"a batch of {self.batch_size} cannot be cut into {num_microbatches} equal microbatches",
                where=f"dimension 0 of {self._name(tensors, whole)}",
                needed=f"a multiple of {num_microbatches}",
                given=self.batch_size,
                fix="change the batch size or num_microbatches",
            )
        self.sliced = tuple(
            t.dim() > 0 and not kept and t.shape[0] == self.batch_size
            for t, kept in zip(tensors, whole, strict=True)
        )
        self.shapes = tuple(tuple(t.shape) for t in tensors)
        self._dtypes = tuple(t.dtype for t in tensors)
        self._strides = tuple(self._piece(k, t, 0).stride() for k, t in enumerate(tensors))

    def _name(self, tensors: Sequence[Tensor], whole: Sequence[bool]) -> str:
        return next(n for n, t, kept in zip(self.names, tensors, whole, strict=True) if t.dim() and not kept)

    def _piece(self, index: int, tensor: Tensor, microbatch: int) -> Tensor:
        if not self.sliced[index]:
            return tensor
        size = self.batch_size // self.num_microbatches
        return tensor.narrow(0, microbatch * size, size)

    def split(self, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        """Return per microbatch the flat tensors, with the strides that were compiled for.

        Raises what `check` raises.
        """
        self.check(tensors)
        return [
            [self._strided(k, self._piece(k, t, microbatch)) for k, t in enumerate(tensors)]
            for microbatch in range(self.num_microbatches)
        ]

    def check(self, tensors: Sequence[Tensor]) -> None:
        """Compare tensors with the example.

        Raises
        ------
        ShapeError
            They differ in number, shape or dtype.
        UsageError
            A sliced tensor differs, and its dimension 0 cannot be cut into equal microbatches.
        """
        if len(tensors) != len(self.names):
            raise ShapeError(
                "the call has another number of tensors than the compiled one",
                needed=f"{len(self.names)}: {', '.join(self.names)}",
                given=len(tensors),
            )
        for name, shape, dtype, tensor in zip(self.names, self.shapes, self._dtypes, tensors, strict=True):
            if tuple(tensor.shape) == shape and tensor.dtype == dtype:
                continue
            size = tensor.shape[0] if tensor.dim() else 0
            if self.sliced[self.names.index(name)] and size % self.num_microbatches:
                raise UsageError(
                    f"a batch of {size} cannot be cut into {self.num_microbatches} equal microbatches",
                    where=f"dimension 0 of {name}",
                    needed=f"a multiple of {self.num_microbatches}",
                    given=size,
                    fix="give a full batch",
                )
            raise ShapeError(
                "a tensor differs from the one compiled for",
                where=name,
                needed=f"{list(shape)} {dtype}",
                given=f"{list(tensor.shape)} {tensor.dtype}",
                fix="give batches of one shape, or compile another pipeline for this one",
            )

    def _strided(self, index: int, tensor: Tensor) -> Tensor:
        """Return the tensor without its history, copied if its strides differ from those compiled for."""
        tensor = tensor.detach()
        stride = self._strides[index]
        if tensor.stride() == stride:
            return tensor
        return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(
            tensor
        )
