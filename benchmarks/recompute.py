"""What recompute="auto" is worth: GPT-2 and Llama on four ranks, caps of half and three quarters of 1F1B's.

    python benchmarks/recompute.py [gpt2] [llama] [--caps .5 .75] [--counted NAME] [--compile] [--limit 10]

A cap of ``x p`` is the largest rank's static bytes and ``x p`` times what a microbatch leaves on the largest
stage without recompute. Planned: spans by the costs that were measured here, the levels of each stage in
turns (``--counted H100``: counted for a device instead, and nothing is run). ``step``: the same order with
the median durations of its own actions in a step that ran (ranks in one process take turns, so durations are
real and the ranks' overlap is the simulated one). ``kept`` is the most that F left for B and B for W on any
rank in that step, from the storages of the tensors themselves, with static bytes, beside the cap; and
``bits`` says whether all gradients are those of ``recompute="none"`` without a cap.

All times are processor times of this one process, so that other work on the machine counts little.

``--compile`` times `compile` with each policy instead: processor seconds without the search.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import zbcompile
from tests.support.saved_ledger import kept_bytes
from zbcompile.compiler.remeasure import profile_of
from zbcompile.errors import InfeasibleError, UsageError
from zbcompile.schedule.costs import Profile
from zbcompile.schedule.devices import device_named
from zbcompile.schedule.simulate import simulate

RANKS, COUNT, ROWS, TOKENS, LAYERS, HIDDEN, WORDS = 4, 12, 2, 64, 4, 192, 512
POLICIES = ("none", "min_memory", "full", "auto")
MIB = 1 << 20


def gpt2() -> nn.Module:
    """Random weights; dropout as GPT-2 has it."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=LAYERS, n_embd=HIDDEN, n_head=4, vocab_size=WORDS, n_positions=TOKENS, use_cache=False,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def llama() -> nn.Module:
    """Random weights; grouped keys and values."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=LAYERS, hidden_size=HIDDEN, intermediate_size=512, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=WORDS, max_position_embeddings=TOKENS, use_cache=False,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config)


MODELS = {"gpt2": gpt2, "llama": llama}


def batch() -> dict[str, Tensor]:
    """The whole batch of a step."""
    ids = torch.randint(0, WORDS, (ROWS * COUNT, TOKENS), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def compiled(name: str, **options: Any) -> tuple[zbcompile.Pipeline, nn.Module]:
    """A pipeline of four stages with one rank each."""
    torch.manual_seed(0)
    model = MODELS[name]().train()
    given = {"num_microbatches": COUNT, "placement": "linear", "verify": False, **options}
    return zbcompile.compile(model, RANKS, example_kwargs=batch(), **given), model


def offered(name: str, counted: str | None) -> Profile:
    """The costs of every stage at every level: what a compile under a low cap planned with."""
    device = None if counted is None else device_named(counted)
    loose, _ = compiled(name, profile=device, time_limit=0.3)
    stages = loose.profile.stages
    loose.close()
    cap = max(s.static_bytes for s in stages) + max(s.saved_bytes for s in stages)
    tight, _ = compiled(name, profile=device, memory_limit=cap, time_limit=0.3)
    tight.close()
    assert tight.solution.offered is not None
    return tight.solution.offered


def gradients(pipeline: zbcompile.Pipeline, model: nn.Module) -> list[Tensor]:
    """Of the pipeline's first step."""
    pipeline.step(**batch())
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def table(name: str, counted: str | None, steps: int, limit: float, caps: list[float]) -> None:
    """Print a line per cap and policy."""
    profile = offered(name, counted)
    saved = max(s.saved_bytes for s in profile.stages)
    static = max(s.static_bytes for s in profile.stages)
    wanted: list[Tensor] = []
    if counted is None:
        free, model = compiled(name, profile=profile, recompute="none", time_limit=0.3)
        wanted = gradients(free, model)
        free.close()
    for share in caps:
        cap = static + int(share * RANKS * saved)
        for policy in POLICIES:
            asked = {"memory_limit": cap, "recompute": policy, "time_limit": limit}
            try:
                pipeline, model = compiled(name, profile=profile, **asked)
            except InfeasibleError as error:
                print(f"{name} {share}p {policy}: needs {error.needed / MIB:.2f} MiB")
                continue
            except UsageError:
                print(f"{name} {share}p {policy}: beaten on some stage by another level")
                continue
            certificate = pipeline.certificate
            line = (
                f"{name} {share}p {policy}: planned {certificate.value_ns / 1e6:.3f} ms, "
                f"bound {certificate.bound_ns / 1e6:.3f} ms"
            )
            if policy == "auto":
                line += f", levels {list(levels(pipeline))}"
            if counted is None:
                line += run(pipeline, model, cap, wanted, steps)
            print(line, flush=True)
            pipeline.close()


def levels(pipeline: zbcompile.Pipeline) -> Iterator[str]:
    """Of every stage."""
    for stage in pipeline.profile.stages:
        yield stage.name.partition("recompute=")[2] or "none"


def run(pipeline: zbcompile.Pipeline, model: nn.Module, cap: int, wanted: list[Tensor], steps: int) -> str:
    """Return what steps of a pipeline took and kept, and whether the first one has the bits."""
    rank_of, problem = pipeline.schedule.placement.rank_of, pipeline.solution.problem
    always = [*model.parameters(), *model.buffers(), *batch().values()]
    with kept_bytes(rank_of, always) as most:
        found = gradients(pipeline, model)
    same = len(found) == len(wanted) and all(map(torch.equal, found, wanted))
    for _ in range(steps - 1):
        pipeline.zero_grad()
        pipeline.step(**batch())
    real = profile_of(pipeline.timeline(), pipeline.schedule, problem, links=False)
    taken = simulate(pipeline.schedule, problem.with_(profile=real)).span_ns
    kept = max(s.static_bytes + most[r] for s, r in zip(problem.profile.stages, rank_of, strict=True))
    return (
        f", step {taken / 1e6:.3f} ms, kept {kept / MIB:.2f} of {cap / MIB:.2f} MiB, "
        f"bits {'equal' if same else 'DIFFER'}"
    )


def compile_times(name: str) -> None:
    """Print the processor seconds of compile, less those of planning's limit of 0.3 s."""
    loose, _ = compiled(name, profile=device_named("cpu"), time_limit=0.3)
    stages = loose.profile.stages
    loose.close()
    cap = max(s.static_bytes for s in stages) + RANKS * max(s.saved_bytes for s in stages) // 2
    for policy in POLICIES:
        for source in (None, device_named("cpu")):
            began = time.process_time()
            pipeline, _ = compiled(name, profile=source, memory_limit=cap, recompute=policy, time_limit=0.3)
            seconds = time.process_time() - began
            pipeline.close()
            print(
                f"{name} {policy}, {'counted' if source else 'measured'}: compile {seconds:.1f} s", flush=True
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=list(MODELS), help="gpt2, llama")
    parser.add_argument("--counted", metavar="DEVICE", help="count for a device of the table; nothing runs")
    parser.add_argument("--compile", action="store_true", help="time compile() with each policy")
    parser.add_argument("--caps", type=float, nargs="+", default=[0.5, 0.75], help="in shares of p (.5 .75)")
    parser.add_argument("--limit", type=float, default=10.0, help="seconds for every search (10)")
    parser.add_argument("--steps", type=int, default=2, help="steps of which the last is measured (2)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    time.perf_counter_ns = time.process_time_ns
    for name in options.models:
        if options.compile:
            compile_times(name)
        else:
            table(name, options.counted, options.steps, options.limit, options.caps)


if __name__ == "__main__":
    main()
