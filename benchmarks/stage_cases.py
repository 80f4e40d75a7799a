"""The stages that the split is measured on: two middle layers of GPT-2 and Llama, as model and as module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

BATCH, LENGTH, VOCABULARY, LAYERS = 4, 256, 1024, 2

__all__ = ["CASES", "LAYERS", "StageCase"]


@dataclass(frozen=True)
class StageCase:
    """A model, where its middle stage starts and ends, and the same layers as a plain module.

    ``blocks(model)`` runs the untouched layers of the stage under autograd: x -> y, shape
    (batch, length, hidden); it is the reference and what torch's own split is given.
    """

    name: str
    hidden: int
    build: Callable[[int], nn.Module]
    split_points: tuple[str, str]
    blocks: Callable[[nn.Module], nn.Module]

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of the tensor between stages."""
        return BATCH, LENGTH, self.hidden

    @property
    def sbh_bytes(self) -> int:
        """Bytes of one (length x batch x hidden) tensor of float32."""
        return BATCH * LENGTH * self.hidden * 4

    def example(self) -> tuple[tuple[Any, ...], dict[str, Tensor]]:
        """args and kwargs of one microbatch; the model returns its loss."""
        tokens = torch.randint(3, VOCABULARY, (BATCH, LENGTH))
        return (), {"input_ids": tokens, "labels": tokens}


class _Gpt2Blocks(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.layers = model.transformer.h[2:4]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            y = layer(x)
            x = y[0] if isinstance(y, tuple) else y
        return x


class _LlamaBlocks(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.layers = model.model.layers[2:4]
        self.rotary = model.model.rotary_emb

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1])[None]
        tables = self.rotary(x, positions)
        for layer in self.layers:
            y = layer(x, position_embeddings=tables, position_ids=positions, attention_mask=None)
            x = y[0] if isinstance(y, tuple) else y
        return x


def _gpt2(hidden: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=6,
        n_embd=hidden,
        n_head=max(2, hidden // 64),
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    return GPT2LMHeadModel(config).train()


def _llama(hidden: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=6,
        hidden_size=hidden,
        intermediate_size=-(-hidden * 8 // 3 // 128) * 128,
        num_attention_heads=max(2, hidden // 64),
        num_key_value_heads=max(1, hidden // 128),
        vocab_size=VOCABULARY,
        max_position_embeddings=LENGTH,
        use_cache=False,
    )
    return LlamaForCausalLM(config).train()


CASES = {
    "GPT-2": lambda hidden: StageCase(
        "GPT-2", hidden, _gpt2, ("transformer.h.2", "transformer.h.4"), _Gpt2Blocks
    ),
    "Llama": lambda hidden: StageCase(
        "Llama", hidden, _llama, ("model.layers.2", "model.layers.4"), _LlamaBlocks
    ),
}
