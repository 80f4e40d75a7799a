"""Loading programs into runners, and what a step leaves into results: for training and evaluation alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from zbcompile.errors import ShapeError
from zbcompile.passes.lower.insert_comm import CommSchedule
from zbcompile.runtime.distributed_runner import DistributedRunner
from zbcompile.runtime.group import PipelineGroup
from zbcompile.runtime.local_runner import LocalRunner
from zbcompile.runtime.spec import PipelineSpec, Step
from zbcompile.runtime.stage_modules import StateReader
from zbcompile.runtime.wiring import RunnableStage
from zbcompile.schedule.ir import Kind
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.simulate import simulate

__all__ = ["Results", "Starts", "join_results", "losses_of", "make_reader", "make_runner", "planned_starts"]

Starts = Mapping[tuple[Kind, int, int], int]
"""Planned start in ns by kind, stage and microbatch."""


class OwnsTensors(Protocol):
    """A stage that names the tensors it runs with."""

    @property
    def parameters(self) -> tuple[str, ...]: ...
    @property
    def buffers(self) -> tuple[str, ...]: ...


class Results(Protocol):
    """Where the leaves of the model's result come from: (stage, output position) each; which is the loss."""

    @property
    def result_ports(self) -> tuple[tuple[int, int], ...]: ...
    @property
    def loss(self) -> int | None: ...
    def rebuild(self, leaves: Sequence[Any]) -> Any: ...


def make_runner(
    group: PipelineGroup | None,
    spec: PipelineSpec,
    programs: Sequence[str],
    starts: Starts,
) -> LocalRunner | DistributedRunner:
    """Return a runner of all ranks where they share this process, or of this process's rank."""
    device = _device(spec.stages)
    if group is None:
        return LocalRunner(spec, programs, starts, device)
    return DistributedRunner(group, spec, programs[group.rank], device)


def make_reader(trained: nn.Module, stages: Sequence[OwnsTensors]) -> StateReader:
    """Return a reader of the present parameters and buffers of stages."""
    names = dict.fromkeys(name for s in stages for name in (*s.parameters, *s.buffers))
    return StateReader(trained, list(names))


def planned_starts(comm: CommSchedule, problem: Problem) -> Starts:
    """Return the planned start of every action: ranks in one process take turns by it."""
    timeline = simulate(comm.schedule, problem)
    return {(a.kind, a.stage, a.microbatch): timeline.start[r][k] for r, k, a in comm.schedule.actions()}


def losses_of(step: Step) -> tuple[Tensor, ...]:
    """Return the loss of every microbatch, in order; empty where this process does not compute it."""
    return tuple(step.losses[i] for i in range(len(step.batch))) if step.losses else ()


def join_results(step: Step, staged: Results, *, loss_is_mean: bool, has_loss_fn: bool) -> Any:
    """Return the model's result for the whole batch; None where this process lacks a part of it.

    Tensors are joined along dimension 0, scalars stacked; the loss is the mean or the sum of its parts. With
    a loss function the stages return ``{"loss", "output"}``, and the model's own result is its output.
    """
    leaves = []
    for k, place in enumerate(staged.result_ports):
        parts = step.results.get(place)
        if parts is None:
            return None
        leaves.append(_join([parts[i] for i in range(len(step.batch))], k == staged.loss, loss_is_mean))
    result = staged.rebuild(leaves)
    return result["output"] if has_loss_fn else result


def _join(parts: list[Tensor], is_loss: bool, loss_is_mean: bool) -> Tensor:
    if parts[0].dim():
        shapes = [list(part.shape[1:]) for part in parts]
        if any(shape != shapes[0] for shape in shapes):
            raise ShapeError(
                "results of the microbatches differ in shape: they cannot be joined",
                needed="equal sizes but in dimension 0",
                given=", ".join(str(list(part.shape)) for part in parts),
                fix="call step without return_outputs, or let the model pad its result to one size",
            )
        return torch.cat(parts)
    stacked = torch.stack(parts)
    if not is_loss:
        return stacked
    return stacked.mean() if loss_is_mean else stacked.sum()


def _device(stages: Sequence[RunnableStage]) -> torch.device:
    for stage in stages:
        for port in (*stage.inputs, *stage.outputs):
            device: torch.device = port.device
            return device
    return torch.device("cpu")
