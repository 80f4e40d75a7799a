"""Backends: inductor's F, B, W and BW are right, share compiled graphs and draw eager's masks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from zbcompile.compiler.stages import build_stages
from zbcompile.errors import UsageError
from zbcompile.passes import torch_private
from zbcompile.passes.split.recompute import recompute_seconds
from zbcompile.passes.split.sequence import run_backward, run_forward
from zbcompile.passes.split.staged_model import StagedModel
from zbcompile.passes.verify.rounding_reasons import INDUCTOR, INDUCTOR_TOLERANCE
from zbcompile.passes.verify.verify import verify
from zbcompile.schedule.devices import DEVICES

pytestmark = pytest.mark.timeout(600)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.norm(x)))))


class Model(nn.Module):
    """Four equal blocks (two equal middle stages) and a buffer that changes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


ARGS = torch.linspace(-1, 1, 48).reshape(6, 8).sin()
CALL = {"target": torch.linspace(1, -1, 48).reshape(6, 8).cos(), "loss_fn": nn.functional.mse_loss}


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return Model().train()


@pytest.fixture(scope="module")
def compiled(model: nn.Module) -> StagedModel:
    points = ["blocks.1", "blocks.2", "blocks.3"]
    return build_stages(model, 4, (ARGS,), **CALL, split_points=points, backend="inductor")


def test_inductor_has_right_gradients_and_eager_masks(model: nn.Module, compiled: StagedModel) -> None:
    report = verify(model, compiled, (ARGS,), **CALL)
    assert report.tolerance == INDUCTOR_TOLERANCE
    assert report.worst.error <= INDUCTOR_TOLERANCE
    assert {value.reason for value in report.values if value.error} <= {INDUCTOR}
    assert {value.name for value in report.values if value.kind == "gradient"} == {
        name for name, _ in model.named_parameters()
    }


def test_equal_stages_are_compiled_once(compiled: StagedModel) -> None:
    assert compiled.stages[1].calls is compiled.stages[2].calls
    assert compiled.stages[0].calls is not compiled.stages[1].calls


def test_held_bytes_are_those_predicted(model: nn.Module, compiled: StagedModel) -> None:
    state = dict(model.named_parameters()) | {n: b.clone() for n, b in model.named_buffers()}
    own = {value.untyped_storage().data_ptr() for value in state.values()}
    _, saves = run_forward(compiled.stages, state, [ARGS, CALL["target"]])
    for stage, saved in zip(compiled.stages[1:3], saves[1:3], strict=True):
        storages = {v.untyped_storage().data_ptr(): v.untyped_storage().nbytes() for v in saved}
        assert sum(size for pointer, size in storages.items() if pointer not in own) == stage.saved_bytes


def test_fused_backward_equals_split(model: nn.Module, compiled: StagedModel) -> None:
    """BW of the last stage against B then W from the same saved values."""
    state = dict(model.named_parameters()) | {n: b.clone() for n, b in model.named_buffers()}
    torch.manual_seed(2)
    _, saves = run_forward(compiled.stages, state, [ARGS, CALL["target"]])
    copies = [list(saved) for saved in saves]
    split = run_backward(compiled.stages, saves)
    last = compiled.stages[-1]
    grads = [torch.ones(()) if port.is_loss else None for port in last.outputs]
    with torch.no_grad():
        _, fused = last.run_full_backward(copies[-1], grads)
    assert fused
    for name, grad in fused.items():
        torch.testing.assert_close(grad, split[name], rtol=1e-5, atol=1e-7)


def test_recompute_is_cheaper_where_calls_are_fused(model: nn.Module) -> None:
    front = build_stages(model, 1, (ARGS,), **CALL)
    nodes = front.stages[0].graphs.full_backward.graph.nodes
    add = next(n for n in nodes if str(n.target).startswith("aten.add.Tensor"))
    product = next(n for n in nodes if str(n.target).startswith("aten.mm"))
    cpu = DEVICES["CPU"]
    assert recompute_seconds(add, "inductor", cpu) < recompute_seconds(add, "eager", cpu)
    assert recompute_seconds(product, "inductor", cpu) == recompute_seconds(product, "eager", cpu)


def test_unknown_backend_and_missing_compiler_say_what_to_do(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="eager, inductor"):
        build_stages(model, 2, (ARGS,), **CALL, backend="tensorrt")
    monkeypatch.setattr(torch_private, "missing_compiler", lambda: "no compiler")
    with pytest.raises(UsageError, match="install g"):
        build_stages(model, 2, (ARGS,), **CALL, backend="inductor")
