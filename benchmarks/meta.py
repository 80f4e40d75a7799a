"""From a model without weights to a plan: seconds and peak memory of every step.

    python benchmarks/meta.py [llama-70b] [gpt2-small] [--device H100] [--json FILE]

Each case runs in a process of its own, so that the peak is its own. Seconds are wall-clock and CPU: on a
machine that does other things the CPU figure is the one to compare. ``peak`` is the resident set of the whole
process, Python, torch and transformers included.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


@dataclass(frozen=True)
class Case:
    """A model to plan, how to build it on the meta device, and into how many stages."""

    what: str
    num_stages: int
    num_microbatches: int
    build: Callable[[], tuple[Any, dict[str, Any]]]
    target_s: int


def llama_70b() -> tuple[Any, dict[str, Any]]:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=80,
        hidden_size=8192,
        intermediate_size=28672,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=8192,
    )
    with torch.device("meta"):
        ids = torch.zeros(1, 8192, dtype=torch.long)
        return LlamaForCausalLM(config).to(torch.bfloat16), {"input_ids": ids, "labels": ids}


def gpt2_small() -> tuple[Any, dict[str, Any]]:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.device("meta"):
        ids = torch.zeros(2, 1024, dtype=torch.long)
        return GPT2LMHeadModel(GPT2Config()), {"input_ids": ids, "labels": ids}


CASES = {
    "llama-70b": Case("Llama 70B, sequence 8192, bfloat16", 16, 64, llama_70b, 45),
    "gpt2-small": Case("GPT-2 small, 124 M, sequence 1024, microbatch 2", 4, 16, gpt2_small, 20),
}


def measure_case(name: str, device: str, time_limit: float) -> dict[str, Any]:
    """Run the straight line once, in this process."""
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    from zbcompile.passes.capture.capture import capture
    from zbcompile.passes.capture.constant_masks import fold_constant_masks
    from zbcompile.passes.partition.partition import partition
    from zbcompile.passes.profile.counted import counted_profile
    from zbcompile.passes.split.split_backward import split_backward
    from zbcompile.planner.plan import plan
    from zbcompile.schedule.problem import Problem

    case = CASES[name]
    steps: dict[str, tuple[float, float]] = {}

    @contextmanager
    def step(what: str) -> Iterator[None]:
        wall, cpu = time.perf_counter(), time.process_time()
        yield
        steps[what] = time.perf_counter() - wall, time.process_time() - cpu

    model, example = case.build()
    start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with step("capture"):
        captured = capture(model, (), example)
        fold_constant_masks(captured)
    with step("partition"):
        sources = partition(captured, case.num_stages)
    with step("split"):
        stages = split_backward(captured, sources)
    with step("count"):
        profile = counted_profile(stages, device)
    with step("plan"):
        problem = Problem.of(profile, num_microbatches=case.num_microbatches)
        solution = plan(problem, time_limit_s=time_limit)
    return {
        "case": name,
        "what": case.what,
        "parameters": sum(p.numel() for p in model.parameters()),
        "stages": case.num_stages,
        "distinct": len({id(stage.graphs) for stage in stages}),
        "microbatches": case.num_microbatches,
        "nodes": len(captured.module.graph.nodes),
        "steps": {what: [round(x, 2) for x in pair] for what, pair in steps.items()},
        "wall_s": round(sum(wall for wall, _ in steps.values()), 1),
        "cpu_s": round(sum(cpu for _, cpu in steps.values()), 1),
        "target_s": case.target_s,
        "peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000),
        "before_mb": round(start / 1000),
        "span_ms": round(solution.certificate.value_ns / 1e6, 1),
        "bound_ms": round(solution.certificate.bound_ns / 1e6, 1),
        "largest_static_gb": round(max(s.static_bytes for s in profile.stages) / 1e9, 1),
        "largest_saved_gb": round(max(s.saved_bytes for s in profile.stages) / 1e9, 2),
        "device": device,
        "load": [round(x, 1) for x in os.getloadavg()],
    }


def show(result: dict[str, Any]) -> None:
    """One block of text per case."""
    print(f"{result['what']}: {result['parameters'] / 1e9:.2f} B parameters, {result['nodes']} nodes")
    print(
        f"  {result['stages']} stages, {result['distinct']} distinct; "
        f"at most {result['largest_static_gb']} GB "
        f"held all the time, {result['largest_saved_gb']} GB per microbatch in flight"
    )
    for what, (wall, cpu) in result["steps"].items():
        print(f"  {what:<10} {wall:>7.2f} s   {cpu:>7.2f} s CPU")
    print(
        f"  {'total':<10} {result['wall_s']:>7.1f} s   {result['cpu_s']:>7.1f} s CPU   "
        f"(target {result['target_s']} s), peak {result['peak_mb']} MB, {result['before_mb']} before capture"
    )
    print(
        f"  span {result['span_ms']} ms on {result['device']} for {result['microbatches']} microbatches, "
        f"bound {result['bound_ms']} ms; load average {result['load'][0]}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", choices=[[], *CASES], default=[])
    parser.add_argument("--device", default="H100")
    parser.add_argument("--time-limit", type=float, default=5.0, help="seconds for the search for an order")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--in-process", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.in_process:
        print(json.dumps(measure_case(arguments.cases[0], arguments.device, arguments.time_limit)))
        return
    results = []
    for name in arguments.cases or CASES:
        command = [sys.executable, __file__, name, "--in-process", "--device", arguments.device]
        command += ["--time-limit", str(arguments.time_limit)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        results.append(json.loads(done.stdout.splitlines()[-1]))
        show(results[-1])
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
