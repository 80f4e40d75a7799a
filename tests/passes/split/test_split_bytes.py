"""Bytes predicted for F, B and W against bytes that the C allocator counts, within 2 %."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from benchmarks.allocator import bytes_in_use
from benchmarks.stage_cases import CASES
from zbcompile.compiler.stages import captured_with_loss
from zbcompile.passes.capture.captured import Captured
from zbcompile.passes.partition.partition import partition
from zbcompile.passes.split.split_backward import TracedStages
from zbcompile.passes.split.stage_graphs import StageGraphs

SHARE = 0.02


Built = tuple[TracedStages, dict[str, Tensor]]


def transformer(name: str) -> Built:
    pytest.importorskip("transformers")
    case = CASES[name](64)
    model = case.build(64)
    return traced(captured_with_loss(model, *case.example()), case.split_points)


def traced(captured: Captured, split_points: Sequence[str]) -> Built:
    return TracedStages(captured, partition(captured, 3, split_points=split_points)), dict(captured.state)


class Conv(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.conv(x)))


def cnn() -> Built:
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), Conv(16), Conv(16), Conv(16), nn.Flatten())
    model.append(nn.Linear(16 * 32 * 32, 2)).train()
    captured = captured_with_loss(
        model, (torch.randn(4, 3, 32, 32),), target=torch.randn(4, 2), loss_fn=nn.functional.mse_loss
    )
    return traced(captured, ["1", "3"])


def held(stage: StageGraphs, state: dict[str, Tensor]) -> tuple[int, int]:
    """Bytes in use after F and after B, above those before; outputs and input gradients are dropped."""
    found = (0, 0)
    for _ in range(2):
        gc.collect()
        before = bytes_in_use()
        with torch.no_grad():
            outputs, saved = stage.run_forward(
                state, [torch.rand(port.shape, dtype=port.dtype) for port in stage.inputs]
            )
            del outputs
            after_forward = bytes_in_use() - before
            grads = [torch.rand(port.shape) if port.has_gradient else None for port in stage.outputs]
            back, rest = stage.run_backward_input(saved, grads)
            del back, grads
            found = after_forward, bytes_in_use() - before
            stage.run_backward_weight(rest)
    return found


@pytest.mark.parametrize(
    "build",
    [partial(transformer, "GPT-2"), partial(transformer, "Llama"), cnn],
    ids=["gpt2", "llama", "cnn"],
)
def test_predicted_bytes_are_in_use(build: Callable[[], Built]) -> None:
    torch.manual_seed(0)
    stages, state = build()
    for recompute in ("none", "min_memory"):
        stage = stages.split([recompute] * 3)[1]
        after_forward, after_backward = held(stage, state)
        assert after_forward == pytest.approx(stage.saved_bytes, rel=SHARE), recompute
        assert after_backward == pytest.approx(stage.saved_for_weight_bytes, rel=SHARE), recompute
        assert stage.saved_bytes > 0
