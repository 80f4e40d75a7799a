"""torch's own pipeline runtime on the hand-made stages, for the interop tests, in processes of its own."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from tests.support.hand_stages import hand_batch, hand_stages, hand_state
from zbcompile.formats import torch_csv
from zbcompile.runtime.distributed_runner import DistributedRunner
from zbcompile.runtime.group import PipelineGroup
from zbcompile.runtime.spec import PipelineSpec, Step
from zbcompile.schedule.ir import Schedule


class TorchStage(nn.Module):
    """y = tanh(x w) as a module."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight)


def in_torch(rank: int, text: str, form: str, rank_of: tuple[int, ...], count: int) -> dict[str, Tensor]:
    """Run a CSV in torch's runtime; return this rank's gradients, summed over microbatches."""
    state, device = hand_state(len(rank_of)), torch.device("cpu")
    modules = {s: TorchStage(state[f"w{s}"]) for s, r in enumerate(rank_of) if r == rank}
    stages = [PipelineStage(module, s, len(rank_of), device) for s, module in modules.items()]
    runtime = _PipelineScheduleRuntime(stages, count, loss_fn=_loss, scale_grads=False)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "schedule.csv"
        path.write_text(text)
        runtime._load_csv(str(path), format=form)
    batch = hand_batch(count)
    x, target = (torch.cat([pair[k] for pair in batch]) for k in range(2))
    args: tuple[Any, ...] = (x,) if rank_of[0] == rank else ()
    runtime.step(*args, target=target if rank_of[-1] == rank else None)
    return {f"w{s}": module.weight.grad for s, module in modules.items() if module.weight.grad is not None}


def sharded_in_torch(rank: int, text: str, rank_of: tuple[int, ...], count: int) -> dict[str, Tensor]:
    """Run a CSV with messages in torch's runtime, two replicas, parameters of stages sharded over them.

    Each replica has microbatches of its own. Returns the whole gradients of this rank's stages.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    state, device, place, replica = hand_state(len(rank_of)), torch.device("cpu"), rank // 2, rank % 2
    modules = {
        s: fully_shard(TorchStage(state[f"w{s}"]), mesh=mesh["dp"])
        for s, r in enumerate(rank_of)
        if r == place
    }
    group = mesh.get_group("pp")
    stages = [PipelineStage(module, s, len(rank_of), device, group=group) for s, module in modules.items()]
    runtime = _PipelineScheduleRuntime(stages, count, loss_fn=_loss, scale_grads=False)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "schedule.csv"
        path.write_text(text)
        runtime._load_csv(str(path), format="compute_comms")
    batch = hand_batch(2 * count)[replica * count : (replica + 1) * count]
    x, target = (torch.cat([pair[k] for pair in batch]) for k in range(2))
    args: tuple[Any, ...] = (x,) if rank_of[0] == place else ()
    runtime.step(*args, target=target if rank_of[-1] == place else None)
    return {f"w{s}": module.weight.grad.full_tensor() for s, module in modules.items()}


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return (output * target).sum()


def in_ours(rank: int, text: str, texts: tuple[str, ...]) -> dict[str, Tensor]:
    """Run an imported CSV in our runtime; return this rank's gradients."""
    schedule = torch_csv.loads(text).schedule
    return ours(rank, schedule, texts)


def ours(rank: int, schedule: Schedule, texts: tuple[str, ...]) -> dict[str, Tensor]:
    """Run an order in our runtime; return this rank's gradients."""
    count = schedule.num_stages
    spec = PipelineSpec(hand_stages(count, skip=False), schedule.placement, schedule.num_microbatches)
    runner = DistributedRunner(PipelineGroup(None, 60.0), spec, texts[rank], torch.device("cpu"))
    sums = runner.run(Step(hand_batch(schedule.num_microbatches)), hand_state(count))
    runner.synchronize()
    runner.close()
    runner.group.close()
    return sums


def both_ways(rank: int, cases: list[tuple[str, Any]]) -> list[dict[str, Tensor]]:
    """Run several cases in one set of processes."""
    return [in_torch(rank, *args) if kind == "torch" else in_ours(rank, *args) for kind, args in cases]
