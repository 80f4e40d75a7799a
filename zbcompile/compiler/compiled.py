"""A compiled pipeline: captured, planned, loaded, ready for steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zbcompile.compiler.call import Batch, CallForm
from zbcompile.compiler.evaluation import Evaluation
from zbcompile.compiler.load import Results, join_results, losses_of, make_reader, make_runner, planned_starts
from zbcompile.compiler.lower import LoweredPlan
from zbcompile.compiler.model_guard import ModeGuard, ModelGuard, refuse_inputs_with_gradients
from zbcompile.errors import UsageError
from zbcompile.formats.measured_json import Measured
from zbcompile.options import CompileOptions
from zbcompile.passes import torch_private
from zbcompile.passes.capture.with_loss import with_loss
from zbcompile.passes.split.staged_model import StagedModel
from zbcompile.runtime.gradients import hand_over, parameters_of
from zbcompile.runtime.group import PipelineGroup
from zbcompile.runtime.randomness import draws_random_numbers
from zbcompile.runtime.spec import PipelineSpec, Step
from zbcompile.runtime.stage_modules import Stage

__all__ = ["CompiledPipeline", "StepResult"]


@dataclass(frozen=True)
class StepResult:
    """What a step gives on this process.

    Attributes
    ----------
    losses
        One per microbatch, where the loss is computed; else empty.
    output
        The model's result for the whole batch, or None where this process holds no part of it.
    """

    losses: tuple[Tensor, ...]
    output: Any


class CompiledPipeline:
    """A captured, planned and loaded pipeline."""

    def __init__(
        self,
        options: CompileOptions,
        group: PipelineGroup | None,
        call: CallForm,
        staged: StagedModel,
        plan: LoweredPlan,
        programs: tuple[str, ...],
    ) -> None:
        self.options, self.group, self.call, self.staged = options, group, call, staged
        self.plan, self.programs = plan, programs
        self.trained = with_loss(options.model, options.loss_fn)
        """The module that owns all tensors of the pipeline: the model, and the loss if it has any."""
        self.spec = PipelineSpec(
            staged.stages,
            plan.schedule.placement,
            call.num_microbatches,
            options.seed,
            frozenset(s.index for s in staged.stages if draws_random_numbers(s.graphs.forward)),
            plan.comm.one_communicator,
        )
        starts = planned_starts(plan.comm, plan.problem)
        self.runner = make_runner(options, group, self.spec, programs, starts, owns_group=True)
        self.reader = make_reader(self.trained, staged.stages)
        self.stages = [Stage(s.index, s, staged.captured.state, self.trained) for s in staged.stages]
        self._evaluations: dict[object, Evaluation] = {}
        self.guard, self.mode = ModelGuard(options.model, options.loss_fn), ModeGuard()

    def run_step(self, batch: Batch, number: int, loss_scale: float, keep_results: bool) -> StepResult:
        """Run one step; gradients are handed over at its end."""
        with self.runner.reporting():
            self.mode.check()
            self.guard.check()
            microbatches = self.call.microbatches(batch)
            refuse_inputs_with_gradients(self.call.plan.names, batch.flat()[0])
            state = self.follow_model()
            self.reader.check(state)
            self._check_weights(state)
        step = Step(microbatches, number, loss_scale, keep_results)
        with torch_private.no_autocast():
            gradients = self.runner.run(step, state)
        divisor = self.spec.num_microbatches if self.options.scale_grads else None
        hand_over(gradients, parameters_of(state), divisor)
        output = self._output(step, self.staged, self.options.loss_fn is not None) if keep_results else None
        return StepResult(losses_of(step), output)

    def run_eval(self, batch: Batch) -> StepResult:
        """Run forward only; the first call with a shape captures the model in evaluation mode."""
        with self.runner.reporting():
            self.guard.check(training=False)
        tensors, spec = batch.flat()
        modes = tuple(torch_private.ambient_autocast())
        key = (*((tuple(t.shape), t.dtype) for t in tensors), tuple(spec.paths()), modes)
        found = self._evaluations.get(key)
        if found is None:
            found = self._evaluations[key] = Evaluation(
                self.options, self.group, self.plan, self.staged.stages, batch
            )
        step = found.run(batch)
        return StepResult(losses_of(step), self._output(step, found.staged, found.has_loss_fn))

    def _output(self, step: Step, staged: Results, has_loss_fn: bool) -> Any:
        mean = self.options.scale_grads
        return join_results(step, staged, loss_is_mean=mean, has_loss_fn=has_loss_fn)

    def _check_weights(self, state: Mapping[str, Tensor]) -> None:
        """Refuse to run a stage of this process whose tensors are still on the meta device."""
        for stage in self.staged.stages:
            rank = self.spec.placement.rank_of[stage.index]
            if self.group is not None and rank != self.group.rank:
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
        """Return the last step as measured."""
        return Measured.of(self.runner.actions(), f"measured, torch {torch.__version__}")

    def close(self) -> None:
        """Release the runners."""
        for evaluation in self._evaluations.values():
            evaluation.runner.close()
        self.runner.close()
