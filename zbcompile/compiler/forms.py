"""The forms of a training step: graphs, order and programs for microbatches of one shape and number.

``compile`` makes the first form. Batches of another size or shape get forms of their own, with the same
stages on the same ranks: a number of microbatches that is new has the graphs of another form and a plan of
its own; a new shape is captured, and planned with the costs at hand, scaled by counted ones.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from torch import Tensor, nn

from zbcompile.compiler.batch_dimension import check_batch_dimension
from zbcompile.compiler.call_form import CallForm
from zbcompile.compiler.cut_choice import CutChoice, cut_choice
from zbcompile.compiler.free_model import free_others, without_tensors
from zbcompile.compiler.load import make_runner, planned_starts
from zbcompile.compiler.lower import LoweredPlan, lower
from zbcompile.compiler.observe import Observer, quiet
from zbcompile.compiler.peers import (
    reduced_stages,
    refuse_changed_buffers,
    refuse_peers,
    refuse_trials,
    require_one_plan,
    require_own_groups,
    sharded_stages,
)
from zbcompile.compiler.plan_cache import PlanCache
from zbcompile.compiler.planning import keep_order_of_changes, plan_for_all
from zbcompile.compiler.runs import Shapes
from zbcompile.compiler.sharding import refuse_unshardable
from zbcompile.compiler.signature import Value
from zbcompile.compiler.stages import build_stages, verify_stages
from zbcompile.compiler.variants import as_planned
from zbcompile.errors import ShapeError, UsageError
from zbcompile.options import CompileOptions
from zbcompile.passes.capture.with_loss import with_loss
from zbcompile.passes.op_costs import nominal_device
from zbcompile.passes.profile.rescaled import rescaled_profile
from zbcompile.passes.split.recompute import Recompute
from zbcompile.passes.split.staged_model import StagedModel
from zbcompile.passes.verify.verify import cheap_to_verify
from zbcompile.runtime.group import PipelineGroup
from zbcompile.runtime.randomness import draws_random_numbers
from zbcompile.runtime.spec import PipelineSpec
from zbcompile.schedule.devices import Device
from zbcompile.schedule.sum_order import sum_order

__all__ = ["TrainingForm", "first_form", "form_name", "further_form"]

_AT_ONCE_S = 1.0
"""Seconds for the search of an order for a further form."""


class TrainingForm:
    """A form of the training step, loaded.

    Parameters
    ----------
    options, group
        Of the pipeline.
    call
        Shape and number of the microbatches.
    staged
        Their graphs.
    plan
        Their order.
    programs
        Its programs, one per rank.

    Attributes
    ----------
    spec
        What runs.
    runner
        Runs it.
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
        self._options, self.call, self.staged = options, call, without_tensors(staged)
        self.plan, self.programs = plan, programs
        self.run_on(group)

    def run_on(self, group: PipelineGroup | None) -> None:
        """Run on the ranks of a group, or all ranks in this process, once the runner is connected."""
        stages, plan = self.staged.stages, self.plan
        self.spec = PipelineSpec(
            stages,
            plan.schedule.placement,
            self.call.num_microbatches,
            self._options.seed,
            frozenset(s.index for s in stages if draws_random_numbers(s.graphs.forward)),
            plan.comm.one_communicator,
            self._options.gradient_dtype,
            accumulate=plan.problem.accumulate,
            microbatch_order=sum_order(plan.schedule, plan.problem) if plan.problem.microbatch_costs else (),
        )
        starts = planned_starts(plan.comm, plan.problem)
        self.runner = make_runner(group, self.spec, self.programs, starts)

    def take(self, plan: LoweredPlan, programs: tuple[str, ...]) -> None:
        """Have another order of the same stages; `run_on` makes it run."""
        self.runner.close()
        self.plan, self.programs = plan, programs

    def free_others(self, trained: nn.Module, group: PipelineGroup) -> list[weakref.ref[Tensor]]:
        """Free what only other ranks use, here and in the model; return what should be gone now."""
        self.staged, freed = free_others(
            trained, self.staged, self.plan.schedule.placement, group.pipeline_rank
        )
        self.runner.close()
        self.run_on(group)
        return freed

    @property
    def name(self) -> str:
        """The same for equal forms only, on all ranks."""
        return form_name(*self.call.key)

    def changed_buffers(self, rank: int | None) -> list[str]:
        """Return the buffers that the stages of a rank, or all stages, change in a step."""
        rank_of = self.spec.placement.rank_of
        mine = [s for s in self.staged.stages if rank is None or rank_of[s.index] == rank]
        return list(dict.fromkeys(name for stage in mine for name in stage.mutated))


def form_name(num_microbatches: int, shapes: Shapes) -> str:
    """Return the name of the form of microbatches of these shapes."""
    return hashlib.sha256(repr((num_microbatches, shapes)).encode()).hexdigest()[:16]


def first_form(
    options: CompileOptions,
    group: PipelineGroup | None,
    planners: PipelineGroup | None,
    num_ranks: int,
    call: CallForm,
    batch: Sequence[Value],
    observer: Observer,
) -> TrainingForm:
    """Compile the model for calls of one form; ``batch`` is the whole example, ``planners`` share the plan.

    ``capture -> fold_constant_masks -> partition -> split_backward -> verify``, then as `_planned`.
    """
    _check_number(options, call)
    _check_costs(options, call)
    cache = PlanCache(options, num_ranks, call, group)
    alone = num_ranks == options.num_stages
    staged = _stages(
        options,
        call,
        known=cache.knows,
        before_calls=lambda staged: _check_job(options, staged, group, planners),
        rank_each=alone,
        observer=observer,
        choose=cut_choice(options, num_ranks, call.num_microbatches, observer),
    )
    if options.verify is not False and cheap_to_verify(options.model):
        check_batch_dimension(options.model, call.signature, batch, call.num_microbatches, options.joined_dim)
    return _planned(options, group, planners, call, staged, cache, observer)


def _check_job(
    options: CompileOptions,
    staged: StagedModel,
    group: PipelineGroup | None,
    planners: PipelineGroup | None,
) -> None:
    """Refuse stages that cannot run beside other pipelines, before any of their calls runs."""
    require_one_plan(staged, group, planners)
    require_own_groups(staged, group)
    refuse_changed_buffers(group, staged)
    refuse_unshardable(options, staged, group)
    if options.post_validation:
        refuse_trials(staged)


def further_form(
    options: CompileOptions, group: PipelineGroup | None, forms: Iterable[TrainingForm], call: CallForm
) -> TrainingForm:
    """Compile the model for calls of another form, with the stages of the first one on its ranks.

    Parameters
    ----------
    options, group
        Of the pipeline.
    forms
        Those at hand, the first one first.
    call
        The new one.

    Raises
    ------
    InfeasibleError, NoOrderError
        No order for it fits under the memory limit.
    ShapeError
        The model cannot be compiled for this shape, or not be cut where it was cut.
    """
    first, *others = forms
    refuse_peers(
        first.staged, "a batch of another shape is planned by one pipeline alone", "give batches of one shape"
    )
    same = next((f for f in (first, *others) if f.call.shapes == call.shapes), None)
    if same is not None:
        staged, profile = same.staged, same.plan.problem.profile
    else:
        # Tensors of other ranks' stages are not trained here, or freed: no rank compares or uses them.
        staged = without_tensors(_stages_of_shape(options, first, call))
        counted = options.profile if isinstance(options.profile, Device) else None
        device = counted or nominal_device(staged.captured.device)
        profile = rescaled_profile(first.plan.problem.profile, first.staged.stages, staged.stages, device)
    given = options.schedule
    fits = given is not None and given.num_microbatches == call.num_microbatches
    quick = replace(
        options,
        profile=profile,
        schedule=given if fits else None,
        solution=None,
        placement=first.plan.schedule.placement,
        num_microbatches=None,
        microbatch_costs=options.costs_of(call.num_microbatches),
        rank_speeds=(),  # the first form's costs are those of its ranks
        time_limit_s=min(options.time_limit_s, _AT_ONCE_S),
    )
    cache = PlanCache(quick, first.plan.schedule.num_ranks, call, group)
    form = _planned(quick, group, group, call, staged, cache, quiet)
    if options.free_model and group is not None:
        form.free_others(with_loss(options.model, options.loss_fn), group)
    form.runner.connect()
    return form


def _check_number(options: CompileOptions, call: CallForm) -> None:
    given = options.schedule
    if given is not None and given.num_microbatches != call.num_microbatches:
        raise UsageError(
            "the batch has another number of microbatches than the order that compile() was given",
            needed=f"{given.num_microbatches} microbatches of equal shape",
            given=f"{call.num_microbatches} of {call.rows} rows",
            fix="give as many, or compile without schedule=",
        )


def _check_costs(options: CompileOptions, call: CallForm) -> None:
    """Refuse costs for microbatches that do not run together."""
    costs, count = len(options.microbatch_costs), call.num_microbatches
    if costs not in (0, count):
        raise UsageError(
            "the microbatches that have a cost do not all have one shape: those of different shape run in "
            "groups, one after the other",
            where="microbatch_costs",
            needed=f"{count} costs: the first group has so many of {call.rows} rows",
            given=costs,
            fix="give microbatches of one shape, or leave microbatch_costs out",
        )


def _stages_of_shape(options: CompileOptions, first: TrainingForm, call: CallForm) -> StagedModel:
    """Capture the model for another shape, with parameters and levels of recompute as they are."""
    homes = [(*s.parameters, *s.buffers) for s in first.staged.stages]
    try:
        return _stages(options, call, homes, levels=first.staged.levels)
    except Exception as error:
        pairs = zip(call.signature.names, first.call.shapes, call.shapes, strict=True)
        name, old, new = next((row for row in pairs if row[1] != row[2]), ("the batch", (), ()))
        raise ShapeError(
            f"the model cannot be compiled for a batch of another shape: {type(error).__name__}: {error}",
            where=name,
            needed=f"{list(old or ())} per microbatch, as compiled",
            given=list(new or ()),
            fix="give batches of one shape, or run this one through the model itself",
        ) from error


def _stages(
    options: CompileOptions,
    call: CallForm,
    homes: list[tuple[str, ...]] | None = None,
    known: Callable[[StagedModel], bool] | None = None,
    before_calls: Callable[[StagedModel], None] | None = None,
    rank_each: bool = False,
    observer: Observer = quiet,
    choose: CutChoice | None = None,
    levels: tuple[Recompute, ...] | None = None,
) -> StagedModel:
    """Capture, cut and split the model; with ``rank_each`` every stage has a rank of its own.

    ``levels`` are those of the stages; by default the ones to begin with.
    """
    one = call.example
    return build_stages(
        options.model,
        options.num_stages,
        one.args,
        one.kwargs,
        target=one.target,
        loss_fn=options.loss_fn,
        split_points=options.split_points,
        homes=homes,
        recompute=options.split_first if levels is None else levels,
        backend=options.backend,
        verify=False if homes is not None and options.free_model else options.verify,
        planned_for=options.profile if isinstance(options.profile, Device) else None,
        num_microbatches=call.num_microbatches if rank_each else None,
        constant=call.constants,
        fixed_branches=options.fixed_branches,
        known=known,
        before_calls=before_calls,
        skip=options.skip,
        observer=observer,
        choose=choose,
    )


def _verify_planned(
    options: CompileOptions,
    group: PipelineGroup | None,
    call: CallForm,
    staged: StagedModel,
    cache: PlanCache,
    observer: Observer,
) -> None:
    """Compare the stages at the levels that the plan chose with other ranks and with the untouched model."""
    if group is not None:
        hashes = " ".join(stage.signature_hash() for stage in staged.stages)
        group.agree({"stage graphs as planned": f"{staged.levels} {hashes}"})
    one = call.example
    verify_stages(
        options.model,
        staged,
        one.args,
        one.kwargs,
        target=one.target,
        loss_fn=options.loss_fn,
        verify=options.verify,
        known=lambda _: cache.found,
        observer=observer,
    )


def _planned(
    options: CompileOptions,
    group: PipelineGroup | None,
    planners: PipelineGroup | None,
    call: CallForm,
    staged: StagedModel,
    cache: PlanCache,
    observer: Observer,
) -> TrainingForm:
    """Measure or count -> plan, once for all ranks -> merge_backward -> insert_comm -> check -> codegen."""
    solution = plan_for_all(options, planners, group, cache.num_ranks, call, staged, cache, observer)
    built, staged = staged, as_planned(staged, solution)
    if staged.levels != built.levels:
        observer("recompute", staged.stages)
        _verify_planned(options, group, call, staged, cache, observer)
    keep_order_of_changes(solution.schedule, staged)
    plan = lower(
        solution,
        merge=options.schedule is None,
        one_communicator=options.one_communicator,
        reduced_stages=reduced_stages(staged, group),
        sharded_stages=sharded_stages(staged, group),
        observer=observer,
    )
    programs = plan.programs(observer)
    if group is not None:
        group.agree({"programs": "\n".join(programs)})
    if planners is None or planners.rank == 0:
        cache.keep(built, plan.solution)
    return TrainingForm(options, group, call, staged, plan, programs)
