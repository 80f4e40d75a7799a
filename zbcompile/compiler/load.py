"""Loading programs into runners, and what a step leaves into results: for training and evaluation alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from zbcompile.errors import ShapeError
from zbcompile.passes.capture.nested_values import Spec
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

__all__ = [
    "Results",
    "Starts",
    "join",
    "join_metrics",
    "join_results",
    "losses_of",
    "make_reader",
    "make_runner",
    "planned_starts",
]

Starts = Mapping[tuple[Kind, int, int], int]
"""Planned start in ns by kind, stage and microbatch."""


class OwnsTensors(Protocol):
    """A stage that names the tensors it runs with."""

    @property
    def parameters(self) -> tuple[str, ...]: ...
    @property
    def buffers(self) -> tuple[str, ...]: ...


class Results(Protocol):
    """Where the leaves of the result come from: (stage, output position) each; which are loss and metrics."""

    @property
    def result_ports(self) -> tuple[tuple[int, int], ...]: ...
    @property
    def result_spec(self) -> Spec: ...
    @property
    def loss(self) -> int | None: ...
    @property
    def metrics(self) -> tuple[int, ...]: ...
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
    return DistributedRunner(group, spec, programs[group.pipeline_rank], device)


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


def join_results(
    steps: Sequence[Step],
    staged: Results,
    *,
    weights: Sequence[float] | None,
    has_loss_fn: bool,
    dim: int,
) -> Any:
    """Return the model's result for the whole batch; None where this process lacks a part of it.

    Tensors are joined along the batch, scalars stacked; the loss is the mean or the sum of its parts. With
    a loss function the stages return ``{"loss", "output"}``, and the model's own result is its output.

    Parameters
    ----------
    steps
        The runs of the step.
    staged
        Where the leaves of the result come from.
    weights
        Per run what each of its microbatches counts in the mean; None: the loss is a sum.
    has_loss_fn
        Whether the stages hold a loss function.
    dim
        The batch dimension of results.
    """
    leaves = []
    for k, place in enumerate(staged.result_ports):
        parts = _parts(steps, place)
        if parts is None:
            return None
        is_loss = k == staged.loss and not parts[0].dim()
        leaves.append(_joined_loss(parts, steps, weights) if is_loss else join(parts, dim))
    result = staged.rebuild(leaves)
    return result["output"] if has_loss_fn else result


def join_metrics(steps: Sequence[Step], staged: Results, dim: int) -> dict[str, Tensor]:
    """Return what the loss returns beside it, by name: joined along the batch, scalars stacked."""
    found: dict[str, Tensor] = {}
    names = list(staged.result_spec.paths())
    for k in staged.metrics:
        parts = _parts(steps, staged.result_ports[k])
        if parts is not None:
            found[names[k].removeprefix(".metrics.")] = join(parts, dim)
    return found


def _parts(steps: Sequence[Step], place: tuple[int, int]) -> list[Tensor] | None:
    """Return an output of every microbatch in order, or None where this process does not have it."""
    if any(place not in step.results for step in steps):
        return None
    return [step.results[place][i] for step in steps for i in range(len(step.batch))]


def join(parts: list[Tensor], dim: int) -> Tensor:
    """Return tensors joined along a dimension, scalars stacked."""
    if not parts[0].dim():
        return torch.stack(parts)
    dim = dim % parts[0].dim() if -parts[0].dim() <= dim < parts[0].dim() else 0
    others = [[n for d, n in enumerate(part.shape) if d != dim] for part in parts]
    if any(sizes != others[0] for sizes in others):
        raise ShapeError(
            "results of the microbatches differ in shape: they cannot be joined",
            needed=f"equal sizes but in dimension {dim}",
            given=", ".join(str(list(part.shape)) for part in parts),
            fix="call step without return_outputs, or let the model pad its result to one size",
        )
    return torch.cat(parts, dim)


def _joined_loss(parts: list[Tensor], steps: Sequence[Step], weights: Sequence[float] | None) -> Tensor:
    stacked = torch.stack(parts)
    if weights is None:
        return stacked.sum()
    each = [weight for weight, step in zip(weights, steps, strict=True) for _ in step.batch]
    if any(weight != 1.0 for weight in each):
        stacked = stacked * torch.tensor(each, dtype=stacked.dtype, device=stacked.device)
    return stacked.mean()


def _device(stages: Sequence[RunnableStage]) -> torch.device:
    for stage in stages:
        for port in (*stage.inputs, *stage.outputs):
            device: torch.device = port.device
            return device
    return torch.device("cpu")
