"""What one call costs, counted from shapes: floating-point operations, bytes moved, seconds on a device.

Used where nothing has been measured: to balance stages and to price recompute.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from zbcompile.passes.aliasing import tensor_bytes, viewed_arguments

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
    """A device: floating-point operations and bytes per second, seconds per call."""

    flops_per_second: float
    bytes_per_second: float
    seconds_per_call: float


NOMINAL = Rates(flops_per_second=60e9, bytes_per_second=10e9, seconds_per_call=4e-6)
"""One core of a present-day server CPU; only ratios matter here."""


def _short(node: Node) -> str:
    name = str(node.target)
    return name.split(".")[1] if name.startswith("aten.") else name


def is_heavy(node: Node) -> bool:
    """Matmul, convolution, attention, recurrent layer or their backward: not recomputed unless priced."""
    if not str(node.target).startswith("aten."):
        return node.op == "call_function" and getattr(node.target, "__name__", "") != "getitem"
    name = _short(node)
    return name in _MATMUL or "conv" in name or "attention" in name or "rnn" in name or name in _RECURRENT


def flops(node: Node) -> int:
    """Floating-point operations of a forward or backward call; 0 for element-wise work."""
    name = _short(node)
    values = [a.meta.get("val") for a in node.all_input_nodes]
    shapes = [tuple(v.shape) for v in values if isinstance(v, torch.Tensor)]
    out = node.meta.get("val")
    if not shapes or not all(isinstance(n, int) for shape in shapes for n in shape):
        return 0
    if name in ("addmm", "baddbmm", "addbmm"):
        return 2 * _numel(out) * shapes[1][-1] if len(shapes) > 1 else 0
    if name in _MATMUL:
        return 2 * _numel(out) * shapes[0][-1] if shapes[0] else 0
    if name == "convolution_backward" and len(shapes) > 2:
        wanted: Any = node.args[10]
        return 2 * math.prod(shapes[0]) * math.prod(shapes[2][1:]) * int(wanted[0] + wanted[1])
    if name in _CONV and len(shapes) > 1:
        return 2 * _numel(out) * math.prod(shapes[1][1:])
    if "attention" in name and len(shapes) > 2:
        # four multiply-adds per score and head dimension; the backward of the same is 2.5 times that
        query, key = shapes[0], shapes[1]
        forward = 4 * math.prod(query) * key[-2]
        return forward * 5 // 2 if "backward" in name else forward
    if any(part in name for part in _RECURRENT):
        return 2 * sum(math.prod(s) for s in shapes if len(s) == 2) * max(shapes[0][0], shapes[0][-2])
    return 0


def bytes_moved(node: Node) -> int:
    """Bytes read and written; 0 for views."""
    if node.op != "call_function" or (viewed_arguments(node) and not str(node.target).endswith("_")):
        return 0
    read = sum(tensor_bytes(a.meta.get("val")) for a in node.all_input_nodes)
    out = node.meta.get("val")
    outs = out if isinstance(out, tuple | list) else [out]
    return read + sum(tensor_bytes(item) for item in outs)


def seconds(node: Node, rates: Rates = NOMINAL) -> float:
    """Roofline: the larger of compute and memory time, plus the cost of a call."""
    if node.op != "call_function":
        return 0.0
    work = max(flops(node) / rates.flops_per_second, bytes_moved(node) / rates.bytes_per_second)
    return work + (rates.seconds_per_call if work else 0.0)


def _numel(value: Any) -> int:
    return value.numel() if isinstance(value, torch.Tensor) else 0
