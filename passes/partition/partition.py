"""Partition: one captured graph becomes one graph per stage, connected by direct edges.

``Captured --> tuple[StageSource, ...]``. Contract in: a captured graph. Contract out: every call that is not
auxiliary runs in exactly one stage, in its original order; auxiliary values are computed again in each stage
that needs them; a value that skips stages goes straight from producer to consumer; no node is renamed.

    a = f(x); b = g(a); c = h(b, a)  -->  stage 0: x -> a;  stage 1: a -> b;  stage 2: b, a -> c
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch.fx import Graph, GraphModule, Node

from zbcompile.errors import CutError, UsageError
from zbcompile.passes.aliasing import StorageGroups
from zbcompile.passes.capture.captured import Captured, Role
from zbcompile.passes.nodes import value_of
from zbcompile.passes.op_costs import nominal_device
from zbcompile.passes.partition.auxiliary import auxiliary_nodes, needed_auxiliary
from zbcompile.passes.partition.balance import Work
from zbcompile.passes.partition.call_costs import call_counts, work_on
from zbcompile.passes.partition.cut_points import CallOrder, CutPoint, call_order
from zbcompile.passes.partition.cuts import balanced_cuts, named_cuts
from zbcompile.passes.provenance import module_path_of, source_of
from zbcompile.passes.torch_private import LazyGraphModule
from zbcompile.schedule.devices import Device

__all__ = ["Policy", "StageSource", "Wire", "legal_cuts", "partition"]

Policy = Callable[[tuple[CutPoint, ...], int], Sequence[CutPoint]]
"""(legal cut points, number of stages) -> the chosen ones, in order."""

_STATE_KINDS = ("parameter", "buffer", "constant")


@dataclass(frozen=True, slots=True)
class Wire:
    """A value of the captured graph that enters or leaves a stage (`Port` adds gradients).

    Attributes
    ----------
    name
        Of its node.
    source
        ``("batch", flat index)`` or ``("stage", producer)``.
    targets
        Stages that consume an output.
    is_result, is_loss
        Whether an output is a tensor of the model's result, and whether it is the loss.
    """

    name: str
    source: tuple[Literal["batch", "stage"], int]
    targets: tuple[int, ...] = ()
    is_result: bool = False
    is_loss: bool = False


@dataclass(frozen=True)
class StageSource:
    """One stage before differentiation.

    Attributes
    ----------
    index
        Of the stage.
    module
        Graph with placeholders in the order of ``roles``, then ``inputs``; returns one value per output.
    roles
        Of the parameters, buffers and constants, in this order.
    inputs, outputs
        What enters and leaves the stage; batch inputs come first.
    modules
        Paths of the modules whose calls it holds, in order.
    seconds
        Counted time of a microbatch, forward and backward.
    auxiliary
        Names of the calls that other stages may repeat.
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
    device: Device | None = None,
    num_microbatches: int | None = None,
) -> tuple[StageSource, ...]:
    """Cut a captured graph into stages.

    Parameters
    ----------
    captured
        Is not changed.
    num_stages
        Into how many stages.
    split_points
        Names of the modules that start the second and later stages, or a function that chooses among the
        legal cuts. By default those with the shortest step by counted times (see `balance`).
    device
        Whose times and link; by default `nominal_device` of what the model was captured for, and no link.
    num_microbatches
        Of a step, if every stage has a rank of its own.

    Raises
    ------
    CutError
        Fewer legal cut points than needed, or a named cut that is not legal.
    UsageError
        Split points that name nothing or come in the wrong number or order.
    """
    if isinstance(num_stages, bool) or not isinstance(num_stages, int) or num_stages < 1:
        raise UsageError("num_stages must be a positive integer", given=num_stages)
    link = device.link if device is not None else None
    order, groups, auxiliary, works = _ordered(captured, device)
    main = order.nodes
    if split_points is None:
        cuts: Sequence[CutPoint] = balanced_cuts(order, num_stages, link, num_microbatches)
    elif callable(split_points):
        cuts = _chosen(split_points, order.cuts, num_stages)
    else:
        cuts = named_cuts(order, list(split_points), num_stages)
    starts = [0, *(cut.position for cut in cuts), len(main)]
    stage_of = {
        node: stage for stage in range(num_stages) for node in main[starts[stage] : starts[stage + 1]]
    }
    pieces = _Pieces(captured, groups, auxiliary, stage_of, num_stages - 1, works)
    return tuple(pieces.source(stage) for stage in range(num_stages))


def legal_cuts(captured: Captured, device: Device | None = None) -> CallOrder:
    """Return the calls of a captured graph and the legal cuts between them; ``device`` as for `partition`."""
    return _ordered(captured, device)[0]


def _ordered(
    captured: Captured, device: Device | None
) -> tuple[CallOrder, StorageGroups, set[Node], dict[Node, Work]]:
    """Return the calls with their legal cuts, groups of storage, auxiliary calls, and every call's times."""
    graph = captured.module.graph
    groups = StorageGroups(graph)
    auxiliary = auxiliary_nodes(captured, groups)
    main = [node for node in graph.nodes if node.op == "call_function" and node not in auxiliary]
    device = device or nominal_device(captured.device)
    works = {node: work_on(device, count) for node, count in call_counts(captured, groups).items()}
    order = call_order(main, groups, works.__getitem__, _trained(captured))
    return order, groups, auxiliary, works


def _trained(captured: Captured) -> set[Node]:
    """Return the parameters that take a gradient."""
    return {
        hole
        for hole in captured.module.graph.find_nodes(op="placeholder")
        if (role := captured.roles[hole.name]).kind == "parameter" and captured.state[role.name].requires_grad
    }


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


@dataclass(frozen=True)
class _Pieces:
    """A captured graph with the stage of every call, from which each stage is copied."""

    captured: Captured
    groups: StorageGroups
    auxiliary: set[Node]
    stage_of: dict[Node, int]
    last: int
    works: Mapping[Node, Work]

    @property
    def results(self) -> list[Node]:
        """The nodes that the captured graph returns."""
        return self.captured.module.graph.output_node().all_input_nodes

    def source(self, stage: int) -> StageSource:
        """Copy the calls, placeholders and wires of one stage into a graph."""
        nodes = self.captured.module.graph.nodes
        own = [node for node in nodes if self.stage_of.get(node) == stage]
        returned = self.results if stage == self.last else []
        wanted = [*own, *(node for node in returned if node in self.auxiliary)]
        helpers = needed_auxiliary(wanted, self.auxiliary, self.groups)
        members = set(own) | helpers
        used = {a for node in members for a in node.all_input_nodes} - members
        used |= {node for node in returned if node.op == "placeholder"}
        outside = [node for node in nodes if node in used]
        roles = {n: self.captured.roles[n.name] for n in outside if n.op == "placeholder"}
        state = [n for kind in _STATE_KINDS for n, role in roles.items() if role.kind == kind]
        batch = [n for n, role in roles.items() if role.kind == "batch"]
        received = [n for n in outside if n.op == "call_function"]
        attributes = {n for n in outside if n.op == "get_attr"}
        outputs = self._outputs(own, stage)
        inputs = [Wire(n.name, ("batch", roles[n].position)) for n in batch]
        inputs += [Wire(n.name, ("stage", self.stage_of[n])) for n in received]
        return StageSource(
            stage,
            self._copy([*state, *batch, *received], members | attributes, outputs),
            tuple(roles[n] for n in state),
            tuple(inputs),
            tuple(outputs.values()),
            tuple(path for path in dict.fromkeys(map(module_path_of, own)) if path),
            1e-9 * sum(self.works[node].total_ns for node in own),
            tuple(n.name for n in nodes if n in helpers),
        )

    def _outputs(self, own: Sequence[Node], stage: int) -> dict[Node, Wire]:
        """Return the values that later stages or the caller use, in graph order."""
        results = self.results
        wires = {}
        for node in own:
            users = {self.stage_of[user] for user in node.users if user in self.stage_of}
            targets = sorted(users - {stage})
            if targets or node in results:
                if value_of(node) is None:
                    raise CutError(f"{node.name} crosses a cut and is not a tensor", where=source_of(node))
                wires[node] = self._wire(node, stage, targets)
        if stage == self.last:
            rest = [n for n in results if n in self.auxiliary or n.op == "placeholder"]
            wires |= {node: self._wire(node, stage, ()) for node in rest}
        return wires

    def _wire(self, node: Node, stage: int, targets: Sequence[int]) -> Wire:
        loss, results = self.captured.loss, self.captured.results
        is_loss = loss is not None and node.name == results[loss]
        return Wire(node.name, ("stage", stage), tuple(targets), node in self.results, is_loss)

    def _copy(self, placeholders: Sequence[Node], calls: set[Node], outputs: Iterable[Node]) -> GraphModule:
        graph = Graph()
        values: dict[Node, Node] = {}
        for node in placeholders:
            values[node] = graph.placeholder(node.name)
            values[node].meta = dict(node.meta)
        for node in self.captured.module.graph.nodes:
            if node in calls:
                values[node] = graph.node_copy(node, lambda n: values[n])
        graph.output(tuple(values[node] for node in outputs))
        return LazyGraphModule(self.captured.module, graph)
