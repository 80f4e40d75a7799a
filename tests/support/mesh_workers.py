"""What the processes of `tests/pipeline/test_mesh.py` run: two pipelines of two ranks, each on half of the
rows.

The reference is plain autograd: every replica's microbatches one after the other, then the sum over the
replicas, then the division. With two replicas that is the order of the sums of a mesh, to the bit.
"""

from __future__ import annotations

import copy
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

import zbcompile
from tests.support import peer_workers
from zbcompile.compiler.sharding import local
from zbcompile.errors import ZBCompileError
from zbcompile.runtime.channels.replicas import Replicas
from zbcompile.runtime.channels.sharded import ShardedStages
from zbcompile.schedule.costs import Edge, Profile, StageCost
from zbcompile.schedule.ir import Kind, Schedule

ROWS, WIDTH, MICROBATCHES, REPLICAS, RANKS = 16, 8, 4, 2, 2
State = dict[str, Tensor]
mse = nn.functional.mse_loss


def layers(seed: int = 0, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        *(m for _ in range(4) for m in (nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout), nn.Tanh()))
    )


class Tied(nn.Module):
    """The first and the last stage hold one table."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.middle(torch.tanh(self.table(x)))))


def batch(step: int = 0) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1 + step)
    return torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)


def profile(num_stages: int = RANKS) -> Profile:
    edges = tuple(Edge(s, s + 1, 4096, 4096) for s in range(num_stages - 1))
    return Profile((StageCost.simple(3_000_000, 3_000_000, 2_000_000),) * num_stages, edges)


def two_by_two() -> DeviceMesh:
    return init_device_mesh("cpu", (REPLICAS, RANKS), mesh_dim_names=("dp", "pp"))


def compiled(model: nn.Module, replica: int, **options: Any) -> zbcompile.Pipeline:
    x, y = (t.chunk(REPLICAS)[replica] for t in batch())
    options = {"profile": profile(), "num_microbatches": MICROBATCHES, **options}
    return zbcompile.compile(
        model,
        RANKS,
        example_args=(x,),
        example_target=y,
        loss_fn=mse,
        verify=False,
        time_limit=0.3,
        stall_limit=60.0,
        **options,
    )


def reference(model: nn.Module, steps: Sequence[int] = (0,), num_microbatches: int = MICROBATCHES) -> State:
    """Return the gradients of the reference for the batches of some steps, which are reduced together."""
    totals: list[State] = []
    for replica in range(REPLICAS):
        plain = copy.deepcopy(model)
        plain.zero_grad()
        for step in steps:
            x, y = (t.chunk(REPLICAS)[replica].chunk(num_microbatches) for t in batch(step))
            for xs, ys in zip(x, y, strict=True):
                mse(plain(xs), ys).backward()
        totals.append({name: p.grad for name, p in plain.named_parameters() if p.grad is not None})
    return {name: (totals[0][name] + totals[1][name]) / (REPLICAS * num_microbatches) for name in totals[0]}


def grads(pipeline: zbcompile.Pipeline) -> State:
    return {name: p.grad.clone() for name, p in pipeline.named_parameters() if p.grad is not None}


def gone_on(folder: Path, num_microbatches: int) -> tuple[zbcompile.Pipeline, torch.optim.Optimizer]:
    """Return a pipeline of one process and its optimizer, loaded from ``saved`` and equal to ``merged``."""
    pipeline = zbcompile.compile(
        layers(seed=3), 2, loss_fn=mse, num_microbatches=num_microbatches, profile=profile(), time_limit=0.3,
        verify=False,
    )  # fmt: skip
    x, y = batch(2)
    pipeline.build((x,), {}, y)
    optimizer = torch.optim.AdamW(list(pipeline.parameters()))
    assert pipeline.load(folder / "saved", optimizer) == {"at": 2}
    merged = load_file(folder / "merged.safetensors")
    assert all(torch.equal(tensor, merged[name]) for name, tensor in pipeline.state_dict().items())
    return pipeline, optimizer


def refused(call: Callable[[], object]) -> str:
    try:
        call()
    except ZBCompileError as error:
        return f"{type(error).__name__}: {error}"
    return "done"


def equal(found: State, wanted: State) -> list[str]:
    """Return the names of what differs in a bit."""
    return [name for name, value in found.items() if not torch.equal(value, wanted[name])]


def trained(rank: int, folder: str) -> dict[str, Any]:
    """Train three steps with clipping, each against the reference; save, go on, load, go on again."""
    mesh = two_by_two()
    replica = mesh.get_local_rank("dp")
    model, plain = layers(), layers()
    pipeline = compiled(model, replica, mesh=mesh)
    mine, theirs = (torch.optim.AdamW(list(m.parameters()), lr=0.1) for m in (pipeline, plain))
    found: dict[str, Any] = {"programs": [pipeline.source(r) for r in range(RANKS)], "differ": []}
    norms, losses = [], []

    def step(number: int, optimizer: torch.optim.Optimizer, on: zbcompile.Pipeline) -> None:
        x, y = (t.chunk(REPLICAS)[replica] for t in batch(number))
        optimizer.zero_grad()
        on.step(x, target=y, losses=losses, share_losses=True)
        norms.append(on.clip_grad_norm_(0.1))
        optimizer.step()

    for number in range(3):
        step(number, mine, pipeline)
        for name, grad in reference(plain, (number,)).items():
            plain.get_parameter(name).grad = grad
        x, y = (t.chunk(REPLICAS * MICROBATCHES) for t in batch(number))
        wanted = [mse(plain(xs), ys) for xs, ys in zip(x, y, strict=True)]
        found["differ"] += [
            k for k, pair in enumerate(zip(losses, wanted, strict=True)) if not torch.equal(*pair)
        ]
        losses.clear()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        theirs.step()
        found["differ"] += equal(dict(pipeline.named_parameters()), dict(plain.named_parameters()))
        found["differ"] += [] if torch.equal(norms[-1], norm) else ["norm"]
        if number == 1:
            pipeline.save(f"{folder}/saved", mine, {"at": 2})
            pipeline.save_merged(f"{folder}/merged.safetensors")
    again = compiled(layers(seed=9), replica, mesh=mesh)
    later = torch.optim.AdamW(list(again.parameters()), lr=0.5)
    found["extra"] = again.load(f"{folder}/saved", later)
    step(2, later, again)
    found["differ"] += equal(again.state_dict(), pipeline.state_dict())
    found["state"] = {name: tensor.clone() for name, tensor in pipeline.state_dict().items()}
    x, y = (t.chunk(REPLICAS)[replica] for t in batch())
    seen = pipeline.eval(x)
    found["eval"] = None if seen is None else torch.equal(seen, torch.cat([plain(xs) for xs in x.chunk(4)]))
    found["timeline"] = len(pipeline.timeline().ranks)
    pipeline.synchronize()
    pipeline.close()
    again.close()
    return found


def ways(rank: int) -> dict[str, Any]:
    """Return gradients of tied weights, of several steps before one reduction, of dropout, and by groups."""
    mesh = two_by_two()
    replica = mesh.get_local_rank("dp")
    x, y = (t.chunk(REPLICAS)[replica] for t in batch())
    found: dict[str, Any] = {}

    tied = compiled(Tied(), replica, mesh=mesh)
    tied.step(x, target=y)
    found["tied"] = grads(tied)
    tied.close()

    groups = (
        [dist.new_group([0, 1]), dist.new_group([2, 3])],
        [dist.new_group([0, 2]), dist.new_group([1, 3])],
    )
    model = layers(dropout=0.3)
    by_groups = {"group": groups[0][rank // 2], "data_group": groups[1][rank % 2]}
    random = compiled(model, replica, seed=5, profile=None, **by_groups)
    losses: list[Tensor] = []
    random.step(x, target=y, losses=losses, share_losses=True)
    found["dropout"], found["losses"] = grads(random), torch.stack(losses)
    found["reduce_ns"] = [stage.reduce_ns for stage in random.profile.stages]
    found["verbs"] = [random.source(r).count("rank.reduce_grad(") for r in range(RANKS)]
    found["reduced"] = [str(a) for row in random.timeline().ranks for a, _, _ in row if a.kind.is_of_stage]
    random.close()

    plain = layers()
    pipeline = compiled(layers(), replica, mesh=mesh)
    later = [t.chunk(REPLICAS)[replica] for t in batch(1)]
    pipeline.step(x, target=y, reduce=False)
    found["early"] = grads(pipeline)
    found["unsaved"] = refused(lambda: pipeline.save("/nowhere"))
    found["scaled"] = refused(lambda: _scaled(pipeline, x, y))
    pipeline.step(later[0], target=later[1])
    found["two steps"] = equal(grads(pipeline), reference(plain, (0, 1)))

    last = list(pipeline.parameters())[-1]
    last.requires_grad_(rank != 3)
    pipeline.zero_grad()
    found["frozen"] = refused(lambda: pipeline.step(x, target=y))
    last.requires_grad_(True)

    # What is refused before the first message leaves the next step as it is.
    pipeline.zero_grad()
    short = (x[:6], y[:6]) if replica else (x, y)
    found["short"] = refused(lambda: pipeline.step(short[0], target=short[1]))
    pipeline.step(x, target=y)
    found["after"] = equal(grads(pipeline), reference(plain))

    found["other evaluation"] = refused(lambda: pipeline.eval(x if replica else x[:4]))

    # Another number of microbatches on all replicas: sums still end together.
    pipeline.zero_grad()
    pipeline.step(x[:6], target=y[:6])
    found["rows"] = grads(pipeline)

    scaler = pipeline.scaler(init_scale=4.0)
    optimizer = torch.optim.SGD(list(pipeline.parameters()), lr=1.0)
    pipeline.zero_grad()
    pipeline.step(x.fill_(torch.inf) if replica else x, target=y)
    scaler.step(optimizer)
    scaler.update()
    found["skipped"] = scaler.get_scale() == 2.0 and not equal(
        dict(pipeline.named_parameters()), dict(plain.named_parameters())
    )
    pipeline.close()
    found |= _refusals(rank, mesh)
    return found


def _scaled(pipeline: zbcompile.Pipeline, x: Tensor, y: Tensor) -> None:
    pipeline.loss_scale = 2.0
    try:
        pipeline.step(x, target=y)
    finally:
        pipeline.loss_scale = 1.0


def _refusals(rank: int, mesh: DeviceMesh) -> dict[str, str]:
    replica = mesh.get_local_rank("dp")
    x, y = (t.chunk(REPLICAS)[replica] for t in batch())
    norm = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))
    other = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "replicas"))
    found = {
        "buffer": refused(lambda: compiled(norm, replica, mesh=mesh)),
        "names": refused(lambda: compiled(layers(), 0, mesh=init_device_mesh("cpu", (4,)))),
        "unused": refused(lambda: compiled(layers(), 0, mesh=other)),
        "both": refused(lambda: compiled(layers(), 0, mesh=mesh, group=dist.group.WORLD)),
        "no mesh": refused(lambda: compiled(layers(), 0, mesh=dist.group.WORLD)),
        "alone": refused(lambda: compiled(layers(), 0, data_group=dist.group.WORLD)),
    }
    unlike = compiled(layers(seed=replica), replica, mesh=mesh)
    found["unlike"] = refused(lambda: unlike.step(x, target=y))
    unlike.close()
    return found


def lost(rank: int, fault: str, folder: str) -> str:
    """Lose rank 3, or let it stand still, when it has to sum gradients of the second step."""
    dim = "dp_shard" if fault == "killed in a shard" else "dp"
    mesh = init_device_mesh("cpu", (REPLICAS, RANKS), mesh_dim_names=(dim, "pp"))
    replica = mesh.get_local_rank(dim)
    x, y = (t.chunk(REPLICAS)[replica] for t in batch())
    model = layers()
    pipeline = zbcompile.compile(
        model, RANKS, mesh=mesh, example_args=(x,), example_target=y, loss_fn=mse, verify=False,
        num_microbatches=MICROBATCHES, profile=profile(), time_limit=0.3,
        stall_limit=10.0 if fault == "stalled" else 60.0,
    )  # fmt: skip
    pipeline.step(x, target=y)
    if rank == 3:

        def faulty(self: object, *given: Any) -> Any:
            if fault != "stalled":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)

        Replicas.start = ShardedStages.reduce = faulty  # type: ignore[method-assign]

    def last() -> None:
        pipeline.step(x, target=y)
        pipeline.synchronize()  # ranks that have their sums may have finished the step

    said = refused(last)
    (Path(folder) / f"said-{rank}").write_text(said)
    return said


def cube(rank: int) -> dict[str, Any]:
    """Train two steps on 2 replicas of 2 ranks of 2 shards, with the plain loop over the shards beside it."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "pp", "tp"))
    replica, shard = mesh.get_local_rank("dp"), mesh.get_local_rank("tp")
    group = mesh["tp"].get_group()
    model, plain = (peer_workers.model("tensor", group, shard) for _ in range(2))
    pipeline = compiled(model, replica, mesh=mesh)
    mine, theirs = (torch.optim.AdamW(list(m.parameters()), lr=0.1) for m in (pipeline, plain))
    differ: list[str] = []
    for number in range(2):
        x, y = (t.chunk(REPLICAS)[replica] for t in batch(number))
        mine.zero_grad()
        pipeline.step(x, target=y)
        totals = []
        for other in range(REPLICAS):
            theirs.zero_grad()
            rows = (t.chunk(REPLICAS)[other].chunk(MICROBATCHES) for t in batch(number))
            for xs, ys in zip(*rows, strict=True):
                mse(plain(xs), ys).backward()
            totals.append([p.grad.clone() for p in plain.parameters() if p.grad is not None])
        for p, a, b in zip(plain.parameters(), *totals, strict=True):
            p.grad = (a + b) / (REPLICAS * MICROBATCHES)
        differ += equal(
            grads(pipeline), {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
        )
        mine.step()
        theirs.step()
        differ += equal(dict(pipeline.named_parameters()), dict(plain.named_parameters()))
    found = {"differ": differ, "names": [name for name, _ in pipeline.named_parameters()]}
    pipeline.synchronize()
    pipeline.close()
    return found


def fully_sharded(rank: int, folder: str) -> dict[str, Any]:
    """Train as `trained` does, with weights that replicas share; save, go on, load, go on again."""
    mesh = init_device_mesh("cpu", (REPLICAS, RANKS), mesh_dim_names=("dp_shard", "pp"))
    replica = mesh.get_local_rank("dp_shard")
    model, plain = layers(), layers()
    seen_by_hook: list[bool] = []
    for parameter in model.parameters():
        parameter.mark = "kept"  # type: ignore[attr-defined]
        parameter.register_post_accumulate_grad_hook(
            lambda p: seen_by_hook.append(threading.current_thread() is threading.main_thread())
        )
    pipeline = compiled(model, replica, mesh=mesh)
    found: dict[str, Any] = {"differ": [], "program": pipeline.source(0)}
    found["marks"] = {getattr(p, "mark", None) for p in pipeline.parameters()}
    found["parts"] = {name: list(local(p).shape) for name, p in pipeline.named_parameters()}
    mine = torch.optim.AdamW(list(pipeline.parameters()), lr=0.1)
    theirs = torch.optim.AdamW(plain.parameters(), lr=0.1)

    def step(number: int, optimizer: torch.optim.Optimizer, on: zbcompile.Pipeline, **options: Any) -> None:
        x, y = (t.chunk(REPLICAS)[replica] for t in batch(number))
        on.step(x, target=y, **options)
        optimizer.step()
        optimizer.zero_grad()

    def compare(number: int) -> None:
        for name, grad in reference(plain, (number,)).items():
            plain.get_parameter(name).grad = grad
        theirs.step()
        step(number, mine, pipeline)
        found["differ"] += equal(_whole(pipeline), dict(plain.named_parameters()))

    compare(0)
    found["hooks"] = len(seen_by_hook), all(seen_by_hook)
    compare(1)
    x, y = (t.chunk(REPLICAS)[replica] for t in batch())
    seen = pipeline.eval(x)
    found["eval"] = None if seen is None else torch.equal(seen, torch.cat([plain(xs) for xs in x.chunk(4)]))
    pipeline.save(f"{folder}/saved", mine, {"at": 2})
    pipeline.save_merged(f"{folder}/merged.safetensors")
    again = compiled(layers(), replica, mesh=mesh, schedule=_as_torch_orders(pipeline.schedule))
    later = torch.optim.AdamW(list(again.parameters()), lr=0.5)
    found["extra"] = again.load(f"{folder}/saved", later)
    compare(2)
    step(2, later, again)
    found["differ"] += equal(_whole(again), _whole(pipeline))
    found["timeline"] = [str(a) for row in pipeline.timeline().ranks for a, _, _ in row if a.kind.is_of_stage]

    # Norms of parts are put together: as torch's up to rounding; two steps with one reduction.
    pipeline.zero_grad()
    for number in range(2):
        part = [t.chunk(REPLICAS)[replica] for t in batch(number)]
        pipeline.step(part[0], target=part[1], reduce=number == 1)
    wanted = reference(plain, (0, 1))
    got = {name: p.grad.full_tensor() for name, p in pipeline.named_parameters()}
    found["differ"] += equal(got, wanted)
    for name, grad in wanted.items():
        plain.get_parameter(name).grad = grad
    found["norms"] = pipeline.clip_grad_norm_(0.1), nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    clipped = ((n, p.grad.full_tensor()) for n, p in pipeline.named_parameters())
    found["clipped"] = {name: (grad, plain.get_parameter(name).grad) for name, grad in clipped}
    unsteppable = torch.optim.Rprop(list(pipeline.parameters()))
    found["rprop"] = refused(lambda: pipeline.optimizer_step(unsteppable))
    given = mine if replica else None
    found["one optimizer"] = refused(lambda: pipeline.save(f"{folder}/none", given))
    stage = pipeline.local_stages[0]
    found["by hand"] = refused(lambda: stage(*(torch.zeros(p.shape, dtype=p.dtype) for p in stage.inputs)))
    pipeline.close()
    again.close()
    found["tied"] = refused(lambda: compiled(Tied(), replica, mesh=mesh))
    early = layers()
    held = torch.optim.SGD(early.parameters(), lr=0.1)
    found["early optimizer"] = refused(lambda: compiled(early, replica, mesh=mesh))
    del held
    scalar = layers()
    scalar[0].scale = nn.Parameter(torch.ones(()))
    scalar[0].register_forward_hook(lambda module, args, output: output * module.scale)
    found["scalar"] = refused(lambda: compiled(scalar, replica, mesh=mesh))
    plainly = layers()
    other = compiled(plainly, replica, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp")))
    before = plainly[0].weight
    plainly[0].weight = nn.Parameter(distribute_tensor(before.detach(), mesh["dp_shard"]))
    found["dtensor"] = refused(lambda: other.step(x, target=y))
    plainly[0].weight = before
    for when in ("before the first step", "after it"):
        wrapped = nn.parallel.DistributedDataParallel(plainly)
        found[f"wrapped {when}"] = refused(lambda: other.step(x, target=y))
        del wrapped
        other.step(x, target=y)
    wrapped = nn.parallel.DistributedDataParallel(other.local_stages[0])
    found["wrapped stage"] = refused(lambda: other.step(x, target=y))
    del wrapped
    other.step(x, target=y)
    other.local_stages[0].__class__ = type(
        "DDPStage", (type(other.local_stages[0]),), {}
    )  # as replicate does
    found["replicated stage"] = refused(lambda: other.step(x, target=y))
    other.local_stages[0].__class__ = zbcompile.Stage
    fully_shard(plainly, mesh=mesh["dp_shard"])
    found["outside"] = refused(lambda: other.step(x, target=y))
    other.close()
    return found


def _as_torch_orders(schedule: Schedule) -> Schedule:
    """Return the order with RESHARD before REDUCE_GRAD, as torch's orders have them."""
    rows = [list(row) for row in schedule.order]
    for row in rows:
        for k, pair in enumerate(pairwise(row)):
            if [action.kind for action in pair] == [Kind.REDUCE_GRAD, Kind.RESHARD]:
                row[k : k + 2] = reversed(pair)
    swapped = Schedule.of(schedule.placement, schedule.num_microbatches, rows)
    assert swapped != schedule
    return swapped


def _whole(pipeline: zbcompile.Pipeline) -> State:
    return {name: p.detach().full_tensor().clone() for name, p in pipeline.named_parameters()}
