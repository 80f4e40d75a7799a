"""`compile`: an unmodified model -> a `Pipeline`, a sequence of runnable stages."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, overload

from torch import Tensor, nn

from zbcompile.compiler.compiled import Asked, CompiledPipeline, build
from zbcompile.compiler.driver import Observer, dump_to, quiet, read_profile, read_schedule
from zbcompile.errors import UsageError
from zbcompile.formats.measured_json import Measured
from zbcompile.runtime.stage_modules import Stage
from zbcompile.schedule.costs import Profile
from zbcompile.schedule.devices import Device
from zbcompile.schedule.ir import Placement, Schedule
from zbcompile.schedule.solution import Certificate, Solution

__all__ = ["Pipeline", "Stage", "compile"]


def compile(
    model: nn.Module,
    num_stages: int,
    *,
    example_args: Sequence[Any] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    example_target: Any = None,
    loss_fn: Callable[..., Tensor] | None = None,
    num_microbatches: int | None = None,
    memory_limit: int | Sequence[int | None] | None = None,
    placement: str | Placement | Sequence[int] = "auto",
    objective: str = "span",
    transport: str = "async",
    profile: Profile | Device | str | os.PathLike[str] | None = None,
    schedule: Schedule | Solution | str | os.PathLike[str] | None = None,
    num_ranks: int | None = None,
    group: Any = None,
    seed: int = 0,
    recompute: Any = "none",
    split_points: Any = None,
    backend: str = "eager",
    verify: bool | None = None,
    time_limit: float = 10.0,
    one_communicator: bool = False,
    scale_grads: bool = True,
    whole: Sequence[str | int] = (),
    stall_limit: float = 300.0,
    observer: Observer | None = None,
) -> Pipeline:
    """Cut a model into stages, find the best order of their work, and make it runnable.

    Parameters
    ----------
    model : any ``nn.Module``; it is not changed, and its own parameters are trained.
    num_stages : number of pieces. A rank may run several.
    example_args, example_kwargs, example_target : the whole batch as `Pipeline.step` gets it. Without them
        the model is captured at the first step.
    loss_fn : ``loss_fn(output, target) -> scalar``; not needed where the model returns its own loss. The
        parameters of a loss that is a module are trained too, in the last stages, as ``loss_fn.<name>``.
    num_microbatches : default: the largest divisor of the batch up to twice the number of ranks.
    memory_limit : bytes per rank, one for all or one each: parameters, gradients, optimizer state (two
        tensors per parameter) and activations.
    placement : ``auto``, ``linear``, ``looped``, ``v``, a `Placement`, or the rank of each stage.
    objective : ``span`` (steps follow each other without a meeting) or ``makespan`` (all ranks meet).
    transport : ``async``, ``rendezvous`` or ``batched``; see docs/runtime.md.
    profile : costs to plan with: a `Profile` or a file, or a `Device` (``device_named("H100")``) to count
        them for; default: the stages are measured here. A model on the meta device cannot be measured.
    schedule : an order to run instead of a search: a `Schedule`, a `Solution`, a schedule file, or torch's
        CSV.
    num_ranks, group : default: the default process group and its size where one is initialised or torchrun
        started the process; else as many as stages, all run in this process.
    seed : of the random streams (dropout) and of the search.
    recompute, split_points, backend, verify : of the front end; see docs/split.md.
    time_limit : seconds for the search.
    one_communicator : keep one global order of messages, where a library refuses several communicators.
    scale_grads : divide gradients by the number of microbatches, for a loss that is a mean.
    whole : tensors that every microbatch gets whole: positions of args, names of kwargs.
    stall_limit : seconds after which a rank that waits is reported and the step ended on all ranks.
    observer : called after every pass with its name and what it made. ``ZBCOMPILE_DUMP=dir`` writes them to
        files.

    Raises
    ------
    CaptureError, CutError, SplitError, InfeasibleError, NoOrderError, CheckError, UsageError.
    """
    if not _is_count(num_stages):
        raise UsageError("num_stages must be a positive whole number", given=num_stages)
    if num_microbatches is not None and not _is_count(num_microbatches):
        raise UsageError("num_microbatches must be a positive whole number", given=num_microbatches)
    _check_types(model, example_args, example_kwargs)
    asked = Asked(
        model=model,
        num_stages=num_stages,
        loss_fn=loss_fn,
        num_microbatches=num_microbatches,
        memory_limit=_limit(memory_limit),
        placement=placement if isinstance(placement, str | Placement) else Placement(tuple(placement)),
        objective=objective,
        transport=transport,
        profile=read_profile(profile) if isinstance(profile, str | os.PathLike) else profile,
        schedule=read_schedule(schedule) if isinstance(schedule, str | os.PathLike) else schedule,
        num_ranks=num_ranks,
        group=group,
        seed=seed,
        front={"recompute": recompute, "split_points": split_points, "backend": backend, "verify": verify},
        time_limit_s=time_limit,
        one_communicator=one_communicator,
        scale_grads=scale_grads,
        kept_whole=tuple(whole),
        stall_limit_s=stall_limit,
    )
    directory = os.environ.get("ZBCOMPILE_DUMP")
    pipeline = Pipeline(asked, observer or (dump_to(directory) if directory else quiet))
    if example_args is not None or example_kwargs is not None:
        pipeline.build(tuple(example_args or ()), dict(example_kwargs or {}), example_target)
    return pipeline


def _check_types(model: object, args: object, kwargs: object) -> None:
    if not isinstance(model, nn.Module):
        raise UsageError(
            "the model must be an nn.Module",
            given=type(model).__name__,
            fix="put the function into the forward of a module",
        )
    if args is not None and not isinstance(args, tuple | list):
        raise UsageError(
            "example_args must be a tuple of the positional arguments of step()",
            given=type(args).__name__,
            fix="write example_args=(inputs,)",
        )
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise UsageError(
            "example_kwargs must map the names of step()'s keyword arguments", given=type(kwargs).__name__
        )


def _limit(limit: int | Sequence[int | None] | None) -> int | tuple[int | None, ...] | None:
    if limit is None or isinstance(limit, int):
        return limit
    if not isinstance(limit, tuple | list):
        raise UsageError(
            "memory_limit must be whole bytes, for all ranks or a list with one entry for each",
            given=repr(limit),
            fix="write for instance memory_limit=4 << 30 for 4 GiB",
        )
    return tuple(limit)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


class Pipeline(Sequence[Stage]):
    """A compiled model: a sequence of stages that runs whole training steps.

    Under an initialised process group each process runs its own rank, and every process makes the same calls
    in the same order; otherwise all ranks run in this process, taking turns.
    """

    def __init__(self, asked: Asked, observer: Observer) -> None:
        self._asked, self._observer = asked, observer
        self._built: CompiledPipeline | None = None
        self.step_number = 0
        """Number of the next step; with the seed it chooses the dropout masks. Set it to repeat a step."""
        self.loss_scale = 1.0
        """Gradient of each microbatch's loss (a gradient scaler's scale)."""

    def build(self, args: Sequence[Any], kwargs: Mapping[str, Any], target: Any = None) -> Pipeline:
        """Capture, plan and load the programs for a batch like this one. Done once."""
        if self._built is None:
            self._built = build(self._asked, tuple(args), dict(kwargs), target, self._observer)
        return self

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Tensor] | None = None,
        return_outputs: bool = True,
        **kwargs: Any,
    ) -> Any:
        """One training step on a whole batch: forward and backward of all microbatches.

        Gradients are set in, or added to, ``param.grad``, in the bits of a loop over the microbatches that
        calls ``loss.backward()`` for each (and divides by their number when ``scale_grads``). Per-microbatch
        losses are appended to ``losses`` where the loss is computed.

        Returns the model's result for the whole batch (tensors joined along dimension 0; scalars stacked,
        the loss averaged), or None on ranks that hold no part of it or without ``return_outputs``.
        Raises `ShapeError` and `UsageError` before the first message, `PipelineError` when a rank fails.
        """
        built = self.build(args, kwargs, target)._ready()
        if built.front.loss is None:
            raise UsageError(
                "there is no loss to differentiate",
                fix="give compile(..., loss_fn=...), or let the model return its loss; eval() needs none",
            )
        if not built.loss_has_gradient:
            raise UsageError(
                "the loss depends on no parameter that requires a gradient",
                fix="let a parameter require a gradient, or call eval()",
            )
        found = built.run_step(args, kwargs, target, self.step_number, self.loss_scale, return_outputs)
        self.step_number += 1
        if losses is not None:
            losses.extend(found.losses)
        return found.output

    def eval(self, *args: Any, target: Any = None, losses: list[Tensor] | None = None, **kwargs: Any) -> Any:
        """Forward only, in evaluation mode (no dropout, running statistics), without gradients.

        The batch may have another size than in training; it is cut into as many microbatches if that
        divides it. Returns what `step` returns.
        """
        built = self.build(args, kwargs, target)._ready()
        found = built.run_eval(args, kwargs, target)
        if losses is not None:
            losses.extend(found.losses)
        return found.output

    def timeline(self) -> Measured:
        """When every action of the last step really began and ended, on one clock for all ranks.

        With one process per rank this is a collective call. In one process the ranks took turns, so
        durations are real and the ranks never overlap.
        """
        return self._ready().timeline()

    def synchronize(self) -> None:
        """Return when every rank has finished its steps so far; raise `PipelineError` when one has failed."""
        self._ready().runner.synchronize()

    def close(self) -> None:
        """End the watchdog and leave the pipeline's process groups."""
        if self._built is not None:
            self._built.close()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def schedule(self) -> Schedule:
        """The order that runs, sends and receives included."""
        return self._ready().plan.schedule

    @property
    def solution(self) -> Solution:
        """What the planner found, and for which problem."""
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
    def rank(self) -> int | None:
        """This process's rank of the pipeline; None when all ranks run here."""
        rank: int | None = self._ready().runner.rank
        return rank

    @property
    def local_stages(self) -> tuple[Stage, ...]:
        """The stages that this process runs."""
        rank, placement = self.rank, self.schedule.placement
        return tuple(s for s in self if rank is None or placement.rank_of[s.index] == rank)

    def source(self, rank: int) -> str:
        """The program that a rank runs."""
        return self._ready().plan.texts[rank]

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters that this process trains, each once. Before the capture: all."""
        if self._built is None:
            yield from self._asked.whole.parameters()
            return
        for _, parameter in self.named_parameters():
            yield parameter

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Names are the model's own; those of a loss with parameters begin with ``loss_fn.``."""
        if self._built is None:
            yield from self._asked.whole.named_parameters()
            return
        self._built.follow_model()
        seen: set[int] = set()
        for stage in self.local_stages:
            for name, parameter in stage.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield name, parameter

    def zero_grad(self) -> None:
        """Forget all gradients of this process."""
        for parameter in self.parameters():
            parameter.grad = None

    def _ready(self) -> CompiledPipeline:
        if self._built is None:
            raise UsageError(
                "the model is not captured yet", fix="give compile() example_args, or call step() once"
            )
        return self._built

    @overload
    def __getitem__(self, index: int) -> Stage: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Stage]: ...
    def __getitem__(self, index: int | slice) -> Stage | Sequence[Stage]:
        return self._ready().stages[index]

    def __len__(self) -> int:
        return self._asked.num_stages

    def __repr__(self) -> str:
        name = type(self._asked.model).__name__
        if self._built is None:
            return f"<Pipeline of {name}: {len(self)} stages, not captured yet>"
        plan = self._built.plan
        return (
            f"<Pipeline of {name}: {len(self)} stages on {plan.schedule.num_ranks} ranks, "
            f"{plan.schedule.num_microbatches} microbatches, {plan.certificate.objective} "
            f"{plan.certificate.value_ns / 1e6:.3f} ms, {plan.certificate.status}>"
        )
