"""``zbcompile demo``: a GPT-2 from end to end. Compile, plan, see, run, compare with autograd."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import zbcompile
from zbcompile.autograd_oracle import autograd_step
from zbcompile.errors import UsageError
from zbcompile.formats import profile_json, schedule_json
from zbcompile.runtime.launch import spawn
from zbcompile.schedule.solution import Solution

__all__ = ["Comparison", "Settings", "compare", "gpt2", "run_processes"]

NUM_STAGES = 4
TIMEOUT_S = 1800.0
TIED_TOLERANCE = 1e-6
"""The table that the first and the last stage share: its gradient is a sum over stages, then over
microbatches, where autograd interleaves them. Everything else must agree to the bit."""


@dataclass(frozen=True)
class Settings:
    """What the demo builds and runs.

    Attributes
    ----------
    memory_limit
        Bytes per rank. Beside weights and AdamW's two tensors per weight the default leaves the first rank
        headroom for three microbatches, where 1F1B wants four.
    """

    steps: int = 3
    num_microbatches: int = 8
    memory_limit: int | None = 128 << 20
    blocks: int = 12
    hidden: int = 256
    vocabulary: int = 8192
    sequence: int = 128
    seed: int = 0


@dataclass(frozen=True)
class Comparison:
    """Four processes against one: losses and gradients of every step.

    Attributes
    ----------
    losses, reference_losses
        Mean loss per step.
    equal
        Number of (step, parameter) pairs that are equal to the bit.
    compared
        Number of all pairs.
    tied
        Largest relative difference of the tied table.
    wrong
        What differs and must not, as text.
    """

    losses: tuple[float, ...]
    reference_losses: tuple[float, ...]
    equal: int
    compared: int
    tied: float
    wrong: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether every loss and gradient is right."""
        return not self.wrong


def gpt2(settings: Settings) -> nn.Module:
    """GPT-2 from transformers with random weights: tied embedding, dropout on. Nothing is downloaded."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        import transformers
    except ImportError:
        raise UsageError("the demo needs transformers", fix="pip install transformers") from None
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    torch.manual_seed(settings.seed)
    config = transformers.GPT2Config(
        n_layer=settings.blocks,
        n_embd=settings.hidden,
        n_head=settings.hidden // 32,
        vocab_size=settings.vocabulary,
        n_positions=settings.sequence,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    model: nn.Module = transformers.GPT2LMHeadModel(config)
    return model.train()


def batch(settings: Settings) -> dict[str, Any]:
    """One sequence per microbatch; each token is the one before plus a constant."""
    generator = torch.Generator().manual_seed(settings.seed)
    shape = (settings.num_microbatches, 1)
    start = torch.randint(settings.vocabulary, shape, generator=generator)
    stride = torch.randint(1, 5, shape, generator=generator)
    tokens = (start + stride * torch.arange(settings.sequence)) % settings.vocabulary
    return {"input_ids": tokens, "labels": tokens}


def compiled(settings: Settings, model: nn.Module, **options: Any) -> zbcompile.Pipeline:
    """The model as a pipeline of four stages."""
    return zbcompile.compile(
        model,
        NUM_STAGES,
        example_kwargs=batch(settings),
        num_microbatches=settings.num_microbatches,
        memory_limit=settings.memory_limit,
        seed=settings.seed,
        **options,
    )


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    """The optimizer of every process and of the reference."""
    return torch.optim.AdamW(parameters, lr=1e-3)


def run_processes(settings: Settings, solution: Solution) -> list[dict[str, Any]]:
    """Train on one gloo process per rank; per rank the losses and gradients of every step.

    Raises `PipelineError` when a process fails.
    """
    profile, schedule = profile_json.dumps(solution.problem.profile), schedule_json.dumps(solution)
    return spawn(_rank, solution.problem.num_ranks, (settings, profile, schedule), timeout_s=TIMEOUT_S)


def _rank(rank: int, settings: Settings, profile: str, schedule: str) -> dict[str, Any]:
    """One process: its own model, its own rank of the pipeline, its own optimizer."""
    costs = profile_json.loads(profile).profile
    order = schedule_json.loads(schedule).solution()
    with compiled(settings, gpt2(settings), profile=costs, schedule=order) as pipeline:
        return train(pipeline, settings)


def train(pipeline: zbcompile.Pipeline, settings: Settings) -> dict[str, Any]:
    """Optimizer steps on a pipeline, as a user writes them; keeps losses and gradients of each step."""
    optimizer = optimizer_of(pipeline.parameters())
    losses: list[list[float]] = []
    gradients: list[dict[str, Tensor]] = []
    for _ in range(settings.steps):
        found: list[Tensor] = []
        optimizer.zero_grad()
        pipeline.step(**batch(settings), losses=found, return_outputs=False)
        gradients.append({n: p.grad.clone() for n, p in pipeline.named_parameters() if p.grad is not None})
        optimizer.step()
        losses.append([float(loss) for loss in found])
    return {"losses": losses, "gradients": gradients}


def compare(
    settings: Settings,
    records: Sequence[dict[str, Any]],
    draws: Sequence[int],
    report: Callable[[str], None],
) -> Comparison:
    """Train the untouched model with plain autograd in this process and compare.

    On one thread, as every process has one: with more, sums of norms' gradients run in another order.
    """
    with _one_thread():
        return _compared(settings, records, draws, report)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _compared(
    settings: Settings,
    records: Sequence[dict[str, Any]],
    draws: Sequence[int],
    report: Callable[[str], None],
) -> Comparison:
    model = gpt2(settings)
    optimizer = optimizer_of(model.parameters())
    table = model.get_input_embeddings().weight  # type: ignore[operator]
    tied = {n for n, p in model.named_parameters() if p is table}
    mine: list[float] = []
    theirs: list[float] = []
    wrong: list[str] = []
    equal = compared = 0
    largest = 0.0
    for step in range(settings.steps):
        optimizer.zero_grad()
        whole = batch(settings)
        parts = [{k: v[i : i + 1] for k, v in whole.items()} for i in range(settings.num_microbatches)]
        losses = autograd_step(model, parts, lambda result: result.loss, draws, seed=settings.seed, step=step)
        given = next(r["losses"][step] for r in records if r["losses"][step])
        mine.append(sum(map(float, losses)) / len(losses))
        theirs.append(sum(given) / len(given))
        if given != [float(loss) for loss in losses]:
            wrong.append(f"step {step}: the losses differ")
        for name, parameter in model.named_parameters():
            for record in records:
                if name not in record["gradients"][step]:
                    continue
                compared += 1
                got = record["gradients"][step][name]
                difference = _relative(got, parameter.grad)
                if name in tied:
                    largest = max(largest, difference)
                equal += difference == 0.0
                if difference > (TIED_TOLERANCE if name in tied else 0.0):
                    wrong.append(f"step {step}: {name} differs by {difference:.2e}")
        report(f"step {step}: loss {theirs[-1]:.6f} on {len(records)} processes, {mine[-1]:.6f} in one")
        _follow(model, records, step, tied)
        optimizer.step()
    return Comparison(tuple(theirs), tuple(mine), equal, compared, largest, tuple(wrong))


def _relative(got: Tensor, wanted: Tensor | None) -> float:
    """Norm of the difference over the norm of what is right; infinite where there is nothing to compare."""
    if wanted is None or got.shape != wanted.shape:
        return float("inf")
    if torch.equal(got, wanted):
        return 0.0
    return float((got - wanted).norm() / wanted.norm())


def _follow(model: nn.Module, records: Sequence[dict[str, Any]], step: int, tied: set[str]) -> None:
    """Take over the tied table's gradient once it is compared: the next step starts from equal weights."""
    for name, parameter in model.named_parameters():
        if name in tied:
            record = next(r for r in records if name in r["gradients"][step])
            parameter.grad = record["gradients"][step][name].clone()
