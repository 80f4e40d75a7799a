"""Steps of a small GPT on four ranks beside torch's schedules, in one run.

    python benchmarks/steps.py [--rounds 10] [--blocks 8]

torch's 1F1B (4 stages of equal numbers of blocks), torch's ZBV (8 stages, two on each rank) and ours (4
stages; costs are measured, cuts and order found). All live in the same four processes. A round is one step of
each, one after the other, from a meeting of all ranks to the end of the last one. Ratios are of steps of the
same round.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleZBVZeroBubble

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import zbcompile
from benchmarks.runtime_modules import Gpt
from zbcompile.runtime.launch import spawn

RANKS, COUNT, ROWS, LENGTH = 4, 8, 2, 128
OURS = "ours, 4 stages"


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def parts(blocks: int, count: int) -> list[nn.Module]:
    """Cut the model into stages of equal numbers of blocks."""
    torch.manual_seed(0)
    model, size = Gpt(blocks=blocks), blocks // count
    cut = [list(model.blocks[k * size : (k + 1) * size]) for k in range(count)]
    cut[0].insert(0, model.embed)
    cut[-1].append(model.head)
    return [nn.Sequential(*layers) for layers in cut]


def torch_step(rank: int, blocks: int, v: bool, ids: Tensor) -> Callable[[], object]:
    """Return what runs a step of torch's ZBV or 1F1B on this rank."""
    own = (rank, 2 * RANKS - 1 - rank) if v else (rank,)
    total = len(own) * RANKS
    cut, device = parts(blocks, total), torch.device("cpu")
    stages = [PipelineStage(cut[s], s, total, device) for s in own]
    schedule = (
        ScheduleZBVZeroBubble(stages, COUNT, loss_fn=loss_fn)
        if v
        else Schedule1F1B(stages[0], COUNT, loss_fn=loss_fn)
    )
    args = (ids,) if 0 in own else ()
    target = ids if total - 1 in own else None

    def step() -> None:
        for stage in stages:
            stage.submod.zero_grad()
        schedule.step(*args, target=target)

    return step


def steps(rank: int, blocks: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of every round."""
    torch.manual_seed(0)
    model = Gpt(blocks=blocks)
    ids = torch.randint(0, 2048, (ROWS * COUNT, LENGTH), generator=torch.Generator().manual_seed(1))
    pipeline = zbcompile.compile(
        model,
        RANKS,
        example_args=(ids,),
        example_target=ids,
        loss_fn=loss_fn,
        num_microbatches=COUNT,
        time_limit=5.0,
    )

    def ours() -> None:
        pipeline.zero_grad()
        pipeline.step(ids, target=ids)

    named = {
        "torch 1F1B, 4 stages": torch_step(rank, blocks, False, ids),
        "torch ZBV, 8 stages": torch_step(rank, blocks, True, ids),
        OURS: ours,
    }
    found: dict[str, list[float]] = {name: [] for name in named}
    with pipeline:
        for number in range(rounds + 2):
            for name, step in named.items():
                dist.barrier()
                begin = time.perf_counter()
                step()
                seconds = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
                dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
                if number >= 2:  # the first ones make connections and buffers
                    found[name].append(float(seconds))
    return found


def main() -> None:
    """Print medians and ratios."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--blocks", type=int, default=8, help="a multiple of 8")
    args = parser.parse_args()
    print(
        f"torch {torch.__version__}, GPT of {args.blocks} blocks, hidden 256, m = {COUNT}, "
        f"{args.rounds} rounds, "
        f"{RANKS} ranks on {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    )
    found = spawn(steps, RANKS, (args.blocks, args.rounds), timeout_s=500)[0]
    for name, seconds in found.items():
        ratio = statistics.median(a / b for a, b in zip(found[OURS], seconds, strict=True))
        print(
            f"{name:<22} median {1000 * statistics.median(seconds):7.1f} ms, "
            f"best {1000 * min(seconds):7.1f} ms; ours / it {ratio:.2f}"
        )


if __name__ == "__main__":
    main()
