"""Forward only: a model captured in evaluation mode -> stages that run F alone, cut like the trained ones.

``Captured + parameters of each trained stage --> tuple[ForwardStage]``. Contract: stage k reads no parameter
that only other trained stages hold, so that each rank has the trained values of what it runs. Among the cuts
that keep this, the one with the fewest bytes crossing is taken.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from zbcompile.errors import CutError
from zbcompile.passes.aliasing import StorageGroups
from zbcompile.passes.capture.captured import Captured
from zbcompile.passes.joint.replay import Replay
from zbcompile.passes.partition.auxiliary import auxiliary_nodes
from zbcompile.passes.partition.cut_points import CutPoint
from zbcompile.passes.partition.partition import StageSource, Wire, partition
from zbcompile.passes.split.stage_graphs import Port

__all__ = ["ForwardStage", "forward_stages"]


@dataclass(frozen=True)
class ForwardStage:
    """One stage without a backward. Parameters, buffers and ports as in ``StageGraphs``."""

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
        """F; nothing is saved."""
        own = [state[name] for name in (*self.parameters, *self.buffers)]
        return list(self.replay(*own, *self.constants, *inputs)), None

    def run_backward_input(self, saved: list[Any], output_grads: list[Tensor | None]) -> Any:
        """There is none."""
        raise self._refusal()

    def run_backward_weight(self, saved: list[Any]) -> Any:
        """There is none."""
        raise self._refusal()

    def run_full_backward(self, saved: list[Any], output_grads: list[Tensor | None]) -> Any:
        """There is none."""
        raise self._refusal()

    def _refusal(self) -> CutError:
        return CutError(f"stage {self.index} was captured for evaluation and has no backward")

    def signature_hash(self) -> str:
        """SHA-256 over ports, names and code."""
        parts = repr((self.inputs, self.outputs, self.parameters, self.buffers, self.code))
        return hashlib.sha256(parts.encode()).hexdigest()


def forward_stages(captured: Captured, held: Sequence[Sequence[str]]) -> tuple[ForwardStage, ...]:
    """``held[k]``: names of the parameters and buffers of trained stage k.

    Raises `CutError` when the evaluation graph cannot be cut where the trained one was.
    """
    policy = _SameHomes(captured, held)
    sources = partition(captured, len(held), split_points=policy)
    ports = {node.name: node for node in captured.module.graph.nodes}
    return tuple(_stage(captured, source, ports) for source in sources)


class _SameHomes:
    """Cuts behind everything that earlier stages' parameters are used in, before anything of later ones."""

    def __init__(self, captured: Captured, held: Sequence[Sequence[str]]) -> None:
        graph = captured.module.graph
        auxiliary = auxiliary_nodes(captured, StorageGroups(graph))
        main = [n for n in graph.nodes if n.op == "call_function" and n not in auxiliary]
        self.end = len(main)
        position = {node: k for k, node in enumerate(main)}
        homes: dict[str, list[int]] = {}
        for stage, names in enumerate(held):
            for name in names:
                homes.setdefault(name, []).append(stage)
        self.uses: list[tuple[int, int, int]] = []
        for hole in graph.find_nodes(op="placeholder"):
            role = captured.roles[hole.name]
            if role.kind in ("parameter", "buffer") and role.name in homes:
                at = homes[role.name]
                self.uses += [(min(at), max(at), position[u]) for u in hole.users if u in position]

    def __call__(self, cuts: tuple[CutPoint, ...], num_stages: int) -> list[CutPoint]:
        chosen: list[CutPoint] = []
        for border in range(num_stages - 1):
            low = max([p + 1 for _, last, p in self.uses if last <= border], default=1)
            high = min([p for first, _, p in self.uses if first > border], default=self.end)
            low = max(low, chosen[-1].position + 1 if chosen else 1)
            fitting = [cut for cut in cuts if low <= cut.position <= high]
            if not fitting:
                raise CutError(
                    "the model in evaluation mode cannot be cut where the trained one was",
                    where=f"between stages {border} and {border + 1}",
                    fix="evaluate with the model itself, or choose split_points between modules",
                )
            chosen.append(min(fitting, key=lambda cut: (cut.live_bytes, cut.position)))
        return chosen


def _stage(captured: Captured, source: StageSource, nodes: Mapping[str, Node]) -> ForwardStage:
    names = {kind: tuple(r.name for r in source.roles if r.kind == kind) for kind in ("parameter", "buffer")}
    constants = tuple(captured.constants[r.name] for r in source.roles if r.kind == "constant")
    return ForwardStage(
        source.index,
        tuple(_port(wire, nodes) for wire in source.inputs),
        tuple(_port(wire, nodes) for wire in source.outputs),
        names["parameter"],
        names["buffer"],
        constants,
        Replay(source.module, captured.functions, frozenset()),
        source.module.code,
    )


def _port(wire: Wire, nodes: Mapping[str, Node]) -> Port:
    value = nodes[wire.name].meta["val"]
    assert isinstance(value, torch.Tensor)
    return Port(
        wire.name,
        tuple(int(n) for n in value.shape),
        tuple(int(n) for n in value.stride()),
        value.dtype,
        value.device,
        False,
        wire.source,
        wire.targets,
        wire.is_result,
        wire.is_loss,
    )
