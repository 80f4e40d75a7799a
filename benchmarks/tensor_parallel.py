"""Split or fuse, asked of a real model: a Llama with tensor parallel 2 and two pipeline stages.

    python -m benchmarks.tensor_parallel [--layers N] [--hidden N] [--length N] [--rows N] [--microbatches N]
                                         [--cap BYTES] [--time-limit S] [--repeats N] [--json FILE]

1. Two processes, the shards of each layer, time F, B, W and BW of both stages with their sums over gloo, once
   with BW's sums overlapped with its products and once as autograd orders them: what fusing saves (delta).
2. The links of two ranks are measured by a rehearsal.
3. With these costs, under every send mode, the best orders that split no backward, all, by the rule of thumb,
   and as planned; each planned, and rehearsed on two processes with real messages and sleeping compute.

One thread per process: with two cores, each shard has a core in step 1. All ratios are of one run.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch
import torch.distributed as dist
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from examples.tensor_parallel import shard_llama
from zbcompile.cli.inputs import parse_caps
from zbcompile.compiler.rehearsal import rehearse, rehearse_each
from zbcompile.compiler.stages import build_stages
from zbcompile.errors import UsageError
from zbcompile.formats import profile_json
from zbcompile.formats.profile_json import ProfileFile
from zbcompile.passes.profile.measure import measure
from zbcompile.planner.imported import rated
from zbcompile.planner.plan import plan
from zbcompile.planner.split_choices import split_choices
from zbcompile.runtime.launch import spawn
from zbcompile.schedule.costs import Profile, StageCost
from zbcompile.schedule.problem import Problem
from zbcompile.show.split_choices import Rehearsed, split_choices_table

SHARDS, STAGES, VOCABULARY = 2, 2, 512
MS = 1_000_000


def measured(rank: int, sizes: argparse.Namespace) -> tuple[Profile, Profile]:
    """Return what both stages cost on this shard, with BW's sums overlapped and without."""
    torch.set_num_threads(1)
    dist.barrier()
    group = dist.group.WORLD
    assert group is not None
    tokens = torch.arange(sizes.rows * sizes.length).reshape(-1, sizes.length) % VOCABULARY
    microbatch = {"input_ids": tokens, "labels": tokens}
    found = []
    for skip in ((), ("overlap_collectives",)):
        staged = build_stages(shard_llama(_llama(sizes), group), STAGES, (), microbatch, skip=skip)
        inputs = staged.flat_inputs((), microbatch, None)
        dist.barrier()
        state = staged.captured.state
        found.append(measure(staged.stages, state, inputs, repeats=sizes.repeats, together=True))
    return found[0], found[1]


def _llama(sizes: argparse.Namespace) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        num_hidden_layers=sizes.layers,
        hidden_size=sizes.hidden,
        intermediate_size=2 * sizes.hidden,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=VOCABULARY,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def print_costs(name: str, costs: Profile) -> None:
    """Print times in ms, and what fusing saves; stage 0 has an empty B: nobody wants gradients of tokens."""
    for stage, cost in enumerate(costs.stages):
        times = " ".join(f"{ns / MS:8.2f}" for ns in _times(cost))
        saved = cost.backward_input_ns + cost.backward_weight_ns - cost.full_backward_ns
        share = 100 * saved / (cost.backward_input_ns + cost.backward_weight_ns)
        print(f"{name:<12} {stage:>5} {times} {saved / MS:8.2f} {share:7.1f} %", flush=True)


def _times(cost: StageCost) -> tuple[int, ...]:
    return cost.forward_ns, cost.backward_input_ns, cost.backward_weight_ns, cost.full_backward_ns


def with_measured_link(costs: Profile, count: int) -> Profile:
    """Return the costs with the link and the host time that a rehearsal measures."""
    found = rehearse(plan(Problem.of(costs, None, count), level=1))
    if found is None:
        raise UsageError("a rehearsal starts its own processes", fix="run the benchmark without torchrun")
    link = found.calibrated.link
    speed = f"{link.bytes_per_second / 1e9:.2f} GB/s" if link.bytes_per_second else "any size alike"
    print(f"link {link.latency_ns / 1000:.0f} us, {speed}; host {found.calibrated.overhead_ns / 1000:.0f} us")
    return replace(costs, link=link, overhead_ns=found.calibrated.overhead_ns)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    for name, value in (("layers", 8), ("hidden", 256), ("length", 128), ("rows", 4), ("repeats", 15)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--cap", help="as for zbcompile plan; none by default")
    parser.add_argument("--time-limit", type=float, default=5.0, help="seconds for every row")
    parser.add_argument("--json", type=Path, help="where to write the measured profile")
    sizes = parser.parse_args()
    load = os.getloadavg()[0]
    print(
        f"Llama, {sizes.layers} layers of hidden {sizes.hidden}, {sizes.rows} x {sizes.length} tokens a "
        f"microbatch, m = {sizes.microbatches}, tp {SHARDS} x pp {STAGES}, gloo, torch {torch.__version__}, "
        f"{os.cpu_count()} cores, load {load:.1f} before"
    )
    overlapped, plain = spawn(measured, SHARDS, (sizes,), timeout_s=900)[0]
    heads = " ".join(f"{name:>8}" for name in ("F ms", "B ms", "W ms", "BW ms", "delta"))
    print(f"{'BW':<12} {'stage':>5} {heads} {'of B + W':>9}")
    print_costs("overlapped", overlapped)
    print_costs("in order", plain)
    costs = with_measured_link(overlapped, sizes.microbatches)
    problem = Problem.of(costs, None, sizes.microbatches)
    if sizes.cap is not None:
        problem = problem.with_(caps=parse_caps(sizes.cap, problem))
    if sizes.json is not None:
        sizes.json.write_text(profile_json.dumps(ProfileFile(costs, num_microbatches=sizes.microbatches)))
    tables = split_choices(problem, seconds_per_row=sizes.time_limit)
    solutions = {
        (made.problem.transport, row.name): rated(row.schedule, made.problem)
        for made in tables
        for row in made.rows
        if row.schedule is not None
    }
    ran = rehearse_each(list(solutions.values()), steps=3)
    rehearsed: Rehearsed = {key: one.measured_span_ns for key, one in zip(solutions, ran, strict=True)}
    Console(width=110).print(split_choices_table(tables, rehearsed))


if __name__ == "__main__":
    main()
