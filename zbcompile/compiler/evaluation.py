"""Evaluation: the same pipeline, captured in evaluation mode for batches of one form, forwards alone."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from zbcompile.compiler.call import Batch, names_a_tensor
from zbcompile.compiler.call_form import CallForm
from zbcompile.compiler.load import make_reader, make_runner, planned_starts
from zbcompile.compiler.lower import LoweredPlan, codegen, lower_order
from zbcompile.compiler.runs import Run
from zbcompile.compiler.signature import Signature, Value, largest_divisor
from zbcompile.errors import UsageError
from zbcompile.options import CompileOptions
from zbcompile.passes.capture.capture import capture
from zbcompile.passes.capture.constant_masks import fold_constant_masks
from zbcompile.passes.capture.nested_values import Spec, unflatten
from zbcompile.passes.capture.with_loss import loss_module, with_loss
from zbcompile.passes.profile.measure import edges_of
from zbcompile.passes.split.forward_only import ForwardStage, forward_stages
from zbcompile.passes.split.rewrites import FOLD_MASKS
from zbcompile.passes.split.stage_graphs import StageGraphs
from zbcompile.runtime.group import PipelineGroup
from zbcompile.runtime.spec import PipelineSpec
from zbcompile.schedule.ir import Action, Kind, Schedule
from zbcompile.schedule.problem import Problem

__all__ = ["Evaluation", "StagedForward", "build_forward", "forward_order"]


@dataclass(frozen=True)
class StagedForward:
    """The evaluation stages; the other fields as in `StagedModel`."""

    stages: tuple[ForwardStage, ...]
    result_spec: Spec
    result_ports: tuple[tuple[int, int], ...]
    loss: int | None
    metrics: tuple[int, ...]
    read_buffers: Mapping[str, Tensor]

    def rebuild(self, leaves: Sequence[Any]) -> Any:
        """Return the model's own result type from its tensor leaves."""
        return unflatten(self.result_spec, leaves)


class Evaluation:
    """Forwards of one form of call, on the ranks and with the parameters of the trained stages.

    Made by all ranks in the same call.

    Parameters
    ----------
    options, group
        Of the pipeline.
    trained
        Its plan: placement, costs and send mode are kept.
    trained_stages
        Its stages: every evaluation stage runs where its parameters are.
    batch
        The first call of this form.

    Attributes
    ----------
    call
        The form of the call.
    staged
        The stages.
    has_loss_fn
        Whether the loss function is part of the stages: the call has a target.
    runner
        Runs them.
    reader
        Reads their present parameters and buffers.
    """

    def __init__(
        self,
        options: CompileOptions,
        group: PipelineGroup | None,
        trained: LoweredPlan,
        trained_stages: Sequence[StageGraphs],
        batch: Batch,
    ) -> None:
        signature = Signature(batch, _named_in(batch, options))
        values = signature.values(batch)
        if signature.size == 0:
            raise UsageError("the batch is empty", where=signature.names[0], fix="leave the call out")
        self._rows = signature.size // largest_divisor(signature.size, trained.schedule.num_microbatches)
        self.call = CallForm(signature, self._run(signature, values))
        count = self.call.num_microbatches
        loss_fn = options.loss_fn if batch.target is not None else None
        self.has_loss_fn = loss_fn is not None
        held = [(*s.parameters, *s.buffers) for s in trained_stages]
        self.staged = build_forward(
            options.model,
            self.call.example,
            loss_fn,
            held,
            self.call.constants,
            options.fixed_branches,
            options.skip,
        )
        one = trained.comm.one_communicator
        order, problem = forward_order(self.staged.stages, trained.problem, count)
        comm = lower_order(order, problem, one_communicator=one)
        spec = PipelineSpec(self.staged.stages, problem.placement, count, one_communicator=one)
        programs = codegen(comm, problem)
        if group is not None:
            graphs = " ".join(s.signature_hash() for s in self.staged.stages)
            group.agree({"evaluation graphs": graphs, "evaluation programs": "\n".join(programs)})
        self.runner = make_runner(group, spec, programs, planned_starts(comm, problem))
        self.reader = make_reader(with_loss(options.model, options.loss_fn), self.staged.stages)

    def microbatches(self, batch: Batch) -> list[list[Tensor | None]]:
        """Return the flat tensors of each microbatch of a batch of this form."""
        signature = self.call.signature
        return self.call.microbatches(self._run(signature, signature.values(batch)))

    def _run(self, signature: Signature, values: Sequence[Value]) -> Run:
        runs = signature.runs(values, signature.lengths(values, self._rows))
        if len(runs) > 1:
            raise UsageError(
                "an evaluation takes microbatches of one shape",
                given=[f"{len(run.pieces)} of {run.rows} rows" for run in runs],
                fix="call eval() for each shape",
            )
        return runs[0]


def _named_in(batch: Batch, options: CompileOptions) -> CompileOptions:
    """Return options without names of arguments, or of the target, that an evaluation was not given."""

    def given(key: str | int) -> bool:
        return not isinstance(key, str) or names_a_tensor(key, options.model, batch)

    dims = options.batch_dim
    return replace(
        options,
        whole=tuple(filter(given, options.whole)),
        constant=tuple(filter(given, options.constant)),
        batch_dim=dims if isinstance(dims, int) else tuple(pair for pair in dims if given(pair[0])),
    )


def build_forward(
    model: nn.Module,
    microbatch: Batch,
    loss_fn: Callable[..., Tensor] | None,
    held: Sequence[Sequence[str]],
    constant: Collection[int] = (),
    fixed_branches: bool = False,
    skip: Collection[str] = (),
) -> StagedForward:
    """Capture a model in evaluation mode and cut it as the trained stages are cut.

    Parameters
    ----------
    held
        Per trained stage the names of its parameters and buffers.
    constant
        Flat positions of the tensors whose values become part of the graphs.
    fixed_branches
        As for `capture`.
    skip
        Names of rewrites to leave out; no other than `rewrites.FOLD_MASKS` plays a part here.

    Raises
    ------
    CaptureError, CutError
        The model in evaluation mode cannot be captured, or not be cut where the trained one was.
    """
    with _evaluation_mode(model, loss_module(model, loss_fn) or model):
        captured = capture(
            model,
            microbatch.args,
            microbatch.kwargs,
            target=microbatch.target,
            loss_fn=loss_fn,
            constant=constant,
            fixed_branches=fixed_branches,
        )
    if FOLD_MASKS not in skip:
        fold_constant_masks(captured)
    stages = forward_stages(captured, held)
    place = {p.name: (s.index, k) for s in stages for k, p in enumerate(s.outputs) if p.is_result}
    ports = tuple(place[name] for name in captured.results)
    return StagedForward(
        stages, captured.result_spec, ports, captured.loss, captured.metrics, captured.read_buffers
    )


@contextmanager
def _evaluation_mode(*roots: nn.Module) -> Iterator[None]:
    """Put modules into evaluation mode; their own modes return afterwards."""
    modes = {module: module.training for root in roots for module in root.modules()}
    for root in roots:
        root.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def forward_order(
    stages: Sequence[ForwardStage], trained: Problem, num_microbatches: int
) -> tuple[Schedule, Problem]:
    """Return an order of forwards alone, and its problem: stage by stage, each through all microbatches.

    The order is the model's, so nothing can wait in a circle.
    """
    placement = trained.placement
    order: list[list[Action]] = [[] for _ in range(placement.num_ranks)]
    for stage, rank in enumerate(placement.rank_of):
        order[rank] += [Action(Kind.FORWARD, stage, i) for i in range(num_microbatches)]
    edges = tuple(replace(e, has_gradient=False) for e in edges_of(stages))
    profile = replace(trained.profile, edges=edges)
    problem = Problem.of(profile, placement, num_microbatches, transport=trained.transport)
    return Schedule.of(placement, num_microbatches, order), problem
