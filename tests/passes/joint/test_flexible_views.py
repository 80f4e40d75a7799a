"""Layouts that depend on data: joint graphs are made without asking how large they are."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.support.pipeline_oracle import SIZE, Calls, assert_right, mean_square


def _kept(model: Calls, x: Tensor, keep: Tensor) -> Tensor:
    """Rows of one shape, cut out of tensors as long as there are tokens to keep."""
    whole = []
    for layer, choice in ((model.first, keep), (model.second, ~keep)):
        rows = layer(x.flatten(0, 1))[torch.nonzero(choice.flatten()).flatten()]
        whole.append(torch.cat([layer(x), rows.expand(len(x), -1, -1)], 1)[:, : x.shape[1]])
    return model.third((whole[0] + whole[1]).reshape(len(x), -1, SIZE).tanh())


def test_slices_of_tensors_whose_length_depends_on_data() -> None:
    torch.manual_seed(3)
    keep = torch.rand(6, 4) < 0.5
    assert_right(Calls(_kept), torch.randn(6, 4, SIZE), keep, stages=2, loss=mean_square)
