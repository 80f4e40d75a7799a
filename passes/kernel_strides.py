"""Foretell the memory layout of results as the kernels of the CPU give it, while a model is traced.

Torch's fake tensors take the layout of some results from the wrong argument. A graph would then send a value
in another layout than eager has, and sums and convolutions round by layout::

    softmax and layer norm backward                -->  contiguous
    dropout and softplus backward                  -->  laid out like the gradient
    batch_norm, element-wise calls of [N, C, 1, 1] -->  contiguous where all arguments are, in any order
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode

__all__ = ["strides_of_kernels"]

aten = torch.ops.aten
_KEEP_ORDER = (
    aten.clone, aten._conj_physical, aten.deg2rad, aten.frexp, aten.hardtanh, aten.nan_to_num, aten.rad2deg,
    aten.relu6,
)  # fmt: skip
"""Element-wise calls whose results have the strides of the argument, as foretold."""
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}

_Strides = tuple[int, ...]
_Rule = Callable[[Sequence[Tensor], Tensor], "_Strides | None"]
"""(tensors among the arguments, first result as foretold) -> its true strides; None: as foretold."""


@contextlib.contextmanager
def strides_of_kernels() -> Iterator[None]:
    """Give fake tensors on the CPU the strides that results of real tensors have."""
    given = FakeTensorMode.dispatch

    def dispatch(
        mode: FakeTensorMode,
        func: OpOverload,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        made = given(mode, func, types, args, kwargs or {})
        rule = _rule(func)
        first = made[0] if isinstance(made, tuple | list) and made else made
        if rule is None or not isinstance(first, Tensor):
            return made
        tensors = [a for a in args if isinstance(a, Tensor)]
        if first.dim() < 2 or not all(map(_is_plain, (first, *tensors))):
            return made
        strides = rule(tensors, first)
        if strides is None or strides == first.stride():
            return made
        form = {"dtype": first.dtype, "device": first.device}
        again = given(mode, aten.empty_strided.default, (), (list(first.shape), list(strides)), form)
        return (again, *made[1:]) if isinstance(made, tuple | list) else again

    setattr(FakeTensorMode, "dispatch", dispatch)  # noqa: B010
    try:
        yield
    finally:
        setattr(FakeTensorMode, "dispatch", given)  # noqa: B010


def _is_plain(value: Tensor) -> bool:
    """Return whether a tensor is a strided one on the CPU, of known size."""
    if value.device.type != "cpu" or value.layout is not torch.strided:
        return False
    return all(type(n) is int for n in (*value.shape, *value.stride()))


@functools.cache
def _rule(func: OpOverload) -> _Rule | None:
    found = _RULES.get(func)
    if found is not None or not isinstance(func, OpOverload) or not str(func).startswith("aten."):
        return found
    if func._schema.is_mutable:
        return None
    if torch.Tag.pointwise not in func.tags or "scalar" in func._overloadname.lower():
        return None
    if func.overloadpacket in _KEEP_ORDER:
        return None
    operands = sum(str(argument.type) == "Tensor" for argument in func._schema.arguments)
    return functools.partial(_element_wise, operands)


def _element_wise(operands: int, tensors: Sequence[Tensor], made: Tensor) -> _Strides | None:
    """Return contiguous strides where all operands are contiguous: a kernel then asks for no other order."""
    if len(tensors) != operands or not made.is_contiguous():
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


_RULES: dict[OpOverload, _Rule] = {
    aten._log_softmax_backward_data.default: _plain,
    aten._softmax_backward_data.default: _plain,
    aten.native_layer_norm_backward.default: _plain,
    aten.native_dropout_backward.default: _like_first,
    aten.softplus_backward.default: _like_first,
    aten.pow.Tensor_Scalar: functools.partial(_element_wise, 1),
    aten.native_batch_norm.default: _batch_norm,
    aten._native_batch_norm_legit.default: _batch_norm,
    aten._native_batch_norm_legit.no_stats: _batch_norm,
    aten._native_batch_norm_legit_functional.default: _batch_norm,
    aten.native_batch_norm_backward.default: _batch_norm_backward,
}
