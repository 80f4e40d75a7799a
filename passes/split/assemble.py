"""Assemble a stage: one joint graph and what is kept between its phases -> four graphs and how to call them.

``StageValues + values to keep --> StageGraphs``. Contract in: the two cuts of `phase_cuts`. Contract out: F,
B, W and BW as graphs of their own, and a call layout that says which value of one is which argument of the
next.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from torch.fx import Node

from zbcompile.passes.aliasing import is_random, owned_bytes
from zbcompile.passes.capture.captured import Captured
from zbcompile.passes.capture.data_checks import is_check
from zbcompile.passes.joint.graph_facts import ancestors, storage_root
from zbcompile.passes.ops import facts
from zbcompile.passes.split.boxed import boxed
from zbcompile.passes.split.ports import input_port, output_port
from zbcompile.passes.split.save_set import leaves
from zbcompile.passes.split.stage_graphs import CallLayout, Graphs, StageGraphs
from zbcompile.passes.split.stage_values import StageValues

__all__ = ["assemble", "weigh"]


def assemble(
    captured: Captured, values: StageValues, for_backward: Collection[Node], for_weight: Collection[Node]
) -> StageGraphs:
    """Build the graphs of one stage.

    Parameters
    ----------
    captured
        The model; its parameters say which of them are trainable.
    values
        The stage's joint graph.
    for_backward, for_weight
        What is kept between F and B, and for W.
    """
    handover = _Handover.of(values, for_backward, for_weight)
    graphs = _graphs(values, handover)
    stage, roles = values.stage, values.stage.source.roles
    parameters = tuple(role.name for role in roles if role.kind == "parameter")
    return StageGraphs(
        index=stage.source.index,
        inputs=tuple(input_port(stage, i) for i in range(len(stage.source.inputs))),
        outputs=tuple(output_port(stage, i) for i in range(len(stage.source.outputs))),
        parameters=parameters,
        trainable=tuple(name for name in parameters if captured.state[name].requires_grad),
        buffers=tuple(role.name for role in roles if role.kind == "buffer"),
        mutated=tuple(roles[i].name for i in values.mutated),
        constants=tuple(captured.constants[role.name] for role in roles if role.kind == "constant"),
        graphs=graphs,
        call_layout=_call_layout(values, handover),
        saved_bytes=_held_bytes(values, [*handover.made, *handover.kept]),
        saved_for_weight_bytes=_held_bytes(values, handover.read_by_weight),
        calls=tuple(getattr(graphs, name).forward for name in Graphs.__slots__),
    )


def weigh(
    values: StageValues,
    for_backward: Collection[Node],
    for_weight: Collection[Node],
    seconds: Callable[[Node], float],
) -> tuple[int, ...]:
    """Return what `assemble` would give, without building it: ns of F, B, W and BW, bytes held for B and W.

    Parameters
    ----------
    values, for_backward, for_weight
        As for `assemble`.
    seconds
        Time of a call.
    """
    handover = _Handover.of(values, for_backward, for_weight)
    input_grads, weight_grads = values.input_grads.values(), values.weight_grads.values()
    phases = (
        ([*values.results, *handover.made], ()),
        ([*input_grads, *handover.from_backward], for_backward),
        (handover.late_grads.values(), for_weight),
        ([*input_grads, *weight_grads], for_backward),
    )
    times = [round(1e9 * sum(map(seconds, leaves(results, kept)[1]))) for results, kept in phases]
    held = _held_bytes(values, [*handover.made, *handover.kept])
    return (*times, held, _held_bytes(values, handover.read_by_weight))


@dataclass(frozen=True)
class _Handover:
    """What each phase takes and leaves; every sequence is in graph order.

    Attributes
    ----------
    made, kept
        What F leaves for B: results of F, and arguments of F as they are.
    pool
        What B and BW take their arguments from: tangents, then what F leaves.
    read_by_weight
        What W reads, or finds made by B as a parameter's gradient.
    from_backward, carried
        The same in two parts: what B computes, and what it passes on out of its pool.
    late_grads
        Name of a parameter -> its gradient, where W computes it.
    input_args, weight_args, full_args
        The arguments of B, W and BW.
    """

    made: Sequence[Node]
    kept: Sequence[Node]
    pool: Sequence[Node]
    read_by_weight: Sequence[Node]
    from_backward: Sequence[Node]
    carried: Sequence[Node]
    late_grads: Mapping[str, Node]
    input_args: Sequence[Node]
    weight_args: Sequence[Node]
    full_args: Sequence[Node]

    @staticmethod
    def of(values: StageValues, for_backward: Collection[Node], for_weight: Collection[Node]) -> _Handover:
        """Follow the gradients back to what the cuts keep."""
        input_grads, weight_grads = values.input_grads.values(), values.weight_grads
        weight_reads, _ = leaves(weight_grads.values(), for_weight)
        input_reads, _ = leaves([*input_grads, *weight_reads], for_backward)
        full_reads, _ = leaves([*input_grads, *weight_grads.values()], for_backward)
        from_forward = values.ordered((input_reads | full_reads) - set(values.tangents))
        made = [n for n in from_forward if not _is_unchanged_argument(values, n)]
        kept = [n for n in from_forward if _is_unchanged_argument(values, n)]
        pool = [*values.tangents, *made, *kept]
        read_by_weight = values.ordered(weight_reads)
        from_backward = [n for n in read_by_weight if n not in pool]
        late_grads = {name: grad for name, grad in weight_grads.items() if grad not in weight_reads}
        return _Handover(
            made=made,
            kept=kept,
            pool=pool,
            read_by_weight=read_by_weight,
            from_backward=from_backward,
            carried=[n for n in read_by_weight if n in pool],
            late_grads=late_grads,
            input_args=values.ordered(leaves([*input_grads, *from_backward], for_backward)[0]),
            weight_args=values.ordered(leaves(late_grads.values(), for_weight)[0]),
            full_args=values.ordered(full_reads),
        )


def _is_unchanged_argument(values: StageValues, node: Node) -> bool:
    """Return whether the caller's own argument can be kept: not if F changes it."""
    return node in values.arguments and values.arguments[node] not in values.mutated


def _graphs(values: StageValues, handover: _Handover) -> Graphs:
    """Build the graphs; the backward waits for what it gathers again only where that is used."""
    joint, input_grads = values.stage.joint, values.input_grads.values()
    again = {n for n in values.nodes if facts(n.target).wait and n not in values.late}
    forward = boxed(
        joint.module,
        [joint.arguments[i] for i in range(len(values.stage.values))],
        [*values.results, *handover.made],
        "forward",
        copies=[joint.arguments[i] for i in values.mutated],
        unread=_unread(values),
    )
    backward_input = boxed(
        joint.module,
        handover.input_args,
        [*input_grads, *handover.from_backward],
        "backward_input",
        deferred=again,
    )
    backward_weight = boxed(
        joint.module,
        handover.weight_args,
        list(handover.late_grads.values()),
        "backward_weight",
        deferred=again,
    )
    full_backward = boxed(
        joint.module,
        handover.full_args,
        [*input_grads, *values.weight_grads.values()],
        "full_backward",
        deferred=again,
    )
    return Graphs(forward, backward_input, backward_weight, full_backward)


def _unread(values: StageValues) -> list[Node]:
    """Return calls that F makes though nothing reads them.

    Random draws, without which later masks would differ from eager's, and the model's checks of its data.
    """
    read = ancestors([*values.results, *values.input_grads.values(), *values.weight_grads.values()])
    early = [n for n in values.nodes if n.op == "call_function" and n not in read and n not in values.late]
    return [node for node in early if is_random(node) or is_check(node.target)]


def _call_layout(values: StageValues, handover: _Handover) -> CallLayout:
    in_pool: Callable[[Node], int] = handover.pool.index
    for_weight = [*handover.from_backward, *handover.carried]
    late = handover.late_grads
    return CallLayout(
        forward_kept=tuple(values.arguments[n] for n in handover.kept),
        input_uses=tuple(map(in_pool, handover.input_args)),
        input_kept=tuple(map(in_pool, handover.carried)),
        weight_uses=tuple(map(for_weight.index, handover.weight_args)),
        full_uses=tuple(map(in_pool, handover.full_args)),
        early=tuple(
            (name, for_weight.index(grad)) for name, grad in values.weight_grads.items() if name not in late
        ),
        late=tuple(late),
        full=tuple(values.weight_grads),
    )


def _held_bytes(values: StageValues, nodes: Sequence[Node]) -> int:
    """Return the bytes of the storages that hold ``nodes``, without those that are alive anyway."""
    roots = dict.fromkeys(storage_root(node) for node in nodes if node not in values.free)
    return sum(owned_bytes(root) or 0 for root in roots if root not in values.free)
