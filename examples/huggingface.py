"""Train a Hugging Face Llama with a tied embedding as a pipeline of four stages.

    python examples/huggingface.py [llama.safetensors]                              one process
    torchrun --nproc-per-node 4 examples/huggingface.py [llama.safetensors]         one process per rank

The weights are random and the text is counted numbers, so nothing is downloaded. With your own, put
`LlamaForCausalLM.from_pretrained(folder)` and a tokenizer in their place. The trained weights are written to
the file that is named, for `safetensors.torch.load_model`. More: docs/howto/huggingface.md.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import zbcompile

STEPS, BATCH, LENGTH, VOCABULARY = 4, 8, 32, 128


def build_model() -> LlamaForCausalLM:
    """Return the model, with the same random weights on every rank."""
    torch.manual_seed(0)
    config = LlamaConfig(
        num_hidden_layers=4,
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        tie_word_embeddings=True,
        use_cache=False,  # a cache of keys and values is for generating
    )
    return LlamaForCausalLM(config)


def batches() -> Iterator[dict[str, Tensor]]:
    """Yield what the model's forward takes; with labels it returns its loss."""
    for step in range(STEPS):
        start = torch.arange(BATCH).unsqueeze(1) + BATCH * step
        tokens = (start + torch.arange(LENGTH)) % VOCABULARY
        yield {"input_ids": tokens, "labels": tokens}


def main(weights: str | None = None) -> None:
    """Compile once, then train as always."""
    pipeline = zbcompile.compile(
        build_model(),
        num_stages=4,
        example_kwargs=next(batches()),
        num_microbatches=8,
        memory_limit=64 << 20,  # bytes per rank
        observer=zbcompile.progress(),  # says on standard error which steps are done
    )
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-3)
    for step, batch in enumerate(batches()):
        losses: list[Tensor] = []
        optimizer.zero_grad()
        pipeline.step(**batch, losses=losses, share_losses=True)
        norm = pipeline.clip_grad_norm_(1.0)  # of all ranks; the tied table counts once
        optimizer.step()
        if not pipeline.rank:  # None where all ranks run in this process
            print(f"step {step}: loss {torch.stack(losses).mean():.6f}, norm {norm:.6f}", flush=True)
    if weights is not None:
        pipeline.save_merged(weights)
    pipeline.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
