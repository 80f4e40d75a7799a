"""A part of a joint graph as a GraphModule of its own, called with one list that it empties.

``joint graph, arguments, outputs --> GraphModule``::

    def forward(self, x, w):   -->   def forward(self, arguments):
        ...                              x, w, = arguments
                                         arguments.clear()
                                         ...

So a value dies after its last use, whoever made the list.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.graph import CodeGen

from zbcompile.passes.nodes import is_getitem
from zbcompile.passes.provenance import with_provenance
from zbcompile.passes.split.save_set import leaves
from zbcompile.passes.torch_private import LINALG_CHECK, LazyGraphModule

__all__ = ["boxed"]


class _Boxed(CodeGen):
    """Code of ``forward(self, arguments)``, which takes its values out of the list and empties it."""

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, **_: object) -> str:
        names = [name.split(":")[0].split("=")[0].strip() for name in free_vars if name != "self"]
        unpack = f"\n    {', '.join(names)}, = arguments" if names else ""
        return f"def forward(self, arguments):{unpack}\n    arguments.clear()"


def boxed(
    module: GraphModule,
    arguments: Sequence[Node],
    outputs: Sequence[Node],
    name: str,
    copies: Collection[Node] = (),
    unread: Collection[Node] = (),
    deferred: Collection[Node] = (),
) -> GraphModule:
    """Return the calls between ``arguments`` and ``outputs`` in their original order.

    Checks of their results that raise (a singular matrix) are among them. Code is written when it is run: a
    backend writes its own.

    Parameters
    ----------
    module
        The joint graph.
    arguments, outputs
        Nodes of it: what the list holds, and what is returned.
    name
        Class name of the result.
    copies
        Arguments that the caller changes afterwards; an output that is one of them is cloned.
    unread
        Calls that are made though nothing reads them: random ones move the random state, checks raise.
    deferred
        Calls that are made right before their first use instead of in their place.
    """
    graph = Graph()
    values: dict[Node, Node] = {}
    for node in arguments:
        values[node] = graph.placeholder(node.name)
        values[node].meta = dict(node.meta)
    _, calls = leaves([node for node in (*outputs, *unread) if node not in values], values)
    calls |= _checks(module.graph, calls)

    def call(node: Node) -> None:
        for argument in node.all_input_nodes:
            if argument not in values:
                call(argument)
        values[node] = graph.node_copy(node, lambda n: values[n])
        values[node].meta = with_provenance(node.meta)

    for node in module.graph.nodes:
        if node in calls and node not in deferred:
            call(node)
    for node in outputs:
        if node not in values:
            call(node)
    results = []
    for node in outputs:
        if node in copies:
            results.append(graph.call_function(torch.ops.aten.clone.default, (values[node],)))
            results[-1].meta = dict(node.meta)
        else:
            results.append(values[node])
    graph.output(tuple(results))
    graph.set_codegen(_Boxed())
    return LazyGraphModule(module, graph, class_name=name)


def _checks(graph: Graph, calls: Collection[Node]) -> set[Node]:
    """Return the checks of what ``calls`` compute, with the picks of a tuple that only they need."""
    found: set[Node] = set()
    for node in graph.find_nodes(op="call_function", target=LINALG_CHECK):
        (info,) = node.all_input_nodes
        if info in calls:
            found.add(node)
        elif is_getitem(info) and info.args[0] in calls:
            found |= {info, node}
    return found
