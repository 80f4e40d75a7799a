"""Rewrite a joint graph so that B and W can be told apart, without changing a bit.

``joint graph --> joint graph``. Contract in: a simplified joint graph. Contract out: the same bits; each
parameter's gradient has storage of its own, and no convolution makes gradients of its input and its weights
in one call (norms and recurrent layers do, and stay in B)::

    dx, dw, db = convolution_backward(...)     -->   dx = convolution_backward(..., mask [1, 0, 0])
                                                     dw, db = convolution_backward(..., mask [0, 1, 1])
    batch_norm_backward(..., mean, var, ...)   -->   batch_norm_backward(..., None, None, ...) in training
    checks without results                     -->   removed
    da = g; db = g                             -->   da = g; db = g.clone()
    da = g.expand(n)                           -->   da = g.expand(n).clone()

Batch norm's backward never reads the running statistics in training mode; without them F need not keep them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import cast

import torch
from torch import Tensor
from torch.fx import Graph, Node

from zbcompile.passes.joint.graph_facts import storage_root
from zbcompile.passes.nodes import is_getitem, value_of
from zbcompile.passes.ops import facts
from zbcompile.passes.torch_private import JointGraph

__all__ = ["drop_checks", "drop_running_statistics", "own_gradients", "separate_convolutions"]


def drop_checks(joint: JointGraph) -> None:
    """Remove, in place, calls that only check something and whose result nobody reads."""
    graph = joint.module.graph
    for node in list(graph.nodes):
        if node.op == "call_function" and facts(node.target).check and not node.users:
            graph.erase_node(node)


def separate_convolutions(joint: JointGraph) -> None:
    """Let the gradients of a convolution's input and of its weights, in place, be made by two calls."""
    graph = joint.module.graph
    for node in list(graph.nodes):
        mask = facts(node.target).output_mask
        if mask:
            _split_call(graph, node, mask)


def drop_running_statistics(joint: JointGraph) -> None:
    """Leave the running statistics out of batch norm's backward in training mode, in place."""
    for node in joint.module.graph.nodes:
        if facts(node.target).ignores_statistics and node.args[7]:
            node.args = (*node.args[:3], None, None, *node.args[5:])


def _split_call(graph: Graph, node: Node, position: int) -> None:
    """``dx, dw, db`` in one call --> ``dx`` in one call, ``dw`` and ``db`` in another, by output mask."""
    mask = cast("Sequence[bool]", node.args[position])
    picks = {user.args[1]: user for user in node.users if is_getitem(user)}
    if not (mask[0] and 0 in picks and (1 in picks or 2 in picks)) or len(picks) != len(node.users):
        return
    with graph.inserting_before(node):
        input_call = graph.node_copy(node)
        weight_call = graph.node_copy(node)
    before, after = node.args[:position], node.args[position + 1 :]
    input_call.args = (*before, [True, False, False], *after)
    weight_call.args = (*before, [False, mask[1], mask[2]], *after)
    for result, pick in picks.items():
        pick.args = (input_call if result == 0 else weight_call, result)
    graph.erase_node(node)


def own_gradients(joint: JointGraph, state: Collection[int]) -> None:
    """Clone, in place, gradients of parameters that share storage with each other, an argument or themselves.

    One that is expanded shares storage with itself, such as that of ``parameter.sum()``: nothing can be
    added to it.

    Parameters
    ----------
    joint
        The graph; its roles follow the values.
    state
        Positions of the arguments that are parameters or buffers.
    """
    graph = joint.module.graph
    output = graph.output_node()
    taken = {storage_root(value) for position, value in joint.gradients.items() if position not in state}
    for position in sorted(joint.gradients):
        value = joint.gradients[position]
        if position not in state:
            continue
        root = storage_root(value)
        made = value_of(value)
        if root in taken or root.op == "placeholder" or (made is not None and _is_expanded(made)):
            with graph.inserting_before(output):
                copy = graph.call_function(torch.ops.aten.clone.default, (value,))
            copy.meta = dict(value.meta)
            if made is not None:
                copy.meta["val"] = made.clone()
            joint.gradients[position] = root = copy
        taken.add(root)


def _is_expanded(value: Tensor) -> bool:
    """Return whether several elements of a value are one number in memory."""
    return value.layout is torch.strided and any(
        stride == 0 and not (isinstance(extent, int) and extent <= 1)
        for extent, stride in zip(value.shape, value.stride(), strict=True)
    )
