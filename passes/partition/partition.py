"""Partition: one captured graph -> one graph per stage, connected by direct edges.

``Captured --> tuple[StageSource, ...]``. Every call that is not auxiliary runs in exactly one stage, in
its original order; auxiliary values are computed again in each stage that needs them; a value that
skips stages goes straight from producer to consumer. Nothing is renamed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Graph, GraphModule, Node

from zbcompile.errors import CutError, UsageError
from zbcompile.passes.aliasing import StorageGroups
from zbcompile.passes.capture.capture import Captured, Role
from zbcompile.passes.op_costs import seconds
from zbcompile.passes.partition.auxiliary import auxiliary_nodes, needed_auxiliary
from zbcompile.passes.partition.cuts import CutPoint, balanced_cuts, named_cuts, order_of

__all__ = ["Policy", "StageSource", "Wire", "partition"]

Policy = Callable[[tuple[CutPoint, ...], int], Sequence[CutPoint]]
"""(legal cut points, number of stages) -> the chosen ones, in order."""


@dataclass(frozen=True, slots=True)
class Wire:
    """A value of the captured graph that enters or leaves a stage (see `Port`, which adds gradients)."""

    name: str
    source: tuple[str, int]
    targets: tuple[int, ...] = ()
    is_result: bool = False
    is_loss: bool = False


@dataclass(frozen=True)
class StageSource:
    """One stage before differentiation.

    module : graph with placeholders in the order of ``roles`` then ``inputs``; returns one value per
    output wire. modules : module paths whose calls it holds, in order; seconds : counted forward time;
    auxiliary : names of the calls that other stages may repeat.
    """

    index: int
    module: GraphModule
    roles: tuple[Role, ...]
    inputs: tuple[Wire, ...]
    outputs: tuple[Wire, ...]
    modules: tuple[str, ...]
    seconds: float
    auxiliary: tuple[str, ...]


def partition(
    captured: Captured,
    num_stages: int,
    *,
    split_points: Sequence[str] | Policy | None = None,
    costs: Callable[[Node], float] = seconds,
) -> tuple[StageSource, ...]:
    """Cut into ``num_stages`` stages: balanced by ``costs``, before named modules, or by a policy.

    Raises
    ------
    CutError : fewer legal cut points than needed, or a named cut that is not legal.
    UsageError : split points that name nothing or come in the wrong number or order.
    """
    if isinstance(num_stages, bool) or not isinstance(num_stages, int) or num_stages < 1:
        raise UsageError("num_stages must be a positive integer", given=num_stages)
    graph = captured.module.graph
    groups = StorageGroups(graph)
    auxiliary = auxiliary_nodes(captured, groups)
    main = [node for node in graph.nodes if node.op == "call_function" and node not in auxiliary]
    order = order_of(main, groups, costs)
    if split_points is None:
        cuts: Sequence[CutPoint] = balanced_cuts(order, num_stages)
    elif callable(split_points):
        cuts = _chosen(split_points, order.cuts, num_stages)
    else:
        cuts = named_cuts(order, list(split_points), num_stages)
    starts = [0, *(cut.position for cut in cuts), len(main)]
    stage_of = {
        node: stage for stage in range(num_stages) for node in main[starts[stage] : starts[stage + 1]]
    }
    return tuple(
        _stage(captured, groups, auxiliary, stage_of, stage, num_stages) for stage in range(num_stages)
    )


def _chosen(policy: Policy, cuts: tuple[CutPoint, ...], num_stages: int) -> Sequence[CutPoint]:
    chosen = list(policy(cuts, num_stages))
    positions = [cut.position for cut in chosen]
    if len(chosen) != num_stages - 1 or any(cut not in cuts for cut in chosen):
        raise UsageError(
            "the cut policy must return legal cut points, one less than stages",
            needed=num_stages - 1,
            given=positions,
        )
    if positions != sorted(set(positions)):
        raise UsageError("the cut policy's points are not in model order", given=positions)
    return chosen


def _stage(
    captured: Captured,
    groups: StorageGroups,
    auxiliary: set[Node],
    stage_of: dict[Node, int],
    stage: int,
    num_stages: int,
) -> StageSource:
    """Collect the calls, placeholders and wires of one stage and copy them into a graph."""
    graph = captured.module.graph
    result_nodes = list(graph.output_node().all_input_nodes)
    own = [node for node in graph.nodes if stage_of.get(node) == stage]
    wanted = list(own)
    last = stage == num_stages - 1
    if last:
        wanted += [node for node in result_nodes if node in auxiliary]
    helpers = needed_auxiliary(wanted, auxiliary, groups)
    members = set(own) | helpers
    used = {a for node in members for a in node.all_input_nodes} - members
    if last:
        used |= {node for node in result_nodes if node.op == "placeholder"}
    outside = [node for node in graph.nodes if node in used]
    roles = [captured.roles[n.name] for n in outside if n.op == "placeholder"]
    state = [n for n, r in zip((n for n in outside if n.op == "placeholder"), roles, strict=True)]
    state_nodes = [
        n
        for kind in ("parameter", "buffer", "constant")
        for n in state
        if captured.roles[n.name].kind == kind
    ]
    batch = [n for n in state if captured.roles[n.name].kind == "batch"]
    received = [n for n in outside if n.op == "call_function"]
    attributes = [n for n in outside if n.op == "get_attr"]
    outputs = _outputs(captured, stage_of, auxiliary, own, result_nodes, last)
    module = _copy(captured, [*state_nodes, *batch, *received], attributes, members, [n for n, _ in outputs])
    inputs = [Wire(n.name, ("batch", captured.roles[n.name].position)) for n in batch]
    inputs += [Wire(n.name, ("stage", stage_of[n])) for n in received]
    paths = dict.fromkeys(n.meta.get("module_path", "") for n in own)
    return StageSource(
        stage,
        module,
        tuple(captured.roles[n.name] for n in state_nodes),
        tuple(inputs),
        tuple(wire for _, wire in outputs),
        tuple(path for path in paths if path),
        sum(seconds(node) for node in own),
        tuple(n.name for n in graph.nodes if n in helpers),
    )


def _outputs(
    captured: Captured,
    stage_of: dict[Node, int],
    auxiliary: set[Node],
    own: list[Node],
    results: list[Node],
    last: bool,
) -> list[tuple[Node, Wire]]:
    """Values that later stages or the caller use, in graph order."""
    stage = stage_of[own[0]] if own else -1
    loss = None if captured.loss is None else captured.results[captured.loss]
    wires = []
    for node in own:
        targets = sorted({stage_of[user] for user in node.users if user in stage_of} - {stage})
        if targets or node in results:
            if not isinstance(node.meta.get("val"), torch.Tensor):
                raise CutError(f"{node.name} crosses a cut and is not a tensor", where=node.meta["source"])
            wires.append((node, _wire(node, stage, targets, results, loss)))
    if last:
        rest = [n for n in results if n in auxiliary or n.op == "placeholder"]
        wires += [(node, _wire(node, stage, [], results, loss)) for node in dict.fromkeys(rest)]
    return wires


def _wire(node: Node, stage: int, targets: list[int], results: list[Node], loss: str | None) -> Wire:
    return Wire(node.name, ("stage", stage), tuple(targets), node in results, node.name == loss)


def _copy(
    captured: Captured, holes: list[Node], attributes: list[Node], members: set[Node], outputs: list[Node]
) -> GraphModule:
    graph = Graph()
    values: dict[Node, Node] = {}
    for node in holes:
        values[node] = graph.placeholder(node.name)
        values[node].meta = dict(node.meta)
    for node in captured.module.graph.nodes:
        if node in members or node in attributes:
            values[node] = graph.node_copy(node, lambda n: values[n])
    graph.output(tuple(values[node] for node in outputs))
    return GraphModule(captured.module, graph)
