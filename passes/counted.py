"""Counted costs: FLOPs and bytes of every operator of a graph, put against a device's roofline.

in: graphs whose nodes carry ``meta["val"]`` (any device, meta too); out: a Profile.

    mm [1024, 512] x [512, 512]  -->  0.54 GFLOP, 5.2 MB  -->  max(flops / peak, bytes / bandwidth) + launch
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

from zbcompile.devices import DEVICES, Device

__all__ = ["OpCount", "count_graph", "counted_ns", "measure_cpu"]

_ATEN = torch.ops.aten
_PASS_THROUGH = frozenset({"getitem", "sym_size", "_assert_tensor_metadata"})


@dataclass(frozen=True, slots=True)
class OpCount:
    """What one operator costs: ``name`` is the node's, ``num_bytes`` is read plus written."""

    name: str
    target: str
    flops: int
    num_bytes: int
    dtype: str


def count_graph(module: GraphModule) -> tuple[OpCount, ...]:
    """One count per operator that does work; views and tuple access cost nothing."""
    return tuple(_counts(module.graph.nodes))


def counted_ns(module: GraphModule, device: Device) -> int:
    """Time of a graph on a device: the sum of its operators' rooflines, in ns."""
    return sum(device.roofline_ns(c.flops, c.num_bytes, c.dtype) for c in count_graph(module))


def _counts(nodes: Iterable[Node]) -> Iterator[OpCount]:
    for node in nodes:
        if node.op != "call_function" or getattr(node.target, "__name__", "") in _PASS_THROUGH:
            continue
        outputs = [v for v in tree_leaves(node.meta.get("val")) if isinstance(v, Tensor)]
        inputs = [
            v for a in node.all_input_nodes for v in tree_leaves(a.meta.get("val")) if isinstance(v, Tensor)
        ]
        if not outputs or _is_view(node, outputs):
            continue
        moved = sum(_num_bytes(v) for v in (*inputs, *outputs))
        floating = [v.dtype for v in (*outputs, *inputs) if v.is_floating_point() or v.is_complex()]
        dtype = str(floating[0] if floating else outputs[0].dtype).removeprefix("torch.")
        yield OpCount(node.name, str(node.target), _flops(node, outputs), moved, dtype)


def _num_bytes(value: Tensor) -> int:
    """Bytes that are really there: an expanded dimension is stored once."""
    size = value.element_size()
    for extent, stride in zip(value.shape, value.stride(), strict=True):
        size *= 1 if stride == 0 and extent > 0 else int(extent)
    return size


def _is_view(node: Node, outputs: Sequence[Tensor]) -> bool:
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return False
    aliases = [r.alias_info for r in schema.returns]
    return bool(aliases) and all(a is not None and not a.is_write for a in aliases)


def _flops(node: Node, outputs: Sequence[Tensor]) -> int:
    packet = getattr(node.target, "overloadpacket", node.target)
    formula = flop_registry.get(packet) or _OWN_FORMULAS.get(packet)
    args, kwargs = (tree_map(_value, x) for x in (node.args, node.kwargs))
    if formula is None:
        return sum(v.numel() for v in outputs)
    return int(formula(*args, **kwargs, out_val=node.meta["val"]))


def _value(argument: Any) -> Any:
    return argument.meta["val"] if isinstance(argument, Node) else argument


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    batch, heads, length, width = query.shape
    return 2 * batch * heads * length * key.shape[-2] * (width + value.shape[-1])


def _attention_backward(_grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    return _attention(query, key, value) * 5 // 2


def _linear(inputs: Tensor, weight: Tensor, *_: Any, **__: Any) -> int:
    return 2 * inputs.numel() * weight.shape[0]


_OWN_FORMULAS: dict[Any, Callable[..., int]] = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu: _attention,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    _ATEN.linear: _linear,
}


def measure_cpu(repeats: int = 7) -> Device:
    """The CPU entry of the table with rates measured now, on this many threads.

    Matrix rate: a 768 x 768 float32 product; bandwidth: one read and one write of 32 MB;
    launch: an addition of one element. Medians of ``repeats`` runs after one warm-up.
    """
    left = torch.ones(768, 768)
    block = torch.ones(8 << 20)
    target = torch.empty_like(block)
    one = torch.ones(1)
    matrix = _median_ns(lambda: torch.mm(left, left), repeats)
    copy = _median_ns(lambda: target.copy_(block), repeats)
    launch = _median_ns(lambda: [torch.add(one, one) for _ in range(100)], repeats) // 100
    base = DEVICES["CPU"]
    rate = 2 * 768**3 * 10**9 // matrix
    rates = {**base.flops_per_second, "float32": rate, "float64": rate // 2}
    return replace(
        base,
        flops_per_second=rates,
        bytes_per_second=2 * block.nbytes * 10**9 // copy,
        launch_ns=launch,
        source=f"measured on this CPU with {torch.get_num_threads()} thread(s)",
    )


def _median_ns(work: Callable[[], object], repeats: int) -> int:
    work()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter_ns()
        work()
        times.append(time.perf_counter_ns() - begin)
    return max(1, int(statistics.median(times)))
