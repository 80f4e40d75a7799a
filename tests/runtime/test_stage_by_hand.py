"""F, B, W and BW of single stages called by hand: the bits of autograd, and what is refused."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import zbcompile
from tests.support.examples import load_example
from zbcompile.errors import ShapeError, UsageError


class Skip(nn.Module):
    """Three layers; the first one's output is used by both others, a frozen layer and a buffer are in it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.bias.requires_grad_(False)
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        first = torch.tanh(self.first(x))
        return self.third(torch.tanh(self.norm(self.second(first)))) * first


@pytest.fixture(scope="module")
def pipeline() -> zbcompile.Pipeline:
    torch.manual_seed(0)
    x = torch.randn(4, 6)
    return zbcompile.compile(
        Skip(),
        3,
        example_args=(x,),
        example_target=x,
        loss_fn=nn.functional.mse_loss,
        num_microbatches=1,
        split_points=["second", "third"],
        time_limit=1.0,
    )


@pytest.mark.parametrize("fused", [False, True])
def test_phases_called_by_hand_have_the_bits_of_autograd(pipeline: zbcompile.Pipeline, fused: bool) -> None:
    x, y = torch.randn(4, 6), torch.randn(4, 6)
    other = copy.deepcopy(pipeline._options.model)
    nn.functional.mse_loss(other(x), y).backward()
    values: dict[str, Tensor] = {}
    kept = []
    for stage in pipeline:
        given = [(x, y)[p.source[1]] if p.source[0] == "batch" else values[p.name] for p in stage.inputs]
        outputs, saved = stage.run_forward(*given)
        values.update(zip((p.name for p in stage.outputs), outputs, strict=True))
        kept.append(saved)
    grads: dict[str, Tensor] = {}
    found: dict[str, Tensor] = {}
    for stage in reversed(pipeline):
        saved = kept[stage.index]
        wanted = [grads.get(p.name) for p in stage.outputs]
        if fused:
            inputs, weights = stage.run_full_backward(saved, *wanted)
        else:
            inputs, after = stage.run_backward_input(saved, *wanted)
            weights = stage.run_backward_weight(after)
        found |= weights
        for port, grad in zip(stage.inputs, inputs, strict=True):
            assert (grad is not None) == port.has_gradient
            if grad is not None:
                grads[port.name] = grads[port.name] + grad if port.name in grads else grad
    expected = {n: p.grad for n, p in other.named_parameters() if p.grad is not None}
    assert sorted(found) == sorted(expected)
    for name, grad in expected.items():
        assert torch.equal(found[name], grad), name
    assert all(p.grad is None for p in pipeline.parameters())
    for name, buffer in other.named_buffers():
        assert torch.equal(dict(pipeline._options.model.named_buffers())[name], buffer), name


def test_saved_values_are_used_once_and_by_their_own_phase(pipeline: zbcompile.Pipeline) -> None:
    first, second = pipeline[0], pipeline[1]
    (out, *_), saved = first.run_forward(torch.randn(4, 6))
    assert saved.num_bytes > 0
    with pytest.raises(UsageError, match="another stage"):
        second.run_backward_input(saved, *(None for _ in second.outputs))
    with pytest.raises(UsageError, match="another phase"):
        first.run_backward_weight(saved)
    with pytest.raises(UsageError, match="another number of gradients"):
        first.run_backward_input(saved)
    with pytest.raises(ShapeError, match="gradient of output 0"):
        first.run_backward_input(saved, torch.zeros(3, 6))
    first.run_full_backward(saved, torch.ones_like(out))
    assert saved.num_bytes == 0
    assert "used" in repr(saved)
    with pytest.raises(UsageError, match="used already"):
        first.run_full_backward(saved, torch.ones_like(out))


def test_inputs_that_do_not_fit_are_refused(pipeline: zbcompile.Pipeline) -> None:
    with pytest.raises(UsageError, match="another number of inputs"):
        pipeline[0]()
    with pytest.raises(ShapeError, match=r"input 0 .* differs"):
        pipeline[0](torch.zeros(5, 6))
    with pytest.raises(ShapeError, match=r"float64"):
        pipeline[0](torch.zeros(4, 6, dtype=torch.float64))
    with pytest.raises(UsageError, match="no tensor"):
        pipeline[0](3.0)
    transposed = torch.randn(6, 4).t()
    assert torch.equal(pipeline[0](transposed)[0], pipeline[0](transposed.contiguous())[0])


def test_the_example_finds_every_gradient_equal(capsys: pytest.CaptureFixture[str]) -> None:
    assert load_example("run_stage").main() == 0
    shown = capsys.readouterr().out
    assert shown.count("equals autograd") == 6


@pytest.mark.timeout(60)
def test_a_parameter_that_was_replaced_in_a_stage_alone_is_refused_by_name() -> None:
    """As ``fully_shard(stage)`` does: optimizers would get parameters that no step trains."""
    x = torch.randn(4, 6)
    made = zbcompile.compile(
        Skip(), 2, example_args=(x,), example_target=x, loss_fn=nn.functional.mse_loss,
        num_microbatches=1, split_points=["second"], time_limit=0.3,
    )  # fmt: skip
    made.step(x, target=x)
    stage = made[0]
    before = stage.first.weight
    stage.first.weight = nn.Parameter(before.detach().clone())
    for call in (lambda: made.step(x, target=x), lambda: list(made.parameters())):
        with pytest.raises(UsageError, match=r"parameter of a stage was replaced.*first\.weight of stage 0"):
            call()
    stage.first.weight = before
    made.step(x, target=x)
