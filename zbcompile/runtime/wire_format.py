"""How the tensors of a message travel: in the memory order of the strides that were compiled for.

A contiguous tensor travels as it is. Any other dense tensor, whatever the order of its dimensions, travels as
the bytes of its own memory, without a copy. A tensor with gaps or repeated elements, or one that is
conjugated or negated only by a mark, travels as a copy. A tensor without elements does not travel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from zbcompile.errors import ShapeError
from zbcompile.runtime.wiring import PortLike

__all__ = ["WireFormat", "is_dense"]


@dataclass(frozen=True)
class WireFormat:
    """How one tensor of a message travels and how it lies in memory at the receiver.

    Attributes
    ----------
    shape, stride, dtype, device
        Of the tensor at the receiver.
    num_bytes
        Bytes that the message carries for it.
    is_dense
        Whether the strides visit every element once and leave no gap.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    num_bytes: int
    is_dense: bool
    _is_plain: bool = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_is_plain", self.is_dense and self.stride == _contiguous(self.shape))

    @staticmethod
    def of(port: PortLike, *, gradient: bool = False) -> WireFormat:
        """Return the wire format of a port's tensor or of its gradient.

        A tensor that repeats elements arrives contiguous.
        """
        shape, stride = tuple(port.shape), tuple(port.stride)
        if gradient and port.grad_stride:
            stride = tuple(port.grad_stride)
        count = 1
        for extent in shape:
            count *= extent
        dense = is_dense(shape, stride)
        if not dense and any(s == 0 and n > 1 for s, n in zip(stride, shape, strict=True)):
            stride, dense = _contiguous(shape), True
        return WireFormat(shape, stride, port.dtype, port.device, count * port.dtype.itemsize, dense)

    @staticmethod
    def contiguous(tensor: Tensor) -> WireFormat:
        """Return the wire format of tensors of this shape and dtype that arrive contiguous."""
        shape = tuple(tensor.shape)
        return WireFormat(shape, _contiguous(shape), tensor.dtype, tensor.device, tensor.nbytes, True)

    def pack(self, tensor: Tensor) -> Tensor:
        """Return what goes on the wire, contiguous: the tensor, or a flat uint8 view of it or of a copy.

        Raises
        ------
        ShapeError
            The tensor has another shape or dtype than the peer's buffer, which has the one compiled for.
        """
        if tensor.shape != self.shape or tensor.dtype != self.dtype:
            raise ShapeError(
                "a tensor to be sent differs from the one compiled for",
                needed=f"{list(self.shape)} {self.dtype}",
                given=f"{list(tensor.shape)} {tensor.dtype}",
            )
        if tensor.is_conj() or tensor.is_neg():
            tensor = tensor.resolve_conj().resolve_neg()
        if self.is_dense:
            if tensor.stride() != self.stride:
                tensor = self._empty(self.stride).copy_(tensor)
            if self._is_plain:
                return tensor
            flat = tensor.as_strided((tensor.numel(),), (1,))
        else:
            flat = tensor.contiguous().view(-1)
        return flat.view(torch.uint8)

    def buffer(self, device: torch.device | str | None = None) -> Tensor:
        """Return memory for what ``pack`` makes at the other end, by default on the tensor's own device."""
        device = self.device if device is None else device
        if self._is_plain:
            return torch.empty(self.shape, dtype=self.dtype, device=device)
        return torch.empty(self.num_bytes, dtype=torch.uint8, device=device)

    def unpack(self, arrived: Tensor) -> Tensor:
        """Return the tensor in an arrived buffer, with the strides that were compiled for."""
        if self._is_plain:
            return arrived
        typed = arrived.view(self.dtype)
        if self.is_dense:
            return typed.as_strided(self.shape, self.stride)
        return self._empty(self.stride).copy_(typed.view(self.shape))

    def _empty(self, stride: tuple[int, ...]) -> Tensor:
        return torch.empty_strided(self.shape, stride, dtype=self.dtype, device=self.device)


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor of this shape."""
    stride, step = [0] * len(shape), 1
    for k in range(len(shape) - 1, -1, -1):
        stride[k] = step
        step *= max(shape[k], 1)
    return tuple(stride)


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Return whether the strides visit every element once, without a gap, in some order of the dimensions."""
    if 0 in shape:
        return True
    step = 1
    for extent, distance in sorted(
        ((n, s) for n, s in zip(shape, stride, strict=True) if n > 1), key=lambda item: item[1]
    ):
        if distance != step:
            return False
        step *= extent
    return True
