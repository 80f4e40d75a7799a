"""Which values to keep between two phases: a minimum cut that weighs bytes against recomputing.

``Phase --> values to keep``. Values are nodes of a flow network, with their bytes as capacity. A value on the
source side is computed in the earlier phase, one on the sink side in the later phase; the values on the
border are kept. Views cost nothing to compute again, so only the owners of storage are kept.

Source: the min-cut view of rematerialisation, as in torch's partitioner (Chen et al., arXiv 1604.06174, pose
the problem); here with a price for seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import networkx as nx
from torch.fx import Node

from zbcompile.passes.joint.graph_facts import ancestors

__all__ = ["Phase", "cut", "leaves"]

_INFINITE = None


@dataclass(frozen=True)
class Phase:
    """The question of one cut.

    Attributes
    ----------
    nodes
        All candidate values in graph order, arguments included.
    needed
        Values that the later phase must have at hand.
    late, early
        Values that the later and the earlier phase compute for certain; the cut places a value in neither.
    free
        Arguments that are held anyway and cost nothing to keep (parameters, the batch).
    size
        Bytes of a value, or None if it cannot be kept (a view or a tuple).
    price
        Cost in bytes of computing an early value again, or None if it never may be.
    """

    nodes: Sequence[Node]
    needed: Collection[Node]
    late: Collection[Node]
    early: Collection[Node]
    free: Collection[Node]
    size: Callable[[Node], int | None]
    price: Callable[[Node], int | None]


def cut(phase: Phase) -> set[Node]:
    """Return the values to keep for the later phase, without those in ``free`` that it reads."""
    relevant = ancestors(phase.needed)
    network = nx.DiGraph()
    network.add_nodes_from(["source", "sink"])
    for node in phase.nodes:
        if node in relevant:
            _add(network, phase, node, relevant)
    for node in phase.needed:
        network.add_edge((node.name, 1), "sink")
    _, sink_side = nx.minimum_cut(network, "source", "sink", flow_func=nx.algorithms.flow.boykov_kolmogorov)[
        1
    ]
    return {
        node
        for node in phase.nodes
        if node in relevant
        and node not in phase.free
        and (node.name, 0) not in sink_side
        and (node.name, 1) in sink_side
    }


def _add(network: nx.DiGraph, phase: Phase, node: Node, relevant: set[Node]) -> None:
    """Add the edges of one value: keep it (inside), who needs it (outside), where it may be computed."""
    inside, outside = (node.name, 0), (node.name, 1)
    size = 0 if node in phase.free else phase.size(node)
    _edge(network, inside, outside, size)
    if node.op == "placeholder":
        _edge(network, "source", inside, _INFINITE)
        return
    for argument in node.all_input_nodes:
        if argument in relevant:
            _edge(network, (argument.name, 1), inside, _INFINITE)
    if node in phase.late:
        _edge(network, inside, "sink", _INFINITE)
    elif node in phase.early:
        price = phase.price(node)
        if price != 0:
            _edge(network, "source", inside, price)
    else:
        for argument in node.all_input_nodes:
            if argument in relevant and argument.op != "placeholder" and argument not in phase.early:
                _edge(network, inside, (argument.name, 0), _INFINITE)


def _edge(network: nx.DiGraph, tail: object, head: object, capacity: int | None) -> None:
    if capacity is None:
        network.add_edge(tail, head)
    else:
        network.add_edge(tail, head, capacity=capacity)


def leaves(outputs: Iterable[Node], kept: Collection[Node]) -> tuple[set[Node], set[Node]]:
    """Follow ``outputs`` back to values that are kept and to arguments.

    Returns
    -------
    tuple
        The kept values and arguments that computing ``outputs`` reads, and the calls that it makes.
    """
    read: set[Node] = set()
    calls: set[Node] = set()
    waiting = list(outputs)
    while waiting:
        node = waiting.pop()
        if node in read or node in calls:
            continue
        if node.op == "placeholder" or node in kept:
            read.add(node)
        else:
            calls.add(node)
            waiting += node.all_input_nodes
    return read, calls
