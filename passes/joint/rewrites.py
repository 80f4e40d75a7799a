"""Changes to a joint graph that keep every bit and let B and W be told apart.

``joint graph --> joint graph``: fused convolution backward becomes one call per gradient; training-mode
batch norm backward forgets the running statistics it never reads; every parameter gradient gets
storage of its own; checks without results go.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from zbcompile.passes.aliasing import viewed_arguments
from zbcompile.passes.joint.recurrent import keep_workspace
from zbcompile.passes.torch_private import JointGraph

__all__ = ["rewrite", "storage_root"]

_CHECKS = ("aten._assert_", "aten.sym_constrain_range", "aten._check")


def rewrite(joint: JointGraph, parameters: set[int]) -> None:
    """Apply all rewrites in place; ``parameters`` are the argument positions that are parameters."""
    graph = joint.module.graph
    for node in list(graph.nodes):
        name = str(node.target)
        if node.op != "call_function":
            continue
        keep_workspace(node)
        if name.startswith(_CHECKS) and not node.users:
            graph.erase_node(node)
        elif name == "aten.convolution_backward.default":
            _split_convolution(graph, node)
        elif name == "aten.native_batch_norm_backward.default" and node.args[7]:
            node.args = (*node.args[:3], None, None, *node.args[5:])
    _own_storage(joint, parameters)


def _split_convolution(graph: Graph, node: Node) -> None:
    """(dx, dw, db) in one call --> dx alone in one call, dw and db in another, by output mask."""
    mask: Any = node.args[10]
    picks = {user.args[1]: user for user in node.users if user.target is operator.getitem}
    if not (mask[0] and 0 in picks and (1 in picks or 2 in picks)) or len(picks) != len(node.users):
        return
    with graph.inserting_before(node):
        input_call = graph.node_copy(node)
        weight_call = graph.node_copy(node)
    input_call.args = (*node.args[:10], [True, False, False])
    weight_call.args = (*node.args[:10], [False, mask[1], mask[2]])
    for position, pick in picks.items():
        pick.args = (input_call if position == 0 else weight_call, position)
    graph.erase_node(node)


def storage_root(node: Node) -> Node:
    """The value whose storage a view chain ends in; of several candidates the first argument's."""
    while True:
        viewed = viewed_arguments(node)
        if not viewed or (node.target is operator.getitem and not viewed_arguments(viewed[0])):
            return node
        node = viewed[0]


def _own_storage(joint: JointGraph, parameters: set[int]) -> None:
    """Clone a parameter gradient that shares storage with another gradient, an argument or a saved value."""
    graph = joint.module.graph
    output = graph.output_node()
    taken = {
        storage_root(value)
        for position, value in joint.gradients.items()
        if position not in parameters and value is not None
    }
    for position in sorted(joint.gradients):
        value = joint.gradients[position]
        if position not in parameters or value is None:
            continue
        root = storage_root(value)
        if root in taken or root.op == "placeholder":
            with graph.inserting_before(output):
                copy = graph.call_function(torch.ops.aten.clone.default, (value,))
            copy.meta = dict(value.meta)
            joint.gradients[position] = root = copy
        taken.add(root)
