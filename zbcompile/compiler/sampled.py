"""The bytes of tensors that ranks compare by their hashes: all of a small one, a sample of a large one."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["bytes_of", "sampled_bytes"]

_WHOLE_BYTES, _SAMPLE = 1 << 20, 4096
"""Tensors up to this size are taken whole, of larger ones so many entries."""


def sampled_bytes(tensor: Tensor) -> bytes:
    """Return the bytes of a tensor, of a sample of its entries where it is large."""
    return bytes_of(_sample(tensor.detach()))


def _sample(tensor: Tensor) -> Tensor:
    if tensor.nbytes <= _WHOLE_BYTES:
        return tensor
    places = torch.linspace(0, tensor.numel() - 1, _SAMPLE, dtype=torch.float64).long()
    return tensor[torch.unravel_index(places.to(tensor.device), tensor.shape)]


def bytes_of(tensor: Tensor) -> bytes:
    """Return the bytes of a tensor."""
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().tobytes()
