"""Bytes predicted for F, B and W against bytes that the C allocator counts, within 2 %."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from benchmarks.allocator import bytes_in_use
from benchmarks.stage_cases import CASES
from zbcompile.compiler.stages import build_stages
from zbcompile.passes.split.stage_graphs import StageGraphs

SHARE = 0.02


def transformer(name: str) -> Callable[[str], tuple[StageGraphs, dict[str, Tensor]]]:
    def build(recompute: str) -> tuple[StageGraphs, dict[str, Tensor]]:
        pytest.importorskip("transformers")
        torch.manual_seed(0)
        case = CASES[name](64)
        model = case.build(64)
        front = build_stages(model, 3, *case.example(), split_points=case.split_points, recompute=recompute)
        return front.stages[1], dict(front.captured.state)

    return build


class Conv(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.conv(x)))


def cnn(recompute: str) -> tuple[StageGraphs, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), Conv(16), Conv(16), Conv(16), nn.Flatten())
    model.append(nn.Linear(16 * 32 * 32, 2)).train()
    front = build_stages(
        model, 3, (torch.randn(4, 3, 32, 32),), target=torch.randn(4, 2), loss_fn=nn.functional.mse_loss,
        split_points=["1", "3"], recompute=recompute,
    )  # fmt: skip
    return front.stages[1], dict(front.captured.state)


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


@pytest.mark.parametrize("recompute", ["none", "min_memory"])
@pytest.mark.parametrize(
    "build", [transformer("GPT-2"), transformer("Llama"), cnn], ids=["gpt2", "llama", "cnn"]
)
def test_predicted_bytes_are_in_use(
    build: Callable[[str], tuple[StageGraphs, dict[str, Tensor]]], recompute: str
) -> None:
    stage, state = build(recompute)
    after_forward, after_backward = held(stage, state)
    assert after_forward == pytest.approx(stage.saved_bytes, rel=SHARE)
    assert after_backward == pytest.approx(stage.saved_for_weight_bytes, rel=SHARE)
    assert stage.saved_bytes > 0
