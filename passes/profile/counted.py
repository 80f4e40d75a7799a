"""Count what stages cost on a device: FLOPs and bytes of every operator, put against the device's roofline.

``tuple[StageGraphs] + Device --> Profile``. Contract in: graphs whose nodes carry fake values, of any device.
Contract out: times from the roofline, exact bytes; nothing is run. A size that depends on data counts as its
upper bound.

    mm [1024, 512] x [512, 512]  -->  0.54 GFLOP, 5.2 MB  -->  max(flops / peak, bytes / bandwidth) + launch
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils.flop_counter import flop_registry

from zbcompile.errors import UsageError
from zbcompile.passes.joint.graph_facts import has_static_shape
from zbcompile.passes.nodes import is_getitem
from zbcompile.passes.profile.measure import OPTIMIZER_SLOTS, edges_of
from zbcompile.passes.provenance import source_of
from zbcompile.passes.split.stage_graphs import Graphs, StageGraphs
from zbcompile.passes.torch_private import OpOverload, schema, tree_leaves, tree_map, upper_bound
from zbcompile.schedule.costs import Link, Profile, StageCost
from zbcompile.schedule.devices import Device, device_named

__all__ = ["OpCount", "count_graph", "counted_ns", "counted_profile", "counted_seconds"]

_ATEN = torch.ops.aten


@dataclass(frozen=True, slots=True)
class OpCount:
    """What one operator costs.

    Attributes
    ----------
    name, target
        Of the node.
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

    name: str
    target: str
    flops: int
    num_bytes: int
    dtype: str
    function: str = ""
    elements: int = 0


def count_graph(module: GraphModule) -> tuple[OpCount, ...]:
    """Return one count per operator that does work; views and tuple access cost nothing."""
    return tuple(_counts(module.graph.nodes))


def counted_ns(module: GraphModule, device: Device) -> int:
    """Return the time of a graph on a device in ns: the sum of its operators' rooflines."""
    return sum(
        device.roofline_ns(c.flops, c.num_bytes, c.dtype, c.function, c.elements) for c in count_graph(module)
    )


def counted_seconds(device: Device) -> Callable[[Node], float]:
    """Return a function that counts the time of one call on a device in seconds."""

    def seconds(node: Node) -> float:
        return 1e-9 * sum(
            device.roofline_ns(c.flops, c.num_bytes, c.dtype, c.function, c.elements) for c in _counts([node])
        )

    return seconds


def counted_profile(
    stages: Sequence[StageGraphs],
    device: Device | str,
    link: Link | None = None,
    *,
    optimizer_bytes: int | None = None,
) -> Profile:
    """Return the costs of stages that nobody has run: times by roofline on their graphs, bytes exact.

    Stages that share their graphs are counted once.

    Parameters
    ----------
    stages
        In order.
    device
        A `Device` or a name of the table.
    link
        Between neighbouring ranks; the device's own if not given.
    optimizer_bytes
        Optimizer state per trainable element; by default two tensors like the parameter (AdamW).

    Raises
    ------
    UsageError
        An unknown device, or a dtype for which it has no rate.
    """
    chosen = device_named(device) if isinstance(device, str) else device
    times: dict[int, tuple[int, int, int, int]] = {}
    costs = []
    for stage in stages:
        key = id(stage.graphs)
        if key not in times:
            f, b, w, full = (counted_ns(getattr(stage.graphs, name), chosen) for name in Graphs.__slots__)
            times[key] = f, b, w, full
        costs.append(
            StageCost(
                *times[key],
                stage.saved_bytes,
                stage.saved_for_weight_bytes,
                _static_bytes(stage, optimizer_bytes),
                name=f"stage {stage.index}",
            )
        )
    source = f"counted for {chosen.name}: {chosen.source}"
    if any(_depends_on_data(stage.graphs.forward) for stage in stages):
        source += "; sizes that depend on data at their upper bound"
    return Profile(tuple(costs), edges_of(stages), link or chosen.link, source=source)


def _static_bytes(stage: StageGraphs, optimizer_bytes: int | None) -> int:
    """Return the bytes of parameters, buffers, gradients and optimizer state, from the forward graph."""
    placeholders = stage.graphs.forward.graph.find_nodes(op="placeholder")
    total = 0
    trainable = set(stage.trainable)
    for name, placeholder in zip((*stage.parameters, *stage.buffers), placeholders, strict=False):
        value: Tensor = placeholder.meta["val"]
        total += value.nbytes
        if name in trainable:
            kept = OPTIMIZER_SLOTS * value.nbytes
            total += value.nbytes + (kept if optimizer_bytes is None else optimizer_bytes * value.numel())
    return total


def _counts(nodes: Iterable[Node]) -> Iterator[OpCount]:
    for node in nodes:
        if node.op != "call_function" or is_getitem(node):
            continue
        outputs = _tensors(node)
        inputs = [value for argument in node.all_input_nodes for value in _tensors(argument)]
        if not outputs or _is_view(node):
            continue
        moved = sum(_num_bytes(v) for v in (*inputs, *outputs))
        floating = [v.dtype for v in (*outputs, *inputs) if v.is_floating_point() or v.is_complex()]
        dtype = str(floating[0] if floating else outputs[0].dtype).removeprefix("torch.")
        elements = outputs[0].numel()
        yield OpCount(
            node.name, str(node.target), _flops(node, outputs), moved, dtype, _function(node), elements
        )


def _tensors(node: Node) -> list[Tensor]:
    """Return the fake tensors that a node makes; sizes that depend on data at their upper bound."""
    values = tree_leaves(node.meta.get("val"))
    return [cast("Tensor", _bounded(node, v)) for v in values if isinstance(v, Tensor)]


def _depends_on_data(module: GraphModule) -> bool:
    """Return whether a size in a graph depends on data."""
    values = (value for node in module.graph.nodes for value in tree_leaves(node.meta.get("val")))
    return any(isinstance(value, Tensor) and not has_static_shape(value) for value in values)


def _bounded(node: Node, value: object) -> object:
    """Return a value of ``node`` with sizes that depend on data at their upper bound."""
    if isinstance(value, torch.SymInt):
        return _bound(node, value)
    if not isinstance(value, Tensor) or value.layout is not torch.strided or has_static_shape(value):
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


def _function(node: Node) -> str:
    """Return the name of the element-wise function, with its backward and its variants under one name."""
    if node.kwargs.get("approximate") == "tanh":
        return "tanh"
    name = str(node.target).removeprefix("aten.").split(".")[0]
    return _ALIKE.get(name, name)


_ALIKE = {
    "gelu_backward": "gelu",
    "silu_backward": "silu",
    "_safe_softmax": "_softmax",
    "_log_softmax": "_softmax",
    "log_softmax": "_softmax",
    "softmax": "_softmax",
    "bernoulli": "rand",
    "randn": "rand",
    "rand_like": "rand",
}


def _num_bytes(value: Tensor) -> int:
    """Return the bytes that are really there: an expanded dimension is stored once."""
    size = value.element_size()
    for extent, stride in zip(value.shape, value.stride(), strict=True):
        size *= 1 if stride == 0 and extent > 0 else int(extent)
    return size


def _is_view(node: Node) -> bool:
    if not isinstance(node.target, OpOverload):
        return False
    aliases = [r.alias_info for r in schema(node.target).returns]
    return bool(aliases) and all(a is not None and not a.is_write for a in aliases)


def _flops(node: Node, outputs: Sequence[Tensor]) -> int:
    packet = getattr(node.target, "overloadpacket", node.target)
    formula = flop_registry.get(packet) or _OWN_FORMULAS.get(packet)
    args, kwargs = (tree_map(_value, x) for x in (node.args, node.kwargs))
    if formula is None:
        return sum(v.numel() for v in outputs)
    made = tree_map(lambda value: _bounded(node, value), node.meta["val"])
    full = int(formula(*args, **kwargs, out_val=made))
    return full // 2 if _is_causal(node) else full


def _is_causal(node: Node) -> bool:
    """Return whether an attention call skips the upper half of the scores."""
    if not isinstance(node.target, OpOverload):
        return False
    arguments = schema(node.target).arguments
    position = next((i for i, a in enumerate(arguments) if a.name == "is_causal"), None)
    if position is None:
        return False
    given = node.args[position] if position < len(node.args) else node.kwargs.get("is_causal")
    return given is True


def _value(argument: object) -> object:
    if not isinstance(argument, Node):
        return argument
    return tree_map(lambda value: _bounded(argument, value), argument.meta["val"])


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> int:
    batch, heads, length, width = query.shape
    return 2 * batch * heads * length * key.shape[-2] * (width + value.shape[-1])


def _attention_backward(
    _grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object
) -> int:
    return _attention(query, key, value) * 5 // 2


def _linear(inputs: Tensor, weight: Tensor, *_: object, **__: object) -> int:
    return 2 * inputs.numel() * weight.shape[0]


_OWN_FORMULAS: dict[object, Callable[..., int]] = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu: _attention,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    _ATEN.linear: _linear,
}
