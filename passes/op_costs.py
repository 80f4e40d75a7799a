"""Count what one call costs from shapes: floating-point operations, bytes moved, seconds.

Used where nothing has been measured: to balance stages and to price recompute.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch.fx import Node

from zbcompile.passes.aliasing import tensor_bytes, viewed_arguments
from zbcompile.passes.nodes import is_getitem, value_of

__all__ = ["NOMINAL", "Rates", "bytes_moved", "flops", "is_heavy", "seconds"]

_CONV = (
    "convolution",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
)
_MATMUL = (
    "mm", "bmm", "matmul", "linear", "addmm", "baddbmm", "mv", "einsum", "bilinear", "addbmm", "dot",
    "_grouped_mm",
)  # fmt: skip
_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu", "mkldnn_rnn_layer", "_thnn_fused_lstm_cell")


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates of a device: floating-point operations and bytes per second, seconds per call."""

    flops_per_second: float
    bytes_per_second: float
    seconds_per_call: float


NOMINAL = Rates(flops_per_second=60e9, bytes_per_second=10e9, seconds_per_call=4e-6)
"""One core of a present-day server CPU; only ratios matter here."""


def _short(node: Node) -> str:
    name = str(node.target)
    return name.split(".")[1] if name.startswith("aten.") else name


def is_heavy(node: Node) -> bool:
    """Return whether a call is a matmul, convolution, attention, recurrent layer or one of their backwards.

    Such a call is not recomputed unless a price is given. A call that is no aten operator counts as heavy.
    """
    if not str(node.target).startswith("aten."):
        return node.op == "call_function" and not is_getitem(node)
    name = _short(node)
    return name in _MATMUL or "conv" in name or "attention" in name or "rnn" in name or name in _RECURRENT


def flops(node: Node) -> int:
    """Return the floating-point operations of a forward or backward call; 0 for element-wise work."""
    name = _short(node)
    shapes = [tuple(value.shape) for a in node.all_input_nodes if (value := value_of(a)) is not None]
    if not shapes or not all(isinstance(n, int) for shape in shapes for n in shape):
        return 0
    if name in ("addmm", "baddbmm", "addbmm"):
        return 2 * _numel(node) * shapes[1][-1] if len(shapes) > 1 else 0
    if name in _MATMUL:
        return 2 * _numel(node) * shapes[0][-1] if shapes[0] else 0
    if name == "convolution_backward" and len(shapes) > 2:
        return 2 * math.prod(shapes[0]) * math.prod(shapes[2][1:]) * _wanted_products(node)
    if name in _CONV and len(shapes) > 1:
        return 2 * _numel(node) * math.prod(shapes[1][1:])
    if "attention" in name and len(shapes) > 2:
        # four multiply-adds per score and head dimension; the backward of the same is 2.5 times that
        query, key = shapes[0], shapes[1]
        forward = 4 * math.prod(query) * key[-2]
        return forward * 5 // 2 if "backward" in name else forward
    if any(part in name for part in _RECURRENT):
        return 2 * sum(math.prod(s) for s in shapes if len(s) == 2) * max(shapes[0][0], shapes[0][-2])
    return 0


def _wanted_products(node: Node) -> int:
    """Return how many of the gradients of input and weight a convolution's backward computes: 0, 1 or 2."""
    mask = node.args[10]
    return sum(map(bool, mask[:2])) if isinstance(mask, list | tuple) else 0


def bytes_moved(node: Node) -> int:
    """Return the bytes that a call reads and writes; 0 for views."""
    if node.op != "call_function" or (viewed_arguments(node) and not str(node.target).endswith("_")):
        return 0
    read = sum(tensor_bytes(value_of(argument)) for argument in node.all_input_nodes)
    made = node.meta.get("val")
    results = made if isinstance(made, tuple | list) else [made]
    return read + sum(tensor_bytes(result) for result in results)


def seconds(node: Node) -> float:
    """Return a call's time at `NOMINAL` rates: the larger of compute and memory time, plus the launch."""
    if node.op != "call_function":
        return 0.0
    work = max(flops(node) / NOMINAL.flops_per_second, bytes_moved(node) / NOMINAL.bytes_per_second)
    return work + (NOMINAL.seconds_per_call if work else 0.0)


def _numel(node: Node) -> int:
    value = value_of(node)
    return 0 if value is None else value.numel()
