"""Whether a process grows while it trains: counts after some steps beside those after many more.

    python benchmarks/growth.py [--steps 500]

A small model in one process, and on two ranks over gloo, with the calls that training makes: losses on all
ranks, clipping, batches of another size, evaluations. Counted are tensors (gc), hooks, keys in the store of
the processes, threads, file descriptors and resident memory.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import threading
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import zbcompile
from zbcompile.passes import hooks
from zbcompile.runtime.launch import spawn

__all__ = ["grown"]

Counts = dict[str, int]


def grown(rank: int, early: int, late: int) -> tuple[Counts, Counts]:
    """Train; return what is counted after ``early`` and after ``late`` steps."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.Tanh())))
    x, y = torch.randn(8, 16), torch.randn(8, 16)
    pipeline = zbcompile.compile(
        model,
        2,
        example_args=(x,),
        example_target=y,
        loss_fn=nn.functional.mse_loss,
        num_microbatches=4,
        time_limit=0.5,
    )
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-3)
    found = []
    with pipeline:
        for number in range(late + 1):
            if number in (early, late):
                pipeline.synchronize()
                found.append(_counts(pipeline))
            rows = 6 if number % 7 == 3 else 8
            losses: list[Tensor] = []
            optimizer.zero_grad()
            pipeline.step(x[:rows], target=y[:rows], losses=losses, share_losses=True)
            pipeline.clip_grad_norm_(1.0)
            optimizer.step()
            if number % 10 == 5:
                pipeline.eval(x)
    return found[0], found[1]


def _counts(pipeline: zbcompile.Pipeline) -> Counts:
    gc.collect()
    counts = {
        "tensors": sum(issubclass(type(o), Tensor) for o in gc.get_objects()),
        "hooks": _hooks(pipeline),
        "threads": len(os.listdir("/proc/self/task")),
        "python threads": threading.active_count(),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "resident KiB": _resident_kib(),
    }
    if dist.is_initialized():
        counts["store keys"] = dist.distributed_c10d._get_default_store().num_keys()
    return counts


def _hooks(pipeline: zbcompile.Pipeline) -> int:
    stages = [module for stage in pipeline for module in stage.modules()]
    own = sum(hooks.has_hooks(parameter) for parameter in pipeline.parameters())
    return own + sum(len(table) for module in stages for _, table in hooks.module_hooks(module))


def _resident_kib() -> int:
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1])


def main() -> None:
    """Print the counts and what they grew by."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=500)
    late = parser.parse_args().steps
    places = {"one process": [grown(0, late // 5, late)], "two ranks": spawn(grown, 2, (late // 5, late))}
    for place, records in places.items():
        for rank, (before, after) in enumerate(records):
            print(f"{place}, rank {rank}: steps {late // 5} -> {late}")
            for name, count in before.items():
                print(f"  {name:<14} {count:>8} -> {after[name]:>8}")


if __name__ == "__main__":
    main()
