"""What the eight processes of `tests/pipeline/test_hybrid.py` run: weights shared by two, copied by two.

The reference is plain autograd: the microbatches of every replica one after the other, the sums of those
that share weights, then the sum of both. With two and two that is the order of the sums of the mesh.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import zbcompile
from tests.support.mesh_workers import RANKS, batch, equal, layers, mse, profile
from zbcompile.compiler.sharding import local, whole

MICROBATCHES, REPLICAS = 2, 4
State = dict[str, Tensor]


def part_of(number: int, replica: int) -> list[Tensor]:
    """Return the rows and targets of one replica in a step."""
    return [t.chunk(REPLICAS)[replica] for t in batch(number)]


def compiled(mesh: DeviceMesh, replica: int, is_measured: bool = False) -> zbcompile.Pipeline:
    """Compile the model of `mesh_workers` for a mesh."""
    x, y = part_of(0, replica)
    known = None if is_measured else profile()
    return zbcompile.compile(
        layers(), RANKS, mesh=mesh, example_args=(x,), example_target=y, loss_fn=mse, verify=False,
        num_microbatches=MICROBATCHES, profile=known, time_limit=0.3, stall_limit=60.0,
    )  # fmt: skip


def reference(model: nn.Module, steps: tuple[int, ...]) -> State:
    """Return the gradients of all replicas for the batches of some steps, which are reduced together."""
    totals: list[State] = []
    for replica in range(REPLICAS):
        plain = copy.deepcopy(model)
        plain.zero_grad()
        for step in steps:
            rows = (t.chunk(MICROBATCHES) for t in part_of(step, replica))
            for xs, ys in zip(*rows, strict=True):
                mse(plain(xs), ys).backward()
        totals.append({name: p.grad for name, p in plain.named_parameters() if p.grad is not None})
    a, b, c, d = totals
    return {name: ((a[name] + b[name]) + (c[name] + d[name])) / (REPLICAS * MICROBATCHES) for name in a}


def wholes(pipeline: zbcompile.Pipeline, grads: bool = False) -> State:
    """Return the whole parameters of this process's stages, or their gradients."""
    found = ((name, p.grad if grads else p.detach()) for name, p in pipeline.named_parameters())
    return {name: whole(tensor).clone() for name, tensor in found if tensor is not None}


def hybrid(rank: int, folder: str) -> dict[str, Any]:
    """Train with weights that two replicas share and two pairs copy; save, go on, load, go on again."""
    mesh = init_device_mesh("cpu", (2, 2, RANKS), mesh_dim_names=("dp", "dp_shard", "pp"))
    replica = 2 * mesh.get_local_rank("dp") + mesh.get_local_rank("dp_shard")
    pipeline, plain = compiled(mesh, replica), layers()
    mine = torch.optim.AdamW(list(pipeline.parameters()), lr=0.1)
    theirs = torch.optim.AdamW(plain.parameters(), lr=0.1)
    found: dict[str, Any] = {"differ": [], "norms": [], "unequal": 0.0}
    found["parts"] = {name: list(local(p).shape) for name, p in pipeline.named_parameters()}

    def step(optimizer: torch.optim.Optimizer, on: zbcompile.Pipeline, *numbers: int) -> None:
        on.zero_grad()
        for number in numbers:
            x, y = part_of(number, replica)
            on.step(x, target=y, reduce=number == numbers[-1])

    def wanted(*numbers: int) -> None:
        for name, grad in reference(plain, numbers).items():
            plain.get_parameter(name).grad = grad
        found["differ"] += equal(
            wholes(pipeline, grads=True), {n: p.grad for n, p in plain.named_parameters()}
        )

    for numbers in ((0,), (1, 2)):  # to the bit; the second time two steps have one reduction
        step(mine, pipeline, *numbers)
        wanted(*numbers)
        mine.step()
        theirs.step()
        found["differ"] += equal(wholes(pipeline), dict(plain.named_parameters()))
    pipeline.save(f"{folder}/saved", mine, {"at": 2})
    pipeline.save_merged(f"{folder}/merged.safetensors")
    again = compiled(mesh, replica, is_measured=True)
    found["once"] = [(stage.unshard_ns, stage.reduce_ns) for stage in again.profile.stages]
    found["planned"] = [str(a) for row in again.solution.schedule.order for a in row if a.kind.is_of_stage]
    later = torch.optim.AdamW(list(again.parameters()), lr=0.5)
    found["extra"] = again.load(f"{folder}/saved", later)
    for on, optimizer in ((pipeline, mine), (again, later)):  # norms are put together from those of parts
        step(optimizer, on, 3)
        found["norms"].append(on.clip_grad_norm_(0.1))
        optimizer.step()
    found["differ"] += equal(wholes(again), wholes(pipeline))
    for name, grad in reference(plain, (3,)).items():
        plain.get_parameter(name).grad = grad
    found["norms"].append(nn.utils.clip_grad_norm_(plain.parameters(), 0.1))
    theirs.step()
    for name, tensor in wholes(pipeline).items():
        found["unequal"] = max(
            found["unequal"], float((tensor - plain.get_parameter(name).detach()).abs().max())
        )
    scaler = pipeline.scaler(init_scale=4.0)
    x, y = part_of(0, replica)
    pipeline.zero_grad()
    pipeline.step(x.fill_(torch.inf) if replica == 3 else x, target=y)
    scaler.step(mine)
    scaler.update()
    found["skipped"] = scaler.get_scale() == 2.0 and not equal(wholes(pipeline), wholes(again))
    found["timeline"] = [str(a) for row in pipeline.timeline().ranks for a, _, _ in row if a.kind.is_of_stage]
    pipeline.close()
    again.close()
    return found
