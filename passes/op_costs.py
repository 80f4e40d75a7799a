"""The one cost model: a call --> what it does (`OpCount`), and that on a `Device` --> nanoseconds.

The cut, the price of recompute and the counted profile ask it::

    mm [1024, 512] x [512, 512]  -->  0.54 GFLOP, 5.2 MB  -->  max(flops / peak, bytes / bandwidth) + launch
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from zbcompile.errors import UsageError
from zbcompile.passes.nodes import is_getitem
from zbcompile.passes.ops import aten_name, facts, namespace
from zbcompile.passes.provenance import source_of
from zbcompile.passes.torch_private import OpOverload, schema, tree_leaves, tree_map, upper_bound
from zbcompile.schedule.devices import DEVICES, Device

__all__ = [
    "OpCount",
    "count_call",
    "count_graph",
    "count_node",
    "depends_on_data",
    "graph_ns",
    "has_bounds",
    "is_heavy",
    "nominal_device",
    "node_ns",
    "op_ns",
]


@dataclass(frozen=True, slots=True)
class OpCount:
    """What one operator does.

    Attributes
    ----------
    target
        The operator.
    flops
        Floating-point operations.
    num_bytes
        Bytes read and written.
    dtype
        Whose rate counts.
    function
        Its entry in `Device.element_ps`.
    elements
        Size of its first output.
    """

    target: str
    flops: int
    num_bytes: int
    dtype: str
    function: str = ""
    elements: int = 0


def nominal_device(device: torch.device) -> Device:
    """Return the row of `DEVICES` that stands for a device whose rates nobody gave: CPU, or H100.

    Only proportions matter there. It does not look at the machine, so that all processes cut alike.
    """
    return DEVICES["CPU" if device.type == "cpu" else "H100"]


def op_ns(count: OpCount, device: Device) -> int:
    """Return the time of an operator on a device in ns, by its roofline."""
    return device.roofline_ns(count.flops, count.num_bytes, count.dtype, count.function, count.elements)


def count_graph(module: GraphModule) -> tuple[OpCount, ...]:
    """Return one count per operator that does work; views and tuple access cost nothing."""
    return tuple(count for node in module.graph.nodes if (count := count_node(node)) is not None)


def graph_ns(module: GraphModule, device: Device) -> int:
    """Return the time of a graph on a device in ns: the sum of its operators' rooflines."""
    return sum(op_ns(count, device) for count in count_graph(module))


def node_ns(node: Node, device: Device) -> int:
    """Return the time of a call on a device in ns; one launch where a size has no upper bound."""
    if not has_bounds(node):
        return device.launch_ns
    count = count_node(node)
    return 0 if count is None else op_ns(count, device)


def count_node(node: Node) -> OpCount | None:
    """Return what a call of a graph does; None where it costs nothing. Sizes count at their upper bound.

    Raises
    ------
    UsageError
        A size depends on data and has no upper bound.
    """
    if node.op != "call_function" or is_getitem(node):
        return None
    args, kwargs = (tree_map(_value, x) for x in (node.args, node.kwargs))
    made = tree_map(lambda value: _bounded(node, value), node.meta.get("val"))
    return count_call(node.target, cast("Sequence[object]", args), cast("Mapping[str, object]", kwargs), made)


def count_call(
    target: object, args: Sequence[object], kwargs: Mapping[str, object], result: object
) -> OpCount | None:
    """Return what a call with these arguments and this result does; None where it costs nothing.

    Parameters
    ----------
    target
        What is called.
    args, kwargs, result
        Tensors are fake or on the meta device: only their shapes, strides and dtypes are read.
    """
    outputs = _tensors(result)
    if not outputs or _is_view(target) or facts(target).wait:
        return None
    inputs = list({id(value): value for value in _tensors((args, kwargs))}.values())
    floating = [v.dtype for v in (*outputs, *inputs) if v.is_floating_point() or v.is_complex()]
    known = facts(target)
    if known.flops is None:
        flops = sum(v.numel() for v in outputs)
    else:
        flops = int(known.flops(*args, **kwargs, out_val=result)) // (
            2 if _is_causal(target, args, kwargs) else 1
        )
    return OpCount(
        str(target),
        flops,
        sum(_num_bytes(v) for v in (*inputs, *outputs)),
        str(floating[0] if floating else outputs[0].dtype).removeprefix("torch."),
        _function(target, kwargs),
        outputs[0].numel(),
    )


def is_heavy(node: Node) -> bool:
    """Return whether a call is a matmul, convolution, attention, recurrent layer or one of their backwards.

    Such a call is not recomputed unless a price is given. A call that is no aten operator counts as heavy.
    """
    if namespace(node.target) != "aten":
        return node.op == "call_function" and not is_getitem(node)
    return facts(node.target).heavy


def has_bounds(node: Node) -> bool:
    """Return whether all sizes that a call reads and makes are known or have an upper bound."""
    values = (v for n in (node, *node.all_input_nodes) for v in tree_leaves(n.meta.get("val")))
    sizes = (n for v in values for n in (v.shape if isinstance(v, Tensor) else (v,)))
    return all(upper_bound(n) is not None for n in sizes if isinstance(n, torch.SymInt))


def depends_on_data(module: GraphModule) -> bool:
    """Return whether a size in a graph depends on data."""
    values = (value for node in module.graph.nodes for value in tree_leaves(node.meta.get("val")))
    return any(isinstance(value, Tensor) and not _is_static(value) for value in values)


def _tensors(values: object) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def _is_static(value: Tensor) -> bool:
    strides = value.stride() if value.layout is torch.strided else ()
    return all(isinstance(n, int) for n in (*value.shape, *strides))


def _value(argument: object) -> object:
    if not isinstance(argument, Node):
        return argument
    return tree_map(lambda value: _bounded(argument, value), argument.meta.get("val"))


def _bounded(node: Node, value: object) -> object:
    """Return a value of ``node`` with sizes that depend on data at their upper bound."""
    if isinstance(value, torch.SymInt):
        return _bound(node, value)
    if not isinstance(value, Tensor) or value.layout is not torch.strided or _is_static(value):
        return value
    return torch.empty([_bound(node, n) for n in value.shape], dtype=value.dtype, device="meta")


def _bound(node: Node, size: int | torch.SymInt) -> int:
    bound = upper_bound(size)
    if bound is None:
        raise UsageError(
            f"the cost of {node.target} cannot be counted: its size depends on data and has no upper bound",
            where=source_of(node),
            fix="leave profile out, so that the stages are measured, or give sizes as Python numbers",
        )
    return bound


def _function(target: object, kwargs: Mapping[str, object]) -> str:
    """Return the name of the element-wise function, with its backward and its variants under one name."""
    if kwargs.get("approximate") == "tanh":
        return "tanh"
    return facts(target).function or aten_name(target)


def _num_bytes(value: Tensor) -> int:
    """Return the bytes that are really there: an expanded dimension is stored once."""
    size = value.element_size()
    if value.layout is not torch.strided:
        return size * value.numel()
    for extent, stride in zip(value.shape, value.stride(), strict=True):
        size *= 1 if stride == 0 and extent > 0 else int(extent)
    return size


def _is_view(target: object) -> bool:
    if not isinstance(target, OpOverload):
        return False
    if facts(target).form == "view":
        return True
    aliases = [r.alias_info for r in schema(target).returns]
    return bool(aliases) and all(a is not None and not a.is_write for a in aliases)


def _is_causal(target: object, args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
    """Return whether an attention call skips the upper half of the scores."""
    if not isinstance(target, OpOverload):
        return False
    arguments = schema(target).arguments
    position = next((i for i, a in enumerate(arguments) if a.name == "is_causal"), None)
    if position is None:
        return False
    return (args[position] if position < len(args) else kwargs.get("is_causal")) is True
