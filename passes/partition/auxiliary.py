"""Find auxiliary values: masks, rotary tables, position ids. They are cheap, so each stage computes its own.

A value is auxiliary if no parameter, random draw or changed buffer is in its past and no heavy call made it.
In-place calls are allowed if everything that shares the storage is auxiliary too.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch.fx import Node

from zbcompile.passes.aliasing import StorageGroups, changed_arguments, is_random
from zbcompile.passes.capture.captured import Captured
from zbcompile.passes.capture.custom_functions import is_function_call
from zbcompile.passes.capture.data_checks import is_check
from zbcompile.passes.nodes import is_getitem
from zbcompile.passes.op_costs import count_node, has_bounds, is_heavy
from zbcompile.passes.torch_private import OpOverload

__all__ = ["auxiliary_nodes", "needed_auxiliary"]

HEAVY_SHARE = 1e-3
"""A matmul below this share of the model's operations still counts as cheap (rotary frequencies)."""


def auxiliary_nodes(captured: Captured, groups: StorageGroups) -> set[Node]:
    """Return the auxiliary calls of a captured graph. ``groups`` : of that graph."""
    nodes = list(captured.module.graph.nodes)
    limit = HEAVY_SHARE * sum(_heavy_flops(node) for node in nodes)
    changed = {other for node in nodes for other in changed_arguments(node)}
    tainted = {node for node in nodes if _taints(node, captured, changed, limit)}
    size = -1
    while size != len(tainted):
        size = len(tainted)
        bad_groups = {groups.root(node) for node in tainted if node.op != "placeholder"}
        for node in nodes:
            if groups.root(node) in bad_groups or any(a in tainted for a in node.all_input_nodes):
                tainted.add(node)
    return {node for node in nodes if node.op == "call_function" and node not in tainted}


def _taints(node: Node, captured: Captured, changed: set[Node], limit: float) -> bool:
    """Return whether what a node makes, and all that is computed from it, is not auxiliary."""
    if node.op == "placeholder":
        return captured.roles[node.name].kind == "parameter" or node in changed
    if node.op != "call_function" or is_random(node) or is_function_call(node.target):
        return True
    if is_check(node.target):
        return True
    if is_heavy(node) and _heavy_flops(node) >= limit:
        return True
    return not (isinstance(node.target, OpOverload) or is_getitem(node))


def _heavy_flops(node: Node) -> int:
    """Return the operations of a heavy call; 0 for any other and where its sizes have no bound."""
    count = count_node(node) if is_heavy(node) and has_bounds(node) else None
    return 0 if count is None else count.flops


def needed_auxiliary(nodes: Iterable[Node], auxiliary: set[Node], groups: StorageGroups) -> set[Node]:
    """Return the auxiliary nodes that ``nodes`` need, in-place changes to what they read included."""
    needed: set[Node] = set()
    waiting = [a for node in nodes for a in node.all_input_nodes if a in auxiliary]
    waiting += [node for node in nodes if node in auxiliary]
    while waiting:
        node = waiting.pop()
        if node in needed:
            continue
        needed.add(node)
        waiting += [a for a in node.all_input_nodes if a in auxiliary]
        waiting += groups.changes.get(groups.root(node), ())
    return needed
