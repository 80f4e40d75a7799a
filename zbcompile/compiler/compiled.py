"""A compiled pipeline: captured, planned, loaded, ready for steps."""

from __future__ import annotations

import hashlib
import json
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zbcompile.compiler.call import Batch, CallForm, constant_values
from zbcompile.compiler.evaluation import Evaluation
from zbcompile.compiler.free_model import without_tensors
from zbcompile.compiler.load import Results, join_results, losses_of, make_reader, make_runner, planned_starts
from zbcompile.compiler.lower import LoweredPlan
from zbcompile.compiler.model_guard import ModeGuard, ModelGuard, refuse_inputs_with_gradients
from zbcompile.errors import UsageError
from zbcompile.formats.measured_json import Measured
from zbcompile.options import CompileOptions
from zbcompile.passes import torch_private
from zbcompile.passes.capture.with_loss import with_loss
from zbcompile.passes.split.staged_model import StagedModel
from zbcompile.runtime.gradients import divided, hand_over, parameters_of, run_hooks
from zbcompile.runtime.group import PipelineGroup
from zbcompile.runtime.kept_buffers import KeptBuffers
from zbcompile.runtime.randomness import draws_random_numbers
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
    """

    losses: tuple[Tensor, ...]
    output: Any


class CompiledPipeline:
    """A captured, planned and loaded pipeline.

    Attributes
    ----------
    trained
        The module that owns all tensors of the pipeline: the model, and the loss if it has any.
    step_number
        Number of the next step.
    """

    def __init__(
        self,
        options: CompileOptions,
        group: PipelineGroup | None,
        call: CallForm,
        staged: StagedModel,
        plan: LoweredPlan,
        programs: tuple[str, ...],
    ) -> None:
        self.options, self.call, self.staged = options, call, without_tensors(staged)
        self.plan, self.programs = plan, programs
        self.trained = with_loss(options.model, options.loss_fn)
        self.spec = PipelineSpec(
            staged.stages,
            plan.schedule.placement,
            call.num_microbatches,
            options.seed,
            frozenset(s.index for s in staged.stages if draws_random_numbers(s.graphs.forward)),
            plan.comm.one_communicator,
            options.gradient_dtype,
        )
        self.reader = make_reader(self.trained, staged.stages)
        state = self.reader.read()
        self.stages = [Stage(s.index, s, state, self.trained) for s in staged.stages]
        self.guard, self.mode = ModelGuard(options.model, options.loss_fn), ModeGuard()
        self.step_number = 0
        self._evaluations: dict[str, Evaluation] = {}
        self.run_on(group)

    def run_on(self, group: PipelineGroup | None) -> None:
        """Run on the ranks of a group from now on, which come here together, or all ranks in this process."""
        self.group = group
        starts = planned_starts(self.plan.comm, self.plan.problem)
        self.runner = make_runner(group, self.spec, self.programs, starts)
        self._kept = KeptBuffers(self._changed_buffers())
        if group is not None:
            group.calls.own_state = self._own_state
            group.calls.on_settled = self._follow_others
        self.runner.connect()

    def run_order(self, plan: LoweredPlan, programs: tuple[str, ...]) -> None:
        """Run another order of the same stages on the same ranks from now on; all ranks come here."""
        self.runner.close()
        self.plan, self.programs = plan, programs
        self.run_on(self.group)

    def run_step(self, batch: Batch, loss_scale: float, keep_results: bool) -> StepResult:
        """Run one step. Gradients, buffers and the step's number change together at its end, or not."""
        with self.runner.call(f"step {self.step_number}") as call:
            with call.checks():
                self.mode.check()
                self.guard.check()
                microbatches = self.call.microbatches(batch)
                refuse_inputs_with_gradients(self.call.plan.names, batch.flat()[0])
                state = self.follow_model()
                self.reader.check(state)
                self._check_weights(state)
                self._check_read_buffers(self.staged.captured.read_buffers)
            step = Step(microbatches, self.step_number, loss_scale, keep_results)
            with self._kept.keep(state):
                with torch_private.no_autocast():
                    sums = self.runner.run(step, state)
                divisor = self.spec.num_microbatches if self.options.scale_grads else None
                gradients = divided(sums, parameters_of(state), divisor)
                has_loss_fn = self.options.loss_fn is not None
                output = self._output(step, self.staged, has_loss_fn) if keep_results else None
                call.finish(lambda: self._take_effect(gradients))
        return StepResult(losses_of(step), output)

    def _take_effect(self, gradients: Sequence[tuple[nn.Parameter, Tensor]]) -> None:
        hand_over(gradients)
        self._kept.release()
        self.step_number += 1
        run_hooks(parameter for parameter, _ in gradients)

    def run_eval(self, batch: Batch) -> StepResult:
        """Run forward only; the first call with a shape captures the model in evaluation mode."""
        with self.runner.call("the evaluation") as call:
            with call.checks():
                self.guard.check(training=False)
                found = self._evaluation(batch)
                microbatches = found.call.microbatches(batch)
                state = found.reader.read()
                self._check_read_buffers(found.staged.read_buffers)
            step = Step(microbatches)
            with torch_private.no_autocast():
                found.runner.run(step, state)
            output = self._output(step, found.staged, found.has_loss_fn)
        return StepResult(losses_of(step), output)

    def _evaluation(self, batch: Batch) -> Evaluation:
        """Return the evaluation of batches like this one; the least recently used one makes room for it."""
        tensors, spec = batch.flat()
        modes = tuple(torch_private.ambient_autocast())
        constants = constant_values(self.options.constant, self.options.model, batch)
        form = repr((*((tuple(t.shape), t.dtype) for t in tensors), tuple(spec.paths()), modes, constants))
        key = hashlib.sha256(form.encode()).hexdigest()
        found = self._evaluations.pop(key, None)
        if found is None:
            found = Evaluation(self.options, self.group, self.plan, self.staged.stages, batch)
            while len(self._evaluations) >= MAX_EVALUATIONS:
                self._evaluations.pop(next(iter(self._evaluations))).runner.close()
        self._evaluations[key] = found
        return found

    def _own_state(self) -> str:
        """Return what must be equal on all ranks, and may not be when some had finished a refused call."""
        return json.dumps([self.step_number, list(self._evaluations)])

    def _follow_others(self, states: Sequence[str]) -> None:
        """Take over the step's number, and keep the evaluations that all ranks have, in rank 0's order."""
        rows = [json.loads(state) for state in states]
        self.step_number = max(row[0] for row in rows)
        kept = [key for key in rows[0][1] if all(key in row[1] for row in rows)]
        for key in set(self._evaluations) - set(kept):
            self._evaluations.pop(key).runner.close()
        self._evaluations = {key: self._evaluations[key] for key in kept}

    def _changed_buffers(self) -> list[str]:
        """Return the buffers that the stages of this process change in a step."""
        rank_of = self.spec.placement.rank_of
        mine = [s for s in self.staged.stages if self.group is None or rank_of[s.index] == self.group.rank]
        return list(dict.fromkeys(name for stage in mine for name in stage.mutated))

    def _output(self, step: Step, staged: Results, has_loss_fn: bool) -> Any:
        mean = self.options.scale_grads
        return join_results(step, staged, loss_is_mean=mean, has_loss_fn=has_loss_fn)

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

    @property
    def failed(self) -> str | None:
        """Why no further step can run, or None."""
        return None if self.group is None else self.group.watchdog.failed

    def close(self) -> None:
        """Release the runners, and leave the pipeline's process groups."""
        for evaluation in self._evaluations.values():
            evaluation.runner.close()
        self.runner.close()
        if self.group is not None:
            self.group.close()
