"""What the processes of `tests/pipeline/test_shards.py` run: stages in two shards, held against one process.

Each block has a norm and a bias that are copies on both shards, and two products of which each shard holds a
part (Megatron's tensor parallelism, arXiv 1909.08053, section 3).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import zbcompile
from tests.support.mesh_workers import profile, refused
from tests.support.peer_workers import _copy, _reduce

WIDTH, WIDE, ROWS, MICROBATCHES, BLOCKS, SHARDS = 6, 12, 8, 4, 2, 2
RULES: dict[str, int | zbcompile.Shard] = {
    "*.up.weight": zbcompile.Shard(0, blocks=2),
    "*.up.bias": zbcompile.Shard(0, blocks=2),
    "*.down.weight": 1,
}
NORMS = (2.0, 1.0, math.inf)
State = dict[str, Tensor]
mse = nn.functional.mse_loss


class Block(nn.Module):
    """A gated product and its sum: gate and up stand in one weight, in blocks. None: all in one process."""

    def __init__(self, group: ProcessGroup | None, size: int = 1, forget: bool = False) -> None:
        super().__init__()
        self.group, self.forget = group, forget
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDE // size), nn.Linear(WIDE // size, WIDTH, bias=False)
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        if self.group is not None and not self.forget:
            normed = _copy(normed, self.group)
        gate, up = self.up(normed).chunk(2, -1)
        made = self.down(torch.tanh(gate) * up)
        return x + (made if self.group is None else _reduce(made, self.group)) + self.bias


def whole_model(seed: int = 0) -> nn.Sequential:
    """Return the model of one process, with weights that are not those of a fresh one."""
    torch.manual_seed(seed)
    model = nn.Sequential(*(Block(None) for _ in range(BLOCKS)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) / 4)
    return model


def cut(name: str, whole: Tensor, number: int, size: int = SHARDS) -> Tensor:
    """Return the part of a tensor that a shard holds; written without the code that is tested."""
    if ".up." in name:
        return torch.cat([half.chunk(size)[number] for half in whole.chunk(2)])
    return whole.chunk(size, 1)[number] if name.endswith("down.weight") else whole


def sharded(group: ProcessGroup, seed: int = 0, forget: bool = False) -> nn.Sequential:
    """Return the same model with the parts of this process."""
    number, size = dist.get_rank(group), dist.get_world_size(group)
    model = nn.Sequential(*(Block(group, size, forget) for _ in range(BLOCKS)))
    whole = whole_model(seed).state_dict()
    model.load_state_dict({name: cut(name, tensor, number, size) for name, tensor in whole.items()})
    return model


def batch(step: int = 0, replicas: int = 1) -> tuple[Tensor, Tensor]:
    torch.manual_seed(10 + step)
    return torch.randn(replicas * ROWS, WIDTH), torch.randn(replicas * ROWS, WIDTH)


def compiled(mesh: DeviceMesh, model: nn.Module | None = None, **options: Any) -> zbcompile.Pipeline:
    x, y = batch()
    return zbcompile.compile(
        sharded(mesh["tp"].get_group()) if model is None else model,
        mesh["pp"].size(),
        mesh=mesh,
        example_args=(x,),
        example_target=y,
        loss_fn=mse,
        num_microbatches=MICROBATCHES,
        profile=profile(mesh["pp"].size()),
        split_points=["1"],
        verify=False,
        time_limit=0.3,
        stall_limit=60.0,
        **{"shards": RULES, **options},
    )


def stepped(model: nn.Module, step: int, replicas: int = 1) -> None:
    """Give a whole model the gradients of a batch, all rows at once."""
    x, y = batch(step, replicas)
    model.zero_grad()
    mse(model(x), y).backward()


def far(name: str, found: Tensor, whole: Tensor, number: int) -> float:
    """Return how far a part is from the whole tensor's, relative."""
    wanted = cut(name, whole, number)
    return float((found - wanted).norm() / wanted.norm())


def trained(pipeline: zbcompile.Pipeline, mesh: DeviceMesh, replicas: int, steps: int = 2) -> dict[str, Any]:
    """Train with clipping beside the whole model; return norms, and how far gradients and weights are."""
    number = mesh.get_local_rank("tp")
    replica = dist.get_rank() // (mesh.size() // replicas)
    plain = whole_model()
    mine, theirs = (torch.optim.AdamW(list(m.parameters()), lr=0.01, eps=1e-3) for m in (pipeline, plain))
    found: dict[str, Any] = {"norms": [], "wanted": [], "far": {}, "optimizer": mine}
    for step in range(steps):
        x, y = (t.chunk(replicas)[replica] for t in batch(step, replicas))
        mine.zero_grad()
        pipeline.step(x, target=y)
        stepped(plain, step, replicas)
        grads = {n: _whole(p.grad) for n, p in pipeline.named_parameters()}
        found["far"] |= {
            (step, n): far(n, grad, plain.get_parameter(n).grad, number) for n, grad in grads.items()
        }
        for kind in NORMS:
            found["norms"].append(float(pipeline.grad_norm(kind)))
            found["wanted"].append(float(nn.utils.get_total_norm([p.grad for p in plain.parameters()], kind)))
        names = pipeline.grad_norms()
        found["names"] = {n: float(v) for n, v in names.items()}
        found["wanted names"] = {n: float(p.grad.norm()) for n, p in plain.named_parameters()}
        found["norms"].append(float(pipeline.clip_grad_norm_(0.1)))
        found["wanted"].append(float(nn.utils.clip_grad_norm_(plain.parameters(), 0.1)))
        mine.step()
        theirs.step()
        weights = {n: _whole(p) for n, p in pipeline.named_parameters()}
        found["far"] |= {
            (step, n, "weight"): far(n, p, plain.get_parameter(n), number) for n, p in weights.items()
        }
    return found


def _whole(tensor: Tensor) -> Tensor:
    full = getattr(tensor, "full_tensor", None)
    return tensor.detach().clone() if full is None else full().detach()


def two_by_two(rank: int, folder: str) -> dict[str, Any]:
    """Train on two ranks of two shards, save and load; then what is not finite, and what is refused."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    pipeline = compiled(mesh)
    found = trained(pipeline, mesh, 1)
    optimizer = found.pop("optimizer")
    pipeline.save(f"{folder}/saved", optimizer, {"at": 2})
    pipeline.save_merged(f"{folder}/merged.safetensors")
    found["state"] = {name: tensor.clone() for name, tensor in pipeline.state_dict().items()}
    found["momenta"] = {
        name: optimizer.state[p]["exp_avg"].clone() for name, p in pipeline.named_parameters()
    }
    again = compiled(mesh, sharded(mesh["tp"].get_group(), seed=5))
    later = torch.optim.AdamW(list(again.parameters()), lr=0.5)
    found["extra"] = again.load(f"{folder}/saved", later)
    for on, steps in ((pipeline, optimizer), (again, later)):
        x, y = batch(7)
        steps.zero_grad()
        on.step(x, target=y)
        on.clip_grad_norm_(0.1)
        steps.step()
    found["differ"] = [
        n for n, t in again.state_dict().items() if not torch.equal(t, pipeline.state_dict()[n])
    ]
    again.load_state_dict(whole_model(3).state_dict())
    found["by hand"] = [
        n
        for n, t in again.state_dict().items()
        if not torch.equal(t, cut(n, whole_model(3).state_dict()[n], mesh.get_local_rank("tp")))
    ]
    again.close()
    found |= _not_finite(pipeline, mesh)
    pipeline.close()
    found["refused"] = _refused(mesh, folder)
    return found


def _not_finite(pipeline: zbcompile.Pipeline, mesh: DeviceMesh) -> dict[str, Any]:
    """Poison a gradient of one shard of one rank, of a part and of a copy: all ranks see it."""
    found: dict[str, Any] = {}
    x, y = batch()
    for name in ("down.weight", "norm.weight"):
        pipeline.zero_grad()
        pipeline.step(x, target=y)
        if list(mesh.get_coordinate()) == [1, 1]:
            next(p for n, p in pipeline.named_parameters() if n.endswith(name)).grad[0] = torch.nan
        found["nan", name] = float(pipeline.grad_norm())
        found["raised", name] = refused(lambda: pipeline.clip_grad_norm_(0.1, error_if_nonfinite=True))
    before = {n: p.detach().clone() for n, p in pipeline.named_parameters()}
    optimizer, scaler = torch.optim.SGD(list(pipeline.parameters()), lr=1.0), pipeline.scaler(init_scale=4.0)
    pipeline.zero_grad()
    pipeline.step(x, target=y)
    if list(mesh.get_coordinate()) == [0, 1]:
        next(iter(pipeline.parameters())).grad[0] = torch.inf
    scaler.step(optimizer)
    scaler.update()
    found["scale"] = scaler.get_scale()
    found["skipped"] = all(torch.equal(p, before[n]) for n, p in pipeline.named_parameters())
    if list(mesh.get_coordinate()) == [1, 1]:
        next(p for n, p in pipeline.named_parameters() if n.endswith("norm.weight")).grad = None
    found["none"] = refused(pipeline.grad_norm)

    # Frozen on one shard only: refused by all before the step, which then runs.
    odd = next(p for n, p in pipeline.named_parameters() if n.endswith("down.weight"))
    odd.requires_grad_(list(mesh.get_coordinate()) != [1, 0])
    found["frozen"] = refused(lambda: pipeline.step(x, target=y))
    odd.requires_grad_(True)
    pipeline.zero_grad()
    pipeline.step(x, target=y)
    found["after"] = float(pipeline.grad_norm())
    return found


def _refused(mesh: DeviceMesh, folder: str) -> dict[str, str]:
    """Return the words of everything that is refused."""
    group, x, y = mesh["tp"].get_group(), *batch()
    shapes = {name: rule for name, rule in RULES.items() if "down" not in name}
    found = {
        "pattern": refused(lambda: compiled(mesh, shards={"*.upp.weight": 0})),
        "dim": refused(lambda: compiled(mesh, shards={**RULES, "*.down.weight": 2})),
        "along": refused(lambda: compiled(mesh, shards={"*.up.bias": zbcompile.Shard(0, along="ep")})),
        "twice": refused(lambda: compiled(mesh, shards={**RULES, "0.up.weight": 0})),
        "blocks": refused(lambda: compiled(mesh, shards={**shapes, "*.down.weight": zbcompile.Shard(1, 4)})),
        "type": refused(lambda: compiled(mesh, shards=["up"])),
        "no mesh": refused(lambda: zbcompile.compile(nn.Linear(2, 2), 2, shards={})),
    }
    for name, options in (
        ("said copy", {"shards": shapes}),
        ("unsaid", {"shards": None}),
        ("forgotten", {"model": sharded(group, forget=True)}),
    ):
        pipeline = compiled(mesh, **options)
        found[name] = refused(lambda: pipeline.step(x, target=y))  # noqa: B023
        if found[name] == "done":
            found[name] = refused(pipeline.grad_norm)
        if name == "unsaid":
            found["unsaved"] = refused(lambda: pipeline.save(f"{folder}/none"))  # noqa: B023
        pipeline.close()
    marked = sharded(group)
    for name, parameter in marked.named_parameters():
        parameter.tensor_model_parallel = name.split(".")[1] in ("up", "down")  # type: ignore[attr-defined]
        if parameter.tensor_model_parallel:  # type: ignore[attr-defined]
            parameter.partition_dim = int("down" in name)  # type: ignore[attr-defined]
            parameter.partition_stride = 2 if "up" in name else 1  # type: ignore[attr-defined]
    pipeline = compiled(mesh, marked, shards=None)
    pipeline.step(x, target=y)
    plain = whole_model()
    stepped(plain, 0)
    wanted = nn.utils.get_total_norm([p.grad for p in plain.parameters()])
    found["marked"] = f"{float(pipeline.grad_norm() / wanted):.6f}"
    factored = torch.optim.Adafactor(list(pipeline.parameters()))
    factored.step()
    found["factored"] = refused(lambda: pipeline.save(f"{folder}/none", factored))
    pipeline.close()
    return found


def cube(rank: int, folder: str) -> list[dict[str, Any]]:
    """Train on 2 x 2 x 2 processes: replicas that hold all weights of their shards, or share them."""
    records = []
    for dim in ("dp", "dp_shard"):
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=(dim, "tp", "pp"))
        pipeline = compiled(mesh)
        found = trained(pipeline, mesh, 2, 1)
        optimizer = found.pop("optimizer")
        pipeline.save(f"{folder}/{dim}", optimizer)
        found["state"] = {name: _whole(tensor) for name, tensor in pipeline.state_dict().items()}
        found["number"] = mesh.get_local_rank("tp")
        pipeline.save_merged(f"{folder}/{dim}.safetensors")
        ends = []
        for steps in (optimizer, torch.optim.AdamW(list(pipeline.parameters()), lr=0.5)):
            if steps is not optimizer:  # from weights that went on, and without a state
                pipeline.load(f"{folder}/{dim}", steps)
            x, y = (t.chunk(2)[mesh.get_local_rank(dim)] for t in batch(3, 2))
            steps.zero_grad()
            pipeline.step(x, target=y)
            steps.step()
            ends.append({name: _whole(tensor) for name, tensor in pipeline.state_dict().items()})
        one, other = ends
        found["differ"] = [n for n, tensor in one.items() if not torch.equal(tensor, other[n])]
        found["moved"] = [n for n, tensor in one.items() if not torch.equal(tensor, found["state"][n])]
        pipeline.close()
        records.append(found)
    return records
