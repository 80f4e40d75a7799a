"""Split: each stage's graph -> F, B, W and BW graphs that equal autograd to the bit.

``tuple[StageSource, ...] --> tuple[StageGraphs, ...]``. F is what outputs and buffer changes need, B what
input gradients need, W the rest (Qi et al., Zero Bubble Pipeline Parallelism, 2024, section 2; there by
hand per layer, here on the joint graph). What is kept between them is decided in `save_set`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from zbcompile.errors import SplitError, UsageError
from zbcompile.passes import torch_private
from zbcompile.passes.aliasing import is_random, owned_bytes, viewed_arguments
from zbcompile.passes.capture.captured import Captured
from zbcompile.passes.capture.collection import collection_paused
from zbcompile.passes.joint.exact_rewrites import rewrite_exactly
from zbcompile.passes.joint.flexible_views import flexible_views
from zbcompile.passes.joint.gradient_layouts import Order, copies_removed, order_of_gradient
from zbcompile.passes.joint.replay import Replay
from zbcompile.passes.joint.rewrites import rewrite, storage_root
from zbcompile.passes.joint.simplify import simplify
from zbcompile.passes.joint.walks import past
from zbcompile.passes.op_costs import is_heavy
from zbcompile.passes.partition.partition import StageSource, Wire
from zbcompile.passes.split.backends import recompute_seconds
from zbcompile.passes.split.boxed import boxed
from zbcompile.passes.split.refusals import explain_split
from zbcompile.passes.split.save_set import Phase, cut, leaves
from zbcompile.passes.split.stage_graphs import CallLayout, Graphs, Port, StageGraphs
from zbcompile.passes.split.structural_hash import renamed, structural_hash

__all__ = ["Recompute", "split_backward"]

Recompute = str | float
"""``"none"``, ``"min_memory"`` (no heavy call twice), ``"full"`` (anything but random draws twice), or a
price: bytes that one second of recompute must save."""

_GATHERS = ("aten.embedding_dense_backward", "aten.index_put", "aten.scatter", "aten.index_add")


@dataclass(frozen=True)
class _Traced:
    """One stage's joint graph with what is known about its ends."""

    source: StageSource
    joint: torch_private.JointGraph
    values: tuple[Tensor, ...]
    num_state: int
    key: str
    """`structural_hash` of the stage: stages with one key share the joint graph and the split."""

    @property
    def gradient_inputs(self) -> frozenset[int]:
        """Positions among the inputs for which the joint graph has a gradient."""
        count = self.num_state
        return frozenset(
            i - count for i, value in self.joint.gradients.items() if i >= count and value is not None
        )


def split_backward(
    captured: Captured,
    sources: Sequence[StageSource],
    *,
    recompute: Recompute = "none",
    backend: str = "eager",
    share: bool = True,
) -> tuple[StageGraphs, ...]:
    """Differentiate and split every stage; with ``share`` stages of equal structure are split once.

    ``backend`` only tells what recomputing costs there; `backends.with_backend` compiles.

    Raises
    ------
    SplitError : a value that should have a gradient lost it, or an operator without a derivative.
    UsageError : an unknown ``recompute``.
    """
    _check_recompute(recompute)
    with torch.inference_mode(False), torch.enable_grad():
        traced = _trace_all(captured, sources, share)
    made: dict[str, tuple[StageSource, StageGraphs]] = {}
    for t in traced:
        if t.key not in made:
            made[t.key] = t.source, _StageSplit(captured, t, recompute, backend).build()
    wanted = {
        (wire.name, t.source.index)
        for t in traced
        for i, wire in enumerate(t.source.inputs)
        if i in t.gradient_inputs
    }
    stages = [renamed(made[t.key][1], made[t.key][0], t.source, captured) for t in traced]
    for stage in stages:
        _check_gradients(stage, wanted)
    strides = {port.name: port.grad_stride for stage in stages for port in stage.outputs}
    return tuple(_with_gradient_strides(stage, strides) for stage in stages)


def _with_gradient_strides(stage: StageGraphs, strides: Mapping[str, tuple[int, ...]]) -> StageGraphs:
    """The stage whose inputs know how their producers want the gradients."""
    inputs = (
        replace(port, grad_stride=strides[port.name]) if port.has_gradient else port for port in stage.inputs
    )
    return replace(stage, inputs=tuple(inputs))


def _check_gradients(stage: StageGraphs, wanted: set[tuple[str, int]]) -> None:
    for port in stage.outputs:
        asked = port.is_loss or any((port.name, target) in wanted for target in port.targets)
        if asked and not port.has_gradient:
            raise SplitError(
                f"stage {stage.index}: {port.name} should have a gradient and lost it in tracing"
            )


def _check_recompute(recompute: Recompute) -> None:
    if isinstance(recompute, int | float) and not isinstance(recompute, bool):
        known = recompute >= 0
    else:
        known = recompute in ("none", "min_memory", "full")
    if not known:
        raise UsageError(
            "unknown recompute",
            given=recompute,
            fix='use "none", "min_memory", "full" or a price in bytes per second',
        )


def _trace_all(captured: Captured, sources: Sequence[StageSource], share: bool) -> list[_Traced]:
    """Trace in stage order to learn what requires a gradient, then again, from the end, without the
    outputs that no gradient comes back to, and for gradients in the layout in which they come."""
    differentiable: dict[str, bool] = {}
    known: dict[str, _Traced] = {}
    traced = []
    for source in sources:
        live = frozenset(i for i, wire in enumerate(source.outputs) if wire.targets or wire.is_loss)
        traced.append(_trace_once(captured, source, differentiable, live, known, share))
        for position, wire in enumerate(source.outputs):
            differentiable[wire.name] = position in traced[-1].joint.tangents
    returned: dict[str, list[Tensor]] = {}
    for index in reversed(range(len(traced))):
        trace = traced[index]
        wires = trace.source.outputs
        live = frozenset(i for i in trace.joint.tangents if wires[i].name in returned or wires[i].is_loss)
        found = {
            i: order_of_gradient(node.meta["val"], returned.get(wires[i].name, ()))
            for i, node in trace.joint.tangents.items()
        }
        orders = {i: order for i, order in found.items() if order is not None}
        if live != frozenset(trace.joint.tangents) or orders:
            trace = _trace_once(captured, trace.source, differentiable, live, known, share, orders)
            traced[index] = trace
        for i in trace.gradient_inputs:
            made = trace.joint.gradients[trace.num_state + i].meta["val"]
            returned.setdefault(trace.source.inputs[i].name, []).append(made)
    return traced


def _trace_once(
    captured: Captured,
    source: StageSource,
    differentiable: dict[str, bool],
    live: frozenset[int],
    known: dict[str, _Traced],
    share: bool,
    orders: Mapping[int, Order] = MappingProxyType({}),
) -> _Traced:
    """The trace of this stage, or that of an equal stage."""
    needs = [wire.source[0] == "stage" and differentiable[wire.name] for wire in source.inputs]
    key = structural_hash(source, captured, needs, live) if share else f"{source.index} {sorted(live)}"
    key += str(sorted(orders.items())) if orders else ""
    if key not in known:
        known[key] = _trace(captured, source, needs, live, key, orders)
    return replace(known[key], source=source)


def _trace(
    captured: Captured,
    source: StageSource,
    needs: Sequence[bool],
    live: frozenset[int],
    key: str,
    orders: Mapping[int, Order],
) -> _Traced:
    mode = torch_private.fake_mode()
    holes = list(source.module.graph.find_nodes(op="placeholder"))
    arguments: list[Tensor] = []
    for role, hole in zip(source.roles, holes, strict=False):
        value = captured.constants[role.name] if role.kind == "constant" else captured.state[role.name]
        device = hole.meta["val"].device
        arguments.append(torch_private.as_fake(mode, value, value.requires_grad, device))
    for hole, need in zip(holes[len(source.roles) :], needs, strict=True):
        arguments.append(torch_private.as_fake(mode, hole.meta["val"], need))
    replay = Replay(source.module, captured.functions, live, orders)
    replay.train()
    try:
        with torch_private.preserve_node_meta(), collection_paused():
            joint = torch_private.joint_graph(replay, arguments)
    except torch_private.ChangeCarriesGradient as error:
        position = error.args[0]
        names = [role.name for role in source.roles] + [wire.name for wire in source.inputs]
        raise SplitError(
            f"stage {source.index} changes {names[position]!r} to a value that carries a gradient",
            fix="change it under torch.no_grad() or from a detached value",
        ) from error
    except Exception as error:
        raise explain_split(error, source.index, replay) from error
    copies_removed(joint, orders)
    parameters = {i for i, role in enumerate(source.roles) if role.kind in ("parameter", "buffer")}
    simplify(joint)
    rewrite_exactly(joint)
    simplify(joint)
    _refuse_sparse(joint, source)
    rewrite(joint, parameters)
    flexible_views(joint.module.graph)
    return _Traced(source, joint, tuple(arguments), len(source.roles), key)


def _refuse_sparse(joint: torch_private.JointGraph, source: StageSource) -> None:
    for position, value in joint.gradients.items():
        made = None if value is None else value.meta.get("val")
        if isinstance(made, Tensor) and made.layout != torch.strided and position < len(source.roles):
            raise SplitError(
                f"the gradient of {source.roles[position].name} is sparse",
                where=f"stage {source.index}",
                fix="make it dense (sparse=False): sums and messages are of dense gradients",
            )


class _StageSplit:
    """Builds one `StageGraphs`; the attributes are the sets that the parts share."""

    def __init__(self, captured: Captured, traced: _Traced, recompute: Recompute, backend: str) -> None:
        self.captured, self.traced, self.source = captured, traced, traced.source
        self.joint, self.recompute, self.backend = traced.joint, recompute, backend
        self.arguments = {node: i for i, node in self.joint.arguments.items()}
        self.mutated = [i for i in sorted(self.joint.mutations) if i < traced.num_state]
        self._check_mutations()
        roles = self.source.roles
        self.tangents = [self.joint.tangents[i] for i in sorted(self.joint.tangents)]
        self.input_grads = {
            i: self.joint.gradients[traced.num_state + i] for i in sorted(traced.gradient_inputs)
        }
        self.weight_grads = {
            roles[i].name: value
            for i, value in sorted(self.joint.gradients.items())
            if i < traced.num_state and value is not None and roles[i].kind == "parameter"
        }
        self.outputs = [self.joint.outputs[i] for i in range(len(self.source.outputs))]
        self.results = [*self.outputs, *(self.joint.mutations[i] for i in self.mutated)]
        self.nodes = [n for n in self.joint.module.graph.nodes if n.op in ("placeholder", "call_function")]
        self.late = self._past_of_tangents()

    def build(self) -> StageGraphs:
        """Two cuts, four graphs and the positions that connect them."""
        for_weight = self._cut_weight()
        for_backward = self._cut_backward(for_weight)
        return self._assemble(for_weight, for_backward)

    def _check_mutations(self) -> None:
        for position in self.joint.mutations:
            role = self.source.roles[position] if position < self.traced.num_state else None
            if role is None or role.kind not in ("buffer", "constant"):
                name = role.name if role else self.source.inputs[position - self.traced.num_state].name
                raise SplitError(f"stage {self.source.index} changes {name} in place", where=name)

    def _past_of_tangents(self) -> set[Node]:
        late = set(self.tangents)
        for node in self.nodes:
            if any(argument in late for argument in node.all_input_nodes):
                late.add(node)
        return late

    def _free(self) -> set[Node]:
        """Arguments that are alive anyway: state that does not change, constants, the batch."""
        free = set()
        for node, position in self.arguments.items():
            inner = position - self.traced.num_state
            if inner < 0:
                if position not in self.mutated:
                    free.add(node)
            elif self.source.inputs[inner].source[0] == "batch":
                free.add(node)
        return free

    def _price(self, node: Node) -> int | None:
        if viewed_arguments(node):
            return 0
        if self.recompute == "none" or is_random(node):
            return None
        if self.recompute == "min_memory":
            return None if is_heavy(node) else 0
        if self.recompute == "full":
            return 0
        return int(float(self.recompute) * recompute_seconds(node, self.backend))

    def _cut_weight(self) -> set[Node]:
        """(F and B) -> W. Cheap work of W moves into B where that holds fewer bytes (norm parameters)."""
        forward = past(self.results)
        early = forward | past(self.input_grads.values())
        if self.input_grads:
            late = {n for n in self.nodes if n not in early and _stays_late(n)}
        else:
            late = {n for n in self.late if n not in early and n.op != "placeholder"}
        grads = list(self.weight_grads.values())
        return cut(Phase(self.nodes, grads, late, early, self._free(), owned_bytes, self._price))

    def _cut_backward(self, for_weight: set[Node]) -> set[Node]:
        """F -> (B and what B leaves for W)."""
        forward = past(self.results)
        needed = [*self.input_grads.values(), *(n for n in self.nodes if n in for_weight)]
        late = {n for n in self.late if n.op != "placeholder"}
        free = self._free() | set(self.tangents)
        return cut(Phase(self.nodes, needed, late, forward, free, owned_bytes, self._price))

    def _assemble(self, for_weight: set[Node], for_backward: set[Node]) -> StageGraphs:
        source, grads = self.source, list(self.weight_grads.values())
        weight_reads, _ = leaves(grads, for_weight)
        input_reads, _ = leaves([*self.input_grads.values(), *weight_reads], for_backward)
        full_reads, _ = leaves([*self.input_grads.values(), *grads], for_backward)
        from_forward = self._ordered((input_reads | full_reads) - set(self.tangents))
        made = [n for n in from_forward if not self._kept_argument(n)]
        kept = [n for n in from_forward if self._kept_argument(n)]
        pool = [*self.tangents, *made, *kept]
        handed = self._ordered(weight_reads)
        from_backward = [n for n in handed if n not in pool]
        carried = [n for n in handed if n in pool]
        after = [*from_backward, *carried]
        late = {name: value for name, value in self.weight_grads.items() if value not in weight_reads}
        weight_args = self._ordered(leaves(late.values(), for_weight)[0])
        input_outs = [*self.input_grads.values(), *from_backward]
        input_args = self._ordered(leaves(input_outs, for_backward)[0])
        full_args = self._ordered(full_reads)
        module = self.joint.module
        forward_args = [self.joint.arguments[i] for i in range(len(self.traced.values))]
        graphs = Graphs(
            boxed(
                module,
                forward_args,
                [*self.results, *made],
                "forward",
                copies=self._old_buffers(),
                draws=self._unread_draws(),
            ),
            boxed(module, input_args, input_outs, "backward_input"),
            boxed(module, weight_args, list(late.values()), "backward_weight"),
            boxed(module, full_args, [*self.input_grads.values(), *grads], "full_backward"),
        )
        layout = CallLayout(
            tuple(self.arguments[n] for n in kept),
            tuple(pool.index(n) for n in input_args),
            tuple(pool.index(n) for n in carried),
            tuple(after.index(n) for n in weight_args),
            tuple(pool.index(n) for n in full_args),
            tuple((name, after.index(v)) for name, v in self.weight_grads.items() if name not in late),
            tuple(late),
            tuple(self.weight_grads),
        )
        roles = source.roles
        return StageGraphs(
            source.index,
            tuple(self._input_port(i, wire) for i, wire in enumerate(source.inputs)),
            tuple(self._output_port(i, wire) for i, wire in enumerate(source.outputs)),
            tuple(r.name for r in roles if r.kind == "parameter"),
            tuple(r.name for r in roles if r.kind == "parameter" and self._trainable(r.name)),
            tuple(r.name for r in roles if r.kind == "buffer"),
            tuple(roles[i].name for i in self.mutated),
            tuple(self.captured.constants[r.name] for r in roles if r.kind == "constant"),
            graphs,
            layout,
            self._held(from_forward),
            self._held(handed),
            tuple(getattr(graphs, name).forward for name in Graphs.__slots__),
        )

    def _ordered(self, nodes: Collection[Node]) -> list[Node]:
        return [node for node in self.nodes if node in nodes]

    def _kept_argument(self, node: Node) -> bool:
        """Whether the caller's own argument can be kept: not if F changes it."""
        return node in self.arguments and self.arguments[node] not in self.mutated

    def _unread_draws(self) -> list[Node]:
        """Random draws that nothing reads: without them later masks would differ from eager's."""
        read = past([*self.results, *self.input_grads.values(), *self.weight_grads.values()])
        dead = (n for n in self.nodes if n.op == "call_function" and n not in read and n not in self.late)
        return [node for node in dead if is_random(node)]

    def _old_buffers(self) -> list[Node]:
        return [self.joint.arguments[i] for i in self.mutated]

    def _trainable(self, name: str) -> bool:
        return self.captured.state[name].requires_grad

    def _held(self, nodes: Sequence[Node]) -> int:
        free = self._free()
        roots = dict.fromkeys(storage_root(node) for node in nodes if node not in free)
        return sum(owned_bytes(root) or 0 for root in roots if root not in free)

    def _input_port(self, position: int, wire: Wire) -> Port:
        value = self.traced.values[self.traced.num_state + position]
        return _port(wire, value, position in self.traced.gradient_inputs)

    def _output_port(self, position: int, wire: Wire) -> Port:
        value, tangent = self.outputs[position].meta["val"], self.joint.tangents.get(position)
        if tangent is None:
            return _port(wire, value, False)
        made = tangent.meta["val"]
        repeats = any(step == 0 and n > 1 for step, n in zip(value.stride(), value.shape, strict=True))
        return replace(_port(wire, made if repeats else value, True), grad_stride=tuple(made.stride()))


def _port(wire: Wire, value: Any, has_gradient: bool) -> Port:
    return Port(
        wire.name,
        tuple(value.shape),
        tuple(value.stride()),
        value.dtype,
        value.device,
        has_gradient,
        wire.source,
        wire.targets,
        wire.is_result,
        wire.is_loss,
    )


def _stays_late(node: Node) -> bool:
    return node.op == "call_function" and (is_heavy(node) or str(node.target).startswith(_GATHERS))
