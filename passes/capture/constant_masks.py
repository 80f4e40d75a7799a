"""Drop constant attention masks where the model itself does without them in eager.

``scaled_dot_product_attention(q, k, v, mask) --> scaled_dot_product_attention(q, k, v, is_causal=True)``

Contract in: a captured graph. Contract out: the same bits as the untouched model in eager, no mask to hold
per layer and a faster kernel.

Under export, transformers builds the causal mask as a tensor and repeats keys and values, because it may not
look at the mask's values; in eager it looks, passes ``is_causal`` instead and leaves the repetition to the
kernel. Here the mask is computed once and compared, and the eager call is put back. A mask that depends on
the batch (padding) or that another library wrote stays as it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Literal, cast

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import Argument

from zbcompile.passes.aliasing import changed_arguments, is_random
from zbcompile.passes.capture.captured import Captured
from zbcompile.passes.nodes import is_getitem, value_of
from zbcompile.passes.ops import aten_name
from zbcompile.passes.torch_private import OpOverload

__all__ = ["fold_constant_masks", "is_mask_of_transformers"]

LARGEST = 1 << 28
"""Elements of the largest mask that is looked at."""
_ORIGIN = re.compile(r"transformers/(masking_utils\.py|.*\n.*\b(create_\w*mask\w*|mask_function)\()")
"""A stack through transformers' masking code; traced nodes keep the frames of modules, which call it."""
_GQA_WIDTH = 256
_ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
_RESHAPES = ("reshape", "_unsafe_view", "view")
_REPEATS = (*_RESHAPES, "clone", "expand", "slice", "unsqueeze")


def fold_constant_masks(captured: Captured) -> int:
    """Edit the captured graph in place; return how many attention calls lost a constant mask."""
    graph = captured.module.graph
    kinds: dict[Node, _Kind] = {}
    folded = 0
    for node in graph.find_nodes(op="call_function", target=_ATTENTION):
        mask = node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
        if not isinstance(mask, Node):
            continue
        if mask not in kinds:
            kinds[mask] = _kind(mask, captured)
        if kinds[mask] is not None:
            _remove_mask(node, causal=kinds[mask] == "causal")
            folded += 1
    for mask, kind in kinds.items():
        if kind is not None:
            _erase_unused(graph, mask)
    return folded


_Kind = Literal["causal", "full"] | None
"""Lower triangle, all ones, or None: not a constant mask of transformers."""


def _kind(mask: Node, captured: Captured) -> _Kind:
    value = value_of(mask)
    if value is None or value.dtype != torch.bool or value.numel() > LARGEST:
        return None
    cone = _cone(mask)
    if not any(is_mask_of_transformers(node) for node in cone):
        return None
    if not all(_is_constant(node, captured) for node in cone):
        return None
    found = _evaluate(mask, cone, captured)
    for dimension, stride in enumerate(found.stride()):
        if stride == 0 and found.shape[dimension] > 1 and dimension < found.dim() - 2:
            found = found.narrow(dimension, 0, 1)
    if bool(found.all()):
        return "full"
    rows, columns = found.shape[-2:]
    lower = torch.ones(rows, columns, dtype=torch.bool).tril_()
    return "causal" if rows == columns and bool((found == lower).all()) else None


def is_mask_of_transformers(node: Node) -> bool:
    """Return whether transformers' masking code made a call."""
    return bool(_ORIGIN.search(str(node.meta.get("stack_trace") or "").replace("\\", "/")))


def _cone(mask: Node) -> list[Node]:
    """Return the mask and everything that it is computed from, in graph order."""
    past: set[Node] = set()
    waiting = [mask]
    while waiting:
        node = waiting.pop()
        if node not in past:
            past.add(node)
            waiting += node.all_input_nodes
    return [node for node in mask.graph.nodes if node in past]


def _is_constant(node: Node, captured: Captured) -> bool:
    if node.op == "placeholder":
        role = captured.roles[node.name]
        return role.kind == "constant" and not captured.constants[role.name].is_meta
    if node.op != "call_function" or is_random(node) or changed_arguments(node):
        return False
    return isinstance(node.target, OpOverload) or is_getitem(node)


def _evaluate(mask: Node, cone: Sequence[Node], captured: Captured) -> Tensor:
    """Compute the mask on the CPU; intermediate values are dropped as soon as they are used."""
    last = {argument: node for node in cone for argument in node.all_input_nodes}
    values: dict[Node, Argument] = {}
    with torch.no_grad():
        for node in cone:
            if node.op == "placeholder":
                values[node] = captured.constants[captured.roles[node.name].name].cpu()
                continue
            args = torch.fx.map_arg(node.args, lambda n: values[n])
            kwargs = dict(torch.fx.map_arg(node.kwargs, lambda n: values[n]))
            if kwargs.get("device") is not None:
                kwargs["device"] = torch.device("cpu")
            values[node] = cast("Callable[..., Argument]", node.target)(*args, **kwargs)
            for argument in node.all_input_nodes:
                if last[argument] is node:
                    del values[argument]
    return cast("Tensor", values[mask])


def _remove_mask(node: Node, *, causal: bool) -> None:
    query, key, value = node.args[:3]
    kwargs = {name: item for name, item in node.kwargs.items() if name != "attn_mask"}
    rate = node.args[4] if len(node.args) > 4 else kwargs.pop("dropout_p", 0.0)
    single, repeated = _before_repeat(key), _before_repeat(value)
    if single is not None and repeated is not None and _width(single) == _width(repeated) <= _GQA_WIDTH:
        key, value = single, repeated
        kwargs["enable_gqa"] = True
    node.args = (query, key, value, None, rate, causal)
    node.kwargs = kwargs


def _width(node: Node) -> int:
    return int(node.meta["val"].shape[-1])


def _before_repeat(node: Argument) -> Node | None:
    """Return x, if ``node`` is transformers' repeat_kv of x: (b, heads, s, d) -> (b, heads * n, s, d)."""
    chain: list[str] = []
    while isinstance(node, Node) and node.op == "call_function" and len(chain) < 8:
        name = aten_name(node.target)
        if name not in _REPEATS:
            return None
        chain.append(name)
        node = node.args[0]
        if name == "unsqueeze":
            found = isinstance(node, Node) and "expand" in chain and chain[0] in _RESHAPES
            return cast("Node", node) if found else None
    return None


def _erase_unused(graph: Graph, mask: Node) -> None:
    for node in reversed(_cone(mask)):
        if node.op == "call_function" and not node.users:
            graph.erase_node(node)
