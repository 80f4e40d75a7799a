"""Modules for the runtime benchmark: stages that sleep, for torch's own runtime, and a small GPT."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from zbcompile.runtime.sleeping import sleep_ns
from zbcompile.schedule.costs import StageCost

__all__ = ["Gpt", "SleepingModule"]


class _SleepInput(torch.autograd.Function):
    """Sleeps in forward and in the gradient of its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: int, backward: int) -> Tensor:
        ctx.sleep = backward
        sleep_ns(forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        sleep_ns(ctx.sleep)
        return grads[0].clone(), None, None


class _SleepWeight(torch.autograd.Function):
    """Sleeps in the gradient of the weight."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, backward: int) -> Tensor:
        ctx.sleep = backward
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        sleep_ns(ctx.sleep)
        return grads[0].clone(), None


class SleepingModule(nn.Module):
    """A module whose F, B and W take as long as told, for torch's own runtime."""

    def __init__(self, cost: StageCost) -> None:
        super().__init__()
        self.cost = cost
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        own = _SleepWeight.apply(self.weight, self.cost.backward_weight_ns)
        return _SleepInput.apply(x, self.cost.forward_ns, self.cost.backward_input_ns) + own


class Block(nn.Module):
    """A plain transformer block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.two = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(self.one(x)).view(rows, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.two(x))))


class Gpt(nn.Module):
    """Embedding, blocks, head."""

    def __init__(self, width: int = 256, blocks: int = 6, words: int = 2048) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(blocks)))
        self.head = nn.Linear(width, words)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(ids)))
