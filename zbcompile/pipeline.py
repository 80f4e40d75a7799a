"""A compiled model: a `Pipeline` is a sequence of runnable stages that trains, evaluates, saves and loads."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, overload

from torch import Tensor, nn
from torch.optim import Optimizer

from zbcompile.compiler.build import build
from zbcompile.compiler.call import Batch
from zbcompile.compiler.checkpoint import (
    load_model,
    load_optimizer,
    model_state,
    optimizer_state,
    own_tensors,
)
from zbcompile.compiler.compiled import CompiledPipeline, StepResult
from zbcompile.compiler.merged import save_merged
from zbcompile.compiler.norms import clip, gradient_norms, total_norm
from zbcompile.compiler.observe import Observer
from zbcompile.compiler.replan import Replan, replan
from zbcompile.compiler.saved import Own, load, save
from zbcompile.compiler.scaler import PipelineScaler
from zbcompile.compiler.update import Asked, Update
from zbcompile.errors import UsageError
from zbcompile.formats.measured_json import Measured
from zbcompile.options import CompileOptions
from zbcompile.passes.capture.nested_values import Microbatches
from zbcompile.passes.capture.with_loss import with_loss
from zbcompile.runtime.stage_modules import Stage
from zbcompile.schedule.costs import Profile
from zbcompile.schedule.ir import Schedule
from zbcompile.schedule.solution import Certificate, Solution
from zbcompile.schedule.sum_order import sum_order

__all__ = ["Microbatches", "Pipeline", "Stage"]


class Pipeline(Sequence[Stage]):
    """A compiled model: a sequence of stages that runs whole training steps.

    Under an initialised process group each process runs its own rank, and every process makes the same calls
    in the same order; otherwise all ranks run in this process, taking turns.
    """

    def __init__(self, options: CompileOptions, observer: Observer) -> None:
        self._options, self._observer = options, observer
        self._compiled: CompiledPipeline | None = None
        self._step_number = 0
        self._closed = False
        self.loss_scale = 1.0
        """Gradient of each microbatch's loss, the same on all ranks; `scaler` makes one that keeps it."""

    def build(self, args: Sequence[Any], kwargs: Mapping[str, Any], target: Any = None) -> Pipeline:
        """Capture, plan and load the programs for a batch like this one. Done once."""
        self._build(Batch(tuple(args), dict(kwargs), target))
        return self

    def _build(self, batch: Batch) -> CompiledPipeline:
        self._refuse_if_closed()
        if self._compiled is None:
            compiled = build(self._options, batch, self._observer)
            compiled.step_number = self._step_number
            self._compiled = compiled
        return self._compiled

    @property
    def step_number(self) -> int:
        """Number of the next step; with the seed it chooses the dropout masks. Set it to repeat a step."""
        return self._step_number if self._compiled is None else self._compiled.step_number

    @step_number.setter
    def step_number(self, number: int) -> None:
        self._step_number = number
        if self._compiled is not None:
            self._compiled.step_number = number

    @property
    def failed(self) -> str | None:
        """Why no further step can run, or None. After a batch that was refused, the next step can run."""
        return None if self._compiled is None else self._compiled.failed

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Tensor] | None = None,
        metrics: dict[str, Tensor] | None = None,
        share_losses: bool = False,
        return_outputs: bool = False,
        reduce: bool = True,
        **kwargs: Any,
    ) -> Any:
        """Run one training step on a whole batch: forward and backward of all microbatches.

        Gradients are set in, or added to, ``param.grad``, in the bits of a loop over the microbatches that
        calls ``loss.backward()`` for each (and divides by their number when ``scale_grads``).

        Parameters
        ----------
        args, kwargs, target
            The whole batch: what the model gets, and what the loss gets beside its output. `Microbatches`
            in place of a tensor where the user has cut it. With one process per rank, a rank may leave out
            (None, or no arguments at all) what no stage of it takes: rank 0 tells the shapes, and a tensor
            that differs from rank 0's is refused, by a hash of all of it up to 1 MiB, of a sample above.
        losses
            The loss of every microbatch is appended, on the process that computes it.
        metrics
            Gets what the loss function returns beside the loss, by name: tensors joined along the batch,
            scalars stacked; on the process that computes them.
        share_losses
            Whether losses and metrics go to all ranks, those of one replica after the other; all must ask
            alike.
        return_outputs
            Whether the result is wanted. If so, the parts of all microbatches are held to the end of the
            step and then joined: at most twice the bytes of the whole batch's result, which neither plan nor
            ``memory_limit`` counts. ``losses`` needs none of it.
        reduce
            Whether gradients are summed over the replicas of ``compile(mesh=)``. With False they wait in the
            pipeline, and the next step that reduces hands them over with its own, in ``param.grad``: so
            several steps have one reduction. Nothing waits where there are no replicas.

        Returns
        -------
        object
            The model's result for the whole batch (tensors joined along dimension 0; scalars stacked, the
            loss averaged), or None on ranks that hold no part of it or without ``return_outputs``.

        Raises
        ------
        ShapeError, UsageError
            The call differs from the one compiled for, or from other ranks'; raised before the first message.
        PipelineError
            Another rank refused its batch, and the next step can run; or a rank failed, and no further step
            can (see `failed`). The same error on every rank that is in the step; a rank that had finished it
            raises in its next step, or in `synchronize`.

        Notes
        -----
        A step that raises leaves no gradient, and buffers as they were before it.
        """
        batch = Batch(args, kwargs, target)
        compiled = self._build(batch)
        if compiled.staged.loss is None:
            raise UsageError(
                "there is no loss to differentiate",
                fix="give compile(..., loss_fn=...), or let the model return its loss; eval() needs none",
            )
        if not compiled.loss_has_gradient:
            raise UsageError(
                "the loss depends on no parameter that requires a gradient",
                fix="let a parameter require a gradient, or call eval()",
            )
        result = compiled.run_step(batch, self.loss_scale, return_outputs, share_losses, reduce)
        return _handed_out(result, losses, metrics)

    def eval(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Tensor] | None = None,
        metrics: dict[str, Tensor] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run forward only, in evaluation mode (no dropout, running statistics), without gradients.

        The batch may have another size than in training; it is cut into as many microbatches if that
        divides it. The forms of the last few batches stay compiled. Parameters, result and errors are those
        of `step`.
        """
        batch = Batch(args, kwargs, target)
        compiled = self._build(batch)
        compiled.updates.settle_all(compiled.group)
        return _handed_out(compiled.run_eval(batch), losses, metrics)

    def timeline(self) -> Measured:
        """Return when every action of the last step really began and ended, on one clock for all ranks.

        With one process per rank this is a collective call. In one process the ranks took turns, so
        durations are real and the ranks never overlap.
        """
        self._refuse_if_closed()
        return self._ready().timeline()

    def optimizer_step(
        self,
        optimizer: Optimizer | Sequence[Optimizer] | None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        *,
        error_if_nonfinite: bool = False,
    ) -> Update:
        """Clip the gradients of all ranks by their common norm, let optimizers step, forget the gradients.

        Every rank calls it, after `step`, with the same arguments but for its own optimizers. It does what
        `clip_grad_norm_`, ``optimizer.step()`` and `zero_grad` do, to the bit; where the norm is not finite
        no weight changes on any rank.

        With ``compile(post_validation=True)`` and one process per rank, no rank waits for the others: each
        steps at once and goes on, and learns the norm in its next `step`, before the first backward. Where
        clipping was due, or a gradient was not finite, the step is then undone and done as it should have
        been, and the forwards that had begun run again. Calls of this object wait for that: what it returns
        and evaluates is never what may still be undone. Whoever reads ``param.data`` by himself calls
        ``wait()`` of the result first.

        Parameters
        ----------
        optimizer
            Of this process's parameters, one or several; None where it trains none.
        max_norm
            What the norm is clipped to; None: gradients are not clipped.
        norm_type
            Order of the norm.
        error_if_nonfinite
            Whether a norm that is not finite raises, with ``post_validation`` from the next call of all ranks
            that needs the weights.

        Returns
        -------
        Update
            With the norm, whether it clipped, and whether it left the step out.

        Raises
        ------
        PipelineError
            A rank is lost; or the norm is not finite, and ``error_if_nonfinite``.
        UsageError
            The ranks give different arguments (with ``post_validation`` raised with the outcome), an
            optimizer holds other parameters or cannot be undone, ``max_norm`` is negative or no number, or
            the last step did not reduce.
        """
        self._refuse_if_closed()
        asked = Asked(None if max_norm is None else float(max_norm), float(norm_type), error_if_nonfinite)
        optimizers = (
            [] if optimizer is None else [optimizer] if isinstance(optimizer, Optimizer) else optimizer
        )
        compiled, own = self._ready(), dict(self._own_parameters())
        compiled.refuse_unreduced("optimizer_step()")
        return compiled.updates.step(
            list(optimizers),
            own,
            self._trained(),
            compiled.group,
            compiled.parts,
            asked,
            self.loss_scale,
            self._options.post_validation,
        )

    def replan(self, threshold: float = 0.02, time_limit: float | None = None) -> Replan:
        """Plan again with the costs that the last step measured, and run the new order if it gains enough.

        Durations of every stage and, with one process per rank, times of every link are those of the last
        step. Placement, caps and objective stay, and with them parameters and the optimizer's state. Every
        rank calls it, between two steps; rank 0 plans for all. `certificate`, `profile` and `schedule` then
        speak of the new order. Gradients keep their bits.

        Parameters
        ----------
        threshold
            The part by which the predicted span (or makespan) must become shorter; below it nothing changes.
        time_limit
            Seconds for the search; default: that of `compile`.

        Returns
        -------
        Replan
            What the old and the new order take, and whether the new one runs now.

        Raises
        ------
        UsageError
            No step has run in the present order, or the ranks give different arguments.
        NoOrderError
            None was found in time. The old order goes on.
        PipelineError
            A rank is lost.
        """
        self._refuse_if_closed()
        limit = self._options.time_limit_s if time_limit is None else time_limit
        return replan(self._settled(), threshold, limit)

    def synchronize(self) -> None:
        """Return when every rank has finished its steps so far; raise `PipelineError` when one has failed."""
        self._refuse_if_closed()
        self._settled().runner.synchronize()

    def close(self) -> None:
        """End the watchdog and leave the pipeline's process groups. No step can run afterwards.

        An `optimizer_step` that is not validated yet is validated before, unless the pipeline has failed.
        Raises `PipelineError` if a rank is lost meanwhile; it is closed all the same.
        """
        try:
            if not self._closed and self.failed is None:
                self._settle_own()
        finally:
            self._leave()

    def _leave(self) -> None:
        self._closed = True
        if self._compiled is not None:
            self._compiled.close()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        if kind is None:
            self.close()
        else:
            self._leave()

    @property
    def schedule(self) -> Schedule:
        """The order that runs, sends and receives included."""
        return self._ready().plan.schedule

    @property
    def solution(self) -> Solution:
        """The order that runs with its problem and certificate: what a schedule file holds."""
        return self._ready().plan.solution

    @property
    def certificate(self) -> Certificate:
        """How good the order is, and why."""
        return self._ready().plan.certificate

    @property
    def profile(self) -> Profile:
        """The costs that the order was planned with."""
        return self._ready().plan.problem.profile

    @property
    def microbatch_order(self) -> tuple[int, ...]:
        """The microbatches of a batch like the example in the order in which gradients are summed.

        0, 1, 2, ... but where ``microbatch_costs`` differ: a plain loop in this order has the same bits.
        """
        plan = self._ready().plan
        return sum_order(plan.schedule, plan.problem)

    @property
    def rank(self) -> int | None:
        """This process's rank in its pipeline; None when all ranks run here."""
        return self._ready().runner.rank

    @property
    def local_stages(self) -> tuple[Stage, ...]:
        """The stages that this process runs."""
        self._settle_own()
        return self._own_stages()

    def _own_stages(self) -> tuple[Stage, ...]:
        compiled = self._ready()
        rank, rank_of = self.rank, compiled.plan.schedule.placement.rank_of
        return tuple(s for s in compiled.stages if rank is None or rank_of[s.index] == rank)

    def source(self, rank: int) -> str:
        """Return the program that a rank runs."""
        return self._ready().programs[rank]

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters that this process trains, each once. Before the capture: all."""
        if self._compiled is None:
            yield from self._trained().parameters()
            return
        for _, parameter in self.named_parameters():
            yield parameter

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield parameters under the model's own names; those of a loss begin with ``loss_fn.``."""
        self._settle_own()
        yield from self._own_parameters()

    def _own_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        if self._compiled is None:
            yield from self._trained().named_parameters()
            return
        self._compiled.follow_model()
        seen: set[int] = set()
        for stage in self._own_stages():
            for name, parameter in stage.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield name, parameter

    def zero_grad(self) -> None:
        """Forget all gradients of this process, those of steps with ``reduce=False`` included."""
        if self._compiled is not None:
            self._compiled.forget_unreduced()
        parameters = self.parameters() if self._compiled is None else (p for _, p in self._own_parameters())
        for parameter in parameters:
            parameter.grad = None

    def grad_norm(self, norm_type: float = 2.0) -> Tensor:
        """Return the norm of all gradients of all ranks together: what `clip_grad_norm_` clips by.

        Every rank calls it, with the same ``norm_type``.
        """
        words = f"grad_norm({float(norm_type)})"
        return total_norm(list(self._norms(norm_type, words).values()), norm_type)

    def grad_norms(self, norm_type: float = 2.0) -> dict[str, Tensor]:
        """Return the norm of every gradient of all ranks: name -> scalar, in the order of the model.

        Every rank calls it, with the same ``norm_type`` (``math.inf``: the largest entry). Gradients of tied
        parameters are the same on all of their ranks, and are here once.
        """
        return self._norms(norm_type, f"grad_norms({float(norm_type)})")

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Clip the gradients of all ranks by their common norm, as `torch.nn.utils.clip_grad_norm_` would.

        Every rank calls it, with the same arguments, between `step` and ``optimizer.step()``. (torch's own
        function on a rank's parameters would clip each rank by a norm of its own.)

        Returns
        -------
        Tensor
            The norm before clipping, a scalar, alike on all ranks; on CPU in the bits of torch's function in
            one process, where all gradients have one dtype.

        Raises
        ------
        PipelineError
            A rank is lost; or the norm is not finite, and ``error_if_nonfinite``. Nothing is clipped.
        UsageError
            The ranks give different arguments, or ``max_norm`` is negative or no number.
        """
        if not float(max_norm) >= 0:
            raise UsageError("max_norm must be a number from 0 on", given=float(max_norm))
        words = f"clip_grad_norm_({float(max_norm)}, {float(norm_type)}, {error_if_nonfinite})"
        total = total_norm(list(self._norms(norm_type, words).values()), norm_type, error_if_nonfinite)
        clip((p for _, p in self._own_parameters()), max_norm, total)
        return total

    def scaler(self, **options: Any) -> PipelineScaler:
        """Return a gradient scaler for all ranks, for float16; every rank calls it after the capture.

        ``options`` are those of `torch.amp.GradScaler` (``init_scale``, ``growth_interval``, ...). The scaler
        keeps `loss_scale`, so the loop is ``step``, ``scaler.unscale_(optimizer)``, `clip_grad_norm_`,
        ``scaler.step(optimizer)``, ``scaler.update()``. A step is skipped on all ranks when a gradient on any
        of them is not finite. (A plain ``GradScaler`` on each rank would skip and scale for itself.) A rank
        that trains nothing gives None for the optimizer.
        """
        self._refuse_if_closed()
        if self._options.post_validation:
            raise UsageError(
                "a gradient scaler decides the scale of the next step from the gradients of all ranks, so "
                "that they wait for each other",
                fix="compile without post_validation, or train in bfloat16",
            )
        compiled = self._ready()
        compiled.refuse_outside("scaler()")
        device = next((p.device.type for p in self.parameters()), "cpu")
        return PipelineScaler(device, compiled.group, self._set_loss_scale, **options)

    def _set_loss_scale(self, scale: float) -> None:
        self.loss_scale = scale

    def state_dict(self) -> dict[str, Tensor]:
        """Return the parameters and buffers of this process's stages, under the model's own names.

        In one process these are all. The parts of all ranks together are the unpipelined model's state dict:
        ``torch.distributed.checkpoint.save(pipeline.state_dict(), checkpoint_id=...)`` on every rank saves
        it, and any number of ranks and stages, or the plain model, can load it. Tensors share memory with the
        model's.

        Raises
        ------
        UsageError
            A module has extra state that is no tensor.
        """
        return model_state(self._own_tensors())

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copy saved values into this process's tensors: all, or none where one is missing or differs.

        ``state`` may hold more, as the unpipelined model's state dict does.

        Raises
        ------
        ShapeError, UsageError
            Name the tensor.
        """
        own = self._own_tensors()
        load_model(own, self._ready().parts.cut_where_whole(own, state))

    def optimizer_state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state and options that an optimizer has for this process's parameters, by name.

        The keys are those of ``torch.distributed.checkpoint.state_dict`` in its flat form,
        ``state.NAME.exp_avg`` and ``param_groups.NAME.lr``, so the parts of all ranks are the unpipelined
        optimizer's.

        Raises
        ------
        UsageError
            The optimizer holds a parameter that is none of the model's.
        """
        self._settle_own()
        return optimizer_state(self._trained(), self._own_names(), optimizer)

    def load_optimizer_state_dict(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Give an optimizer what `optimizer_state_dict` returned; ``state`` may hold more.

        Raises
        ------
        UsageError
            Names the parameter that is missing or whose options differ from its group's; nothing is changed.
        """
        self._settle_own()
        load_optimizer(self._trained(), self._own_names(), optimizer, state)

    def save(
        self, path: str | os.PathLike[str], optimizer: Optimizer | None = None, extra: object = None
    ) -> None:
        """Write a checkpoint: weights, optimizer, step number, seed and plan of all ranks, in one folder.

        Every rank calls it, with the same path and ``extra``, between two steps. The folder, which all ranks
        must be able to write, appears whole: where a rank is killed meanwhile, what was there before stays.
        Tensors stand in the format of ``torch.distributed.checkpoint`` under the names of the unpipelined
        model and optimizer (docs/howto/checkpoints.md), so any number of ranks and stages, or the plain
        model, goes on with it.

        Parameters
        ----------
        path
            A folder, new or of an earlier checkpoint.
        optimizer
            Saved with its groups and options.
        extra
            Any JSON value, which `load` returns: position in the data, state of a schedule.

        Raises
        ------
        UsageError
            ``extra`` is no JSON value, the folder holds something else or cannot be written, a tensor has no
            values yet. Raised on all ranks; the next step can run.
        PipelineError
            The ranks differ in what they save, a part cannot be written (the next step can run), or a rank is
            lost.
        """
        self._refuse_if_closed()
        save(self._settled(), self._own, path, optimizer, extra)

    def load(self, path: str | os.PathLike[str], optimizer: Optimizer | None = None) -> Any:
        """Go on from a checkpoint: read weights, optimizer and step number, all of them or nothing.

        Every rank calls it. The folder may have been saved by other numbers of ranks and stages, or by
        ``torch.distributed.checkpoint`` from the plain model. The optimizer need not have made a step.

        Returns
        -------
        object
            What was given as ``extra``; None for a checkpoint of the plain model.

        Raises
        ------
        FormatError
            The folder is no checkpoint, is damaged, or would need code of its own to be read.
        ShapeError, UsageError
            It is another model's, lacks the optimizer, or was trained with another seed where masks depend on
            it. Raised on all ranks, which keep what they have; the next step can run.
        """
        self._refuse_if_closed()
        return load(self._settled(), self._own, path, optimizer)

    def save_merged(self, path: str | os.PathLike[str]) -> None:
        """Write all weights and buffers of the model to one safetensors file, on rank 0.

        Every rank calls it; rank 0 holds all of them meanwhile. A tied tensor is written once, under its
        first name; the file's metadata holds its other names.

        Raises
        ------
        PipelineError
            The file cannot be written (its name must end in ``.safetensors``), or a rank is lost.
        """
        self._refuse_if_closed()
        save_merged(self._settled(), self._own, path)

    def _own(self) -> Own:
        return Own(self._own_tensors(), self._trained(), self._own_names(), self._ready().parts)

    def _own_tensors(self) -> dict[str, Tensor]:
        self._settle_own()
        compiled = self._ready()
        compiled.follow_model()
        local = [stage.index for stage in self._own_stages()]
        return own_tensors(self._trained(), compiled.staged.stages, local, self.rank in (None, 0))

    def _own_names(self) -> set[str]:
        return {name for name, _ in self._own_parameters()}

    def _norms(self, norm_type: float, asked: str) -> dict[str, Tensor]:
        self._refuse_if_closed()
        compiled, own = self._ready(), dict(self._own_parameters())
        compiled.refuse_unreduced(asked)
        asked = f"{asked} at loss_scale {self.loss_scale}"
        return gradient_norms(self._trained(), own, float(norm_type), compiled.group, compiled.parts, asked)

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise UsageError(
                "the pipeline is closed", fix="compile another one, or close it after the last step"
            )

    def _trained(self) -> nn.Module:
        return with_loss(self._options.model, self._options.loss_fn)

    def _settle_own(self) -> None:
        """Let the weights of this process be those that stay."""
        if self._compiled is not None:
            self._compiled.updates.settle(self._compiled.group)

    def _settled(self) -> CompiledPipeline:
        """Return the compiled pipeline with the weights that stay, before a call of all ranks."""
        compiled = self._ready()
        compiled.updates.settle_all(compiled.group)
        return compiled

    def _ready(self) -> CompiledPipeline:
        if self._compiled is None:
            raise UsageError(
                "the model is not captured yet", fix="give compile() example_args, or call step() once"
            )
        return self._compiled

    @overload
    def __getitem__(self, index: int) -> Stage: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Stage]: ...
    def __getitem__(self, index: int | slice) -> Stage | Sequence[Stage]:
        self._settle_own()
        return self._ready().stages[index]

    def __len__(self) -> int:
        return self._options.num_stages

    def __repr__(self) -> str:
        name = type(self._options.model).__name__
        if self._compiled is None:
            return f"<Pipeline of {name}: {len(self)} stages, not captured yet>"
        plan = self._compiled.plan
        return (
            f"<Pipeline of {name}: {len(self)} stages on {plan.schedule.num_ranks} ranks, "
            f"{plan.schedule.num_microbatches} microbatches, {plan.certificate.objective} "
            f"{plan.certificate.value_ns / 1e6:.3f} ms, {plan.certificate.status}>"
        )

    def _repr_html_(self) -> str | None:
        """Draw the order that runs, in a notebook; None, for the text, before the model is captured."""
        return None if self._compiled is None else self._compiled.plan.solution._repr_html_()


def _handed_out(result: StepResult, losses: list[Tensor] | None, metrics: dict[str, Tensor] | None) -> Any:
    if losses is not None:
        losses.extend(result.losses)
    if metrics is not None:
        metrics.update(result.metrics)
    return result.output
