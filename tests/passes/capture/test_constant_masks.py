"""Masks that transformers builds only under export are dropped, others kept; bits equal the model's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zbcompile.compiler.stages import build_stages
from zbcompile.passes.capture.capture import capture
from zbcompile.passes.capture.captured import Captured
from zbcompile.passes.capture.constant_masks import fold_constant_masks
from zbcompile.passes.verify.verify import verify

ATTENTION = torch.ops.aten.scaled_dot_product_attention.default


def attention_calls(captured: Captured) -> list[tuple[Any, bool, bool]]:
    """(mask, is_causal, enable_gqa) of every attention call."""
    found = []
    for node in captured.module.graph.find_nodes(op="call_function", target=ATTENTION):
        args = [*node.args, *([None, 0.0, False][len(node.args) - 3 :])]
        mask = node.kwargs.get("attn_mask", args[3])
        found.append((mask, node.kwargs.get("is_causal", args[5]), node.kwargs.get("enable_gqa", False)))
    return found


def llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            num_hidden_layers=2, hidden_size=32, intermediate_size=48, num_attention_heads=4,
            num_key_value_heads=2, vocab_size=61, max_position_embeddings=32,
        )
    ).train()  # fmt: skip


def batch(**extra: Any) -> dict[str, Any]:
    tokens = torch.arange(24).reshape(2, 12) % 61
    return {"input_ids": tokens, "labels": tokens, **extra}


def test_a_causal_mask_becomes_is_causal_and_keys_are_not_repeated() -> None:
    """Without a cache transformers looks for packed sequences and builds the mask under any tracing."""
    captured = capture(llama(), (), batch(use_cache=False))
    assert all(mask is not None for mask, _, _ in attention_calls(captured))
    assert fold_constant_masks(captured) == 2
    assert attention_calls(captured) == [(None, True, True)] * 2
    assert not any(str(node.target).startswith("aten.repeat") for node in captured.module.graph.nodes)


def test_grouped_queries_are_right_to_the_bit() -> None:
    model = llama()
    call = batch(use_cache=False)
    front = build_stages(model, 2, (), call)
    assert verify(model, front, (), call).exact


def test_a_mask_that_depends_on_the_batch_stays() -> None:
    padding = torch.ones(2, 12, dtype=torch.long)
    padding[0, 9:] = 0
    captured = capture(llama(), (), batch(attention_mask=padding))
    assert fold_constant_masks(captured) == 0
    assert all(mask is not None for mask, _, _ in attention_calls(captured))


class OwnMask(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(5, 5, dtype=torch.bool).tril()
        h = self.proj(x)
        return nn.functional.scaled_dot_product_attention(h, h, h, attn_mask=mask).sum()


def test_a_mask_that_the_user_wrote_stays() -> None:
    """Plain autograd runs the kernel with a mask there, so the split must too."""
    captured = capture(OwnMask(), (torch.ones(1, 2, 5, 8),))
    assert fold_constant_masks(captured) == 0
    assert all(mask is not None for mask, _, _ in attention_calls(captured))
