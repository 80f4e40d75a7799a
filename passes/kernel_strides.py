"""Foretell the memory layout of results as the kernels of the CPU give it, while a model is traced.

Torch's fake tensors take the layout of some results from the wrong argument. A graph would then send a value
in another layout than eager has, and sums and convolutions round by layout::

    softmax and layer norm backward                -->  contiguous
    dropout and softplus backward                  -->  laid out like the gradient
    batch_norm, element-wise calls of [N, C, 1, 1] -->  contiguous where all arguments are, in any order
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from zbcompile.passes.ops import Strides, facts, namespace

__all__ = ["strides_of"]

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}

_Function = Callable[..., object]
_Strides = tuple[int, ...]
_Rule = Callable[[Sequence[Tensor], Tensor], "_Strides | None"]
"""(tensors among the arguments, first result as foretold) -> its true strides; None: as foretold."""


def strides_of(
    func: _Function, operands: int | None, tensors: Sequence[Tensor], made: Tensor
) -> tuple[int, ...] | None:
    """Return the strides that the CPU's kernel gives the first result of a call.

    Parameters
    ----------
    func
        An overload of ``torch.ops.aten``.
    operands
        How many tensors it must be given; None: it changes one of them, and only a rule of its own holds.
    tensors, made
        Tensors among the positional arguments, and the result, as torch foretells it.

    Returns
    -------
    tuple of int or None
        None where they are those of ``made``, or where nothing is known.
    """
    rule = _RULES.get(facts(func).strides) if operands is None else _rule(func)
    if rule is None or made.dim() < 2 or not all(map(_is_plain, (made, *tensors))):
        return None
    found = rule(tensors, made) if len(tensors) >= (operands or 1) else None
    return None if found == made.stride() else found


def _is_plain(value: Tensor) -> bool:
    """Return whether a tensor is a strided one on the CPU, of known size."""
    if value.device.type != "cpu" or value.layout is not torch.strided:
        return False
    return all(type(n) is int for n in (*value.shape, *value.stride()))


@functools.cache
def _rule(func: _Function) -> _Rule | None:
    overload = str(func).rpartition(".")[2]
    strides = facts(func).strides
    if strides or namespace(func) != "aten":
        return _RULES.get(strides)
    is_element_wise = torch.Tag.pointwise in getattr(func, "tags", ())
    return _element_wise if is_element_wise and "scalar" not in overload.lower() else None


def _element_wise(tensors: Sequence[Tensor], made: Tensor) -> _Strides | None:
    """Return contiguous strides where all operands are contiguous: a kernel then asks for no other order."""
    if not made.is_contiguous():
        return None
    alike = all(t.shape == made.shape and t.is_contiguous() for t in tensors)
    return _contiguous(made) if alike else None


def _plain(tensors: Sequence[Tensor], made: Tensor) -> _Strides:
    return _contiguous(made)


def _like_first(tensors: Sequence[Tensor], made: Tensor) -> _Strides:
    return _dense_like(tensors[0])


def _batch_norm(tensors: Sequence[Tensor], made: Tensor) -> _Strides:
    """Return contiguous strides, or with the channels last where the input is contiguous only so."""
    return _contiguous(made) if tensors[0].is_contiguous() else _in_known_order(tensors[0])


def _batch_norm_backward(tensors: Sequence[Tensor], made: Tensor) -> _Strides:
    grad, given = tensors[:2]
    alike = given.is_contiguous() and grad.stride() == given.stride()
    return _contiguous(made) if alike else _in_known_order(given)


def _in_known_order(value: Tensor) -> _Strides:
    """Return the strides of ``empty_like`` in the memory format that kernels read off strides."""
    if value.dim() in _CHANNELS_LAST:
        meta = torch.empty(value.shape, device="meta", memory_format=_CHANNELS_LAST[value.dim()])
        if meta.stride() == value.stride():
            return meta.stride()
    return _contiguous(value)


def _dense_like(value: Tensor) -> _Strides:
    """Return the strides of ``torch.empty_like(value)``."""
    return torch.empty_like(torch.empty_strided(value.shape, value.stride(), device="meta")).stride()


def _contiguous(value: Tensor) -> _Strides:
    strides, step = [0] * value.dim(), 1
    for k in reversed(range(value.dim())):
        strides[k] = step
        step *= max(1, value.shape[k])
    return tuple(strides)


_RULES: dict[Strides, _Rule] = {
    "contiguous": _plain,
    "like_first": _like_first,
    "element_wise": _element_wise,
    "batch_norm": _batch_norm,
    "batch_norm_backward": _batch_norm_backward,
}
"""What a fact of `ops` says --> how the strides follow from it."""
