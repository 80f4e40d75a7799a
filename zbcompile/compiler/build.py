"""The spine: from what `zbcompile.compile` was asked for to something that runs.

Read `build` from top to bottom, then `forms.first_form`. An observer is called after each step, before the
next begins, with the step's name and artifact; ``ZBCOMPILE_DUMP=directory`` writes every artifact as text
(`compiler.dump`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from zbcompile.compiler.call import Batch
from zbcompile.compiler.call_form import CallForm
from zbcompile.compiler.compiled import CompiledPipeline
from zbcompile.compiler.forms import first_form
from zbcompile.compiler.free_model import let_go, require_group
from zbcompile.compiler.job import check_places, place_of, require_members
from zbcompile.compiler.observe import Observer, quiet
from zbcompile.compiler.part_rules import check_shards
from zbcompile.compiler.signature import Signature, Value, largest_divisor
from zbcompile.errors import UsageError
from zbcompile.options import CompileOptions
from zbcompile.passes.capture.nested_values import Microbatches
from zbcompile.passes.capture.with_loss import with_loss
from zbcompile.runtime.calls import DistributedCall
from zbcompile.runtime.group import PipelineGroup

__all__ = ["build"]


def build(options: CompileOptions, batch: Batch, observer: Observer = quiet) -> CompiledPipeline:
    """Compile a model for batches like this one.

    ``model -> stages (F, B, W graphs) -> profile -> proved order -> order with communication -> programs``.

    Raises
    ------
    CaptureError, CutError, SplitError
        The model cannot be captured, cut or split.
    InfeasibleError, NoOrderError, CheckError
        No order fits, none was found in time, or the one that was given is wrong.
    PipelineError, UsageError
        The ranks differ; an argument cannot be meant.
    """
    # 1. Who runs it, and what one call of it looks like. A rank that fails from here on ends the others.
    with _ranks(options, observer) as (group, planners, observer):
        if planners is not None:
            planners.agree(options.agreed_parts())
        if options.free_model:
            require_group(group)
        check_shards(options, with_loss(options.model, options.loss_fn), group)
        num_ranks = _num_ranks(options, group)
        signature = Signature(batch, options)
        values = signature.values(batch)
        lengths = signature.lengths(values, _rows(options, signature, values, num_ranks))
        _check_count(options, len(lengths))
        call = CallForm(signature, signature.runs(values, lengths)[0])

        # 2. The first form: graphs, order, programs, loaded.
        form = first_form(options, group, planners, num_ranks, call, values, observer)
        freed = []
        if options.free_model and group is not None:
            freed = form.free_others(with_loss(options.model, options.loss_fn), group)
        compiled = CompiledPipeline(options, group, form)
        if options.free_model:
            let_go(freed)
        return compiled


@contextlib.contextmanager
def _ranks(
    options: CompileOptions, observer: Observer
) -> Iterator[tuple[PipelineGroup | None, PipelineGroup | None, Observer]]:
    """Build as one call: of the pipeline's ranks, and of all ranks that run one plan with them.

    Yields both, or None for this process alone; and the observer, which looks whether a rank has failed.
    """
    job = None
    if options.plan_group is not None:
        job = PipelineGroup.present(options.plan_group, options.stall_limit_s)
    with _built_by_all(job, observer) as (whole, observer):
        place = place_of(options, whole)
        if place is not None and job is not None:
            require_members(job, place)
        group = PipelineGroup.present(options.group if place is None else place, options.stall_limit_s)
        with _built_by_all(group, observer, whole) as (_, observer):
            if group is not None and place is not None:
                check_places(group)
            yield group, job or group, observer
    if job is not None:
        job.close()


@contextlib.contextmanager
def _built_by_all(
    group: PipelineGroup | None, observer: Observer, around: DistributedCall | None = None
) -> Iterator[tuple[DistributedCall | None, Observer]]:
    """Build as one call of all ranks, or as the part of one that they have in the call ``around`` it.

    Between two steps a rank looks whether another one has failed.
    """
    if group is None:
        yield None, observer
        return

    def looking(name: str, artifact: object) -> None:
        observer(name, artifact)
        group.watchdog.check()

    try:
        with group.calls.building("compile()", around) as call:
            yield call, looking
    except BaseException:
        group.close()
        raise


def _num_ranks(options: CompileOptions, group: PipelineGroup | None) -> int:
    """Return the group's size, the schedule's number, the one asked for, or one rank per stage."""
    wanted = options.num_ranks if options.schedule is None else options.schedule.num_ranks
    if group is None:
        return wanted or options.num_stages
    group.require_size(wanted)
    return len(group.pipeline)


def _check_count(options: CompileOptions, given: int) -> None:
    """Refuse a batch that the user has cut into another number of microbatches than asked for."""
    count = options.num_microbatches if options.schedule is None else options.schedule.num_microbatches
    if count is not None and given != count:
        raise UsageError(
            "the batch is cut into another number of microbatches than was asked for",
            needed=f"{count}, as asked for",
            given=given,
            fix="leave num_microbatches out, or cut the batch accordingly",
        )


def _rows(options: CompileOptions, signature: Signature, values: Sequence[Value], num_ranks: int) -> int:
    """Return the rows of a microbatch; not read where the user has cut the batch.

    Their number is the schedule's, the one asked for, or the largest divisor up to twice the ranks.

    Raises
    ------
    UsageError
        The batch is empty, or cannot be cut into equal microbatches.
    """
    size = signature.size
    if size == 0:
        raise UsageError("the batch is empty", fix="leave the call out")
    if any(isinstance(value, Microbatches) for value in values):
        return size
    count = options.num_microbatches if options.schedule is None else options.schedule.num_microbatches
    if count is None:
        return size // largest_divisor(size, 2 * num_ranks)
    if size % count:
        raise UsageError(
            f"a batch of {size} cannot be cut into {count} equal microbatches",
            where=signature.names[0],
            needed=f"a multiple of {count}",
            given=size,
            fix="change the batch size or num_microbatches",
        )
    return size // count
