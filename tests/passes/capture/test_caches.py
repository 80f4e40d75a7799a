"""Tables in a function's cache: a compiled model still runs by itself afterwards."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from tests.support.pipeline_oracle import SIZE, Calls, assert_right, batch_of, mean_square


def _waves(scale: float) -> Tensor:
    return torch.polar(torch.ones(SIZE // 2), torch.arange(SIZE // 2) * scale)


def _turned(table: object) -> object:
    def body(model: Calls, x: Tensor) -> Tensor:
        waves, shift = table(0.5)  # type: ignore[operator]
        x = torch.view_as_complex(model.first(x).unflatten(-1, (-1, 2)).contiguous())
        return model.second(torch.view_as_real(x * waves).flatten(-2)) + shift

    return body


@pytest.mark.parametrize("size", [None, 4])
def test_no_tensor_of_the_trace_stays_in_a_cache(size: int | None) -> None:
    table = functools.lru_cache(maxsize=size)(lambda scale: (_waves(scale), torch.full((SIZE,), scale)))
    other = functools.lru_cache(maxsize=size)(_waves)
    kept = other(1.0)
    model = Calls(_turned(table))  # type: ignore[arg-type]
    assert_right(model, batch_of(SIZE), stages=2, loss=mean_square, verify=True)
    waves, shift = table(0.5)
    assert type(waves) is Tensor
    assert torch.equal(torch.view_as_real(waves), torch.view_as_real(_waves(0.5)))
    assert torch.equal(shift, torch.full((SIZE,), 0.5))
    assert other(1.0) is kept, "a cache without a tensor of the trace is left alone"
