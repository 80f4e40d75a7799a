"""Collectives in a stage's graphs: over which groups of processes they go, and code without their names.

A stage may exchange data with processes outside its pipeline (tensor, sequence and expert parallel). Groups
have names, which differ between the ranks of a pipeline although their graphs are the same: every rank traces
all stages with the groups that it is in itself, and runs its own ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch.fx import Graph, GraphModule, Node

from zbcompile.passes.ops import facts
from zbcompile.passes.torch_private import OpOverload, group_members, schema

__all__ = ["code_for_peers", "collective_groups", "members_of"]


def collective_groups(graphs: Iterable[GraphModule]) -> tuple[str, ...]:
    """Return the names of the groups that calls of some graphs exchange data in, in order of first use."""
    return tuple(dict.fromkeys(name for module in graphs for _, _, name in _group_arguments(module.graph)))


def members_of(group: str) -> tuple[int, ...]:
    """Return the ranks of the processes of a group, by their numbers in the default group."""
    return group_members(group)


def code_for_peers(module: GraphModule) -> str:
    """Return the code of a graph with the number and size of each group in place of its name."""
    named = list(_group_arguments(module.graph))
    if not named:
        return str(module.code)
    number = {name: k for k, name in enumerate(collective_groups([module]))}
    for node, position, name in named:
        _set_argument(node, position, f"group {number[name]} of {len(members_of(name))}")
    try:
        return str(module.graph.python_code("self").src)
    finally:
        for node, position, name in named:
            _set_argument(node, position, name)


def _group_arguments(graph: Graph) -> Iterator[tuple[Node, int | str, str]]:
    """Yield the calls that exchange data: node, position or keyword of the group, and its name."""
    for node in graph.nodes:
        if node.op != "call_function" or not facts(node.target).collective:
            continue
        assert isinstance(node.target, OpOverload)
        names = [argument.name for argument in schema(node.target).arguments]
        position = names.index("group_name")
        if position < len(node.args):
            yield node, position, str(node.args[position])
        else:
            yield node, "group_name", str(node.kwargs["group_name"])


def _set_argument(node: Node, position: int | str, value: str) -> None:
    if isinstance(position, int):
        node.update_arg(position, value)
    else:
        node.update_kwarg(position, value)
