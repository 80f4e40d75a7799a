"""Forward only: a model captured in evaluation mode -> stages that run F alone, cut like the trained ones.

``Captured + names that each trained stage holds --> tuple[ForwardStage, ...]``. Contract out: stage k reads
no parameter that only other trained stages hold, so that each rank has the trained values of what it runs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from torch import Tensor
from torch.fx import Node

from zbcompile.errors import CutError
from zbcompile.passes.capture.captured import Captured
from zbcompile.passes.collectives import code_for_peers
from zbcompile.passes.joint.replay import Replay
from zbcompile.passes.partition.homes import SameHomes
from zbcompile.passes.partition.partition import StageSource, partition
from zbcompile.passes.split.ports import port_of
from zbcompile.passes.split.stage_graphs import Port, Saved

__all__ = ["ForwardStage", "forward_stages"]


@dataclass(frozen=True)
class ForwardStage:
    """One stage without a backward; it runs where a `StageGraphs` does.

    Attributes
    ----------
    index, inputs, outputs, parameters, buffers, constants
        As in `StageGraphs`.
    replay
        Runs the captured calls.
    code
        Their code, to compare two ranks by.
    trainable
        Empty: no parameter gets a gradient.
    """

    index: int
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    constants: tuple[Tensor, ...]
    replay: Replay
    code: str
    trainable: tuple[str, ...] = ()

    def run_forward(self, state: Mapping[str, Tensor], inputs: list[Tensor]) -> tuple[list[Tensor], None]:
        """Run F; nothing is saved."""
        own = [state[name] for name in (*self.parameters, *self.buffers)]
        return list(self.replay(*own, *self.constants, *inputs)), None

    def run_backward_input(self, saved: Saved, output_grads: list[Tensor | None]) -> NoReturn:
        """Raise CutError: there is no backward."""
        raise self._refusal()

    def run_backward_weight(self, saved: Saved) -> NoReturn:
        """Raise CutError: there is no backward."""
        raise self._refusal()

    def run_full_backward(self, saved: Saved, output_grads: list[Tensor | None]) -> NoReturn:
        """Raise CutError: there is no backward."""
        raise self._refusal()

    def _refusal(self) -> CutError:
        return CutError(f"stage {self.index} was captured for evaluation and has no backward")

    def signature_hash(self) -> str:
        """Return SHA-256 over ports, names and code."""
        parts = repr((self.inputs, self.outputs, self.parameters, self.buffers, self.code))
        return hashlib.sha256(parts.encode()).hexdigest()


def forward_stages(captured: Captured, held: Sequence[Sequence[str]]) -> tuple[ForwardStage, ...]:
    """Cut a model that was captured in evaluation mode.

    Parameters
    ----------
    captured
        The model.
    held
        Per trained stage, the names of its parameters and buffers.

    Raises
    ------
    CutError
        The evaluation graph cannot be cut where the trained one was.
    """
    sources = partition(captured, len(held), split_points=SameHomes(captured, held))
    nodes = {node.name: node for node in captured.module.graph.nodes}
    return tuple(_stage(captured, source, nodes) for source in sources)


def _stage(captured: Captured, source: StageSource, nodes: Mapping[str, Node]) -> ForwardStage:
    roles = source.roles
    return ForwardStage(
        index=source.index,
        inputs=tuple(port_of(wire, nodes[wire.name].meta["val"]) for wire in source.inputs),
        outputs=tuple(port_of(wire, nodes[wire.name].meta["val"]) for wire in source.outputs),
        parameters=tuple(role.name for role in roles if role.kind == "parameter"),
        buffers=tuple(role.name for role in roles if role.kind == "buffer"),
        constants=tuple(captured.constants[role.name] for role in roles if role.kind == "constant"),
        replay=Replay(source.module, captured.functions, live=frozenset(), layouts={}),
        code=code_for_peers(source.module),
    )
