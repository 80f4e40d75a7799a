"""Where processes stand in a job of several pipelines: ranks of one pipeline, and replicas of its stages.

A job is a set of pipelines of the same form. Processes with the same rank in each of them run the same
stages: those are replicas if they hold the same weights, which is what ``dp`` in a mesh says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import ProcessGroup

from zbcompile.errors import UsageError

__all__ = ["OWN_DIMS", "Place", "place_in_mesh", "place_of_groups"]

OWN_DIMS = ("pp", "dp", "dp_shard")
"""Dimensions of a mesh that are known here: ranks of a pipeline, replicas, and such that share weights."""

_FIX = 'write for instance init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))'


@dataclass(frozen=True)
class Place:
    """Where one process stands. All numbers are ranks of the default process group, in ascending order.

    Attributes
    ----------
    members
        All processes of the job.
    pipeline
        Those of this process's pipeline, by rank in it.
    replicas
        Those that run the same stages with the same weights, this one included.
    others
        Per further dimension of the mesh, its name and the processes along it.
    is_sharded
        Whether the replicas share the weights of their stages, each with a part of them.
    """

    members: tuple[int, ...]
    pipeline: tuple[int, ...]
    replicas: tuple[int, ...]
    others: tuple[tuple[str, tuple[int, ...]], ...] = ()
    is_sharded: bool = False


def place_in_mesh(mesh: DeviceMesh) -> Place:
    """Return where this process stands in a mesh.

    Raises
    ------
    UsageError
        The mesh has no names, or neither ``pp`` nor ``dp``; its ranks do not ascend along a dimension; or it
        does not hold this process.
    """
    names = mesh.mesh_dim_names
    if names is None or not set(OWN_DIMS) & set(names):
        raise UsageError(
            "the mesh names neither pipelines nor replicas",
            where="mesh",
            needed="a dimension pp, dp or dp_shard",
            given=names,
            fix=_FIX,
        )
    here = mesh.get_coordinate()
    if here is None:
        raise UsageError("this process is not in the mesh", where="mesh", given=f"rank {dist.get_rank()}")
    along = {}
    for dim, name in enumerate(names):
        index = [slice(None) if d == dim else at for d, at in enumerate(here)]
        along[name] = tuple(int(rank) for rank in mesh.mesh[tuple(index)])
        if list(along[name]) != sorted(along[name]):
            raise UsageError(
                f"the ranks of the mesh do not ascend along {name}", where="mesh", given=along[name], fix=_FIX
            )
    alone = (dist.get_rank(),)
    is_sharded = len(along.get("dp_shard", alone)) > 1
    if is_sharded and len(along.get("dp", alone)) > 1:
        raise UsageError(
            "replicas either hold all weights of their stages (dp) or share them (dp_shard)",
            where="mesh",
            given=", ".join(f"{name} of {len(ranks)}" for name, ranks in along.items()),
            fix="give one of the two dimensions",
        )
    return Place(
        tuple(sorted(int(rank) for rank in mesh.mesh.flatten())),
        along.get("pp", alone),
        along["dp_shard"] if is_sharded else along.get("dp", alone),
        tuple((name, ranks) for name, ranks in along.items() if name not in OWN_DIMS),
        is_sharded,
    )


def place_of_groups(pipelines: Sequence[Sequence[int]], pipeline: ProcessGroup, data: ProcessGroup) -> Place:
    """Return where this process stands between a pipeline and the replicas of its rank.

    Parameters
    ----------
    pipelines
        The pipelines of all replicas.
    pipeline, data
        The group of this process's pipeline, and that of the replicas of its stages.
    """
    return Place(
        tuple(sorted({rank for ranks in pipelines for rank in ranks})),
        tuple(dist.get_process_group_ranks(pipeline)),
        tuple(dist.get_process_group_ranks(data)),
    )
