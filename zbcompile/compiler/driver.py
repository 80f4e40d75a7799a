"""The spine: a model becomes stages, stages a profile, a profile an order, an order programs.

Read `build` from top to bottom. After every step the observer gets (pass name, artifact); dumping, timing
and checking hang there. ``ZBCOMPILE_DUMP=directory`` writes every artifact as text.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.fx import GraphModule

from zbcompile.compiler.stages import build_stages
from zbcompile.errors import UsageError
from zbcompile.formats import profile_json, schedule_json
from zbcompile.formats.detect import load_schedule
from zbcompile.formats.files import read_text, write_text
from zbcompile.passes.capture.capture import capture
from zbcompile.passes.capture.constant_masks import fold_constant_masks
from zbcompile.passes.capture.meta_capture import planned_device
from zbcompile.passes.capture.nested_values import Spec, unflatten
from zbcompile.passes.capture.with_loss import loss_module, with_loss
from zbcompile.passes.lower.codegen import emit
from zbcompile.passes.lower.insert_comm import CommSchedule, insert_comm, keep_comm
from zbcompile.passes.lower.merge_backward import merge_backward
from zbcompile.passes.profile.counted import counted_profile
from zbcompile.passes.profile.measure import edges_of, measure
from zbcompile.passes.split.forward_only import ForwardStage, forward_stages
from zbcompile.passes.split.staged_model import StagedModel
from zbcompile.passes.verify.verify import cheap_to_verify
from zbcompile.passes.verify.verify import verify as check_stages
from zbcompile.planner.bounds.analytic import best_bound
from zbcompile.planner.placements import plan_auto
from zbcompile.planner.plan import plan as find_order
from zbcompile.runtime.group import PipelineGroup
from zbcompile.runtime.launch import spawn
from zbcompile.runtime.rehearse import Rehearsal, rehearse_rank
from zbcompile.schedule.check import check
from zbcompile.schedule.costs import Link, Profile
from zbcompile.schedule.devices import Device
from zbcompile.schedule.ir import Action, Kind, Placement, Schedule
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.simulate import simulate
from zbcompile.schedule.solution import Certificate, Solution

__all__ = [
    "Observer",
    "Options",
    "Plan",
    "build_front",
    "check_meta",
    "counted",
    "dump_to",
    "lower",
    "measured",
    "plan",
    "rated",
    "read_profile",
    "read_schedule",
    "rehearse",
]

Observer = Callable[[str, object], None]
"""Called with the name of a pass and what it made."""


@dataclass(frozen=True)
class Options:
    """What a pipeline is asked to be; see `zbcompile.compile` for the meaning of each.

    memory_limit : bytes, for all ranks or for each. schedule : an order to use instead of a search.
    """

    num_stages: int
    num_ranks: int
    num_microbatches: int
    memory_limit: int | tuple[int | None, ...] | None = None
    placement: str | Placement = "auto"
    objective: str = "span"
    transport: str = "async"
    schedule: Schedule | None = None
    seed: int = 0
    time_limit_s: float = 10.0
    one_communicator: bool = False


@dataclass(frozen=True)
class Plan:
    """An order ready to run: the planner's solution, the order with its communication, the programs.

    certificate : of the order that runs, communication and merged backwards included.
    """

    solution: Solution
    lowered: CommSchedule
    certificate: Certificate
    texts: tuple[str, ...]

    @property
    def schedule(self) -> Schedule:
        """What runs, sends and receives included."""
        return self.lowered.schedule

    @property
    def problem(self) -> Problem:
        """What it was planned for."""
        return self.solution.problem


def quiet(name: str, artifact: object) -> None:
    """The observer that does nothing."""


def build_front(
    model: nn.Module,
    num_stages: int,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    observer: Observer = quiet,
    *,
    verify: bool | None = None,
    **front: Any,
) -> StagedModel:
    """Capture, partition, split: one example microbatch in, stages out.

    ``verify`` compares them with the untouched model (see `passes.verify`); by default where that is cheap.
    """
    result = build_stages(model, num_stages, args, kwargs, **front)
    observer("capture", result.captured)
    observer("partition", result.sources)
    observer("split_backward", result.stages)
    if verify if verify is not None else cheap_to_verify(with_loss(model, front.get("loss_fn"))):
        report = check_stages(model, result, args, kwargs, front.get("target"), front.get("loss_fn"))
        observer("verify", str(report))
    return result


def check_meta(model: nn.Module) -> None:
    """Raise `CaptureError` for a model on the meta device with tensors whose values are lost."""
    planned_device(model, ())


def measured(
    front: StagedModel, microbatch: Sequence[Tensor], observer: Observer = quiet, **how: Any
) -> Profile:
    """Time the stages on this machine."""
    profile = measure(front.stages, front.captured.state, microbatch, **how)
    observer("measure", profile)
    return profile


def counted(
    front: StagedModel, device: Device | str, observer: Observer = quiet, *, link: Link | None = None
) -> Profile:
    """Costs on ``device`` (an entry of the device table) counted from the graphs; nothing is run."""
    profile = counted_profile(front.stages, device, link)
    observer("counted", profile)
    return profile


def plan(profile: Profile, options: Options, observer: Observer = quiet) -> Plan:
    """The best order that the time allows, lowered to programs."""
    if options.schedule is not None:
        solution = rated(options.schedule, profile, options)
    else:
        solution = _search(profile, options)
    observer("plan", solution)
    return lower(solution, observer, one_communicator=options.one_communicator)


def lower(solution: Solution, observer: Observer = quiet, *, one_communicator: bool = False) -> Plan:
    """merge_backward, insert_comm, check, codegen. An order that has its communication keeps it."""
    schedule, problem = solution.schedule, solution.problem
    if schedule.has_communication:
        lowered = keep_comm(schedule, problem)
    else:
        if solution.origin != "imported":
            schedule = merge_backward(schedule, problem)
            observer("merge_backward", schedule)
        lowered = insert_comm(schedule, problem, one_communicator=one_communicator)
    observer("insert_comm", lowered.schedule)
    check(lowered.schedule, problem)
    certificate = replace(solution.certificate, value_ns=lowered.value_ns)
    texts = emit(lowered.schedule, problem, certificate, lowered.send_slots)
    observer("codegen", texts)
    return Plan(solution, lowered, certificate, texts)


def rated(schedule: Schedule, profile: Profile, options: Options) -> Solution:
    """An order from elsewhere, checked, with the bound of its problem as certificate."""
    caps = options.memory_limit
    problem = Problem.of(
        profile, schedule.placement, schedule.num_microbatches, caps, options.objective, options.transport
    )
    check(schedule, problem)
    value = simulate(schedule, problem).value_ns
    bound = best_bound(problem)
    certificate = Certificate(
        options.objective, value, min(bound.value_ns, value), bound.method, bound.witness
    )
    return Solution(problem, schedule, certificate, (0,) * problem.num_stages, "imported")


def _search(profile: Profile, options: Options) -> Solution:
    """Plan for the placement that is asked for, or for every one and keep the best."""
    placement = _placement(options)
    problem = Problem.of(
        profile,
        placement or _evenly(options),
        options.num_microbatches,
        options.memory_limit,
        options.objective,
        options.transport,
    )
    if placement is None:
        return plan_auto(problem, time_limit_s=options.time_limit_s, seed=options.seed).solution
    return find_order(problem, time_limit_s=options.time_limit_s, seed=options.seed)


def _evenly(options: Options) -> Placement:
    """Neighbouring stages on one rank, as many on each as can be."""
    stages, ranks = options.num_stages, options.num_ranks
    return Placement(tuple(s * ranks // stages for s in range(stages)))


def _placement(options: Options) -> Placement | None:
    """The placement that is asked for; ``None`` for ``auto``."""
    stages, ranks = options.num_stages, options.num_ranks
    if isinstance(options.placement, Placement):
        chosen = options.placement
        if chosen.num_stages != stages or chosen.num_ranks != ranks:
            raise UsageError(
                "the placement does not fit",
                needed=f"{stages} stages on {ranks} ranks",
                given=f"{chosen.num_stages} stages on {chosen.num_ranks} ranks",
            )
        return chosen
    if stages < ranks:
        raise UsageError(
            f"{ranks} ranks cannot share {stages} stages",
            fix="ask for at least as many stages as ranks",
        )
    if options.placement == "auto":
        return None
    if stages % ranks:
        raise UsageError(
            f"placement {options.placement!r} needs the same number of stages on every rank",
            needed=f"a multiple of {ranks} stages",
            given=stages,
        )
    return Placement.named(options.placement, ranks, stages // ranks)


@dataclass(frozen=True)
class Forward:
    """Programs of forwards alone. predicted : planned start of every action."""

    texts: tuple[str, ...]
    predicted: Mapping[tuple[Kind, int, int], int]


def build_forward(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    target: Any,
    loss_fn: Callable[..., Tensor] | None,
    held: Sequence[Sequence[str]],
) -> ForwardFront:
    """Capture in evaluation mode and cut as the trained stages are. The model's modes are left as they
    were."""
    roots = (model, loss_module(model, loss_fn) or model)
    modes = {module: module.training for root in roots for module in root.modules()}
    for root in roots:
        root.eval()
    try:
        captured = capture(model, args, kwargs, target=target, loss_fn=loss_fn)
    finally:
        for module, training in modes.items():
            module.training = training
    fold_constant_masks(captured)
    stages = forward_stages(captured, held)
    place = {p.name: (s.index, k) for s in stages for k, p in enumerate(s.outputs) if p.is_result}
    return ForwardFront(
        stages, captured.result_spec, tuple(place[name] for name in captured.results), captured.loss
    )


@dataclass(frozen=True)
class ForwardFront:
    """The evaluation stages; the other fields as in `StagedModel`."""

    stages: tuple[ForwardStage, ...]
    result_spec: Spec
    result_ports: tuple[tuple[int, int], ...]
    loss: int | None

    def rebuild(self, leaves: Sequence[Any]) -> Any:
        """The model's own result type from its tensor leaves."""
        return unflatten(self.result_spec, leaves)


def plan_forward(
    stages: Sequence[ForwardStage], trained: Problem, num_microbatches: int, one_communicator: bool = False
) -> Forward:
    """Stage by stage, each through all microbatches: in model order, so nothing can wait in a circle."""
    placement = trained.placement
    order: list[list[Action]] = [[] for _ in range(placement.num_ranks)]
    for stage, rank in enumerate(placement.rank_of):
        order[rank] += [Action(Kind.FORWARD, stage, i) for i in range(num_microbatches)]
    edges = tuple(replace(e, has_gradient=False) for e in edges_of(stages))
    profile = replace(trained.profile, edges=edges)
    problem = Problem.of(profile, placement, num_microbatches, transport=trained.transport)
    schedule = Schedule.of(placement, num_microbatches, order)
    lowered = insert_comm(schedule, problem, one_communicator=one_communicator)
    timeline = simulate(lowered.schedule, problem)
    starts = {(a.kind, a.stage, a.microbatch): timeline.start[r][k] for r, k, a in lowered.schedule.actions()}
    return Forward(emit(lowered.schedule, problem, None, lowered.send_slots), starts)


def read_schedule(path: str | os.PathLike[str]) -> Schedule:
    """An order from a schedule file (JSON) or torch's CSV. Raises `FormatError`."""
    return load_schedule(read_text(path), str(path))[0].schedule


def read_profile(path: str | os.PathLike[str]) -> Profile:
    """A profile from a file. Raises `FormatError`."""
    return profile_json.loads(read_text(path), str(path)).profile


def dump_to(directory: str | os.PathLike[str]) -> Observer:
    """An observer that writes what every pass made to ``NN-name.txt``, in order."""
    folder, count = Path(directory), 0
    folder.mkdir(parents=True, exist_ok=True)

    def write(name: str, artifact: object) -> None:
        nonlocal count
        write_text(folder / f"{count:02d}-{name}.txt", _as_text(artifact) + "\n")
        count += 1

    return write


def _as_text(artifact: object) -> str:
    if isinstance(artifact, tuple):
        return "\n\n".join(_as_text(part) for part in artifact)
    if isinstance(artifact, str):
        return artifact
    if isinstance(artifact, Schedule | Profile):
        return str(artifact) if isinstance(artifact, Schedule) else profile_json.dumps(artifact)
    if isinstance(artifact, Solution):
        return schedule_json.dumps(artifact)
    graphs = getattr(artifact, "graphs", None)
    if graphs is not None:
        names = ("forward", "backward_input", "backward_weight", "full_backward")
        head = f"# stage {getattr(artifact, 'index', '')}"
        return "\n\n".join([head, *(_as_text(getattr(graphs, name)) for name in names)])
    module = getattr(artifact, "module", artifact)
    if isinstance(module, GraphModule):
        return str(module.print_readable(print_output=False))
    return repr(artifact)


def rehearse(
    solution: Solution, *, steps: int = 3, stall_limit_s: float = 300.0, timeout_s: float = 600.0
) -> Rehearsal | None:
    """Run an order with sleeping compute and real messages.

    Started by torchrun, this process runs its rank and rank 0 gets the result (others None); otherwise one
    process per rank is started here. Raises `PipelineError` and `UsageError`.
    """
    plan_ = lower(solution)
    group = PipelineGroup.present(None, stall_limit_s)
    if group is None:
        if solution.problem.num_ranks == 1:
            raise UsageError("an order on one rank sends nothing; there is nothing to rehearse")
        args = (plan_.schedule, plan_.problem, plan_.texts, steps, stall_limit_s)
        found = spawn(_rehearse_process, solution.problem.num_ranks, args, timeout_s=timeout_s)
        return found[0]  # type: ignore[no-any-return]
    group.require_size(solution.problem.num_ranks)
    result = rehearse_rank(
        group,
        plan_.schedule,
        plan_.problem,
        plan_.texts[group.rank],
        steps=steps,
        stall_limit_s=stall_limit_s,
    )
    return result if group.rank == 0 else None


def _rehearse_process(
    rank: int, schedule: Schedule, problem: Problem, texts: Sequence[str], steps: int, stall_limit_s: float
) -> Rehearsal:
    group = PipelineGroup(None, stall_limit_s)
    return rehearse_rank(group, schedule, problem, texts[rank], steps=steps, stall_limit_s=stall_limit_s)
