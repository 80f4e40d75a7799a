"""From stages to an order: the profile that is planned with, and one plan for all ranks."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from zbcompile.compiler.call_form import CallForm
from zbcompile.compiler.observe import Observer
from zbcompile.compiler.peers import has_peers
from zbcompile.compiler.plan_cache import PlanCache
from zbcompile.compiler.reduction_speed import (
    StepSpeeds,
    counted_speeds,
    measured_speeds,
    with_step_times,
)
from zbcompile.compiler.variants import memory_may_bind, offered_levels, way_of_recompute
from zbcompile.errors import CheckError, InfeasibleError, NoOrderError, UsageError
from zbcompile.formats import schedule_json
from zbcompile.options import CompileOptions
from zbcompile.passes.profile.counted import counted_profile
from zbcompile.passes.profile.measure import (
    OPTIMIZER_SLOTS,
    edges_of,
    measure,
    snapshot_bytes,
    static_bytes_of,
)
from zbcompile.passes.split.recompute import AUTO
from zbcompile.passes.split.stage_graphs import StageGraphs
from zbcompile.passes.split.staged_model import StagedModel
from zbcompile.runtime.gradients import sum_dtype, tied_holders
from zbcompile.runtime.group import PipelineGroup
from zbcompile.schedule.costs import Profile
from zbcompile.schedule.devices import Device
from zbcompile.schedule.ir import Kind, Placement, Schedule
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.solution import Solution
from zbcompile.schedule.speeds import on_ranks, relative
from zbcompile.schedule.spread import spread_words

__all__ = ["keep_order_of_changes", "plan_for_all", "profile_and_plan", "solve"]

Finish = Callable[[Profile], Profile]

_FIRST_SHARE = 0.2
"""Share of the search for a plan without recompute, where that might do."""


def plan_for_all(
    options: CompileOptions,
    group: PipelineGroup | None,
    pipeline: PipelineGroup | None,
    num_ranks: int,
    call: CallForm,
    staged: StagedModel,
    cache: PlanCache,
    observer: Observer,
) -> Solution:
    """Profile and plan: here where all ranks run in this process, else on rank 0 for all ranks.

    Parameters
    ----------
    options, num_ranks, call, staged, cache, observer
        Of this pipeline.
    group
        The processes that run one plan: the pipeline's ranks, or those of several pipelines.
    pipeline
        The ranks that run this pipeline, and its replicas.

    Raises
    ------
    PipelineError
        The ranks were asked for different things.
    """
    if group is None:
        return _found_or_planned(options, num_ranks, call, staged, cache, observer)
    _agree(group, num_ranks, call, staged)
    with_others = pipeline is not None and len(pipeline.replicas) > 1
    speeds: StepSpeeds | None = None
    if pipeline is not None and with_others and isinstance(options.profile, Device):
        speeds = counted_speeds(options.profile.link, len(pipeline.shards), len(pipeline.copies))
    if options.profile is None and (has_peers(staged) or with_others):
        known = group.rank == 0 and cache.find(staged) is not None
        if not group.from_first("known" if known else "", "whether a plan is known"):
            if pipeline is not None and with_others:
                speeds = measured_speeds(pipeline, staged.captured.device)
            if has_peers(staged):
                options = _measured_together(options, call, staged, observer)

    def finished(profile: Profile) -> Profile:
        if speeds is None:
            return profile
        return with_step_times(profile, staged, pipeline, speeds, options.gradient_dtype)

    text = None
    if group.rank == 0:
        found = _found_or_planned(options, num_ranks, call, staged, cache, observer, finished)
        text = schedule_json.dumps(found)
    plan = group.from_first(text, "the plan", options.time_limit_s)
    return schedule_json.loads(plan, "the plan of rank 0").solution()


def _measured_together(
    options: CompileOptions, call: CallForm, staged: StagedModel, observer: Observer
) -> CompileOptions:
    """Measure on all ranks at once, as often on each; return options with what this one measured."""
    others = offered_levels(staged) if options.recompute == AUTO else None
    profile = _profile(options, call, staged, observer, together=True, others=others)
    return replace(options, profile=profile)


def _found_or_planned(
    options: CompileOptions,
    num_ranks: int,
    call: CallForm,
    staged: StagedModel,
    cache: PlanCache,
    observer: Observer,
    finished: Finish = lambda profile: profile,
) -> Solution:
    found = cache.find(staged)
    if found is None:
        return profile_and_plan(options, num_ranks, call, staged, observer, finished)
    observer("plan", found)
    return found


def profile_and_plan(
    options: CompileOptions,
    num_ranks: int,
    call: CallForm,
    staged: StagedModel,
    observer: Observer,
    finished: Finish = lambda profile: profile,
) -> Solution:
    """Return the order that was given, rated, or the best one that the time allows.

    ``finished`` adds to a profile what was measured on all ranks.
    """
    profile = finished(_profile(options, call, staged, observer))
    if options.solution is not None:
        options = replace(options, solution=_with_gradients_counted(options.solution, options, staged))
    count = call.num_microbatches
    if options.recompute != AUTO or isinstance(options.profile, Profile):
        solution = solve(options, profile, num_ranks, count, staged)
    else:
        found = _without_recompute(options, profile, num_ranks, count)
        if found is None:
            profile = finished(_profile(options, call, staged, observer, others=offered_levels(staged)))
            rest = replace(options, time_limit_s=(1 - _FIRST_SHARE) * options.time_limit_s)
            found = solve(rest, profile, num_ranks, count)
        solution = found
    observer("plan", solution)
    return solution


def _without_recompute(
    options: CompileOptions, profile: Profile, num_ranks: int, num_microbatches: int
) -> Solution | None:
    """Return a plan of the stages as they are, if recompute can make none shorter; else None.

    It cannot where no cap is ever reached, or where the plan takes as little as it would without any cap.
    """
    from zbcompile.planner.assignments import bound_of
    from zbcompile.planner.placements import placements_for

    problem = _problem(options, profile, num_ranks, num_microbatches)
    placements = [problem.placement]
    if _placement(options, num_ranks) is None:
        placements = [placement for _, placement in placements_for(problem, num_ranks)]
    if not any(memory_may_bind(problem.with_(placement=placement)) for placement in placements):
        return solve(options, profile, num_ranks, num_microbatches)
    first = replace(options, time_limit_s=_FIRST_SHARE * options.time_limit_s)
    try:
        found = solve(first, profile, num_ranks, num_microbatches)
    except (InfeasibleError, NoOrderError):
        return None
    profiles = [on_ranks(profile, placement, _speeds(options)) for placement in placements]
    free = [
        bound_of(problem.with_(profile=here, placement=placement, caps=()))
        for here, placement in zip(profiles, placements, strict=True)
    ]
    return found if found.certificate.value_ns <= min(bound.value_ns for bound in free) else None


def solve(
    options: CompileOptions,
    profile: Profile,
    num_ranks: int,
    num_microbatches: int,
    staged: StagedModel | None = None,
) -> Solution:
    """Plan for the placement that was asked for, or for every one that fits and keep the best.

    The planner is loaded when it is needed: that takes a second, which ranks with a plan are spared. An error
    of a cap that is too low says what recompute would do for the stages ``staged``.
    """
    given = options.schedule
    problem = _problem(options, profile, num_ranks, num_microbatches)
    if given is not None:
        if options.solution is not None and options.solution.problem == problem:
            return options.solution
        from zbcompile.planner.imported import rated

        return rated(given, problem)
    from zbcompile.planner.placements import plan_auto
    from zbcompile.planner.plan import plan

    try:
        if _placement(options, num_ranks) is None:
            speeds = _speeds(options)
            found = plan_auto(problem, time_limit_s=options.time_limit_s, seed=options.seed, speeds=speeds)
            return found.solution
        return plan(problem, time_limit_s=options.time_limit_s, seed=options.seed)
    except InfeasibleError as error:
        raise _less_memory(error, options, problem, staged) from error


def _problem(options: CompileOptions, profile: Profile, num_ranks: int, num_microbatches: int) -> Problem:
    """Return what is planned; where the placement is searched for, with the stages dealt evenly."""
    given = options.schedule
    placement = _placement(options, num_ranks) if given is None else given.placement
    problem = Problem.of(
        profile,
        placement or _evenly(options.num_stages, num_ranks),
        num_microbatches,
        options.memory_limit,
        options.objective,
        options.transport,
        accumulate=options.accumulate,
        kept_gradients=options.kept_gradients,
        microbatch_costs=options.costs_of(num_microbatches),
    )
    return problem.with_(profile=on_ranks(profile, problem.placement, _speeds(options) if placement else ()))


def _speeds(options: CompileOptions) -> tuple[int, ...]:
    """Return the speeds of the ranks: as given beside a profile, else relative to the one that measures."""
    return options.rank_speeds if options.profile is not None else relative(options.rank_speeds)


def _less_memory(
    error: InfeasibleError, options: CompileOptions, problem: Problem, staged: StagedModel | None
) -> InfeasibleError:
    """Return the error with the ways out that `compile` has."""
    ways = [f"raise memory_limit to {error.needed} bytes on {error.where}"]
    if not isinstance(options.profile, Profile):
        if staged is not None and options.recompute != AUTO:
            ways += way_of_recompute(problem, staged)
        ways.append("cut the batch into more microbatches")
    return InfeasibleError(
        error.what, where=error.where, needed=error.needed, given=error.given, fix=", or ".join(ways)
    )


def keep_order_of_changes(schedule: Schedule, staged: StagedModel) -> None:
    """Refuse an order in which a stage that changes a buffer sees the microbatches in another order.

    Raises
    ------
    CheckError
        Names the stage, the buffer and the order of its forwards.
    """
    for stage in staged.stages:
        rank = schedule.placement.rank_of[stage.index]
        order = [
            a.microbatch for a in schedule.order[rank] if a.kind is Kind.FORWARD and a.stage == stage.index
        ]
        if stage.mutated and order != sorted(order):
            raise CheckError(
                f"stage {stage.index} changes {stage.mutated[0]} in every forward, "
                "so its forwards must run in the order of the microbatches",
                where=f"rank {rank}",
                given=" ".join(map(str, order)),
                fix="use an order that keeps them, leave microbatch_costs out, or freeze the buffer "
                "(evaluation mode of its module)",
            )


def _with_gradients_counted(solution: Solution, options: CompileOptions, staged: StagedModel) -> Solution:
    """Return a plan whose profile counts gradients that wait: its bound holds, no order gets shorter."""
    profile = _counting_gradients(solution.problem.profile, options, staged)
    offered = solution.offered and _counting_gradients(solution.offered, options, staged)
    return replace(solution, problem=solution.problem.with_(profile=profile), offered=offered)


def _counting_gradients(profile: Profile, options: CompileOptions, staged: StagedModel) -> Profile:
    """Return the profile with the gradients of the stages' weights, where it leaves them out.

    A number that it states is kept. Where it states none, an order could hold gradients that wait for their
    turn in the sum, and no cap would count them.
    """
    state, stages = staged.captured.state, []
    for stage, cost in zip(staged.stages, profile.stages, strict=True):
        own = [state[name] for name in stage.trainable]
        size = sum(t.numel() * sum_dtype(t, options.gradient_dtype).itemsize for t in own)
        stages.append(replace(cost, gradient_bytes=cost.gradient_bytes or size))
    return _counting_snapshot(replace(profile, stages=tuple(stages)), options, staged)


def _counting_snapshot(profile: Profile, options: CompileOptions, staged: StagedModel) -> Profile:
    """Return the profile with what undoes a step of the optimizer, where steps are validated later.

    A profile that states as many static bytes as that, such as the one of a checkpoint's plan, is kept.
    """
    if not options.post_validation:
        return profile
    state, stages = staged.captured.state, []
    for stage, cost in zip(staged.stages, profile.stages, strict=True):
        # The state of some optimizers, and gradients that some change (Nesterov), are as wide as gradients.
        wider = _wider_bytes(stage, options, staged)
        held = static_bytes_of(stage, state) + wider
        copied = snapshot_bytes(sum(state[name].nbytes for name in stage.trainable))
        needed = held + copied + OPTIMIZER_SLOTS * wider
        stages.append(replace(cost, static_bytes=max(cost.static_bytes, needed)))
    return replace(profile, stages=tuple(stages))


def _profile(
    options: CompileOptions,
    call: CallForm,
    staged: StagedModel,
    observer: Observer,
    *,
    together: bool = False,
    others: Sequence[Sequence[StageGraphs]] | None = None,
) -> Profile:
    """Return the profile that was given, counted for the device that was given, or measured here.

    ``together``: other processes measure the same stages at the same time, and wait for this one in them.
    ``others`` are the stages at other levels of recompute, which become variants.
    """
    if isinstance(options.profile, Profile):
        return _counting_gradients(_with_edges_of(options.profile, staged), options, staged)
    if isinstance(options.profile, Device):
        profile = counted_profile(staged.stages, options.profile, others=others)
        profile = _with_own_bytes(profile, options, staged)
        observer("counted", profile)
        return profile
    empty = [name for name, tensor in staged.captured.state.items() if tensor.is_meta]
    if empty:
        raise UsageError(
            "a model on the meta device cannot be measured",
            where=empty[0],
            fix='give profile=device_named("H100") to count its costs, or a profile measured elsewhere',
        )
    profile = measure(
        staged.stages, staged.captured.state, call.flat_example, together=together, others=others
    )
    if profile.unsteady:
        warnings.warn(spread_words(profile.unsteady), RuntimeWarning, stacklevel=2)
    profile = _with_own_bytes(profile, options, staged)
    observer("measure", profile)
    return profile


def _with_own_bytes(profile: Profile, options: CompileOptions, staged: StagedModel) -> Profile:
    """Return a profile of the stages with what the options add: wider gradients, what undoes a step."""
    stages = []
    for stage, cost in zip(staged.stages, profile.stages, strict=True):
        wider = _wider_bytes(stage, options, staged)
        static, gradients = cost.static_bytes + wider, cost.gradient_bytes + wider
        stages.append(replace(cost, static_bytes=static, gradient_bytes=gradients))
    return _counting_snapshot(replace(profile, stages=tuple(stages)), options, staged)


def _wider_bytes(stage: StageGraphs, options: CompileOptions, staged: StagedModel) -> int:
    """Return the bytes by which the gradients of a stage are wider than its parameters."""
    own = [staged.captured.state[name] for name in stage.trainable]
    return sum(t.numel() * (sum_dtype(t, options.gradient_dtype).itemsize - t.itemsize) for t in own)


def _with_edges_of(profile: Profile, staged: StagedModel) -> Profile:
    """Return the profile with the messages that the stages send: its sizes, their gradients.

    Raises
    ------
    UsageError
        The profile does not know of a message.
    """
    sent = {(edge.source, edge.target): edge for edge in edges_of(staged.stages)}
    known = {(edge.source, edge.target): edge for edge in profile.edges}
    if missing := sorted(sent.keys() - known.keys()):
        raise UsageError(
            f"a value goes from stage {missing[0][0]} to stage {missing[0][1]}, the profile has no such edge",
            where="profile.edges",
            needed=sorted(sent),
            given=sorted(known),
            fix="add Edge(source, target, ...) to the profile, or let compile() measure one",
        )
    edges = tuple(replace(known[pair], has_gradient=edge.has_gradient) for pair, edge in sent.items())
    return replace(profile, edges=edges)


def _evenly(num_stages: int, num_ranks: int) -> Placement:
    """Return neighbouring stages on one rank, as many on each as can be."""
    return Placement(tuple(s * num_ranks // num_stages for s in range(num_stages)))


def _placement(options: CompileOptions, num_ranks: int) -> Placement | None:
    """Return the placement that was asked for; None for ``auto``."""
    stages, chosen = options.num_stages, options.placement
    if isinstance(chosen, Placement):
        if chosen.num_stages != stages or chosen.num_ranks != num_ranks:
            raise UsageError(
                "the placement does not fit",
                needed=f"{stages} stages on {num_ranks} ranks",
                given=f"{chosen.num_stages} stages on {chosen.num_ranks} ranks",
            )
        return chosen
    if stages < num_ranks:
        raise UsageError(
            f"{num_ranks} ranks cannot share {stages} stages",
            fix="ask for at least as many stages as ranks",
        )
    if chosen == "auto":
        return None
    if stages % num_ranks:
        raise UsageError(
            f"placement {chosen!r} needs the same number of stages on every rank",
            needed=f"a multiple of {num_ranks} stages",
            given=stages,
        )
    return Placement.named(chosen, num_ranks, stages // num_ranks)


def _agree(group: PipelineGroup, num_ranks: int, call: CallForm, staged: StagedModel) -> None:
    """Refuse to start where the ranks have different models or batches."""
    group.agree(
        {
            "number of ranks": str(num_ranks),
            "microbatches": str(call.num_microbatches),
            "stage graphs": " ".join(s.signature_hash() for s in staged.stages),
            "batch": f"{call.signature.names} {call.signature.dims} {call.shapes}",
            "constant arguments": repr({k: value.tolist() for k, value in call.constants.items()}),
            "tied parameters": _tied_state(staged),
        }
    )


def _tied_state(staged: StagedModel) -> str:
    """Return a hash of the parameters that several stages hold: their copies must start equal."""
    digest = hashlib.sha256()
    for name in tied_holders([s.parameters for s in staged.stages]):
        tensor = staged.captured.state[name].detach()
        if tensor.is_meta:
            continue  # `Stage.materialize` gives all copies the same value
        value = tensor.cpu().contiguous().view(-1).view(torch.uint8)
        digest.update(value.numpy().tobytes())
    return digest.hexdigest()
