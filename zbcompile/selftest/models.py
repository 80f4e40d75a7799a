"""The models of the self-test in plain torch: blocks of GPT-2 and of Llama, and small models made of them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["BLOCKS", "Gpt2Block", "LanguageModel", "LlamaBlock", "token_loss"]

_HEAD = 64
_VOCABULARY = 512


class Gpt2Block(nn.Module):
    """A block of GPT-2: layer norm, attention with biases, layer norm, MLP of four times the width.

    (rows, length, hidden) -> (rows, length, hidden).
    """

    def __init__(self, hidden: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads = max(1, hidden // _HEAD)
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.attention, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, hidden = x.shape
        parts = self.attention(self.norm1(x)).split(hidden, dim=2)
        q, k, v = (part.view(rows, length, self.heads, -1).transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).reshape(rows, length, hidden)))
        y: Tensor = self.dropout(self.down(functional.gelu(self.up(self.norm2(x)), approximate="tanh")))
        return x + y


class LlamaBlock(nn.Module):
    """A block of Llama: RMS norms, rotary embedding, grouped queries, gated MLP; no biases.

    (rows, length, hidden) -> (rows, length, hidden).
    """

    def __init__(self, hidden: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads = max(2, hidden // _HEAD)
        self.groups = self.heads // 2
        self.size = hidden // self.heads
        inner = -(-hidden * 8 // 3 // 32) * 32
        self.norm1, self.norm2 = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.q = nn.Linear(hidden, hidden, bias=False)
        self.k = nn.Linear(hidden, self.groups * self.size, bias=False)
        self.v = nn.Linear(hidden, self.groups * self.size, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.gate, self.up = nn.Linear(hidden, inner, bias=False), nn.Linear(hidden, inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, hidden = x.shape
        y = self.norm1(x)
        cos, sin = self._turns(length, x)
        q = _turned(self.q(y).view(rows, length, self.heads, self.size).transpose(1, 2), cos, sin)
        k = _turned(self.k(y).view(rows, length, self.groups, self.size).transpose(1, 2), cos, sin)
        v = self.v(y).view(rows, length, self.groups, self.size).transpose(1, 2)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, hidden))
        y = self.norm2(x)
        gated: Tensor = self.down(functional.silu(self.gate(y)) * self.up(y))
        return x + gated

    def _turns(self, length: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosine and sine of every position and pair of entries: (length, size)."""
        rates = 1e4 ** (-torch.arange(0, self.size, 2, device=x.device, dtype=torch.float32) / self.size)
        angles = torch.outer(torch.arange(length, device=x.device, dtype=torch.float32), rates).repeat(1, 2)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


BLOCKS: dict[str, type[Gpt2Block] | type[LlamaBlock]] = {"gpt2": Gpt2Block, "llama": LlamaBlock}
"""Kinds of blocks by name."""


class LanguageModel(nn.Module):
    """Tokens (rows, length) -> logits (rows, length, 512): embedding, blocks, norm, head.

    Parameters
    ----------
    family
        Of the blocks, a key of `BLOCKS`.
    blocks, hidden
        How many, and how wide.
    dropout
        In the blocks of GPT-2.
    """

    def __init__(self, family: str, blocks: int, hidden: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(_VOCABULARY, hidden)
        self.blocks = nn.ModuleList(BLOCKS[family](hidden, dropout) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, _VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the mean cross entropy of each token given itself: enough for a gradient of everything."""
    return functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())
