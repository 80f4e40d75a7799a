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
    grid
        Those that run the same stages with the same weights, this one included. The ranks of a row share the
        weights, each with a part of them; those of a column have the same part. Where each has all weights,
        every row has one rank.
    others
        Per further dimension of the mesh, its name and the processes along it.
    """

    members: tuple[int, ...]
    pipeline: tuple[int, ...]
    grid: tuple[tuple[int, ...], ...]
    others: tuple[tuple[str, tuple[int, ...]], ...] = ()

    @property
    def replicas(self) -> tuple[int, ...]:
        """Those that run the same stages with the same weights, this one included."""
        return tuple(sorted(rank for row in self.grid for rank in row))


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
    return Place(
        tuple(sorted(int(rank) for rank in mesh.mesh.flatten())),
        along.get("pp", alone),
        _replica_grid(mesh, here),
        tuple((name, ranks) for name, ranks in along.items() if name not in OWN_DIMS),
    )


def _replica_grid(mesh: DeviceMesh, here: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return the ranks that stand where this one does but for ``dp`` (rows) and ``dp_shard`` (columns)."""
    names = mesh.mesh_dim_names or ()
    index = [slice(None) if name in ("dp", "dp_shard") else at for name, at in zip(names, here, strict=True)]
    found = mesh.mesh[tuple(index)]
    left = [name for name in names if name in ("dp", "dp_shard")]
    if left == ["dp_shard", "dp"]:
        found = found.t()
    rows = found.reshape(-1, found.shape[-1] if "dp_shard" in left else 1).tolist()
    return tuple(tuple(int(rank) for rank in row) for row in rows)


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
        tuple((rank,) for rank in dist.get_process_group_ranks(data)),
    )
