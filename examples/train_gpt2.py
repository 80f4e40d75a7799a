"""Train a small GPT-2 as a pipeline of four stages.

    python examples/train_gpt2.py                               all ranks take turns in one process
    torchrun --nproc-per-node 4 examples/train_gpt2.py          one process per rank

The model is transformers' own, with random weights; nothing is downloaded. See
docs/concepts/words.md for the words used.
"""

from __future__ import annotations

import os

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import zbcompile

STEPS, BATCH, SEQUENCE, VOCABULARY = 5, 8, 64, 512


def main() -> None:
    """Compile once, then train as always."""
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=4,
        n_embd=64,
        n_head=4,
        vocab_size=VOCABULARY,
        n_positions=SEQUENCE,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config)
    start = torch.arange(BATCH).unsqueeze(1)
    tokens = (start + torch.arange(SEQUENCE)) % VOCABULARY
    batch = {"input_ids": tokens, "labels": tokens, "use_cache": False}

    pipeline = zbcompile.compile(
        model, num_stages=4, example_kwargs=batch, num_microbatches=8, memory_limit=64 << 20, time_limit=5.0
    )
    talks = int(os.environ.get("RANK", "0")) == 0
    if talks:
        print(pipeline)
        for stage in pipeline:
            print(f"  stage {stage.index}: {sum(p.numel() for p in stage.parameters()):,} parameters")

    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-2)
    for step in range(STEPS):
        losses: list[torch.Tensor] = []
        optimizer.zero_grad()
        pipeline.step(**batch, losses=losses)
        optimizer.step()
        if losses:
            print(f"step {step}: loss {torch.stack(losses).mean():.4f}", flush=True)
    pipeline.close()


if __name__ == "__main__":
    main()
