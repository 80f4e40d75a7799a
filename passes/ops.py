"""Facts about operators that their schemas and tags do not tell: one table, asked by all passes.

``call target --> OpFacts``. An operator that the table does not name has the facts that its schema and its
tags tell. To teach the compiler an operator, write its name beside what holds for it; a kernel or a rewrite
that it needs has a file of its own.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, TypeVar

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

__all__ = ["Form", "Formula", "OpFacts", "Strides", "aten_name", "facts", "namespace"]

Formula = Callable[..., int]
"""The arguments of a call, and its result as ``out_val`` --> floating-point operations."""

_Fact = TypeVar("_Fact")

Strides = Literal[
    "", "foretold", "contiguous", "like_first", "element_wise", "batch_norm", "batch_norm_backward"
]  # fmt: skip
"""How the CPU's kernel lays its result out (see `kernel_strides`); empty: torch's tags tell."""

Form = Literal["", "alias", "copy", "power", "view", "expand", "swap", "permute", "pad"]
"""What a call that computes nothing does: ``power`` with an exponent of 1, ``swap`` of two dimensions, and
``pad``, which puts zeros around a slice."""


_OVERLOAD = type(torch.ops.aten.add.Tensor)
"""What graphs call: one signature of an operator."""


@dataclass(frozen=True, slots=True)
class OpFacts:
    """What the compiler knows of an operator.

    Attributes
    ----------
    flops
        Counts its floating-point operations; None: one for each element of its results.
    function
        Its name in `Device.element_ps`, where it is not the operator's own.
    strides, form
        See `Strides` and `Form`.
    into
        The overload that writes its result into ``grad_input``, where it has no in-place form.
    output_mask
        Position of the argument that says which gradients it computes, of (input, weight, bias), where a call
        for that of the input and one for those of the weights give the same bits as one for all; 0: none.
    heavy
        A product, convolution, attention, recurrent layer or the backward of one: it is not computed twice
        unless a price is given, and stays in W where only parameter gradients need it.
    whole
        Runs as one call where fake tensors take it apart.
    gathers
        Adds rows up into a table: stays in W as heavy calls do.
    hidden_view
        Its result may share storage with its first argument, and its schema does not say so.
    idle_in_eval
        Returns its first argument, and draws nothing, where its third one (training) is false.
    random_by_rate
        Draws only at a dropout rate (its fifth argument, ``dropout_p``) above 0.
    writes_statistics
        Writes to its fourth and fifth arguments where its sixth (training) is true.
    ignores_statistics
        Does not read its fourth and fifth arguments (running statistics) where its eighth (training) is true.
    assigns
        Writes its second argument over its first.
    writes_no_data
        Its schema says that it changes its argument; no number changes.
    impure
        Has an effect, or a result that its arguments do not determine.
    check
        Only raises: a joint graph drops it where nothing reads it.
    checks_metadata
        Only raises where dtype, device or layout of a tensor are not as told: a captured graph drops it.
    commutes
        Gives the same bits with its two arguments exchanged, if they are real.
    by_scalar
        Combines each element with one number.
    rounds_once
        Has one rounding at most (without an ``alpha``): its bits do not depend on a kernel's code.
    fresh, fresh_tuple
        Its result is, or its results are, new tensors for certain.
    keeps_hold
        Its results hold on to its arguments though its schema does not say so.
    dense
        Its result has the layout that torch foretells, whatever its arguments have.
    own_layout
        May or may not keep the layout of an argument that is not contiguous.
    any_order
        Adds in no fixed order on CUDA: ``torch.use_deterministic_algorithms`` lists it.
    sums_weights_traced
        While traced, adds up class weights in another way if it takes a mean with label smoothing.
    collective
        Starts a message among the processes of a group: its result may be read only after a wait.
    all_gather
        A collective that puts together what the processes of a group hold.
    wait
        Returns its argument when that is there; it takes no time of its own.
    """

    flops: Formula | None = None
    function: str = ""
    strides: Strides = ""
    form: Form = ""
    into: str = ""
    output_mask: int = 0
    heavy: bool = False
    whole: bool = False
    gathers: bool = False
    hidden_view: bool = False
    idle_in_eval: bool = False
    random_by_rate: bool = False
    writes_statistics: bool = False
    ignores_statistics: bool = False
    assigns: bool = False
    writes_no_data: bool = False
    impure: bool = False
    check: bool = False
    checks_metadata: bool = False
    commutes: bool = False
    by_scalar: bool = False
    rounds_once: bool = False
    fresh: bool = False
    fresh_tuple: bool = False
    keeps_hold: bool = False
    dense: bool = False
    own_layout: bool = False
    any_order: bool = False
    sums_weights_traced: bool = False
    collective: bool = False
    all_gather: bool = False
    wait: bool = False


def namespace(target: object) -> str:
    """Return the library of an operator: aten, prims, zbcompile, or another; empty for other functions."""
    return target.namespace if isinstance(target, _OVERLOAD) else ""


def aten_name(target: object) -> str:
    """``aten.linalg_solve.default --> linalg_solve``; empty for what is no operator of aten."""
    return str(target).split(".")[1] if namespace(target) == "aten" else ""


def facts(target: object) -> OpFacts:
    """Return the facts of what a node calls; a name of another kind of node has none."""
    if isinstance(target, str):
        return OpFacts()
    formula = flop_registry.get(getattr(target, "overloadpacket", None))
    return _facts(str(target).removeprefix("aten."), formula)


@functools.cache
def _facts(name: str, formula: Formula | None) -> OpFacts:
    own = next((count for count, names in _FLOPS if _is_among(name, names)), None)
    flops = own or formula
    flags = {fact: _is_among(name, names) for fact, names in _HOLDS.items()}
    flags["heavy"] |= flops is not None
    return OpFacts(
        flops,
        _named(_FUNCTIONS, name, ""),
        _named(_STRIDES, name, ""),
        _named(_FORMS, name, ""),
        _named(_INTO, name, ""),
        _named(_MASKS, name, 0),
        **flags,
    )


def _named(table: Sequence[tuple[_Fact, str]], name: str, default: _Fact) -> _Fact:
    """Return the fact of the first row that lists the operator."""
    return next((fact for fact, names in table if _is_among(name, names)), default)


def _is_among(name: str, names: str) -> bool:
    """Return whether a list of names has an operator: its overload, its packet, or a pattern of either."""
    packet = name.rpartition(".")[0]
    return any(fnmatchcase(name, entry) or fnmatchcase(packet, entry) for entry in names.split())


def _tensors(values: object) -> list[Tensor]:
    """Return the tensors in nested tuples, lists and mappings, in order."""
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, Mapping):
        values = list(values.values())
    return [t for value in values for t in _tensors(value)] if isinstance(values, tuple | list) else []


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


_FLOPS: tuple[tuple[Formula, str], ...] = (
    (_product, "matmul einsum mv dot _grouped_mm"),
    (_linear, "linear"),
    (_added_product, "addbmm"),
    (_bilinear, "bilinear"),
    (_convolution, "conv1d conv2d conv3d conv_depthwise3d _conv_depthwise2d _convolution_mode"),
    (_transposed_convolution, "conv_transpose1d conv_transpose2d conv_transpose3d"),
    (_attention, "scaled_dot_product_attention _scaled_dot_product_attention_math"),
    (_attention, "_scaled_dot_product_flash_attention_for_cpu"),
    (_attention_backward, "_scaled_dot_product_flash_attention_for_cpu_backward"),
    (_recurrent, "lstm gru rnn_tanh rnn_relu mkldnn_rnn_layer _cudnn_rnn miopen_rnn zbcompile.lstm_layer"),
    (_recurrent_backward, "mkldnn_rnn_layer_backward _cudnn_rnn_backward miopen_rnn_backward"),
)
"""Where torch has no formula of its own."""

_FUNCTIONS: tuple[tuple[str, str], ...] = (
    ("gelu", "gelu_backward"),
    ("silu", "silu_backward"),
    ("_softmax", "_safe_softmax _log_softmax log_softmax softmax"),
    ("rand", "bernoulli randn rand_like"),
)

_STRIDES: tuple[tuple[Strides, str], ...] = (
    ("foretold", "clone _conj_physical deg2rad frexp hardtanh nan_to_num rad2deg relu6"),
    ("contiguous", "_log_softmax_backward_data.default _softmax_backward_data.default"),
    ("contiguous", "native_layer_norm_backward.default"),
    ("like_first", "native_dropout_backward.default softplus_backward.default"),
    ("element_wise", "pow.Tensor_Scalar"),
    ("batch_norm", "native_batch_norm.default _native_batch_norm_legit_functional.default"),
    ("batch_norm", "_native_batch_norm_legit.default _native_batch_norm_legit.no_stats"),
    ("batch_norm_backward", "native_batch_norm_backward.default"),
)

_FORMS: tuple[tuple[Form, str], ...] = (
    ("alias", "detach.default alias.default"),
    ("copy", "clone.default"),
    ("power", "pow.Tensor_Scalar"),
    ("view", "view.default _unsafe_view.default"),
    ("expand", "expand.default"),
    ("swap", "t.default transpose.int"),
    ("permute", "permute.default"),
    ("pad", "slice_backward.default"),
)

_INTO: tuple[tuple[str, str], ...] = (
    ("grad_input", "silu_backward.default sigmoid_backward.default tanh_backward.default"),
    ("grad_input", "threshold_backward.default"),
)

_MASKS: tuple[tuple[int, str], ...] = ((10, "convolution_backward.default"),)

_HOLDS: Mapping[str, str] = {
    "heavy": """
        *convolution* slow_conv* thnn_conv2d conv_tbc* conv_depthwise3d _conv_depthwise2d
        *attention* *rnn rnn_* *_rnn_*_cell mkldnn_rnn_layer* *rnn_backward _thnn_fused_lstm_cell
    """,
    "whole": "lstm gru rnn_tanh rnn_relu",
    "gathers": "embedding_dense_backward index_put* scatter* index_add*",
    "hidden_view": "_unsafe_view _reshape_alias broadcast_tensors meshgrid type_as atleast_*",
    "idle_in_eval": "dropout feature_dropout alpha_dropout",
    "random_by_rate": "scaled_dot_product_attention",
    "writes_statistics": "batch_norm instance_norm",
    "ignores_statistics": "native_batch_norm_backward.default",
    "assigns": "copy_",
    "writes_no_data": "detach_",
    "impure": "empty* new_empty* _assert* sym_constrain* _linalg_check_errors*",
    "check": "_assert_* sym_constrain_range*",
    "checks_metadata": "_assert_tensor_metadata.default",
    "commutes": "add.Tensor mul.Tensor",
    "by_scalar": "div.Scalar mul.Scalar",
    "rounds_once": """
        add.Tensor sub.Tensor mul.Tensor mul.Scalar div.Tensor div.Scalar neg.default where.self
        masked_fill.Scalar masked_fill.Tensor threshold_backward.default
    """,
    "fresh": "mm addmm bmm baddbmm cat clone sum mean convolution",
    "fresh_tuple": "native_layer_norm_backward _scaled_dot_product_flash_attention_for_cpu_backward",
    "keeps_hold": "unsafe_*",
    "dense": "mm bmm addmm baddbmm clone embedding*",
    "own_layout": """
        *batch_norm* *group_norm* *instance_norm* *convolution* *pool* *upsample* *interpolate* *log_sigmoid*
    """,
    "any_order": """
        *embedding_dense_backward* *embedding_bag* *index_add* *index_put* *index_reduce* *scatter_add*
        *scatter_reduce* *grid_sampler* *upsample* *max_pool3d* *adaptive_avg_pool* *cumsum*
        *scaled_dot_product* *flash_attention* *efficient_attention* *convolution_backward* *ctc_loss*
    """,
    "sums_weights_traced": "cross_entropy_loss",
    "collective": """
        _c10d_functional.all_* _c10d_functional.reduce_scatter* _c10d_functional.broadcast*
        _c10d_functional_autograd.*
    """,
    "all_gather": """
        _c10d_functional.all_gather_into_tensor _c10d_functional_autograd.all_gather_into_tensor
    """,
    "wait": "_c10d_functional.wait_tensor",
}
"""What holds for which operators: names of packets (all overloads) or overloads; ``*`` is any text."""
