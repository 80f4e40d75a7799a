"""The values of one stage's joint graph, sorted: what the two cuts and the assembly of the graphs share."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch.fx import Node

from zbcompile.errors import SplitError
from zbcompile.passes.joint.trace import JointStage

__all__ = ["StageValues"]


@dataclass(frozen=True)
class StageValues:
    """Sets and lists of nodes of one joint graph.

    Attributes
    ----------
    stage
        The stage and its joint graph.
    nodes
        Arguments and calls, in graph order.
    arguments
        Argument -> position among parameters, buffers, constants and inputs.
    tangents
        Gradients of the outputs that take one, in output order.
    mutated
        Positions of the arguments that F changes; they are buffers.
    results
        What F returns to the caller: outputs, then the new values of ``mutated``.
    input_grads
        Position of an input -> its gradient.
    weight_grads
        Name of a parameter -> its gradient.
    late
        Tangents and everything that is computed from them.
    free
        Arguments that are alive anyway: state that F does not change, and the batch.
    """

    stage: JointStage
    nodes: Sequence[Node]
    arguments: Mapping[Node, int]
    tangents: Sequence[Node]
    mutated: Sequence[int]
    results: Sequence[Node]
    input_grads: Mapping[int, Node]
    weight_grads: Mapping[str, Node]
    late: Collection[Node]
    free: Collection[Node]

    @staticmethod
    def of(stage: JointStage) -> StageValues:
        """Sort the values of a joint graph.

        Raises
        ------
        SplitError
            The stage changes an argument in place that is not a buffer.
        """
        joint, roles, count = stage.joint, stage.source.roles, stage.num_state
        _check_mutations(stage)
        mutated = sorted(joint.mutations)
        outputs = [joint.outputs[i] for i in range(len(stage.source.outputs))]
        tangents = [joint.tangents[i] for i in sorted(joint.tangents)]
        nodes = [n for n in joint.module.graph.nodes if n.op in ("placeholder", "call_function")]
        return StageValues(
            stage=stage,
            nodes=nodes,
            arguments={node: i for i, node in joint.arguments.items()},
            tangents=tangents,
            mutated=mutated,
            results=[*outputs, *(joint.mutations[i] for i in mutated)],
            input_grads={i: joint.gradients[count + i] for i in sorted(stage.gradient_inputs)},
            weight_grads={
                roles[i].name: gradient
                for i, gradient in sorted(joint.gradients.items())
                if i < count and roles[i].kind == "parameter"
            },
            late=_descendants(nodes, tangents),
            free=_free(stage),
        )

    def ordered(self, chosen: Collection[Node]) -> list[Node]:
        """Return the chosen nodes in graph order."""
        return [node for node in self.nodes if node in chosen]


def _check_mutations(stage: JointStage) -> None:
    for position in stage.joint.mutations:
        role = stage.source.roles[position] if position < stage.num_state else None
        if role is None or role.kind != "buffer":
            name = role.name if role else stage.source.inputs[position - stage.num_state].name
            raise SplitError(f"stage {stage.source.index} changes {name} in place", where=name)


def _descendants(nodes: Sequence[Node], roots: Collection[Node]) -> set[Node]:
    """Return ``roots`` and everything that is computed from them."""
    found = set(roots)
    for node in nodes:
        if any(argument in found for argument in node.all_input_nodes):
            found.add(node)
    return found


def _free(stage: JointStage) -> set[Node]:
    """Return the arguments that are alive anyway: unchanged state, constants, the batch."""
    free = set()
    for position, node in stage.joint.arguments.items():
        inner = position - stage.num_state
        if inner < 0:
            if position not in stage.joint.mutations:
                free.add(node)
        elif stage.source.inputs[inner].source[0] == "batch":
            free.add(node)
    return free
