"""Make one flat graph of an exported program.

``ExportedProgram --> Graph``. Contract out: no region submodules; every node carries ``module_path``,
``source`` and ``region``; checks of metadata and unread placeholders are gone; a buffer is written where its
new value is made; the batch is not changed.

    wrap_with_set_grad_enabled(False, body, x)  -->  the calls of body, each with its region
    buffer.copy_(new)  ... last of the graph    -->  ... next to the call that makes new
    x.add_(1), x of the batch                   -->  y = x.clone(); y.add_(1)
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import Argument

from zbcompile.errors import CaptureError
from zbcompile.passes import torch_private
from zbcompile.passes.aliasing import StorageGroups, viewed_arguments
from zbcompile.passes.capture.captured import Region, Role
from zbcompile.passes.capture.refusals import refuse_changed_state
from zbcompile.passes.nodes import is_getitem
from zbcompile.passes.ops import facts
from zbcompile.passes.provenance import provenance_of

__all__ = ["inline"]


def inline(program: ExportedProgram, roles: Mapping[str, Role]) -> Graph:
    """Copy an exported graph into one flat graph.

    Parameters
    ----------
    program
        What export made.
    roles
        Placeholder name -> its role.

    Raises
    ------
    CaptureError
        A call takes functions (``torch.cond``), or the forward changes a parameter or plain tensor in place.
    """
    copier = _Copier()
    copier.graph.output(copier.copy(program.graph_module, {}, ()))
    graph = copier.graph
    refuse_changed_state(graph, roles)
    _clone_changed_batch(graph, roles)
    _hoist_buffer_writes(graph, roles)
    for node in graph.find_nodes(op="placeholder"):
        if not node.users:
            graph.erase_node(node)
    return graph


class _Copier:
    """Copies graphs, submodules that run under a mode included, into ``graph``."""

    def __init__(self) -> None:
        self.graph = Graph()
        self._numbers = itertools.count()

    def copy(
        self, module: GraphModule, values: dict[Node, Argument], regions: tuple[Region, ...]
    ) -> Argument:
        """Copy the calls of a module whose placeholders have ``values``; return its results."""
        for node in module.graph.nodes:
            if node.op == "output":
                results: Argument = torch.fx.map_arg(node.args[0], lambda n: values[n])
                return results
            if node not in values and not facts(node.target).checks_metadata:
                values[node] = self._copied(module, node, values, regions)
        return ()

    def _copied(
        self, module: GraphModule, node: Node, values: dict[Node, Argument], regions: tuple[Region, ...]
    ) -> Argument:
        call = torch_private.RegionCall.of(node)
        if call is not None:
            inner: GraphModule = getattr(module, call.body)
            given = torch.fx.map_arg(call.arguments, lambda n: values[n])
            placeholders = inner.graph.find_nodes(op="placeholder")
            region = Region(call.kind, call.settings, next(self._numbers))
            return self.copy(inner, dict(zip(placeholders, given, strict=True)), (*regions, region))
        if torch_private.is_higher_order(node):
            raise CaptureError(
                f"cannot split {getattr(node.target, '__name__', node.target)}: it takes functions",
                where=", ".join(part for part in provenance_of(node).values() if part),
                fix="use torch.where or a loop in Python, or a choice that is made before training",
            )
        if node.op == "get_attr" and isinstance(getattr(module, str(node.target), None), nn.Module):
            return node
        if is_getitem(node):
            source = values[cast("Node", node.args[0])]
            if not isinstance(source, Node):
                return cast("Sequence[Argument]", source)[cast("int", node.args[1])]
        made = self.graph.node_copy(node, lambda n: cast("Node", values[n]))
        made.meta.update(provenance_of(node), region=regions)
        return made


def _clone_changed_batch(graph: Graph, roles: Mapping[str, Role]) -> None:
    """Give a model that changes its input in place a copy: the caller's batch stays as it is."""
    groups = StorageGroups(graph)
    placeholders = list(graph.find_nodes(op="placeholder"))
    changed = [n for n in placeholders if roles[n.name].kind == "batch" and groups.root(n) in groups.changes]
    for node in changed:
        with graph.inserting_after(placeholders[-1]):
            copy = graph.call_function(torch.ops.aten.clone.default)
        node.replace_all_uses_with(copy)
        copy.args = (node,)
        copy.meta = {**node.meta, "region": (), "module_path": "", "source": ""}


def _hoist_buffer_writes(graph: Graph, roles: Mapping[str, Role]) -> None:
    """Move ``buffer.copy_(new)`` up to where ``new`` is made, unless the buffer is used in between."""
    position = {node: i for i, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        if not facts(node.target).assigns or node.users:
            continue
        buffer, new = node.args[0], node.args[1]
        if not isinstance(new, Node) or buffer.op != "placeholder" or roles[buffer.name].kind != "buffer":
            continue
        uses = [user for user in buffer.users if user is not node]
        if any(viewed_arguments(user) for user in uses):
            continue
        only_detached = facts(new.target).form == "alias" and len(new.users) == 1
        made = cast("Node", new.args[0]) if only_detached else new
        last = max([made, *uses], key=lambda n: position[n])
        if position[last] < position[node] and last.op != "placeholder":
            last.append(node)
            if made is not new:
                last.append(new)
