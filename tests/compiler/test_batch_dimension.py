"""An argument cut along a dimension that is not the batch is refused on evidence; models that mix samples
are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zbcompile
from zbcompile.compiler.batch_dimension import check_batch_dimension
from zbcompile.compiler.call import Batch
from zbcompile.compiler.signature import Signature
from zbcompile.errors import UsageError
from zbcompile.options import CompileOptions

B = 4


class Attention(nn.Module):
    """Attention whose mask is [S, S] for all samples, or [B, S] for the keys of each."""

    def __init__(self, padding: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.padding = nn.MultiheadAttention(8, 2, batch_first=True, dropout=0.1), padding

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        use = {"key_padding_mask": mask} if self.padding else {"attn_mask": mask[: x.shape[1], : x.shape[1]]}
        if not self.padding:  # broadcast over rows, so that a piece of the mask is accepted, too
            use = {"attn_mask": mask.mean(0, keepdim=True).expand(x.shape[1], -1)}
        value: Tensor = self.inner(x, x, x, **use, need_weights=False)[0]
        return value


class Contrast(nn.Module):
    """Mixes the samples of a batch on purpose."""

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return (x - x.mean((0, 1))) * other.sum()


def check(model: nn.Module, *args: Any, whole: tuple[int | str, ...] = (), count: int = 2) -> None:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state, batch = torch.get_rng_state(), Batch(args)
    modes = [m.training for m in model.modules()]
    try:
        options = CompileOptions(model=model, num_stages=1, whole=whole)
        signature = Signature(batch, options)
        check_batch_dimension(model, signature, signature.values(batch), count, 0)
    finally:
        assert torch.equal(torch.get_rng_state(), state)
        assert [m.training for m in model.modules()] == modes
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def encoder(batch_first: bool) -> nn.Module:
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=batch_first)


def test_a_mask_without_a_batch_dimension_is_refused_unless_it_is_named_whole() -> None:
    x, mask = torch.randn(B, B, 8), torch.randn(B, B)
    with pytest.raises(UsageError, match=r"(?s)no batch dimension \(args\[1\]\).*whole="):
        check(Attention(padding=False), x, mask)
    check(Attention(padding=False), x, mask, whole=(1,))
    check(Attention(padding=False), x, mask, whole=("mask",))
    check(Attention(padding=True), x, torch.eye(B).bool())
    check(Attention(padding=False), x, mask, count=1)


@pytest.mark.parametrize("option", ["whole", "constant"])
def test_a_name_that_names_no_tensor_of_the_call_is_refused(option: str) -> None:
    example: dict[str, Any] = {
        "example_args": (torch.randn(B, B, 8), torch.randn(B, B)),
        "num_microbatches": 2,
    }
    for wrong in (["masks"], [2]):
        with pytest.raises(UsageError, match=rf"(?s){option}=.* names no tensor of the call.*args\[1\]"):
            zbcompile.compile(Attention(padding=False), 1, **example, **{option: wrong})
    for wrong in ("mask", 1, [True]):
        with pytest.raises(UsageError, match=f"{option} must be a list of positions and names"):
            zbcompile.compile(Attention(padding=False), 1, **example, **{option: wrong})


@pytest.mark.parametrize("build", [lambda: encoder(False), lambda: nn.LSTM(8, 8)], ids=["encoder", "lstm"])
def test_a_batch_in_dimension_1_is_refused(build: Any) -> None:
    with pytest.raises(UsageError, match=r"(?s)batch is dimension 1 .*\(args\[0\]\).*batch_dim=1"):
        check(build(), torch.randn(B, 6, 8))


def test_models_with_the_batch_first_and_models_that_mix_samples_pass() -> None:
    x = torch.randn(B, 6, 8)
    check(encoder(True), x)
    check(nn.LSTM(8, 8, batch_first=True), x)
    check(nn.Sequential(nn.Conv1d(6, 6, 3), nn.BatchNorm1d(6), nn.Dropout(0.5)), x)
    check(Contrast(), x, torch.randn(B, B))
    check(nn.Linear(8, 8), torch.randn(8, 8))


def test_compile_refuses_it_before_anything_runs() -> None:
    x = torch.randn(B, 6, 8)
    with pytest.raises(UsageError, match="batch is dimension 1"):
        zbcompile.compile(
            encoder(False),
            1,
            example_args=(x,),
            example_target=x,
            loss_fn=nn.functional.mse_loss,
            num_microbatches=2,
        )
