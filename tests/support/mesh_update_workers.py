"""Optimizers without a barrier on a mesh: what the processes of `tests/runtime/test_mesh_update.py` run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import zbcompile
from tests.support import peer_workers
from tests.support.mesh_workers import REPLICAS, batch, compiled, layers, refused
from tests.support.update_workers import FACTORS, MAX_NORM, POISONED
from zbcompile.compiler.sharding import local

DIMS = ("dp", "dp_shard")


def update_on_meshes(rank: int) -> dict[str, Any]:
    """Train with and without a barrier, with weights that replicas copy and that they share."""
    found = {}
    for dim in DIMS:
        mesh = init_device_mesh("cpu", (REPLICAS, 2), mesh_dim_names=(dim, "pp"))
        replica = mesh.get_local_rank(dim)
        for without in (False, True):
            pipeline = compiled(layers(), replica, mesh=mesh, post_validation=without)
            found[dim, without] = _trained(pipeline, replica)
            if dim == "dp" and without:
                found["replaced"] = _replaced(pipeline, replica)
            pipeline.close()
    tensor = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    model = peer_workers.model("tensor", tensor["tp"].get_group(), tensor.get_local_rank("tp"))
    found["tensor"] = refused(lambda: compiled(model, 0, mesh=tensor, post_validation=True))
    return found


def _trained(pipeline: zbcompile.Pipeline, replica: int) -> dict[str, Any]:
    """Train with steps that clip, one that is left out, and one of two steps; return all that came of it."""
    optimizer = torch.optim.AdamW(list(pipeline.parameters()), lr=0.05)
    losses: list[Tensor] = []
    updates = []
    for number, factor in enumerate(FACTORS):
        x, y = (t.chunk(REPLICAS)[replica] for t in batch(number))
        if number == POISONED and replica == 1:
            y = y * float("inf")
        if number == 4:
            pipeline.step(x, target=y * factor, losses=losses, reduce=False)
        pipeline.step(x, target=y * factor, losses=losses, share_losses=True)
        updates.append(pipeline.optimizer_step(optimizer, MAX_NORM / 2))
    decided = [(float(u.norm).hex(), u.clipped, u.skipped) for u in updates]
    state = {name: local(tensor).clone() for name, tensor in pipeline.state_dict().items()}
    moments = {
        name: local(value).clone()
        for name, value in pipeline.optimizer_state_dict(optimizer).items()
        if isinstance(value, Tensor)
    }
    return {"decided": decided, "state": state, "moments": moments, "losses": losses}


def _replaced(pipeline: zbcompile.Pipeline, replica: int) -> str:
    """Give a parameter other memory while a step is not validated; return what the next step says."""
    x, y = (t.chunk(REPLICAS)[replica] for t in batch())
    parameter = next(iter(pipeline.parameters()))
    optimizer = torch.optim.SGD(list(pipeline.parameters()), lr=0.1)
    pipeline.step(x, target=y)
    pipeline.optimizer_step(optimizer)
    parameter.data = parameter.detach().clone()
    return refused(lambda: pipeline.step(x, target=y))
