"""The spine: from what `zbcompile.compile` was asked for to something that runs.

Read `build` from top to bottom. An observer is called after each step, before the next begins, with the
step's name and artifact; ``ZBCOMPILE_DUMP=directory`` writes every artifact as text (`compiler.dump`).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator

from torch import Tensor

from zbcompile.compiler.batch_dimension import check_batch_dimension
from zbcompile.compiler.call import Batch, CallForm, check_named
from zbcompile.compiler.compiled import CompiledPipeline
from zbcompile.compiler.free_model import free_others, let_go, require_group
from zbcompile.compiler.lower import lower
from zbcompile.compiler.observe import Observer, quiet
from zbcompile.compiler.planning import (
    gradient_bytes,
    keep_order_of_changes,
    plan_for_all,
    warn_of_held_gradients,
)
from zbcompile.compiler.stages import build_stages
from zbcompile.options import CompileOptions
from zbcompile.passes.capture.with_loss import with_loss
from zbcompile.passes.verify.verify import cheap_to_verify
from zbcompile.runtime.group import PipelineGroup
from zbcompile.schedule.devices import Device

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
    group = PipelineGroup.present(options.group, options.stall_limit_s)
    with _built_by_all(group, observer) as observer:
        if group is not None:
            group.agree(options.agreed_parts())
        if options.free_model:
            require_group(group)
        num_ranks = _num_ranks(options, group)
        for option, keys in (("whole", options.whole), ("constant", options.constant)):
            check_named(option, keys, options.model, batch)
        count = _num_microbatches(options, batch, num_ranks)
        call = CallForm(batch, options.model, count, options.whole, options.constant)

        # 2. capture -> fold_constant_masks -> partition -> split_backward -> verify
        one = call.example
        staged = build_stages(
            options.model,
            options.num_stages,
            one.args,
            one.kwargs,
            target=one.target,
            loss_fn=options.loss_fn,
            split_points=options.split_points,
            recompute=options.recompute,
            backend=options.backend,
            verify=options.verify,
            planned_for=options.profile if isinstance(options.profile, Device) else None,
            constant=call.constants,
            observer=observer,
        )

        if options.verify is not False and cheap_to_verify(options.model):
            check_batch_dimension(options.model, call, batch)

        # 3. measure or count -> plan, once for all ranks
        solution = plan_for_all(options, group, num_ranks, call, staged, observer)
        keep_order_of_changes(solution.schedule, staged)

        # 4. merge_backward -> insert_comm -> check -> codegen
        plan = lower(
            solution,
            merge=options.schedule is None,
            one_communicator=options.one_communicator,
            observer=observer,
        )
        warn_of_held_gradients(plan.solution, staged)
        programs = plan.programs(observer, gradient_bytes(staged))
        if group is not None:
            group.agree({"programs": "\n".join(programs)})

        # 5. load
        freed: list[weakref.ref[Tensor]] = []
        if options.free_model and group is not None:
            trained = with_loss(options.model, options.loss_fn)
            staged, freed = free_others(trained, staged, plan.schedule.placement, group.rank)
        compiled = CompiledPipeline(options, group, call, staged, plan, programs)
        if options.free_model:
            let_go(freed)
        return compiled


@contextlib.contextmanager
def _built_by_all(group: PipelineGroup | None, observer: Observer) -> Iterator[Observer]:
    """Build as one call of all ranks. Between two steps a rank looks whether another one has failed."""
    if group is None:
        yield observer
        return

    def looking(name: str, artifact: object) -> None:
        observer(name, artifact)
        group.watchdog.check()

    try:
        with group.calls.building("compile()"):
            yield looking
    except BaseException:
        group.close()
        raise


def _num_ranks(options: CompileOptions, group: PipelineGroup | None) -> int:
    """Return the group's size, the schedule's number, the one asked for, or one rank per stage."""
    wanted = options.num_ranks if options.schedule is None else options.schedule.num_ranks
    if group is None:
        return wanted or options.num_stages
    group.require_size(wanted)
    return group.size


def _num_microbatches(options: CompileOptions, batch: Batch, num_ranks: int) -> int:
    """Return the schedule's number, the one asked for, or the largest divisor up to twice the ranks."""
    if options.schedule is not None:
        return options.schedule.num_microbatches
    return options.num_microbatches or batch.most_microbatches(2 * num_ranks)
