"""What `zbcompile.compile` was asked for: one frozen record that travels whole. No torch is loaded here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from zbcompile.errors import UsageError
from zbcompile.schedule.costs import Profile
from zbcompile.schedule.devices import Device
from zbcompile.schedule.ir import PLACEMENTS, Placement, Schedule
from zbcompile.schedule.limits import check_seed
from zbcompile.schedule.microbatches import MicrobatchCost
from zbcompile.schedule.problem import ACCUMULATE, OBJECTIVES, TRANSPORTS
from zbcompile.schedule.solution import Solution

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from zbcompile.passes.partition.partition import Policy
    from zbcompile.passes.split.split_backward import Recompute

__all__ = [
    "NAMED_PLACEMENTS",
    "BatchDim",
    "CompileOptions",
    "MemoryLimit",
    "Shard",
    "argument_places",
    "batch_dims",
]

MemoryLimit = int | tuple[int | None, ...] | None
"""Bytes for every rank, or for each one (None: no limit)."""

BatchDim = int | tuple[tuple[str | int, int | None], ...]
"""The batch dimension of all tensors; or of those that are named (None: it has none), and 0 of the others."""

OTHER_SHAPES = ("plan", "refuse")
CUTS = ("balance", "plan")

NAMED_PLACEMENTS = ("auto", *PLACEMENTS)


@dataclass(frozen=True)
class Shard:
    """How the processes along a dimension of the mesh cut a parameter: one behind the other, along ``dim``.

    Attributes
    ----------
    dim
        The parameter's dimension.
    blocks
        Where several matrices stand in one parameter (queries, keys and values; gate and up), how many: each
        is cut for itself, and a process holds its part of the first, then of the second, and so on. They have
        the same size.
    along
        The mesh's dimension. Default: ``tp``, or the one that it has beside ``pp``, ``dp`` and ``dp_shard``.

    Raises
    ------
    UsageError
        ``dim`` is no whole number, or ``blocks`` no positive one.
    """

    dim: int
    blocks: int = 1
    along: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.dim, bool) or not isinstance(self.dim, int):
            raise UsageError("a shard needs the dimension that is cut", given=repr(self.dim), fix="Shard(0)")
        _check_count("blocks", self.blocks)


@dataclass(frozen=True, kw_only=True)
class CompileOptions:
    """The arguments of `zbcompile.compile`, with its meanings; values that cannot be meant are refused here.

    Attributes
    ----------
    profile
        Costs to plan with, or the device to count them for; None: the stages are measured.
    schedule
        The order to run instead of a search; None: search.
    solution
        The plan that the order comes from, with its costs and certificate, where it was made for such stages.
    plan_group
        The processes that run one plan, which several pipelines may share; None: those of the pipeline.
    mesh
        All processes of a job of several pipelines, with dimensions ``pp`` and ``dp``; None: no such job.
    shards
        Pattern of names -> how the mesh's further dimensions cut these parameters; None: not said.
    data_group
        The processes that run the same stages as this one, where there is no mesh; None: it alone.
    cache
        Folder of plans that were made before; None: none.
    whole
        Tensors that every microbatch gets whole: positions of args, names of the forward's arguments.
    gradient_dtype
        What gradients of narrower parameters are summed in; None: their own dtype.
    accumulate
        Whether gradients are summed in microbatch ``order``, or as they come, in the least ``memory``.
    kept_gradients
        Whether ``param.grad`` may hold gradients of earlier steps when a step begins: the plan counts them.
    post_validation
        Whether optimizers step without a barrier and are validated later: the plan counts what undoes a step.
    constant
        Arguments of the model whose values are the same in every microbatch of every step, and become part
        of the graphs: positions of args, names of the forward's arguments.
    batch_dim
        Which dimension of a tensor is the batch.
    result_dim
        Which dimension of the results is the batch; None: ``batch_dim`` if that is one number, else 0.
    other_shapes
        Whether batches of other shapes get an order of their own, or are refused.
    fixed_branches
        Whether branches on data take the side that they take on the example, and are checked at every step.
    microbatch_costs
        What each microbatch costs, as factors of the costs of the stages; empty: all cost the same.
    skip
        Names of rewrites of graphs to leave out, as ``ZBCOMPILE_SKIP`` has them.
    cuts
        ``balance`` or ``plan``; None: ``plan`` where ranks differ in speed, else ``balance``.
    rank_speeds
        Speeds of the ranks in millionths (`zbcompile.schedule.speeds`); empty: all alike.
    recompute
        What stages compute again in their backward; "auto": chosen with the order.
    levels
        Per stage what it recomputes where the plan or the profile that was given says so, else None.

    Raises
    ------
    UsageError
        A count that is not positive, an unknown name, a limit that is no whole number of bytes.
    """

    model: nn.Module
    num_stages: int
    loss_fn: Callable[..., Tensor] | None = None
    num_microbatches: int | None = None
    memory_limit: MemoryLimit = None
    placement: str | Placement = "auto"
    objective: str = "span"
    transport: str = TRANSPORTS[0]
    profile: Profile | Device | None = None
    schedule: Schedule | None = None
    solution: Solution | None = None
    num_ranks: int | None = None
    group: ProcessGroup | None = None
    plan_group: ProcessGroup | None = None
    mesh: DeviceMesh | None = None
    shards: tuple[tuple[str, Shard], ...] | None = None
    data_group: ProcessGroup | None = None
    seed: int = 0
    recompute: Recompute = "none"
    split_points: Sequence[str] | Policy | None = None
    backend: str = "eager"
    verify: bool | None = None
    time_limit_s: float = 10.0
    one_communicator: bool = False
    scale_grads: bool = True
    whole: tuple[str | int, ...] = ()
    constant: tuple[str | int, ...] = ()
    batch_dim: BatchDim = 0
    result_dim: int | None = None
    other_shapes: str = "plan"
    fixed_branches: bool = False
    stall_limit_s: float = 300.0
    free_model: bool = False
    gradient_dtype: torch.dtype | None = None
    accumulate: str = ACCUMULATE[0]
    kept_gradients: bool = False
    post_validation: bool = False
    cache: str | None = None
    skip: tuple[str, ...] = ()
    microbatch_costs: tuple[MicrobatchCost, ...] = ()
    cuts: str | None = None
    rank_speeds: tuple[int, ...] = ()
    levels: tuple[Recompute, ...] | None = None

    def __post_init__(self) -> None:
        _check_count("num_stages", self.num_stages)
        for name in ("num_microbatches", "num_ranks"):
            if getattr(self, name) is not None:
                _check_count(name, getattr(self, name))
        check_seed(self.seed)
        if self.mesh is not None and (self.group is not None or self.data_group is not None):
            raise UsageError(
                "the mesh says which processes are a pipeline, and which are replicas",
                where="mesh",
                fix="leave group and data_group out",
            )
        if self.shards is not None and self.mesh is None:
            raise UsageError(
                "shards says how the mesh's further dimensions cut parameters, and there is no mesh",
                where="shards",
                fix="give mesh= with dimensions pp and tp, or leave shards out",
            )
        if self.data_group is not None and self.group is None:
            raise UsageError(
                "data_group are the replicas of one rank of a pipeline, whose group is not given",
                where="data_group",
                fix="give group=, or mesh= with dimensions pp and dp",
            )
        _check_name("gradient_dtype", str(self.gradient_dtype), ("None", "torch.float32"))
        for name in ("fixed_branches", "kept_gradients", "post_validation"):
            if not isinstance(getattr(self, name), bool):
                raise UsageError(f"{name} must be True or False", given=repr(getattr(self, name)))
        if self.post_validation and self.plan_group is not None:
            raise UsageError(
                "post_validation is for one pipeline or one mesh: pipelines that share no more than a plan "
                "would not undo a step together",
                where="plan_group",
                fix="leave out one of the two, or give mesh= with dimensions pp and dp",
            )
        _check_name("objective", self.objective, OBJECTIVES)
        _check_name("transport", self.transport, TRANSPORTS)
        _check_name("accumulate", self.accumulate, ACCUMULATE)
        _check_name("other_shapes", self.other_shapes, OTHER_SHAPES)
        if self.cuts is not None:
            _check_name("cuts", self.cuts, CUTS)
        if self.cuts == "plan" and self.split_points is not None:
            raise UsageError("split_points are given, so no cuts are planned", fix="leave out one of the two")
        if not isinstance(self.placement, Placement):
            _check_name("placement", self.placement, NAMED_PLACEMENTS)
        limits = self.memory_limit if isinstance(self.memory_limit, tuple) else (self.memory_limit,)
        for limit in limits:
            if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 0):
                raise UsageError(
                    "memory_limit must be whole bytes, for all ranks or a list with one entry for each",
                    given=repr(limit),
                    fix="write for instance memory_limit=4 << 30 for 4 GiB",
                )

        count = self.num_microbatches if self.schedule is None else self.schedule.num_microbatches
        if self.microbatch_costs and count is not None and len(self.microbatch_costs) != count:
            raise UsageError(
                "one cost per microbatch",
                where="microbatch_costs",
                needed=count,
                given=len(self.microbatch_costs),
            )
        if self.microbatch_costs and self.plans_cuts:
            raise UsageError(
                "cuts are planned for microbatches that are alike",
                where="microbatch_costs",
                fix='leave them out, or give cuts="balance"',
            )
        if self.schedule is not None:
            self._check_beside_schedule(self.schedule)

    def _check_beside_schedule(self, schedule: Schedule) -> None:
        """Refuse what contradicts the order that was given."""
        beside = (
            ("num_stages", self.num_stages, schedule.num_stages),
            ("num_microbatches", self.num_microbatches, schedule.num_microbatches),
            ("num_ranks", self.num_ranks, schedule.num_ranks),
        )
        for name, asked, given in beside:
            if asked is not None and asked != given:
                raise UsageError(
                    f"the schedule has another {name}",
                    needed=f"{name}={asked}, as asked for",
                    given=f"{given} in the schedule",
                    fix=f"leave {name} out or give {name}={given}, or plan another schedule",
                )
        placement = self.placement
        if placement == "auto":
            return
        name = placement if isinstance(placement, str) else placement.name
        same = (
            schedule.placement.name == name if isinstance(placement, str) else schedule.placement == placement
        )
        if not same:
            raise UsageError(
                "the schedule has another placement",
                needed=f"{name}, as asked for",
                given=f"{schedule.placement.name}: {list(schedule.placement.rank_of)}",
                fix="leave placement out, or plan another schedule",
            )

    @property
    def plans_cuts(self) -> bool:
        """Whether the cuts are chosen with the order."""
        unequal = self.cuts is None and len(set(self.rank_speeds)) > 1
        return self.split_points is None and (unequal or self.cuts == "plan")

    @property
    def split_first(self) -> Recompute | tuple[Recompute, ...]:
        """What the stages are split at before anything is planned: one level for all, or one for each."""
        if self.levels is not None:
            return self.levels
        return "none" if self.recompute == "auto" else self.recompute

    @property
    def joined_dim(self) -> int:
        """The dimension along which results of microbatches are joined."""
        if self.result_dim is not None:
            return self.result_dim
        return self.batch_dim if isinstance(self.batch_dim, int) else 0

    def costs_of(self, num_microbatches: int) -> tuple[MicrobatchCost, ...]:
        """Return what each of so many microbatches costs; empty, for all alike, for another number."""
        return self.microbatch_costs if len(self.microbatch_costs) == num_microbatches else ()

    def agreed_parts(self) -> dict[str, str]:
        """Everything that all ranks must have been asked for alike, as text by name.

        The model, the loss and the cuts are compared by the graphs that they become; the group is each
        process's own handle.
        """
        parts = {
            name: repr(getattr(self, name))
            for name in self.__dataclass_fields__
            if name not in _COMPARED_ELSEWHERE
        }
        schedule, profile = parts.pop("schedule") + parts.pop("solution"), parts.pop("profile")
        return {"plan": schedule, "profile": profile, "options": repr(parts)}


_COMPARED_ELSEWHERE = (
    "model", "loss_fn", "group", "plan_group", "mesh", "data_group", "split_points", "cache",
)  # fmt: skip


def argument_places(option: str, value: object) -> tuple[str | int, ...]:
    """Return an option that names arguments of a call, as a tuple.

    Raises
    ------
    UsageError
        It is no list of positions and names.
    """
    places = tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else None
    if places is None or any(isinstance(p, bool) or not isinstance(p, str | int) for p in places):
        raise UsageError(
            f"{option} must be a list of positions and names of arguments",
            given=repr(value),
            fix=f'write for instance {option}=["mask"]',
        )
    return places


def batch_dims(value: object) -> BatchDim:
    """Return the option ``batch_dim`` as it is kept.

    Raises
    ------
    UsageError
        It is no dimension, and no mapping of positions and names of arguments to dimensions.
    """
    if _is_dim(value):
        return cast(int, value)
    if isinstance(value, Mapping):
        places = argument_places("batch_dim", value)
        if all(dim is None or _is_dim(dim) for dim in value.values()):
            return tuple(zip(places, value.values(), strict=True))
    raise UsageError(
        "batch_dim must be a dimension, or map positions and names of arguments to dimensions",
        given=repr(value),
        fix='write for instance batch_dim=1, or batch_dim={"tokens": 1, "mask": None}',
    )


def _is_dim(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"{name} must be a positive whole number", given=value)


def _check_name(what: str, value: Any, known: Sequence[str]) -> None:
    if value not in known:
        raise UsageError(f"unknown {what} {value!r}", needed=" or ".join(known))
