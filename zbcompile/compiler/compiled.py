"""From what `compile` was asked to something that runs: one straight line, in one process or one per rank."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from zbcompile.compiler import driver
from zbcompile.compiler.call import Call
from zbcompile.compiler.driver import Observer, Options, Plan
from zbcompile.errors import CheckError, PipelineError, UsageError, ZBCompileError
from zbcompile.formats import schedule_json
from zbcompile.formats.measured_json import Measured
from zbcompile.passes.capture.nested_values import flatten, unflatten
from zbcompile.passes.capture.with_loss import with_loss
from zbcompile.passes.split.staged_model import StagedModel
from zbcompile.runtime.distributed_runner import DistributedRunner
from zbcompile.runtime.gradients import hand_over, tied_holders
from zbcompile.runtime.group import PipelineGroup
from zbcompile.runtime.local_runner import LocalRunner
from zbcompile.runtime.randomness import draws_random_numbers
from zbcompile.runtime.stage_modules import Stage, StateReader
from zbcompile.runtime.verbs import PipelineSpec, Step, parameters_of
from zbcompile.schedule.costs import Profile
from zbcompile.schedule.devices import Device
from zbcompile.schedule.ir import Kind, Placement, Schedule
from zbcompile.schedule.simulate import simulate
from zbcompile.schedule.solution import Solution

__all__ = ["Asked", "CompiledPipeline", "StepResult", "build"]


@dataclass(frozen=True)
class Asked:
    """The arguments of `zbcompile.compile`, checked for their types."""

    model: nn.Module
    num_stages: int
    loss_fn: Callable[..., Tensor] | None
    num_microbatches: int | None
    memory_limit: int | tuple[int | None, ...] | None
    placement: str | Placement
    objective: str
    transport: str
    profile: Profile | Device | None
    schedule: Schedule | Solution | None
    num_ranks: int | None
    group: Any
    seed: int
    front: Mapping[str, Any]
    time_limit_s: float
    one_communicator: bool
    scale_grads: bool
    kept_whole: tuple[str | int, ...]
    stall_limit_s: float

    @property
    def whole(self) -> nn.Module:
        """The module that owns all tensors of the pipeline: the model, and the loss if it has any."""
        return with_loss(self.model, self.loss_fn)


@dataclass(frozen=True)
class StepResult:
    """What a step gives on this process."""

    losses: tuple[Tensor, ...]
    output: Any


class CompiledPipeline:
    """A captured, planned and loaded pipeline."""

    def __init__(
        self,
        asked: Asked,
        group: PipelineGroup | None,
        call: Call,
        front: StagedModel,
        plan: Plan,
        setup: PipelineSpec,
    ) -> None:
        self.asked, self.group, self.call, self.front, self.plan = asked, group, call, front, plan
        self.setup = setup
        self.runner = self.make_runner(setup, plan.texts, _predicted(plan))
        self.reader = _reader(asked.whole, front.stages)
        self._evaluations: dict[tuple[Any, ...], Evaluation] = {}
        self.stages = [Stage(s.index, s, front.captured.state, asked.whole) for s in front.stages]

    def make_runner(
        self, setup: PipelineSpec, texts: Sequence[str], predicted: Mapping[tuple[Kind, int, int], int]
    ) -> Any:
        """All ranks here, or this process's rank."""
        device = _device(setup.stages)
        if self.group is None:
            return LocalRunner(setup, texts, predicted, device)
        text = texts[self.group.rank]
        limit = self.asked.stall_limit_s
        return DistributedRunner(self.group, setup, text, device, limit, owns_group=setup is self.setup)

    def run_step(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        target: Any,
        number: int,
        loss_scale: float,
        keep: bool,
    ) -> StepResult:
        """One step; gradients are handed over at its end."""
        with self.runner.reporting():
            batch = self.call.microbatches(args, kwargs, target)
            state = self.follow_model()
            self.reader.check(state)
            self._check_weights(state)
        step = Step(batch, number, loss_scale, keep)
        gradients = self.runner.run(step, state)
        divisor = self.setup.num_microbatches if self.asked.scale_grads else None
        hand_over(gradients, parameters_of(state), divisor)
        return self._found(step, self.front, keep, self.asked.loss_fn is not None)

    def run_eval(self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any) -> StepResult:
        """Forward only; the first call with a shape captures the model in evaluation mode."""
        tensors, spec = flatten((args, kwargs, target))
        key = (*((tuple(t.shape), t.dtype) for t in tensors), tuple(spec.paths()))
        found = self._evaluations.get(key)
        if found is None:
            found = self._evaluations[key] = Evaluation(self, args, kwargs, target)
        with found.runner.reporting():
            batch = found.call.microbatches(args, kwargs, target)
        step = Step(batch)
        found.runner.run(step, found.reader.read())
        return self._found(step, found.front, True, found.wrapped)

    def _check_weights(self, state: Mapping[str, Tensor]) -> None:
        """Refuse to run a stage of this process whose tensors are still on the meta device."""
        for stage in self.front.stages:
            rank = self.setup.placement.rank_of[stage.index]
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
        if self.front.loss is None:
            return False
        stage, position = self.front.result_ports[self.front.loss]
        return bool(self.front.stages[stage].outputs[position].has_gradient)

    def follow_model(self) -> dict[str, Tensor]:
        """The model's present tensors, which the stages hold from now on."""
        state = self.reader.read()
        for stage in self.stages:
            stage.follow(state)
        return state

    def _found(self, step: Step, front: Any, keep: bool, wrapped: bool) -> StepResult:
        count = len(step.batch)
        losses = tuple(step.losses[i] for i in range(count)) if step.losses else ()
        if not keep:
            return StepResult(losses, None)
        leaves = []
        for k, place in enumerate(front.result_ports):
            parts = step.results.get(place)
            if parts is None:
                return StepResult(losses, None)
            leaves.append(self._join([parts[i] for i in range(count)], k == front.loss))
        result = front.rebuild(leaves)
        return StepResult(losses, result["output"] if wrapped else result)

    def _join(self, parts: list[Tensor], is_loss: bool) -> Tensor:
        if parts[0].dim():
            return torch.cat(parts)
        stacked = torch.stack(parts)
        if not is_loss:
            return stacked
        return stacked.mean() if self.asked.scale_grads else stacked.sum()

    def timeline(self) -> Measured:
        """The last step as measured."""
        return Measured.of(self.runner.actions(), f"measured, torch {torch.__version__}")

    def close(self) -> None:
        """Release the runners."""
        for evaluation in self._evaluations.values():
            evaluation.runner.close()
        self.runner.close()


class Evaluation:
    """The same pipeline, captured in evaluation mode for batches of one shape: forwards alone."""

    def __init__(
        self, built: CompiledPipeline, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any
    ) -> None:
        asked, plan = built.asked, built.plan
        size = next((t.shape[0] for t in flatten((args, kwargs, target))[0] if t.dim()), 1)
        most = built.setup.num_microbatches
        count = next(k for k in range(min(most, size), 0, -1) if size % k == 0)
        self.call = Call(args, kwargs, target, asked.kept_whole, count)
        one_args, one_kwargs, one_target = unflatten(self.call.spec, self.call.example)
        loss_fn = asked.loss_fn if target is not None else None
        held = [(*s.parameters, *s.buffers) for s in built.front.stages]
        self.front = driver.build_forward(asked.model, one_args, one_kwargs, one_target, loss_fn, held)
        self.wrapped = loss_fn is not None
        one = plan.lowered.one_communicator
        lowered = driver.plan_forward(self.front.stages, plan.problem, count, one)
        setup = PipelineSpec(self.front.stages, plan.schedule.placement, count, one_communicator=one)
        self.runner = built.make_runner(setup, lowered.texts, lowered.predicted)
        self.reader = _reader(asked.whole, self.front.stages)


def _reader(model: nn.Module, stages: Sequence[Any]) -> StateReader:
    names = dict.fromkeys(n for s in stages for n in (*s.parameters, *s.buffers))
    return StateReader(model, list(names))


def build(
    asked: Asked, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any, observer: Observer
) -> CompiledPipeline:
    """Capture, plan (on rank 0, for all) and load the programs."""
    group = PipelineGroup.present(asked.group, asked.stall_limit_s)
    if group is not None:
        group.require_size(asked.num_ranks)
    ranks = group.size if group is not None else (asked.num_ranks or asked.num_stages)
    count = _microbatches(asked, args, kwargs, target, ranks)
    call = Call(args, kwargs, target, asked.kept_whole, count)
    one_args, one_kwargs, one_target = unflatten(call.spec, call.example)
    wanted = {name: value for name, value in asked.front.items() if value not in (None, "eager", "none")}
    front = driver.build_front(
        asked.model,
        asked.num_stages,
        one_args,
        one_kwargs,
        observer,
        target=one_target,
        loss_fn=asked.loss_fn,
        **wanted,
    )
    options = _options(asked, ranks, count)
    if group is None:
        plan = _plan(asked, options, call, front, observer)
    else:
        plan = _agreed_plan(group, asked, options, call, front, observer)
    _keep_order_of_changes(plan.schedule, front.stages)
    setup = PipelineSpec(
        front.stages,
        plan.schedule.placement,
        count,
        asked.seed,
        frozenset(s.index for s in front.stages if draws_random_numbers(s.graphs.forward)),
        plan.lowered.one_communicator,
    )
    return CompiledPipeline(asked, group, call, front, plan, setup)


def _keep_order_of_changes(schedule: Schedule, stages: Sequence[Any]) -> None:
    """A stage that changes a buffer must see the microbatches in their order, as a loop would."""
    for stage in stages:
        row = schedule.order[schedule.placement.rank_of[stage.index]]
        order = [a.microbatch for a in row if a.kind is Kind.FORWARD and a.stage == stage.index]
        if stage.mutated and order != sorted(order):
            raise CheckError(
                f"stage {stage.index} changes {stage.mutated[0]} in every forward, "
                "so its forwards must run in the order of the microbatches",
                where=f"rank {schedule.placement.rank_of[stage.index]}",
                given=" ".join(map(str, order)),
                fix="use an order that keeps them, or freeze the buffer (evaluation mode of its module)",
            )


def _options(asked: Asked, ranks: int, count: int) -> Options:
    schedule = asked.schedule.schedule if isinstance(asked.schedule, Solution) else asked.schedule
    return Options(
        asked.num_stages,
        ranks,
        count,
        asked.memory_limit,
        asked.placement,
        asked.objective,
        asked.transport,
        schedule,
        asked.seed,
        asked.time_limit_s,
        asked.one_communicator,
    )


def _plan(asked: Asked, options: Options, call: Call, front: StagedModel, observer: Observer) -> Plan:
    return driver.plan(_profile(asked, call, front, observer), options, observer)


def _profile(asked: Asked, call: Call, front: StagedModel, observer: Observer) -> Profile:
    """The one that was given, counted for the device that was given, or measured here."""
    if isinstance(asked.profile, Profile):
        _has_every_edge(asked.profile, front)
        return asked.profile
    if isinstance(asked.profile, Device):
        return driver.counted(front, asked.profile, observer)
    empty = [name for name, tensor in front.captured.state.items() if tensor.is_meta]
    if empty:
        raise UsageError(
            "a model on the meta device cannot be measured",
            where=empty[0],
            fix='give profile=device_named("H100") to count its costs, or a profile measured elsewhere',
        )
    return driver.measured(front, call.example, observer)


def _has_every_edge(profile: Profile, front: StagedModel) -> None:
    """Refuse a profile that does not know of a message that the stages send."""
    ports = [(stage.index, port) for stage in front.stages for port in stage.inputs]
    sent = {(port.source[1], index) for index, port in ports if port.source[0] == "stage"}
    known = {(edge.source, edge.target) for edge in profile.edges}
    if missing := sorted(sent - known):
        raise UsageError(
            f"a value goes from stage {missing[0][0]} to stage {missing[0][1]}, the profile has no such edge",
            where="profile.edges",
            needed=sorted(sent),
            given=sorted(known),
            fix="add Edge(source, target, ...) to the profile, or let compile() measure one",
        )


def _agreed_plan(
    group: PipelineGroup,
    asked: Asked,
    options: Options,
    call: Call,
    front: StagedModel,
    observer: Observer,
) -> Plan:
    """Rank 0 measures and plans; all refuse to start when they were asked for different things."""
    group.agree(
        {
            "microbatches": str(options.num_microbatches),
            "stage graphs": " ".join(s.signature_hash() for s in front.stages),
            "batch": f"{call.plan.names} {call.plan.sliced} {call.plan.shapes}",
            "plan": "" if options.schedule is None else str(options.schedule),
            "profile": "" if asked.profile is None else repr(asked.profile),
            "options": repr(replace(options, schedule=None)),
            "tied parameters": _tied_state(front),
        }
    )
    problem: ZBCompileError | None = None
    text = ""
    if group.rank == 0:
        try:
            text = "ok" + schedule_json.dumps(_plan(asked, options, call, front, observer).solution)
        except ZBCompileError as error:
            problem, text = error, f"{type(error).__name__} on rank 0: {error}"
    text = group.from_first(text)
    if problem is not None:
        raise problem
    if not text.startswith("ok"):
        raise PipelineError(text)
    solution = schedule_json.loads(text[2:], "the plan of rank 0").solution()
    plan = driver.lower(solution, one_communicator=options.one_communicator)
    group.agree({"programs": "\n".join(plan.texts)})
    return plan


def _tied_state(front: StagedModel) -> str:
    """A hash of the parameters that several stages hold: their copies must start equal."""
    digest = hashlib.sha256()
    for name in tied_holders([s.trainable for s in front.stages]):
        tensor = front.captured.state[name].detach()
        if tensor.is_meta:
            continue  # `Stage.materialize` gives all copies the same value
        value = tensor.cpu().contiguous().view(-1).view(torch.uint8)
        digest.update(value.numpy().tobytes())
    return digest.hexdigest()


def _microbatches(
    asked: Asked, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any, ranks: int
) -> int:
    given = asked.schedule
    if given is not None:
        schedule = given.schedule if isinstance(given, Solution) else given
        if asked.num_microbatches not in (None, schedule.num_microbatches):
            raise UsageError(
                "the schedule has another number of microbatches",
                needed=asked.num_microbatches,
                given=schedule.num_microbatches,
            )
        return schedule.num_microbatches
    if asked.num_microbatches is not None:
        return asked.num_microbatches
    tensors, _ = flatten((args, kwargs, target))
    size = next((t.shape[0] for t in tensors if t.dim()), 1)
    return next(k for k in range(min(2 * ranks, size), 0, -1) if size % k == 0)


def _predicted(plan: Plan) -> dict[tuple[Kind, int, int], int]:
    timeline = simulate(plan.schedule, plan.problem)
    return {(a.kind, a.stage, a.microbatch): timeline.start[r][k] for r, k, a in plan.schedule.actions()}


def _device(stages: Sequence[Any]) -> torch.device:
    for stage in stages:
        for port in (*stage.inputs, *stage.outputs):
            return port.device  # type: ignore[no-any-return]
    return torch.device("cpu")
