"""Facts about operators that their schemas and tags do not tell: one table, asked by all passes.

``call target --> OpFacts``. An operator that the table does not name has the facts that its schema and its
tags tell. To teach the compiler an operator, write its row here, and its kernel where it needs one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

__all__ = ["Formula", "OpFacts", "facts"]

Formula = Callable[..., int]
"""The arguments of a call, and its result as ``out_val`` --> floating-point operations."""


@dataclass(frozen=True, slots=True)
class OpFacts:
    """What the compiler knows of an operator.

    Attributes
    ----------
    flops
        Counts its floating-point operations; None: one for each element of its results.
    heavy
        Whether it is a product, convolution, attention, recurrent layer or the backward of one: it is not
        computed twice unless a price is given, and stays in W where only parameter gradients need it.
    function
        Its name in `Device.element_ps`, where it is not the operator's own.
    whole
        Whether it runs as one call where fake tensors take it apart.
    """

    flops: Formula | None = None
    heavy: bool = False
    function: str = ""
    whole: bool = False


def facts(target: object) -> OpFacts:
    """Return the facts of what a node calls: those of its overload, else of the operator, else none."""
    name = str(target)
    found = _FACTS.get(name) or _FACTS.get(name.rpartition(".")[0])
    if found is not None:
        return found
    formula = flop_registry.get(getattr(target, "overloadpacket", target))
    return _PLAIN if formula is None else OpFacts(formula, heavy=True)


def _tensors(values: object) -> list[Tensor]:
    leaves = torch.utils._pytree.tree_leaves(values)
    return [value for value in leaves if isinstance(value, Tensor)]


def _linear(inputs: Tensor, weight: Tensor, *_: object, **__: object) -> int:
    return 2 * inputs.numel() * weight.shape[0]


def _product(*args: object, out_val: Tensor, **_: object) -> int:
    """Count a product that sums over the last dimension of its first tensor."""
    first = _tensors(args)[0]
    return 2 * out_val.numel() * (first.shape[-1] if first.ndim else 1)


def _added_product(_: Tensor, left: Tensor, right: Tensor, *__: object, **___: object) -> int:
    return 2 * left.numel() * right.shape[-1]


def _bilinear(left: Tensor, _: Tensor, weight: Tensor, *__: object, **___: object) -> int:
    return 2 * math.prod(left.shape[:-1]) * weight.numel()


def _convolution(_: Tensor, weight: Tensor, *__: object, out_val: Tensor, **___: object) -> int:
    return 2 * out_val.numel() * math.prod(weight.shape[1:])


def _transposed_convolution(inputs: Tensor, weight: Tensor, *_: object, **__: object) -> int:
    return 2 * inputs.numel() * math.prod(weight.shape[1:])


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> int:
    rows = math.prod(query.shape[:-1])
    return 2 * rows * key.shape[-2] * (query.shape[-1] + value.shape[-1])


def _attention_backward(
    _: Tensor, query: Tensor, key: Tensor, value: Tensor, *__: object, **___: object
) -> int:
    return _attention(query, key, value) * 5 // 2


def _recurrent(inputs: Tensor, *rest: object, **_: object) -> int:
    """Count the products of a layer: every weight matrix meets every position of the input."""
    weights = sum(value.numel() for value in _tensors(rest) if value.ndim == 2)
    return 2 * math.prod(inputs.shape[:-1]) * weights


def _recurrent_backward(inputs: Tensor, *rest: object, **_: object) -> int:
    return 2 * _recurrent(inputs, *rest)


_PLAIN = OpFacts()
_HEAVY = OpFacts(heavy=True)
_PRODUCT = OpFacts(_product, heavy=True)
_CONVOLUTION = OpFacts(_convolution, heavy=True)
_TRANSPOSED = OpFacts(_transposed_convolution, heavy=True)
_ATTENTION = OpFacts(_attention, heavy=True)
_LAYER = OpFacts(_recurrent, heavy=True, whole=True)


def _rows(names: str, row: OpFacts) -> dict[str, OpFacts]:
    return {f"aten.{name}": row for name in names.split()}


_FACTS: Mapping[str, OpFacts] = {
    **_rows("matmul einsum mv dot _grouped_mm", _PRODUCT),
    **_rows("linear", OpFacts(_linear, heavy=True)),
    **_rows("addbmm", OpFacts(_added_product, heavy=True)),
    **_rows("bilinear", OpFacts(_bilinear, heavy=True)),
    **_rows("conv1d conv2d conv3d conv_depthwise3d _conv_depthwise2d _convolution_mode", _CONVOLUTION),
    **_rows("conv_transpose1d conv_transpose2d conv_transpose3d", _TRANSPOSED),
    **_rows("conv_tbc conv_tbc_backward slow_conv3d slow_conv3d_forward slow_conv_dilated2d", _HEAVY),
    **_rows("slow_conv_dilated3d slow_conv_transpose2d slow_conv_transpose3d thnn_conv2d", _HEAVY),
    **_rows("mkldnn_convolution miopen_convolution cudnn_convolution_transpose", _HEAVY),
    **_rows("_slow_conv2d_backward", _HEAVY),
    **_rows("scaled_dot_product_attention _scaled_dot_product_attention_math", _ATTENTION),
    **_rows("_scaled_dot_product_flash_attention_for_cpu", _ATTENTION),
    **_rows(
        "_scaled_dot_product_flash_attention_for_cpu_backward", OpFacts(_attention_backward, heavy=True)
    ),
    **_rows("_native_multi_head_attention _scaled_dot_product_fused_attention_overrideable", _HEAVY),
    **_rows("_scaled_dot_product_fused_attention_overrideable_backward", _HEAVY),
    **_rows("lstm gru rnn_tanh rnn_relu", _LAYER),
    **_rows("mkldnn_rnn_layer _cudnn_rnn miopen_rnn", OpFacts(_recurrent, heavy=True)),
    **_rows("mkldnn_rnn_layer_backward _cudnn_rnn_backward miopen_rnn_backward",
            OpFacts(_recurrent_backward, heavy=True)),
    **_rows("rnn_tanh_cell rnn_relu_cell _thnn_fused_lstm_cell", _HEAVY),
    "zbcompile.lstm_layer": OpFacts(_recurrent, heavy=True),
    **_rows("gelu_backward", OpFacts(function="gelu")),
    **_rows("silu_backward", OpFacts(function="silu")),
    **_rows("_safe_softmax _log_softmax log_softmax softmax", OpFacts(function="_softmax")),
    **_rows("bernoulli randn rand_like", OpFacts(function="rand")),
}  # fmt: skip
