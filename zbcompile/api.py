"""`compile`: from an unmodified model and what is asked of it to a `Pipeline`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from zbcompile.compiler.arguments import (
    check_processes,
    check_types,
    limits_of,
    microbatch_costs_of,
    placement_of,
    plan_of_checkpoint,
    problem_of,
    profile_of,
    schedule_of,
    shards_of,
)
from zbcompile.compiler.asked_levels import with_levels
from zbcompile.compiler.dump import observer_from_environment
from zbcompile.compiler.observe import Observer
from zbcompile.options import CompileOptions, Shard, argument_places, batch_dims
from zbcompile.passes.split.rewrites import skipped_from_environment
from zbcompile.pipeline import Pipeline
from zbcompile.schedule.costs import Profile
from zbcompile.schedule.devices import Device
from zbcompile.schedule.ir import Placement, Schedule
from zbcompile.schedule.microbatches import MicrobatchCost
from zbcompile.schedule.problem import ACCUMULATE, OBJECTIVES, TRANSPORTS
from zbcompile.schedule.solution import Solution
from zbcompile.schedule.speeds import speeds_of

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from zbcompile.passes.partition.partition import Policy
    from zbcompile.passes.split.split_backward import Recompute

__all__ = ["compile"]


def compile(
    model: nn.Module,
    num_stages: int,
    *,
    example_args: Sequence[Any] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    example_target: Any = None,
    loss_fn: Callable[..., Tensor] | None = None,
    num_microbatches: int | None = None,
    microbatch_costs: Sequence[float | MicrobatchCost | tuple[float, float]] | None = None,
    memory_limit: int | Sequence[int | None] | None = None,
    placement: str | Placement | Sequence[int] = "auto",
    objective: str | None = None,
    transport: str | None = None,
    profile: Profile | Device | str | os.PathLike[str] | None = None,
    schedule: Schedule | Solution | str | os.PathLike[str] | None = None,
    num_ranks: int | None = None,
    group: ProcessGroup | None = None,
    plan_group: ProcessGroup | None = None,
    mesh: DeviceMesh | None = None,
    shards: Mapping[str, int | Shard] | None = None,
    data_group: ProcessGroup | None = None,
    seed: int = 0,
    recompute: Recompute | None = None,
    split_points: Sequence[str] | Policy | None = None,
    backend: str = "eager",
    verify: bool | None = None,
    time_limit: float = 10.0,
    one_communicator: bool = False,
    scale_grads: bool = True,
    whole: Sequence[str | int] = (),
    constant: Sequence[str | int] = (),
    batch_dim: int | Mapping[str | int, int | None] = 0,
    result_dim: int | None = None,
    other_shapes: str = "plan",
    fixed_branches: bool = False,
    stall_limit: float = 300.0,
    free_model: bool = False,
    gradient_dtype: torch.dtype | None = None,
    accumulate: str | None = None,
    kept_gradients: bool | None = None,
    post_validation: bool = False,
    cache: str | os.PathLike[str] | None = None,
    cuts: str | None = None,
    rank_speeds: Sequence[float] | None = None,
    observer: Observer | None = None,
) -> Pipeline:
    """Cut a model into stages, find the best order of their work, and make it runnable.

    Parameters
    ----------
    model
        Any ``nn.Module``. It is not changed (but see ``free_model``); its own parameters are trained.
    num_stages
        Number of pieces. A rank may run several.
    example_args
        A whole batch: positional arguments of the model, as `Pipeline.step` gets them. Without an example the
        model is captured at the first step.
    example_kwargs
        Keyword arguments of the model for that batch.
    example_target
        What the loss function gets beside the model's output.
    loss_fn
        ``loss_fn(output, target) -> scalar``, or ``(scalar, {name: tensor})`` with metrics for
        ``step(metrics=...)``; not needed where the model returns its own loss. The parameters of a loss that
        is a module are trained too, in the last stages, as ``loss_fn.<name>``.
    num_microbatches
        Of a batch of the example's size. Default: as many as ``microbatch_costs`` has, or the largest divisor
        of the batch up to twice the number of ranks.
    microbatch_costs
        What each microbatch costs where they differ: a factor of all times, a pair of factors (times, bytes),
        or a `zbcompile.schedule.microbatches.MicrobatchCost` with one per stage. Their order is then planned,
        and gradients are summed in it (`Pipeline.microbatch_order`); see docs/howto/training.md. Default: as
        the plan or profile file that was given says, else all alike.
    memory_limit
        Bytes per rank, one for all or one each: parameters, gradients, optimizer state (two tensors per
        parameter), activations, and gradients that wait for their turn in the sum (``accumulate``). Not
        counted: the result of `Pipeline.step` with ``return_outputs``.
    placement
        ``auto``, ``linear``, ``looped``, ``v``, a `Placement`, or the rank of each stage.
    objective
        ``span`` (steps follow each other without a meeting) or ``makespan`` (all ranks meet). Default: that
        of the plan that was given, else ``span``.
    transport
        Send mode that is planned for: ``async``, ``rendezvous`` or ``batched``, defined in
        docs/reference/send-modes.md. Default: that of the plan that was given, else ``async``.
    profile
        Costs to plan with: a `Profile` or a file, or a `Device` (``device_named("H100")``) to count them for.
        Default: the stages are measured here. A model on the meta device cannot be measured.
    schedule
        An order to run as it is instead of a search: a `Schedule`, a `Solution`, a schedule file, torch's
        CSV; or the folder of a checkpoint (`Pipeline.save`), whose plan is taken with the costs that it was
        made for, so that nothing is measured.
    num_ranks
        Number of ranks. Default: the size of the group; without one, as many as stages, all in this process.
    group
        The process group of the pipeline, one process per rank. Default: the default group where one is
        initialised or torchrun started the process; else none.
    plan_group
        The process group of a job in which several pipelines of the same form run side by side (replicas),
        each with its own ``group``: all of its processes compile at the same time, and run the plan that its
        first one makes. Default: each pipeline makes its own, or with ``mesh`` or ``data_group`` all of them
        together.
    mesh
        A `DeviceMesh` of all processes of the job, with dimensions ``pp`` (the ranks of a pipeline), ``dp``
        (replicas: each runs the same stages on rows of its own, and gradients are summed over them) or both,
        and further ones (``tp``) along which stages exchange data. All processes make the same calls, and run
        one plan. See docs/howto/data-parallel.md.
    shards
        Which parameters and buffers the processes along a further dimension of the mesh (``tp``) hold a part
        of, and the dimension that is cut: ``{"*.q_proj.weight": 0, "*.o_proj.weight": 1}``, names of the
        model's ``state_dict()`` with ``*``; or a `Shard`. All others are copies. With it norms,
        clipping and checkpoints are those of the whole parameters (docs/howto/tensor-parallel.md). Default:
        as the attributes ``tensor_model_parallel`` and ``partition_dim`` of parameters say (Megatron-Core);
        without any, such calls are refused.
    data_group
        In place of ``mesh``, beside ``group``: the process group of the replicas of this process.
    seed
        Of the random streams (dropout) and of the search.
    recompute
        What stages compute again in their backward to hold less: ``none``, ``regather`` (all-gathers over a
        group), ``min_memory``, ``full``, a price in bytes per second, or ``auto``: a level for each stage,
        chosen with the order. Default: what the plan or the profile says that was given, else ``auto`` under
        a ``memory_limit``, else ``none``.
    split_points
        The modules that begin stages 1, 2, ..., or a function that chooses among legal cuts. Default: cuts
        are found (``cuts``).
    backend
        ``eager``, with the bits of plain autograd, or ``inductor``, which compiles every graph.
    verify
        Whether one microbatch is compared with the untouched model (docs/reference/split.md). Default: for
        models on the CPU of at most 1 GiB without gradient hooks.
    time_limit
        Seconds for the search.
    one_communicator
        Keep one global order of messages, where a library refuses several communicators.
    scale_grads
        Divide gradients by the number of microbatches, for a loss that is a mean.
    whole
        Tensors that every microbatch gets whole: positions of args, names of the forward's arguments.
    constant
        Arguments of the model whose values are the same in every microbatch of every step (sizes of images,
        lengths): positions of args, names of the forward's arguments. Python code of the model may read
        them; a step with other values is refused.
    batch_dim
        The dimension along which arguments are cut into microbatches: one for all, or a mapping from
        positions of args and names of the forward's arguments (and ``"target"``), None for a tensor that has
        none. Others are cut along dimension 0 where that has the size of the batch.
    result_dim
        The dimension along which results are joined. Default: ``batch_dim`` if that is a number, else 0.
    other_shapes
        What happens to a batch of another size or shape than the example's. ``plan``: its microbatches have
        the rows of the example's, the last one what is left over and counts by its rows; a new shape or
        number of microbatches is compiled when it comes, with the costs at hand, and the last 8 stay
        compiled. ``refuse``: `ShapeError`.
    fixed_branches
        Take, wherever the model's code asks a tensor for its truth, the side that the first microbatch of
        the example takes (the model runs on it once). F checks it: a microbatch that takes another side
        raises a `DataError`.
    stall_limit
        Seconds after which a rank that waits is reported and the step ended on all ranks.
    free_model
        Take the parameters and buffers of other ranks' stages out of this process's ``model`` once it is
        compiled; a later use of them raises `UsageError` with their name. Make the optimizer afterwards.
        Only with one process per rank.
    gradient_dtype
        ``torch.float32``: gradients of narrower parameters (bfloat16, float16) are summed in float32 and
        handed over so; ``param.grad`` is then wider than ``param``. docs/reference/runtime.md has the
        optimizer. Default: gradients have the dtype of their parameter.
    accumulate
        ``order``: gradients of weights are summed in the order of the microbatches, with the bits of a plain
        loop. Where an order computes one out of turn it waits, and the plan counts it. ``memory``: each is
        added as it comes, so that none waits: equal up to rounding, and the same at every step of one order.
        Default: that of the plan that was given, else ``order``.
    kept_gradients
        Whether steps begin with gradients of earlier steps in ``param.grad`` (several steps to one of the
        optimizer): the plan counts a second set of gradients. Without it, such a step under a
        ``memory_limit`` that leaves no room for them warns. Default: as the plan that was given says, else
        False.
    post_validation
        Whether `Pipeline.optimizer_step` steps without a barrier, and undoes the step where the norm of all
        gradients, known later, asks for clipping or for none: the plan counts a copy of the weights and of
        the optimizer's state (two tensors per parameter). For the optimizers of
        `zbcompile.compiler.optimizer_snapshot.REVERSIBLE`; see docs/howto/training.md.
    cache
        Folder in which plans are kept, to be found again at the next start with the same graphs, options,
        ranks and versions: then nothing is measured, searched, or, unless ``verify`` is True, compared with
        the model. Each process may have a folder of its own; rank 0's decides the plan.
    cuts
        How the model is cut where no ``split_points`` are given. ``balance``: for the shortest step by a
        formula. ``plan``: small pieces of it are counted, and quick plans under ``memory_limit`` choose how
        they are joined. Default: ``plan`` where ranks differ in speed, else ``balance``.
    rank_speeds
        One number per rank, where ranks differ in speed: 1 for that of the profile, 0.5 where everything
        takes twice as long. Where stages are measured, that is on rank 0: the ratios to its number count. The
        costs of a checkpoint's plan are those of its ranks already.
    observer
        Called after every step of the compiler, before the next begins, with the step's name and what it
        made; by the name ``split_backward.joint`` also after every rewrite of a stage's joint graph.
        ``ZBCOMPILE_DUMP=directory`` writes these to files; `zbcompile.progress` writes the names of the steps
        to standard error.

    Returns
    -------
    Pipeline
        Captured, planned and loaded if an example was given.

    Raises
    ------
    CaptureError, CutError, SplitError
        The model cannot be captured, cut, or split into B and W.
    InfeasibleError, NoOrderError, CheckError
        No order fits under the limit, none was found in time, or the one that was given is wrong.
    UsageError
        An argument cannot be meant.
    """
    check_types(model, example_args, example_kwargs)
    check_processes(mesh, group=group, plan_group=plan_group, data_group=data_group)
    saved = plan_of_checkpoint(schedule)
    order, planned = schedule_of(schedule if saved is None else saved)
    costs = microbatch_costs_of(microbatch_costs, profile, schedule, saved)
    known = problem_of(schedule, saved)
    options = CompileOptions(
        model=model,
        num_stages=num_stages,
        loss_fn=loss_fn,
        num_microbatches=len(costs) if num_microbatches is None and costs else num_microbatches,
        microbatch_costs=costs,
        memory_limit=limits_of(memory_limit),
        placement=placement_of(placement),
        objective=(known.objective if known else OBJECTIVES[0]) if objective is None else objective,
        transport=(known.transport if known else TRANSPORTS[0]) if transport is None else transport,
        profile=saved.problem.profile if saved is not None and profile is None else profile_of(profile),
        schedule=order,
        solution=saved,
        num_ranks=num_ranks,
        group=group,
        plan_group=plan_group,
        mesh=mesh,
        shards=shards_of(shards),
        data_group=data_group,
        seed=seed,
        split_points=split_points,
        backend=backend,
        verify=verify,
        time_limit_s=time_limit,
        one_communicator=one_communicator,
        scale_grads=scale_grads,
        whole=argument_places("whole", whole),
        constant=argument_places("constant", constant),
        batch_dim=batch_dims(batch_dim),
        result_dim=result_dim,
        other_shapes=other_shapes,
        fixed_branches=fixed_branches,
        stall_limit_s=stall_limit,
        free_model=free_model,
        gradient_dtype=gradient_dtype,
        accumulate=(known.accumulate if known else ACCUMULATE[0]) if accumulate is None else accumulate,
        kept_gradients=(known is not None and known.kept_gradients)
        if kept_gradients is None
        else kept_gradients,
        post_validation=post_validation,
        cache=None if cache is None else os.path.abspath(cache),
        skip=skipped_from_environment(),
        cuts=cuts,
        rank_speeds=speeds_of(None if saved is not None and profile is None else rank_speeds),
    )
    options = with_levels(options, recompute, planned)
    pipeline = Pipeline(options, observer or observer_from_environment())
    if example_args is not None or example_kwargs is not None:
        pipeline.build(tuple(example_args or ()), dict(example_kwargs or {}), example_target)
    return pipeline
