"""Collectives of the backward overlap with the work that does not wait for them.

``joint graph --> joint graph``. Contract out: the same calls with the same arguments in another order::

    g = all_reduce(dy)          -->   g = all_reduce(dy)
    dx = wait(g)                      dw = x.t().mm(dy)
    dw = x.t().mm(dy)                 dx = wait(g)

The graphs of a stage keep the joint graph's order, so BW runs weight gradients while a collective is on its
way. Only calls of the backward move, among themselves: the forward draws random numbers, the backward none.
"""

from __future__ import annotations

from torch.fx import Node

from zbcompile.passes.joint.graph_facts import ancestors
from zbcompile.passes.ops import facts
from zbcompile.passes.torch_private import JointGraph

__all__ = ["overlap_collectives"]


def overlap_collectives(joint: JointGraph) -> int:
    """Reorder the backward in place and return how many collectives are in it.

    What a collective is made of comes first, then all that is ready, then the wait for the first one.
    """
    nodes = list(joint.module.graph.nodes)
    late = _descendants(nodes, joint)
    pending = [node for node in nodes if node in late]
    started = [node for node in pending if facts(node.target).collective]
    if not started:
        return 0
    first = ancestors(started)
    order: list[Node] = []
    placed = {node for node in nodes if node not in late}
    while pending:
        before = len(order)
        for chosen in (first, late):
            for node in pending:
                ready = node in chosen and node not in placed and placed.issuperset(node.all_input_nodes)
                if ready and not facts(node.target).wait:
                    order.append(node)
                    placed.add(node)
        if len(order) == before:
            wait = next(node for node in pending if placed.issuperset(node.all_input_nodes))
            order.append(wait)
            placed.add(wait)
        pending = [node for node in pending if node not in placed]
    _move(nodes, order)
    return len(started)


def _descendants(nodes: list[Node], joint: JointGraph) -> set[Node]:
    """Return the calls that gradients of outputs lead to: the backward, if no call of it has an effect."""
    found: set[Node] = set(joint.tangents.values())
    for node in nodes:
        if node.op == "call_function" and any(argument in found for argument in node.all_input_nodes):
            found.add(node)
    return found - set(joint.tangents.values())


def _move(nodes: list[Node], order: list[Node]) -> None:
    """Put the calls one after the other behind the last call that is none of them."""
    last = next(node for node in reversed(nodes) if node.op != "output" and node not in set(order))
    for node in order:
        last.append(node)
        last = node
