"""A compiled pipeline: captured, planned, loaded, ready for steps."""

from __future__ import annotations

import contextlib
import hashlib
import json
import reprlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zbcompile.compiler.call import Batch, constant_values, name_of
from zbcompile.compiler.checkpoint import own_names
from zbcompile.compiler.evaluation import Evaluation
from zbcompile.compiler.form_table import FormTable
from zbcompile.compiler.forms import TrainingForm
from zbcompile.compiler.job import check_frozen, check_replicas
from zbcompile.compiler.kept_gradients import KeptGradients
from zbcompile.compiler.load import join, join_metrics, join_results, losses_of, make_reader
from zbcompile.compiler.lower import LoweredPlan
from zbcompile.compiler.model_guard import ModeGuard, ModelGuard
from zbcompile.compiler.part_rules import check_copies, parts_of
from zbcompile.compiler.peers import outside_peers
from zbcompile.compiler.runs import Run
from zbcompile.compiler.sharding import Shards, refuse_dtensors
from zbcompile.compiler.sharing import share_values, tell_evaluation
from zbcompile.compiler.signature import described
from zbcompile.compiler.unreduced import Unreduced
from zbcompile.compiler.updates import Updates
from zbcompile.compiler.wrapped import Wrappers
from zbcompile.errors import UsageError
from zbcompile.formats.measured_json import Measured
from zbcompile.options import CompileOptions
from zbcompile.passes import torch_private
from zbcompile.passes.capture.with_loss import with_loss
from zbcompile.passes.split.stage_graphs import StageGraphs
from zbcompile.passes.split.staged_model import StagedModel
from zbcompile.runtime.distributed_runner import DistributedRunner
from zbcompile.runtime.gradients import GradientSums, divided, hand_over, parameters_of, run_hooks
from zbcompile.runtime.group import PipelineGroup
from zbcompile.runtime.kept_buffers import KeptBuffers
from zbcompile.runtime.local_runner import LocalRunner
from zbcompile.runtime.spec import PipelineSpec, Step
from zbcompile.runtime.stage_modules import Stage

__all__ = ["MAX_EVALUATIONS", "CompiledPipeline", "StepResult"]

MAX_EVALUATIONS = 8
"""Forms of evaluation batches that stay compiled."""


@dataclass(frozen=True)
class StepResult:
    """What a step gives on this process.

    Attributes
    ----------
    losses
        One per microbatch, where the loss is computed; else empty.
    output
        The model's result for the whole batch, or None where this process holds no part of it.
    metrics
        What the loss returns beside it, joined over the microbatches; empty where it is not computed.
    """

    losses: tuple[Tensor, ...]
    output: Any
    metrics: Mapping[str, Tensor]


class _Void(Exception):
    """The step does not count."""


class CompiledPipeline:
    """A captured, planned and loaded pipeline.

    Parameters
    ----------
    options, group
        What was asked for; the ranks, or None where all run in this process.
    form
        The form of the batch that it was compiled for.

    Attributes
    ----------
    trained
        The module that owns all tensors of the pipeline: the model, and the loss if it has any.
    step_number
        Number of the next step.
    updates
        Steps of optimizers that may not be validated yet.
    parts
        Which tensors of this process are parts of larger ones.
    """

    def __init__(self, options: CompileOptions, group: PipelineGroup | None, form: TrainingForm) -> None:
        self.options, self.first = options, form
        self.trained = with_loss(options.model, options.loss_fn)
        self.reader = make_reader(self.trained, self.staged.stages)
        self._replicas_checked = self._copies_checked = False
        self._shards = self._sharded_stages(group)
        self._outside = outside_peers(self.staged, group)
        self.parts = parts_of(options, self.trained, self._own_names(group), group, self._outside)
        state = self.reader.read()
        self.stages = [Stage(s.index, s, state, self.trained) for s in self.staged.stages]
        self.guard, self.mode = ModelGuard(options.model, options.loss_fn), ModeGuard()
        self._wrappers = Wrappers()
        self._kept_gradients, self._unreduced = KeptGradients(), Unreduced()
        self.step_number = 0
        self.updates = Updates()
        self._evaluations: dict[str, Evaluation] = {}
        self._attach(group)

    def run_on(self, group: PipelineGroup | None) -> None:
        """Run on the ranks of a group from now on, which come here together, or all ranks in this process."""
        self.first.run_on(group)
        self._attach(group)

    def _sharded_stages(self, group: PipelineGroup | None) -> Shards | None:
        """Shard the weights of this process's stages over its replicas, where they share them."""
        if group is None or len(group.shards) == 1:
            return None
        state, mine = self.reader.read(), self._own_stages(group)
        self._check_replicas(group, state)
        own = {s.index: parameters_of({name: state[name] for name in s.parameters}) for s in mine}
        return Shards(self.trained, group, own, self.staged.captured.device)

    def _own_stages(self, group: PipelineGroup | None) -> list[StageGraphs]:
        """Return the stages of this process."""
        rank_of = self.first.spec.placement.rank_of
        return [s for s in self.staged.stages if group is None or rank_of[s.index] == group.pipeline_rank]

    def _own_names(self, group: PipelineGroup | None) -> list[str]:
        local = [stage.index for stage in self._own_stages(group)]
        first = group is None or group.pipeline_rank == 0
        return own_names(self.trained.state_dict(keep_vars=True), self.staged.stages, local, first)

    def _own_parameters(self, group: PipelineGroup, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: state[name] for stage in self._own_stages(group) for name in stage.parameters}

    def refuse_outside(self, what: str) -> None:
        """Refuse a decision of all ranks where stages have peers beside them. Raises `UsageError`."""
        if self._outside:
            raise UsageError(
                f"{what} decides for these ranks alone, and their peers would decide otherwise",
                where="mesh",
                given=self._outside,
                fix="give compile() mesh= with dimensions pp and tp in place of group= and plan_group=",
            )

    def _attach(self, group: PipelineGroup | None) -> None:
        self.group = group
        self._forms, self._last = FormTable(self.options, group, self.first), self.first
        self._forms.before_compiling = self.updates.settle_within_call
        self._kept = KeptBuffers(self.first.changed_buffers(self.runner.rank))
        if group is not None:
            group.calls.own_state = self._own_state
            group.calls.on_settled = self._follow_others
        self.runner.connect()

    def run_order(self, plan: LoweredPlan, programs: tuple[str, ...]) -> None:
        """Run another order of the same stages on the same ranks from now on; all ranks come here."""
        self.first.take(plan, programs)
        self.first.run_on(self.group)
        self.runner.connect()

    @property
    def staged(self) -> StagedModel:
        """The stages of the first form."""
        return self.first.staged

    @property
    def plan(self) -> LoweredPlan:
        """The order of the first form."""
        return self.first.plan

    @property
    def programs(self) -> tuple[str, ...]:
        """The programs of the first form."""
        return self.first.programs

    @property
    def spec(self) -> PipelineSpec:
        """What runs in the first form."""
        return self.first.spec

    @property
    def runner(self) -> LocalRunner | DistributedRunner:
        """What runs it."""
        return self.first.runner

    @property
    def num_replicas(self) -> int:
        """How many pipelines run the same weights on other rows, this one included."""
        return 1 if self.group is None else len(self.group.replicas)

    @property
    def unreduced_steps(self) -> int:
        """Steps whose gradients have not been summed over the replicas yet."""
        return self._unreduced.steps

    def refuse_unreduced(self, asked: str) -> None:
        """Refuse a call for which gradients must be summed over the replicas. Raises `UsageError`."""
        if self.unreduced_steps:
            raise UsageError(
                f"gradients of {self.unreduced_steps} steps wait for their sum over the replicas",
                where=asked,
                fix="leave reduce=False out of the step before, or forget them with pipeline.zero_grad()",
            )

    def forget_unreduced(self) -> None:
        """Forget their gradients. All ranks do."""
        self._unreduced = Unreduced()

    def run_step(
        self,
        batch: Batch,
        loss_scale: float,
        keep_results: bool,
        share_losses: bool = False,
        reduce: bool = True,
    ) -> StepResult:
        """Run one step. Gradients, buffers and the step's number change together at its end, or not.

        Where the weights that it began with do not stand, it is run again with those that do.
        """
        result = self._run_step(batch, loss_scale, keep_results, share_losses, reduce)
        if result is None:
            self.updates.leave()
            result = self._run_step(batch, loss_scale, keep_results, share_losses, reduce)
            assert result is not None
        return result

    def _run_step(
        self, batch: Batch, loss_scale: float, keep_results: bool, share_losses: bool, reduce: bool
    ) -> StepResult | None:
        """Run one step; return None, on all ranks alike, if it does not count (`Step.trial`)."""
        waits = self.num_replicas > 1 and not reduce
        trial = self.updates.current
        with self.runner.call(f"step {self.step_number}") as call:
            with call.checks():
                self.mode.check()
                self.guard.check()
                agreed = {
                    "share_losses": share_losses,
                    "loss_scale": loss_scale,
                    "step_number": self.step_number,
                    "reduce": reduce,
                    "steps before the reduction": self.unreduced_steps,
                    "calls of optimizer_step": self.updates.state,
                }
                if trial is not None:
                    trial.check_untouched()
                parts = self._forms.parts(batch, agreed)
                count = sum(len(run.pieces) for _, run in parts)
                self._unreduced.check(count, loss_scale)
                weights = self._weights([run for _, run in parts])
                steps = self._steps(parts, weights, loss_scale, keep_results)
                steps[-1].ends_sums = not waits
                self._kept.watch(b for form, _ in parts for b in form.changed_buffers(self.runner.rank))
                state = self.follow_model()
                self._check_shards(state)
                self.reader.check(state)
                self._check_weights(state)
                self._kept_gradients.check(self.plan, self.spec, self.runner.rank, state)
                self._check_read_buffers(self.staged.captured.read_buffers)
                if dist.is_initialized():
                    self._wrappers.refuse(self.trained)
                if self.group is not None:
                    self._check_replicas(self.group, state)
                    self._check_copies(self.group)
                    check_frozen(self.group, self._own_parameters(self.group, state))
                    if waits or self._shards is not None:
                        # Nothing else makes the replicas meet before they have changed something.
                        self.group.barrier("the beginning of the step")
            if trial is not None:
                trial.before_forward()
            try:
                with self._kept.keep(state):
                    with torch_private.no_autocast():
                        for (form, _), step in zip(parts, steps, strict=True):
                            self._last = form
                            self._share(form.runner)
                            sums = form.runner.run(step, state)
                    if trial is not None and trial.void(wait=True):
                        raise _Void
                    divisor = count * self.num_replicas if self.options.scale_grads else None
                    gradients = divided(sums, parameters_of(state), divisor)
                    result = self._result(steps, weights, keep_results, share_losses)
                    later = self._unreduced.after(steps[-1].sums, count, loss_scale) if waits else Unreduced()
                    call.finish(lambda: self._take_effect(gradients, later))
            except _Void:
                assert trial is not None
                call.finish(trial.settle)
                return None
        return result

    def _take_effect(self, gradients: Sequence[tuple[nn.Parameter, Tensor]], later: Unreduced) -> None:
        hand_over(gradients)
        self._unreduced = later
        self._kept.release()
        self.step_number += 1
        self.updates.current = None
        run_hooks(parameter for parameter, _ in gradients)

    def _steps(
        self,
        parts: Sequence[tuple[TrainingForm, Run]],
        weights: Sequence[float],
        loss_scale: float,
        keep_results: bool,
    ) -> list[Step]:
        """Return what every part of a step runs with: microbatches count by their weights."""
        steps: list[Step] = []
        sums: dict[int, GradientSums] = dict(self._unreduced.sums)
        # Microbatches count over all replicas, as those of one process that has all rows would.
        first = 0 if self.group is None else self.group.replica * sum(len(run.pieces) for _, run in parts)
        for (form, run), weight in zip(parts, weights, strict=True):
            metrics = frozenset(form.staged.result_ports[k] for k in form.staged.metrics)
            microbatches = form.call.microbatches(run)
            steps.append(
                Step(
                    microbatches,
                    self.step_number,
                    loss_scale * weight,
                    keep_results,
                    metrics,
                    first,
                    sums,
                    ends_sums=False,
                    trial=self.updates.current,
                )
            )
            first += len(microbatches)
        return steps

    def _weights(self, runs: Sequence[Run]) -> list[float]:
        """Return per run what a microbatch counts: its rows over the mean, for a loss that is a mean."""
        if not self.options.scale_grads:
            return [1.0] * len(runs)
        rows = sum(run.rows * len(run.pieces) for run in runs)
        count = sum(len(run.pieces) for run in runs)
        return [run.rows * count / rows for run in runs]

    def _result(
        self,
        steps: Sequence[Step],
        weights: Sequence[float],
        keep_results: bool,
        share_losses: bool,
    ) -> StepResult:
        """Return the losses, metrics and results of a step's runs, joined."""
        staged = self.staged
        losses = tuple(loss for step in steps for loss in losses_of(step))
        metrics = join_metrics(steps, staged, self.options.joined_dim)
        if share_losses and self.group is not None:
            losses, metrics = self._shared(self.group, losses, metrics)
        output = None
        if keep_results:
            output = join_results(
                steps,
                staged,
                weights=weights if self.options.scale_grads else None,
                has_loss_fn=self.options.loss_fn is not None,
                dim=self.options.joined_dim,
            )
        return StepResult(losses, output, metrics)

    def _shared(
        self, group: PipelineGroup, losses: Sequence[Tensor], metrics: Mapping[str, Tensor]
    ) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        """Return losses and metrics of all ranks on every rank, one replica's after the other's."""
        staged, rank_of = self.staged, self.spec.placement.rank_of
        wanted = (*staged.metrics, *(() if staged.loss is None else (staged.loss,)))
        found = {f"loss {i}": loss for i, loss in enumerate(losses)}
        found |= {f"metric {name}": value for name, value in metrics.items()}
        sources = sorted({rank_of[staged.result_ports[k][0]] for k in wanted})
        everyone: list[Tensor] = []
        joined: dict[str, list[Tensor]] = {}
        for pipeline, source in product(group.pipelines, sources):
            for name, value in share_values(group, pipeline, source, found).items():
                if name.startswith("loss "):
                    everyone.append(value)
                else:
                    joined.setdefault(name.removeprefix("metric "), []).append(value)
        dim = self.options.joined_dim
        return tuple(everyone), {name: join(parts, dim) for name, parts in joined.items()}

    def _share(self, runner: LocalRunner | DistributedRunner) -> None:
        if isinstance(runner, DistributedRunner) and self._shards is not None:
            runner.sharded = self._shards.stages

    def _check_shards(self, state: Mapping[str, Tensor]) -> None:
        if self._shards is not None:
            self._shards.check(state)
        else:
            refuse_dtensors(state)

    def _check_replicas(self, group: PipelineGroup, state: Mapping[str, Tensor]) -> None:
        """Compare the weights that replicas begin with, before the first step."""
        if not self._replicas_checked:
            mine = self._own_stages(group)
            names = dict.fromkeys(name for stage in mine for name in (*stage.parameters, *stage.buffers))
            check_replicas(group, {name: state[name] for name in names})
        self._replicas_checked = True

    def _check_copies(self, group: PipelineGroup) -> None:
        """Compare the copies that processes along the mesh's further dimensions begin with, once."""
        if not self._copies_checked:
            state = self.trained.state_dict(keep_vars=True)
            own = {name: state[name] for name in self._own_names(group) if not state[name].is_meta}
            check_copies(group, self.parts, own)
        self._copies_checked = True

    def run_eval(self, batch: Batch) -> StepResult:
        """Run forward only; the first call with a shape captures the model in evaluation mode."""
        with self.runner.call("the evaluation") as call, self._gathered():
            with call.checks():
                self.guard.check(training=False)
                found = self._evaluation(batch)
                microbatches = found.microbatches(batch)
                state = found.reader.read()
                self._check_read_buffers(found.staged.read_buffers)
            step = Step(microbatches)
            with torch_private.no_autocast():
                found.runner.run(step, state)
            output = join_results(
                [step],
                found.staged,
                weights=[1.0] if self.options.scale_grads else None,
                has_loss_fn=found.has_loss_fn,
                dim=self.options.joined_dim,
            )
        return StepResult(
            losses_of(step), output, join_metrics([step], found.staged, self.options.joined_dim)
        )

    def _gathered(self) -> AbstractContextManager[None]:
        """Have all weights of this process's stages stand in the model, whole."""
        return contextlib.nullcontext() if self._shards is None else self._shards.gathered()

    def _evaluation(self, batch: Batch) -> Evaluation:
        """Return the evaluation of batches like this one; the least recently used one makes room for it."""
        tensors, spec = batch.flat()
        modes = tuple(torch_private.ambient_autocast())
        constants = constant_values(self.options.constant, self.options.model, batch)
        form = repr((*map(described, tensors), tuple(spec.paths()), modes, constants))
        key = hashlib.sha256(form.encode()).hexdigest()
        if self.group is not None:
            tell_evaluation(self.group, key, [name_of(path) for path in spec.paths()], tensors)
        found = self._evaluations.pop(key, None)
        if found is None:
            found = Evaluation(self.options, self.group, self.plan, self.staged.stages, batch)
            while len(self._evaluations) >= MAX_EVALUATIONS:
                self._evaluations.pop(next(iter(self._evaluations))).runner.close()
        self._evaluations[key] = found
        return found

    def _own_state(self) -> str:
        """Return what must be equal on all ranks, and may not be when some had finished a refused call."""
        trial = self.updates.state[1]
        return json.dumps([self.step_number, list(self._evaluations), self._forms.names, trial])

    def _follow_others(self, states: Sequence[str]) -> None:
        """Take over the step's number, and keep the forms that all ranks have, in rank 0's order.

        Weights that a rank has done with are on trial nowhere.
        """
        rows = [json.loads(state) for state in states]
        if len({row[3] for row in rows}) > 1:
            self.updates.settle_within_call()
            self.updates.current = None
        self.step_number = max(row[0] for row in rows)
        kept = [key for key in rows[0][1] if all(key in row[1] for row in rows)]
        for key in set(self._evaluations) - set(kept):
            self._evaluations.pop(key).runner.close()
        self._evaluations = {key: self._evaluations[key] for key in kept}
        self._forms.keep_common([row[2] for row in rows])

    def _check_read_buffers(self, read: Mapping[str, Tensor]) -> None:
        """Refuse another value of a buffer that Python code of the model read when it was captured."""
        for name, value in read.items():
            now = self.trained.get_buffer(name)
            if not now.is_meta and not torch.equal(now.cpu(), value.cpu()):
                raise UsageError(
                    "the model's code read a buffer when it was compiled, which has another value now",
                    where=name,
                    needed=reprlib.repr(value.tolist()),
                    given=reprlib.repr(now.tolist()),
                    fix="compile another pipeline, or compute with the buffer instead of reading it",
                )

    def _check_weights(self, state: Mapping[str, Tensor]) -> None:
        """Refuse to run a stage of this process whose tensors are still on the meta device."""
        for stage in self.staged.stages:
            rank = self.spec.placement.rank_of[stage.index]
            if self.group is not None and rank != self.group.pipeline_rank:
                continue
            empty = [name for name in (*stage.parameters, *stage.buffers) if state[name].is_meta]
            if empty:
                raise UsageError(
                    f"stage {stage.index} has no weights yet: {len(empty)} tensors are on the meta device",
                    where=empty[0],
                    fix="call stage.materialize(...) for every stage in pipeline.local_stages",
                )

    @property
    def loss_has_gradient(self) -> bool:
        """Whether anything that is trained has a part in the loss."""
        if self.staged.loss is None:
            return False
        stage, position = self.staged.result_ports[self.staged.loss]
        return bool(self.staged.stages[stage].outputs[position].has_gradient)

    def follow_model(self) -> dict[str, Tensor]:
        """Return the model's present tensors, which the stages hold from now on."""
        state = self.reader.read()
        for stage in self.stages:
            stage.follow(state)
        return state

    def timeline(self) -> Measured:
        """Return the last step as measured; of a step whose microbatches differ in shape its last run."""
        return Measured.of(self._last.runner.actions(), f"measured, torch {torch.__version__}")

    @property
    def failed(self) -> str | None:
        """Why no further step can run, or None."""
        return None if self.group is None else self.group.watchdog.failed

    def close(self) -> None:
        """Release the runners, and leave the pipeline's process groups."""
        for evaluation in self._evaluations.values():
            evaluation.runner.close()
        self._forms.close()
        if self._shards is not None:
            self._shards.close()
        if self.group is not None:
            self.group.close()
