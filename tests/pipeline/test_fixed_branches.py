"""Branches on data that take one side in all steps: `compile(..., fixed_branches=True)`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zbcompile
from tests.support.pipeline_oracle import SIZE, Batch, Calls, assert_right, batch_of, compiled, mean_square
from zbcompile.errors import CaptureError, PipelineError, UsageError
from zbcompile.schedule.devices import device_named


def clamped(m: Any, x: Tensor) -> Tensor:
    x = m.first(x).tanh()
    if (x > 2).any():
        x = x.clamp(-1, 1) * 7
    if bool(x.isfinite().all()) and not (x > 3).any().item():
        x = m.second(x)
    if torch.equal(x, x + 1):
        x = m.third(x) * 5
    return m.norm(x)


def by_size(m: Any, x: Tensor) -> Tensor:
    x = m.first(x) if x.abs().max() < 100 else m.second(x)
    return m.norm(x.tanh())


def test_the_side_of_the_example_is_taken() -> None:
    assert_right(Calls(clamped), batch_of(SIZE), loss=mean_square, fixed_branches=True)


def test_without_the_option_the_refusal_names_it() -> None:
    with pytest.raises(CaptureError, match=r"__bool__.*\n.*fixed_branches=True"):
        compiled(Calls(by_size), Batch((batch_of(SIZE),)), 2, 3, loss_fn=mean_square)
    body = Calls(lambda m, x: m.second(m.first(x)) if (x > 3).any().item() else m.first(x))
    with pytest.raises(CaptureError, match=r"item.*\n.*fixed_branches=True"):
        compiled(body, Batch((batch_of(SIZE),)), 2, 3, loss_fn=mean_square)


def test_another_side_ends_the_step_and_nothing_else() -> None:
    model, x = Calls(by_size), batch_of(SIZE)
    pipeline = compiled(model, Batch((x,)), 2, 3, loss_fn=mean_square, fixed_branches=True)
    far = x.clone()
    far[4] = 1000.0
    with pytest.raises(PipelineError, match="DataError: .*another side of a branch") as caught:
        pipeline.step(far)
    assert "x.abs().max() < 100 to be True" in str(caught.value)
    assert "test_fixed_branches.py:" in str(caught.value)
    assert "microbatch 2" in str(caught.value)
    assert all(p.grad is None for p in model.parameters())
    pipeline.step(x)
    assert model.first.weight.grad is not None
    assert model.second.weight.grad is None
    other = compiled(model, Batch((far * 1000,)), 2, 3, loss_fn=mean_square, fixed_branches=True)
    model.zero_grad()
    other.step(far * 1000)
    assert model.second.weight.grad is not None


class Counts(nn.Module):
    """Counts its calls, and asks a buffer whether it ran before."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Dropout(0.5), nn.Linear(SIZE, SIZE))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.seen > 0:
            x = x / 2
        self.seen.add_(x.detach().abs().max())
        return self.layers(x).square().sum()


def test_a_buffer_decides_and_the_run_on_the_example_leaves_no_trace() -> None:
    torch.manual_seed(0)
    model, x = Counts(), batch_of(SIZE)
    state, seen = torch.get_rng_state(), model.seen
    with pytest.raises(PipelineError, match="DataError: .*another side"):
        zbcompile.compile(model, 2, example_args=(x,), num_microbatches=3, fixed_branches=True).step(x)
    assert model.seen is seen
    assert not seen
    assert torch.equal(torch.get_rng_state(), state)
    model(x)
    pipeline = zbcompile.compile(model, 2, example_args=(x,), num_microbatches=3, fixed_branches=True)
    pipeline.step(x)
    assert torch.allclose(seen, x.abs().max() + sum(part.abs().max() / 2 for part in x.chunk(3)))


def test_what_cannot_be_fixed_is_refused() -> None:
    def dropped(m: Any, x: Tensor) -> Tensor:
        return m.second(m.first(x)) if torch.rand([]) < 0.5 else m.first(x)

    x = batch_of(SIZE)
    options = {"loss_fn": mean_square, "fixed_branches": True}
    with pytest.raises(CaptureError, match="random draw"):
        compiled(Calls(dropped), Batch((x,)), 2, 3, **options)
    with pytest.raises(UsageError, match="no values"):
        compiled(Calls(by_size).to("meta"), Batch((x,)), 2, 3, profile=device_named("H100"), **options)
    with pytest.raises(UsageError, match="fixed_branches must be"):
        compiled(Calls(by_size), Batch((x,)), 2, 3, loss_fn=mean_square, fixed_branches=1)
    with pytest.raises(UsageError, match="fails on the example"):
        compiled(Calls(lambda m, x: m.first(x[:, :2])), Batch((x,)), 2, 3, **options)
