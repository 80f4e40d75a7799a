"""Memory of a rank: a Llama on four processes beside the same training in one.

    python benchmarks/rank_memory.py [100M] [1B]

Every case runs in processes of its own and trains two steps. ``bare`` is the resident set of a process that
has joined the group and compiled a pipeline of four small layers, so that everything is imported. ``now`` and
``peak`` are its resident set after the steps and at most. ``part`` is what the rank must hold: its
parameters, their gradients and the optimizer's state. ``activations`` is what the plan says that its stage
holds at most.
The target is ``now <= part + 1.1 x (bare + activations)``. The C library is told to give back what is freed
from 1 MiB on (MALLOC_MMAP_THRESHOLD_): by default it keeps back what a step has freed.

plain       one process, no pipeline
free_model  every process builds the model; what belongs to others is freed after compile()
meta        the model is built without memory, planned by counted costs, and filled stage by stage
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from zbcompile.runtime.launch import spawn
from zbcompile.schedule.memory import memory_peaks

RANKS, STEPS = 4, 2
MIB = 1 << 20


@dataclass(frozen=True)
class Case:
    """A model, its batch, and which ways to train it fit into memory."""

    config: dict[str, int]
    num_microbatches: int
    rows: int
    tokens: int
    momentum: bool
    ways: tuple[str, ...]


CASES = {
    "100M": Case(
        {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 10, "vocab_size": 16000},
        8,
        16,
        64,
        False,
        ("plain", "free_model", "meta"),
    ),
    "1B": Case(
        {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 17, "vocab_size": 32000},
        4,
        4,
        32,
        True,
        ("plain", "meta"),
    ),
}


def build(case: Case) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = case.config["hidden_size"] // 64
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(num_attention_heads=heads, use_cache=False, **case.config))


def optimizer_of(case: Case, parameters: Any) -> torch.optim.Optimizer:
    """AdamW, 16 bytes a parameter in all; SGD with momentum, 12, where that is what fits."""
    if case.momentum:
        return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)
    return torch.optim.AdamW(parameters, lr=1e-3)


def resident(what: str) -> int:
    """Resident set of this process in bytes: ``VmRSS`` or ``VmHWM``."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(what))


def train(rank: int, name: str, way: str) -> dict[str, float]:
    """Train as one process of a case; return bytes."""
    import transformers

    import zbcompile
    from zbcompile.schedule.devices import DEVICES

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    case = CASES[name]
    ids = torch.arange(case.rows * case.tokens).reshape(case.rows, case.tokens) % case.config["vocab_size"]
    _compile_small_one(way)
    bare = resident("VmRSS")
    if way == "plain":
        model = build(case)
        optimizer = optimizer_of(case, model.parameters())
        for _ in range(STEPS):
            optimizer.zero_grad()
            for rows in ids.chunk(case.num_microbatches):
                (model(input_ids=rows, labels=rows).loss / case.num_microbatches).backward()
            optimizer.step()
        own, activations = list(model.parameters()), 0
    else:
        with torch.device("meta" if way == "meta" else "cpu"):
            model = build(case)
        pipeline = zbcompile.compile(
            model,
            RANKS,
            example_kwargs={"input_ids": ids, "labels": ids},
            num_microbatches=case.num_microbatches,
            time_limit=2.0,
            profile=DEVICES["CPU"],
            free_model=way == "free_model",
            stall_limit=600.0,
        )
        if way == "meta":
            for stage in pipeline.local_stages:
                stage.materialize(init_weights=model._init_weights, build=lambda: build(case))
        optimizer = optimizer_of(case, pipeline.parameters())
        for _ in range(STEPS):
            optimizer.zero_grad()
            pipeline.step(input_ids=ids, labels=ids)
            optimizer.step()
        own = list(pipeline.parameters())
        problem = pipeline.solution.problem
        activations = memory_peaks(pipeline.schedule, problem)[rank] - problem.static_bytes(rank)
        pipeline.synchronize()
    now, peak = resident("VmRSS"), resident("VmHWM")
    part = sum(p.nbytes for p in own) * (3 if case.momentum else 4)
    return {"bare": bare, "part": part, "activations": activations, "now": now, "peak": peak}


def _compile_small_one(way: str) -> None:
    import zbcompile

    layers, x = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(RANKS))), torch.randn(8, 4)
    loss_fn = torch.nn.functional.mse_loss
    if way != "plain":
        with zbcompile.compile(
            layers, RANKS, loss_fn=loss_fn, num_microbatches=4, time_limit=0.2
        ) as pipeline:
            pipeline.step(x, target=x)


def show(name: str, way: str, rows: list[dict[str, float]]) -> None:
    for rank, row in enumerate(rows):
        allowed = row["part"] + 1.1 * (row["bare"] + row["activations"])
        words = " ".join(f"{row[key] / MIB:>8.0f}" for key in ("bare", "part", "activations", "now", "peak"))
        target = "" if way == "plain" else f"  {row['now'] / allowed:>6.2f} of the target"
        print(f"{name:<5} {way:<11} {rank:>4} {words}{target}", flush=True)


def main() -> None:
    """Run the cases that are named, or all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", choices=[[], *CASES], default=[])
    args = parser.parse_args()
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(MIB))
    print(f"torch {torch.__version__}; MiB")
    print(
        f"{'model':<5} {'way':<11} {'rank':>4} {'bare':>8} {'part':>8} {'activ.':>8} {'now':>8} {'peak':>8}"
    )
    for name in args.cases or CASES:
        for way in CASES[name].ways:
            ranks = 1 if way == "plain" else RANKS
            show(name, way, spawn(train, ranks, (name, way), timeout_s=1500))


if __name__ == "__main__":
    main()
