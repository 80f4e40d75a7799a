"""Small pieces: how many, how equal, and that each has something to train."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from zbcompile.compiler.stages import build_pieces, captured_with_loss
from zbcompile.passes.partition.cuts import piece_cuts
from zbcompile.passes.partition.partition import legal_cuts
from zbcompile.passes.profile.counted import counted_profile


def model() -> nn.Module:
    layers = [part for _ in range(6) for part in (nn.Linear(16, 16), nn.ReLU(), nn.ReLU())]
    return nn.Sequential(*layers)


@pytest.mark.parametrize("most", [1, 2, 4, 100])
def test_pieces_are_at_most_so_many_and_each_has_a_parameter_to_train(most: int) -> None:
    order = legal_cuts(captured_with_loss(model(), (torch.randn(4, 16),)))
    cuts = piece_cuts(order, most)
    assert len(cuts) + 1 == min(most, 6), [cut.position for cut in cuts]
    trained = [0, *(cut.trained_before for cut in cuts), order.trained]
    assert all(a < b for a, b in zip(trained, trained[1:], strict=False))
    if most == 4:
        work = [cut.work_before.total_ns / order.total.total_ns for cut in cuts]
        assert work == pytest.approx([0.25, 0.5, 0.75], abs=0.13)


def test_as_many_pieces_as_stages_where_only_some_have_parameters() -> None:
    order = legal_cuts(captured_with_loss(model(), (torch.randn(4, 16),)))
    assert len(piece_cuts(order, 20, 9)) + 1 >= 9


def test_pieces_are_built_and_counted_as_stages_are() -> None:
    x = torch.randn(4, 16)
    staged = build_pieces(model(), 4, (x,), loss_fn=lambda out, target: out.square().mean(), target=x)
    assert len(staged.stages) == 4
    profile = counted_profile(staged.stages, "CPU")
    assert [(edge.source, edge.target) for edge in profile.edges] == [(0, 1), (1, 2), (2, 3)]
    assert all(stage.static_bytes > 0 for stage in profile.stages)
