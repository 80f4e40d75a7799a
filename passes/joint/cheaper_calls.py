"""Replace calls of a joint graph by cheaper ones with the same bits: what autograd's formulas leave behind.

``joint graph --> joint graph``. Contract in: a traced graph with fake values. Contract out: the same bits,
and the roles of the joint graph follow its values::

    x.t().t()                                      -->   x
    x.view(a).view(b)                              -->   x.view(b)
    x.expand(shape) / c                            -->   (x / c).expand(shape)
    slice_backward(a) + slice_backward(b)          -->   cat([a, b]) + 0.0
    (a + b).clone(), if (b + a) has the layout     -->   (b + a).clone(), which `simplify` removes
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard, cast

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import Argument

from zbcompile.passes.joint.graph_facts import has_static_shape, is_elementwise, node_argument
from zbcompile.passes.ops import Form, facts
from zbcompile.passes.torch_private import JointGraph, OpOverload, evaluate_fake

__all__ = ["use_cheaper_calls"]

aten = torch.ops.aten
_RELAYOUTS: tuple[Form, ...] = ("view", "swap", "permute")


def use_cheaper_calls(joint: JointGraph) -> None:
    """Apply all rewrites in place. Calls that nothing reads afterwards are left to `simplify`."""
    graph = joint.module.graph
    roles = (joint.outputs, joint.mutations, joint.gradients)
    slices = _Slices()
    for node in list(graph.nodes):
        if node.op != "call_function" or not has_static_shape(node.meta.get("val")):
            continue
        _choose_layout(node)
        for rule in (_undone_swap, _view_of_view, _scaled_before_expand, slices.joined):
            other = rule(graph, node)
            if other is not None:
                node.replace_all_uses_with(other)
                for role in roles:
                    role.update({k: other for k, value in role.items() if value is node})
                break


def _undone_swap(graph: Graph, node: Node) -> Node | None:
    """``x.t().t()`` and ``x.transpose(a, b).transpose(a, b)`` --> ``x``."""
    inner = _call_of(node.args[0], "swap") if facts(node.target).form == "swap" else None
    if inner is None or inner.target is not node.target or inner.args[1:] != node.args[1:]:
        return None
    source = node_argument(inner, 0)
    return source if _same_form(source.meta["val"], node.meta["val"]) else None


def _view_of_view(graph: Graph, node: Node) -> Node | None:
    """``x.view(a).view(b)`` --> ``x.view(b)``."""
    inner = _call_of(node.args[0], "view") if facts(node.target).form == "view" else None
    if inner is None:
        return None
    return _insert_call(graph, node, aten.view.default, (inner.args[0], node.args[1]))


def _scaled_before_expand(graph: Graph, node: Node) -> Node | None:
    """``x.expand(shape) / c`` --> ``(x / c).expand(shape)`` where only element-wise calls read it.

    Kernels compute whole vectors and the rest of a row by different code, and the layout says where a row
    ends: the calls must round alike anyway, or ``x`` be one element, which leaves the rows as they are.
    """
    wide = _call_of(node.args[0], "expand") if facts(node.target).by_scalar else None
    if wide is None or not isinstance(node.args[1], int | float):
        return None
    source = node_argument(wide, 0)
    narrow = evaluate_fake(node, (source.meta["val"], node.args[1]))
    expanded = None if narrow is None else evaluate_fake(wide, (narrow, *wide.args[1:]))
    if expanded is None or expanded.dtype != node.meta["val"].dtype or expanded.is_complex():
        return None
    one = has_static_shape(source.meta["val"]) and source.meta["val"].numel() == 1
    alike = all(is_elementwise(user) if one else _rounds_once(user) for user in node.users)
    if not alike or not all(_keeps_form(user, node, expanded) for user in node.users):
        return None
    with graph.inserting_before(node):
        scaled = graph.call_function(cast("OpOverload", node.target), (source, node.args[1]))
        made = graph.call_function(aten.expand.default, (scaled, *wide.args[1:]))
    scaled.meta, made.meta = {**node.meta, "val": narrow}, {**node.meta, "val": expanded}
    return made


class _Slices:
    """``slice_backward(a) + slice_backward(b) + ...`` whose slices cover one dimension --> ``cat + 0.0``.

    Each element is one gradient plus zeros. Adding zero changes nothing but the sign of -0.0, and so does
    ``+ 0.0``.
    """

    def __init__(self) -> None:
        self._terms: dict[Node, list[Node]] = {}

    def joined(self, graph: Graph, node: Node) -> Node | None:
        """Return the concatenation, once ``node`` adds the last slice."""
        if facts(node.target).form == "pad":
            self._terms[node] = [node]
        if node.target is not aten.add.Tensor or node.kwargs or len(node.args) != 2:
            return None
        terms: list[Node] = []
        for argument in node.args:
            if not isinstance(argument, Node) or len(argument.users) > 1 or argument not in self._terms:
                return None
            terms += self._terms[argument]
        self._terms[node] = terms
        _, shape, dim, *_ = terms[0].args
        pieces = _in_order(terms)
        if not pieces or not node.meta["val"].is_floating_point():
            return None
        joined = _insert_call(graph, node, aten.cat.default, (pieces, dim), exact=False)
        if joined is None or joined.meta["val"].shape != node.meta["val"].shape:
            return None
        return _insert_call(graph, node, aten.add.Tensor, (joined, 0.0))


def _in_order(terms: Sequence[Node]) -> list[Node]:
    """Return the gradients of slices of step 1 in the order of the dimension that they cover.

    The list is empty if they do not cover it.
    """
    _, shape, dim, *_ = terms[0].args
    if any(t.args[1:3] != (shape, dim) or t.args[5] != 1 for t in terms):
        return []
    if not all(isinstance(bound, int) for t in terms for bound in t.args[3:5]):
        return []
    extent = cast("Sequence[int]", shape)[cast("int", dim)]
    ranges = {t: slice(*t.args[3:5]).indices(extent)[:2] for t in terms}
    ordered = sorted(terms, key=lambda t: ranges[t])
    starts, stops = [ranges[t][0] for t in ordered], [ranges[t][1] for t in ordered]
    covered = starts == [0, *stops[:-1]] and stops[-1] == extent
    return [node_argument(t, 0) for t in ordered] if covered else []


def _choose_layout(node: Node) -> None:
    """``(a + b)`` then a copy in another layout --> ``(b + a)`` if that has the layout: the copy is idle."""
    if facts(node.target).form != "copy":
        return
    chain: list[Node] = []
    source = node_argument(node, 0)
    while facts(source.target).form in _RELAYOUTS and len(source.users) == 1:
        chain.insert(0, source)
        source = node_argument(source, 0)
    if not facts(source.target).commutes or source.kwargs or len(source.users) > 1:
        return
    if source.meta["val"].is_complex():  # products of complex numbers are rounded by order
        return
    first, second = source.args
    if not (_is_like(first, source) and _is_like(second, source)):
        return
    values = [evaluate_fake(source, (second.meta["val"], first.meta["val"]))]
    for call in chain:
        values.append(None if values[-1] is None else evaluate_fake(call, (values[-1], *call.args[1:])))
    if values[-1] is None or not _same_form(values[-1], node.meta["val"]):
        return
    source.args = (second, first)
    for call, value in zip([source, *chain], values, strict=True):
        call.meta["val"] = value


def _call_of(value: Argument, form: Form) -> Node | None:
    known = isinstance(value, Node) and facts(value.target).form == form
    known = known and has_static_shape(cast("Node", value).meta.get("val"))
    return cast("Node", value) if known else None


def _is_like(argument: Argument, call: Node) -> TypeGuard[Node]:
    """Return whether an argument is a node of the shape and dtype of the call's result."""
    return isinstance(argument, Node) and _same_kind(argument.meta["val"], call.meta["val"])


def _rounds_once(call: Node) -> bool:
    return facts(call.target).rounds_once and not call.kwargs


def _same_kind(value: object, other: Tensor) -> TypeGuard[Tensor]:
    if not has_static_shape(value) or not has_static_shape(other):
        return False
    return value.shape == other.shape and value.dtype == other.dtype


def _same_form(value: object, other: Tensor) -> bool:
    return _same_kind(value, other) and value.stride() == other.stride()


def _keeps_form(user: Node, argument: Node, value: Tensor) -> bool:
    """Return whether ``user`` gives the same shape, strides and dtype when ``argument`` becomes ``value``."""
    given = torch.fx.map_arg(user.args, lambda n: value if n is argument else n.meta["val"])
    result = user.meta["val"]
    return has_static_shape(result) and _same_form(evaluate_fake(user, given), result)


def _insert_call(
    graph: Graph, node: Node, target: OpOverload, args: tuple[Argument, ...], *, exact: bool = True
) -> Node | None:
    """Insert a call before ``node``; with ``exact`` only if its value has the form of ``node``'s.

    Returns None where nothing is inserted.
    """
    with graph.inserting_before(node):
        made = graph.call_function(target, args)
    value = evaluate_fake(made, torch.fx.map_arg(args, lambda n: n.meta["val"]))
    if value is None or (exact and not _same_form(value, node.meta["val"])):
        graph.erase_node(made)
        return None
    made.meta = {**node.meta, "val": value}
    return made
