"""Train a small GPT on Python's own documentation: the same file alone, and with one process per rank.

    python examples/train.py                                      all ranks take turns in one process
    torchrun --nproc-per-node 4 examples/train.py                 one process per rank
    torchrun --nproc-per-node 4 examples/train.py --steps 400     goes on from the last checkpoint

Killed and started again with the same line, it ends as if nothing had happened. Nothing is downloaded. See
docs/concepts/words.md for the words used.
"""

from __future__ import annotations

import math
import os
import time
import warnings
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from collections.abc import Iterable
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

import zbcompile
from zbcompile.schedule.simulate import simulate

TEXT = "\n".join(topics.values())
LETTERS = sorted(set(TEXT))
STAGES, LAYERS, WIDTH, HEADS, LENGTH = 4, 4, 64, 4, 64


class Block(nn.Module):
    """One layer: causal attention, then an MLP; each is added to its input."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.attention_norm(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        attention = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(attention.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.down(F.gelu(self.up(self.mlp_norm(x)))))


class GPT(nn.Module):
    """Predicts the next letter. The head has weights of its own."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(len(LETTERS), WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block(dropout) for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(LETTERS), bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        return self.head(self.norm(self.blocks(x)))


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


class Batches:
    """Pieces of the text, in a new random order in every epoch."""

    def __init__(self, size: int, seed: int) -> None:
        codes = {letter: code for code, letter in enumerate(LETTERS)}
        ids = torch.tensor([codes[letter] for letter in TEXT])
        self.pieces = ids[: len(ids) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)
        self.size, self.random = size, torch.Generator().manual_seed(seed)
        self.begin_epoch()

    def begin_epoch(self) -> None:
        self.state, self.position = self.random.get_state(), 0
        self.order = torch.randperm(len(self.pieces), generator=self.random)

    def next(self) -> tuple[Tensor, Tensor]:
        if self.position + self.size > len(self.order):
            self.begin_epoch()
        chosen = self.pieces[self.order[self.position : self.position + self.size]]
        self.position += self.size
        return chosen[:, :-1].contiguous(), chosen[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        return {"random": self.state.tolist(), "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.random.set_state(torch.tensor(state["random"], dtype=torch.uint8))
        self.begin_epoch()
        self.position = state["position"]


def optimizer_and_schedule(parameters: Iterable[nn.Parameter], args: Namespace) -> tuple[Optimizer, LambdaLR]:
    """AdamW that lets matrices decay and vectors not; its rate warms up, then falls as a cosine."""
    every = list(parameters)
    matrices, vectors = [p for p in every if p.dim() > 1], [p for p in every if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr)

    def share(step: int) -> float:
        return min(1.0, (step + 1) / 20) * (0.55 + 0.45 * math.cos(math.pi * min(1.0, step / args.horizon)))

    return optimizer, LambdaLR(optimizer, share)


def train(args: Namespace) -> None:
    """Compile, go on where the last run stopped, train, save, write a sample."""
    torch.manual_seed(args.seed)
    model, batches = GPT(args.dropout), Batches(args.batch, args.seed)
    inputs, targets = batches.next()
    batches.position = 0
    resumes = os.path.exists(args.checkpoint)
    mixed = torch.autocast("cpu", torch.bfloat16, enabled=args.bf16)
    with mixed:
        pipeline = zbcompile.compile(
            model,
            STAGES,
            example_args=(inputs,),
            example_target=targets,
            loss_fn=loss_fn,
            num_microbatches=args.microbatches,
            schedule=args.checkpoint if resumes else None,  # a restart runs the plan of the first start
            seed=args.seed,
            time_limit=args.time_limit,
            observer=zbcompile.progress(),
        )
    optimizer, schedule = optimizer_and_schedule(pipeline.parameters(), args)
    if resumes:
        extra = pipeline.load(args.checkpoint, optimizer)
        schedule.load_state_dict(extra["schedule"])
        batches.load_state_dict(extra["batches"])

    talks = pipeline.local_stages[-1].index == STAGES - 1  # the process that computes the loss
    planned = simulate(pipeline.schedule, pipeline.solution.problem).bubble("makespan")
    words = "loss {task.fields[loss]:.3f}  {task.fields[rate]:,.0f} tokens/s  {task.fields[bubble]}"
    columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(20), TextColumn(words))
    with Progress(*columns, disable=not talks) as progress:
        bar = progress.add_task("", total=args.steps, loss=math.nan, rate=0.0, bubble="")
        while pipeline.step_number < args.steps:
            begin = time.perf_counter()
            losses: list[Tensor] = []
            inputs, targets = batches.next()
            optimizer.zero_grad()
            with mixed:
                pipeline.step(inputs, target=targets, losses=losses)
            if args.clip:
                pipeline.clip_grad_norm_(args.clip)
            optimizer.step()
            schedule.step()
            if losses:
                loss = float(torch.stack(losses).mean())
                rate = inputs.numel() / (time.perf_counter() - begin)
                progress.update(bar, completed=pipeline.step_number, loss=loss, rate=rate)
            if pipeline.step_number % args.save_every == 0 or pipeline.step_number == args.steps:
                extra = {"schedule": schedule.state_dict(), "batches": batches.state_dict()}
                pipeline.save(args.checkpoint, optimizer, extra)
                if pipeline.rank is not None:  # in one process the ranks take turns, and never overlap
                    bubble = f"bubble {planned:.0%} planned, {pipeline.timeline().bubble:.0%} measured"
                    progress.update(bar, bubble=bubble)
    pipeline.close()
    if talks and args.sample:
        print(sample(args.checkpoint, "The ", args.sample))


@torch.no_grad()
def sample(checkpoint: str, text: str, count: int) -> str:
    """Go on with a text: the plain model reads the checkpoint by torch's own means."""
    warnings.filterwarnings("ignore", "torch.distributed is disabled")  # it is not needed for one process
    model = GPT().eval()
    dcp.load({"model": model.state_dict()}, checkpoint_id=checkpoint, no_dist=True)
    random = torch.Generator().manual_seed(0)
    for _ in range(count):
        ids = torch.tensor([[LETTERS.index(letter) for letter in text[-LENGTH:]]])
        chances = (model(ids)[0, -1] / 0.7).softmax(0)
        text += LETTERS[int(torch.multinomial(chances, 1, generator=random))]
    return text


def arguments(words: list[str] | None = None) -> Namespace:
    parser = ArgumentParser(formatter_class=ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--steps", type=int, default=200, help="of the training, over all restarts")
    add("--horizon", type=int, default=1000, help="steps until the learning rate is lowest")
    add("--batch", type=int, default=32, help="pieces of text per step")
    add("--microbatches", type=int, default=8, help="parts of a batch")
    add("--lr", type=float, default=3e-3, help="highest learning rate")
    add("--clip", type=float, default=1.0, help="largest norm of the gradients; 0 for any")
    add("--dropout", type=float, default=0.0, help="share of values")
    add("--bf16", action="store_true", help="compute in bfloat16, keep weights in float32")
    add("--seed", type=int, default=0, help="of weights, data and dropout")
    add("--checkpoint", default="checkpoints/gpt", help="folder")
    add("--save-every", type=int, default=25, help="steps")
    add("--sample", type=int, default=300, help="letters to write at the end")
    add("--time-limit", type=float, default=5.0, help="seconds to look for the best order")
    return parser.parse_args(words)


if __name__ == "__main__":
    train(arguments())
