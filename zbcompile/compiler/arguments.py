"""Arguments of `zbcompile.compile` as users write them -> values of `CompileOptions`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import ProcessGroup

from zbcompile.errors import UsageError
from zbcompile.formats import folders, profile_json
from zbcompile.formats.checkpoint_json import PLAN_FILE
from zbcompile.formats.detect import load_schedule
from zbcompile.formats.files import read_text
from zbcompile.options import MemoryLimit, Shard
from zbcompile.schedule.costs import Profile
from zbcompile.schedule.devices import Device
from zbcompile.schedule.ir import Placement, Schedule
from zbcompile.schedule.microbatches import MicrobatchCost
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.solution import Solution

__all__ = [
    "check_processes",
    "check_types",
    "limits_of",
    "microbatch_costs_of",
    "placement_of",
    "plan_of_checkpoint",
    "problem_of",
    "profile_of",
    "schedule_of",
    "shards_of",
]


def check_types(model: object, args: object, kwargs: object) -> None:
    """Refuse a model that is no module, and examples that are no arguments."""
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


def check_processes(mesh: object, **groups: object) -> None:
    """Refuse a mesh that is no `DeviceMesh`, and groups that are no process groups of this process."""
    wanted = {"mesh": (mesh, DeviceMesh)} | {name: (group, ProcessGroup) for name, group in groups.items()}
    for name, (given, kind) in wanted.items():
        if given is not None and not isinstance(given, kind):
            fix = f"give what {'init_device_mesh' if kind is DeviceMesh else 'new_group'} returned"
            raise UsageError(
                f"{name} must be a torch {kind.__name__} that holds this process",
                where=name,
                given=repr(given),
                fix=f"{fix} on this process",
            )


def limits_of(limit: int | Sequence[int | None] | None) -> MemoryLimit:
    """Return the limit of memory as an option."""
    return tuple(limit) if isinstance(limit, list) else cast(MemoryLimit, limit)


def placement_of(placement: str | Placement | Sequence[int]) -> str | Placement:
    """Return a placement or its name; a sequence gives the rank of each stage."""
    if isinstance(placement, str | Placement):
        return placement
    return Placement(tuple(placement))


def profile_of(profile: Profile | Device | str | os.PathLike[str] | None) -> Profile | Device | None:
    """Return the costs to plan with, read from a file where one was named."""
    if isinstance(profile, str | os.PathLike):
        return profile_json.loads(read_text(profile), str(profile)).profile
    return profile


def microbatch_costs_of(
    costs: Sequence[float | MicrobatchCost | tuple[float, float]] | None,
    profile: object,
    schedule: object,
    saved: Solution | None,
) -> tuple[MicrobatchCost, ...]:
    """Return what each microbatch costs: as given, else as the plan or the profile file that was named says.

    Raises
    ------
    UsageError
        An entry is no factor, no pair of factors (times, bytes) and no `MicrobatchCost`.
    """
    if costs is not None:
        return tuple(_cost_of(cost) for cost in costs)
    problem = problem_of(schedule, saved)
    if problem is not None or schedule is not None:
        return () if problem is None else problem.microbatch_costs
    if isinstance(profile, str | os.PathLike):
        return profile_json.loads(read_text(profile), str(profile)).microbatch_costs
    return ()


def _cost_of(cost: object) -> MicrobatchCost:
    if isinstance(cost, MicrobatchCost):
        return cost
    factors = cost if isinstance(cost, tuple) else (cost,)
    if 1 <= len(factors) <= 2 and all(isinstance(f, int | float | str) for f in factors):
        return MicrobatchCost.of(*factors)
    raise UsageError(
        "a microbatch's cost is a factor, a pair of factors (times, bytes) or a MicrobatchCost",
        where="microbatch_costs",
        given=repr(cost)[:60],
        fix="write for instance microbatch_costs=[1, 1.3, (0.8, 2)]",
    )


def plan_of_checkpoint(schedule: object) -> Solution | None:
    """Return the whole plan of a checkpoint; None where no checkpoint was given."""
    if not isinstance(schedule, str | os.PathLike):
        return None
    folder = folders.present(os.path.realpath(schedule))
    if not os.path.isdir(folder):
        return None
    path = os.path.join(folder, PLAN_FILE)
    return load_schedule(read_text(path), path)[0].solution()


def problem_of(schedule: object, saved: Solution | None) -> Problem | None:
    """Return the problem that a given order was planned for; None where it does not say, or none was given.

    Parameters
    ----------
    schedule
        What was given as the order.
    saved
        The plan of a checkpoint, where that was given.
    """
    if saved is None and isinstance(schedule, Solution):
        saved = schedule
    if saved is not None:
        return saved.problem
    if isinstance(schedule, str | os.PathLike):
        return load_schedule(read_text(schedule), str(schedule))[0].problem
    return None


def schedule_of(
    schedule: Schedule | Solution | str | os.PathLike[str] | None,
) -> tuple[Schedule | None, Profile | None]:
    """Return the order to run, read from a file where one was named, and the costs that it was made for."""
    if isinstance(schedule, str | os.PathLike):
        file = load_schedule(read_text(schedule), str(schedule))[0]
        return file.schedule, None if file.problem is None else file.problem.profile
    if isinstance(schedule, Solution):
        return schedule.schedule, schedule.problem.profile
    return schedule, None


def shards_of(shards: Mapping[str, int | Shard] | None) -> tuple[tuple[str, Shard], ...] | None:
    """Return how parameters are cut, as an option: pattern of names and shard.

    Raises
    ------
    UsageError
        An entry is no pattern with a dimension or a `Shard`.
    """
    if shards is None:
        return None
    entries = shards.items() if isinstance(shards, Mapping) else [(shards, None)]
    for pattern, shard in entries:
        if not isinstance(pattern, str) or isinstance(shard, bool) or not isinstance(shard, int | Shard):
            raise UsageError(
                "shards maps patterns of names to the dimension that is cut, or to a Shard",
                where="shards",
                given=f"{pattern!r}: {shard!r}"[:80],
                fix='write for instance {"*.up.weight": 0, "*.qkv.weight": zbcompile.Shard(0, blocks=3)}',
            )
    return tuple((p, s if isinstance(s, Shard) else Shard(s)) for p, s in shards.items())
