"""Trace one stage: its captured forward -> forward and backward in one joint graph, cleaned and rewritten.

``StageSource --> JointStage``. Contract in: a stage of the partition. Contract out: the joint graph gives the
bits of autograd for the stage, under the autocast and grad modes of its calls; every output that takes a
gradient has a *tangent*, torch's word for the argument that is the gradient of an output::

    y = x.mm(w)   -->   y = x.mm(w);  dx = tangent.mm(w.t());  dw = x.t().mm(tangent)

What cleans and rewrites is the list `joint_passes.JOINT_PASSES`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zbcompile.errors import SplitError
from zbcompile.passes import torch_private
from zbcompile.passes.capture.captured import Captured
from zbcompile.passes.capture.collection import collection_paused
from zbcompile.passes.capture.custom_functions import functions_guarded
from zbcompile.passes.joint import joint_passes
from zbcompile.passes.joint.gradient_layouts import GradientLayout
from zbcompile.passes.joint.joint_pass import Observer, StageFacts, run_passes, unobserved
from zbcompile.passes.joint.refusals import explain_split
from zbcompile.passes.joint.replay import Replay
from zbcompile.passes.nodes import value_of
from zbcompile.passes.partition.partition import StageSource

__all__ = ["JointStage", "trace_stage"]


@dataclass(frozen=True)
class JointStage:
    """One stage's joint graph with what is known about its ends.

    Attributes
    ----------
    source
        The stage before differentiation.
    joint
        Its joint graph. Stages of equal structure may share it.
    values
        The fake arguments that it was traced with: parameters, buffers and constants, then inputs.
    """

    source: StageSource
    joint: torch_private.JointGraph
    values: tuple[Tensor, ...]

    @property
    def num_state(self) -> int:
        """How many arguments are parameters, buffers and constants; the inputs come after them."""
        return len(self.source.roles)

    @property
    def gradient_inputs(self) -> frozenset[int]:
        """Positions among the inputs for which the joint graph has a gradient."""
        return frozenset(i - self.num_state for i in self.joint.gradients if i >= self.num_state)


def trace_stage(
    captured: Captured,
    source: StageSource,
    needs_gradient: Sequence[bool],
    live: frozenset[int],
    layouts: Mapping[int, GradientLayout],
    *,
    skip: Collection[str] = (),
    observer: Observer = unobserved,
) -> JointStage:
    """Differentiate one stage.

    Parameters
    ----------
    captured
        The model that the stage is part of.
    source
        The stage.
    needs_gradient
        Per input of the stage, whether a gradient is wanted for it.
    live
        Positions of the outputs that take a gradient.
    layouts
        Output -> layout that its gradient arrives in, where that is not the one of the output.
    skip
        Names of passes to leave out.
    observer
        Called with the traced graph and after each pass.

    Raises
    ------
    SplitError
        An operator has no derivative, a changed buffer carries a gradient, or a parameter's gradient is
        sparse; names the stage and where in the model. Or a pass broke the graph.
    """
    arguments = _fake_arguments(captured, source, needs_gradient)
    with functions_guarded(captured.functions, captured.state):
        joint = _trace(source, Replay(source.module, captured.functions, live, layouts), arguments)
    _refuse_sparse(joint, source)
    state = frozenset(i for i, role in enumerate(source.roles) if role.kind in ("parameter", "buffer"))
    facts = StageFacts(source.index, layouts, state)
    run_passes(joint, facts, joint_passes.JOINT_PASSES, skip, observer)
    return JointStage(source, joint, tuple(arguments))


def _fake_arguments(captured: Captured, source: StageSource, needs_gradient: Sequence[bool]) -> list[Tensor]:
    """Return fake parameters, buffers, constants and inputs, on the devices of the captured graph."""
    mode = torch_private.fake_mode()
    holes = list(source.module.graph.find_nodes(op="placeholder"))
    arguments: list[Tensor] = []
    for role, hole in zip(source.roles, holes, strict=False):
        value = captured.constants[role.name] if role.kind == "constant" else captured.state[role.name]
        device = hole.meta["val"].device
        arguments.append(torch_private.as_fake(mode, value, value.requires_grad, device))
    for hole, need in zip(holes[len(source.roles) :], needs_gradient, strict=True):
        arguments.append(torch_private.as_fake(mode, hole.meta["val"], need))
    return arguments


def _trace(source: StageSource, replay: Replay, arguments: list[Tensor]) -> torch_private.JointGraph:
    replay.train()
    try:
        with torch_private.preserve_node_meta(), collection_paused():
            return torch_private.joint_graph(replay, arguments)
    except torch_private.ChangeCarriesGradient as error:
        position = error.args[0]
        names = [role.name for role in source.roles] + [wire.name for wire in source.inputs]
        raise SplitError(
            f"stage {source.index} changes {names[position]!r} to a value that carries a gradient",
            fix="change it under torch.no_grad() or from a detached value",
        ) from error
    except Exception as error:
        raise explain_split(error, source.index, replay) from error


def _refuse_sparse(joint: torch_private.JointGraph, source: StageSource) -> None:
    for position, gradient in joint.gradients.items():
        made = value_of(gradient)
        if made is not None and made.layout != torch.strided and position < len(source.roles):
            raise SplitError(
                f"the gradient of {source.roles[position].name} is sparse",
                where=f"stage {source.index}",
                fix="make it dense (sparse=False): sums and messages are of dense gradients",
            )
