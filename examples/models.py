"""Models for `zbcompile profile`: each function returns a model and an example of one microbatch.

    zbcompile profile examples/models.py:gpt2 --stages 4 --microbatches 8
    zbcompile profile examples/models.py:gpt2 --stages 4 --device H100

The first measures here, the second counts for a device that need not be there. Weights are random; nothing is
downloaded.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

__all__ = ["gpt2", "mlp"]


def gpt2() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """GPT-2 with 12 blocks, hidden 256, a vocabulary of 8192; one sequence of 128 tokens."""
    config = GPT2Config(
        n_layer=12,
        n_embd=256,
        n_head=8,
        vocab_size=8192,
        n_positions=128,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    tokens = torch.randint(config.vocab_size, (1, 128), generator=torch.Generator().manual_seed(0))
    return GPT2LMHeadModel(config).train(), {"input_ids": tokens, "labels": tokens}


def mlp() -> tuple[nn.Module, tuple[torch.Tensor]]:
    """Return a small chain of layers, and an input."""
    layers = (layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.Tanh()))
    return nn.Sequential(*layers), (torch.zeros(8, 64),)
