"""What the processes of `tests/pipeline/test_checkpoints.py` run."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter

import zbcompile
from tests.support.gloo_workers import even_profile
from zbcompile.errors import UsageError, ZBCompileError
from zbcompile.runtime.group import PipelineGroup
from zbcompile.runtime.watchdog import Watchdog

STATE = dict[str, Tensor]
EXTRA = {"position": 7, "random": [1, 2, 0.5], "name": None}


def adamw(parameters: Any, lr: float = 0.01) -> torch.optim.AdamW:
    """Two groups: matrices decay, vectors do not."""
    every = list(parameters)
    matrices, vectors = [p for p in every if p.dim() > 1], [p for p in every if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=lr)


def steps(
    pipeline: zbcompile.Pipeline, optimizer: torch.optim.Optimizer, call: dict[str, Any], count: int
) -> None:
    for _ in range(count):
        optimizer.zero_grad()
        pipeline.step(*call.get("args", ()), target=call.get("target"), **call.get("kwargs", {}))
        optimizer.step()


def saved_and_continued(rank: int, pipeline: zbcompile.Pipeline, call: dict[str, Any], folder: str) -> STATE:
    """Train two steps, save in every way there is, train one more; return this rank's tensors."""
    compiled = pipeline._ready()
    group = PipelineGroup(None, 120.0)
    with group.calls.building("the test"):
        compiled.run_on(group)
    optimizer = adamw(pipeline.parameters())
    steps(pipeline, optimizer, call, 2)
    pipeline.save(f"{folder}/whole", optimizer, EXTRA)
    pipeline.save_merged(f"{folder}/merged.safetensors")
    flat = {**pipeline.state_dict(), **pipeline.optimizer_state_dict(optimizer)}
    dcp.save(flat, checkpoint_id=f"{folder}/flat")
    steps(pipeline, optimizer, call, 1)
    pipeline.synchronize()
    found = {name: tensor.clone() for name, tensor in pipeline.state_dict().items()}
    pipeline.close()
    return found


class Narrow(nn.Module):
    """Four stages, of which the third has no parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.bend, self.last = nn.Tanh(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.bend(self.second(self.first(x))))


def narrow(**options: Any) -> tuple[zbcompile.Pipeline, dict[str, Any]]:
    torch.manual_seed(1)
    call = {"args": (torch.randn(4, 8),), "target": torch.randn(4, 8)}
    pipeline = zbcompile.compile(
        Narrow(),
        4,
        loss_fn=nn.functional.mse_loss,
        num_microbatches=2,
        profile=even_profile(),
        time_limit=0.2,
        split_points=["second", "bend", "last"],
        stall_limit=60.0,
        **options,
    )
    return pipeline.build(call["args"], {}, call["target"]), call


def refused(action: Any) -> str:
    try:
        action()
    except ZBCompileError as error:
        return f"{type(error).__name__}: {error}"
    return "done"


def saved_and_killed(rank: int, folder: str, victim: int) -> dict[str, Any]:
    """Be refused on one rank or all, save, train on, and lose a rank while saving to the same place."""
    pipeline, call = narrow()
    optimizer = adamw(pipeline.parameters()) if list(pipeline.parameters()) else None
    place = Path(folder) / "saved"

    def step() -> None:
        if optimizer is None:
            pipeline.step(*call["args"], target=call["target"])
        else:
            steps(pipeline, optimizer, call, 1)

    step()
    said = [
        refused(lambda: pipeline.save(place, optimizer, {"rank": rank == 1})),
        refused(lambda: pipeline.save(place, optimizer, {1: 2} if rank == 1 else {})),
        refused(lambda: pipeline.save(Path(__file__).parent, optimizer)),
        refused(lambda: pipeline.load(place if rank == 1 else folder, optimizer)),
        refused(lambda: pipeline.save(place, optimizer, {"step": 1})),
    ]
    kept = {name: tensor.clone() for name, tensor in pipeline.state_dict().items()}
    step()
    write = FileSystemWriter.write_data
    if rank == 1:
        FileSystemWriter.write_data = _full  # type: ignore[method-assign]
    said.append(refused(lambda: pipeline.save(place, optimizer, {"step": 2})))
    FileSystemWriter.write_data = _killed if rank == victim else write  # type: ignore[method-assign]
    said.append(refused(lambda: pipeline.save(place, optimizer, {"step": 2})))
    return {"said": said, "kept": kept, "parameters": len(list(pipeline.parameters()))}


def _full(*args: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _killed(*args: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@contextlib.contextmanager
def hears_its_pipeline_first(does: bool) -> Iterator[None]:
    """Let this rank's watchdog hear no news of all four ranks, but those of its pipeline's two."""
    read_news = Watchdog._read_news
    if does:
        Watchdog._read_news = lambda self, s: None if self.size == 4 else read_news(self, s)  # type: ignore[method-assign]
    try:
        yield
    finally:
        Watchdog._read_news = read_news  # type: ignore[method-assign]


def replicas(rank: int, folder: str) -> dict[str, Any]:
    """Train two replicas of two ranks each, by one plan; compile and train them again from a checkpoint."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    own = pairs[rank // 2]
    form = {"loss_fn": nn.functional.mse_loss, "num_microbatches": 2, "time_limit": 0.3, "group": own}
    call = {"args": (torch.ones(4, 8),), "target": torch.zeros(4, 8)}
    example = {"example_args": call["args"], "example_target": call["target"], "stall_limit": 60.0}

    def model(wide: bool) -> nn.Module:
        torch.manual_seed(0)
        last = nn.Linear(8, 8, bias=not wide)
        return nn.Sequential(*(nn.Linear(8, 8) for _ in range(7)), last)

    different = refused(
        lambda: zbcompile.compile(model(rank == 3), 4, plan_group=dist.group.WORLD, **form, **example)
    )

    def fails(name: str, artifact: object) -> None:
        if rank == 3 and name == "partition":
            raise UsageError("mine")

    with hears_its_pipeline_first(rank == 2):
        failed = refused(
            lambda: zbcompile.compile(
                model(False), 4, plan_group=dist.group.WORLD, **form, **example, observer=fails
            )
        )
    job = {"plan_group": dist.group.WORLD, "cache": f"{folder}/cache"}
    pipeline = zbcompile.compile(model(False), 4, **job, **form, **example)
    seen: list[str] = []
    cached = zbcompile.compile(
        model(False), 4, **job, **form, **example, observer=lambda name, artifact: seen.append(name)
    )
    optimizer = adamw(pipeline.parameters())
    steps(pipeline, optimizer, call, 1)
    pipeline.save(f"{folder}/{rank // 2}", optimizer)
    again = zbcompile.compile(model(False), 4, schedule=f"{folder}/{rank // 2}", **form, **example)
    later = adamw(again.parameters())
    again.load(f"{folder}/{rank // 2}", later)
    steps(again, later, call, 1)
    steps(pipeline, optimizer, call, 1)
    pipeline.synchronize()
    again.synchronize()
    equal = all(torch.equal(tensor, again.state_dict()[n]) for n, tensor in pipeline.state_dict().items())
    return {
        "different": different,
        "failed": failed,
        "plan": repr(pipeline.solution),
        "again": repr(again.solution),
        "cached": repr(cached.solution),
        "seen": seen,
        "equal": equal,
    }
