"""Equal stages are found, split once, and run to the same bits as stages that were split one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from tests.support.frontend_helpers import run_autograd, run_stages, state_of
from zbcompile.compiler.stages import build_stages
from zbcompile.passes.capture.capture import capture
from zbcompile.passes.partition.partition import partition
from zbcompile.passes.split.split_backward import split_backward
from zbcompile.passes.split.structural_hash import structural_hash


class Block(nn.Module):
    def __init__(self, width: int = 16, eps: float = 1e-5, scale: float = 1.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=eps)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.scale = scale
        self.register_buffer("shift", torch.randn(width))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(1)
        return x + self.scale * self.down(torch.nn.functional.gelu(self.up(self.norm(x) + self.shift)))


def blocks(count: int = 4, **changes: object) -> nn.Sequential:
    return nn.Sequential(*(Block(**changes) for _ in range(count)))


def square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).pow(2).mean()


def hashes(model: nn.Module, num_stages: int = 4, width: int = 16, batch: int = 3) -> list[str]:
    """Structural hashes of all stages, cut before every top-level module, every output live."""
    captured = capture(model, (torch.randn(batch, width),))
    names = [str(i) for i in range(1, num_stages)]
    sources = partition(captured, num_stages, split_points=names)
    return [
        structural_hash(s, captured, [i > 0] * len(s.inputs), range(len(s.outputs)))
        for i, s in enumerate(sources)
    ]


def test_names_and_values_do_not_count() -> None:
    first, second, third, fourth = hashes(blocks())
    assert second == third == fourth
    assert first != second  # its input is the batch, which needs no gradient
    assert hashes(blocks())[1] == second


@pytest.mark.parametrize(
    "changed",
    [
        lambda m: m[2].__init__(eps=1e-6),
        lambda m: m[2].__init__(scale=0.5),
        lambda m: m[2].up.weight.requires_grad_(False),
        lambda m: m[2].double(),
        lambda m: setattr(m[2].up, "bias", None),
        lambda m: setattr(m[2].up, "weight", nn.Parameter(torch.randn(16, 32).t())),
        lambda m: setattr(m[2], "shift", torch.randn(16, requires_grad=True)),
    ],
    ids=["eps", "scale", "frozen weight", "dtype", "no bias", "strides", "buffer with a gradient"],
)
def test_what_changes_the_graphs_changes_the_hash(changed) -> None:
    model = blocks()
    before = hashes(model)
    changed(model)
    if model[2].up.weight.dtype == torch.float64:
        model[2].forward = lambda x, own=model[2].forward: own(x.double()).float()
    after = hashes(model)
    assert after[2] != before[2]
    assert after[1] == before[1]


def test_needs_and_live_outputs_count() -> None:
    model = blocks()
    captured = capture(model, (torch.randn(3, 16),))
    source = partition(captured, 4, split_points=["1", "2", "3"])[1]
    made = {
        structural_hash(source, captured, [needs], live) for needs in (True, False) for live in ((0,), ())
    }
    assert len(made) == 4


class Constant(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.lin, self.factor = nn.Linear(8, 8), torch.full((8,), factor)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) * self.factor


def test_constants_stay_with_their_stage() -> None:
    model = nn.Sequential(*(Constant(float(i + 1)) for i in range(4)))
    batch = ((torch.randn(3, 8),), {}, torch.randn(3, 8))
    built = build_stages(model, 4, batch[0], target=batch[2], loss_fn=square, split_points=["1", "2", "3"])
    assert built.stages[1].graphs is built.stages[2].graphs
    _check(model, built, batch)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad * ctx.factor * 0.5, None


class WithFunction(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.lin, self.factor = nn.Linear(8, 8), factor

    def forward(self, x: Tensor) -> Tensor:
        return Doubled.apply(self.lin(x), self.factor)


def test_custom_functions_are_compared_by_class_and_arguments() -> None:
    model = nn.Sequential(*(WithFunction(f) for f in (2.0, 2.0, 2.0, 3.0)))
    found = hashes(model, width=8)
    assert found[1] == found[2] != found[3]


def _check(model: nn.Module, built, batch) -> None:
    results, grads = run_stages(built, state_of(model), [batch])
    wanted, reference = run_autograd(model, [batch], square)
    assert torch.equal(results[0]["loss"], wanted[0]["loss"])
    for name, parameter in reference.named_parameters():
        assert torch.equal(grads[name], parameter.grad), name


def test_one_split_for_all_equals_separate_splits_to_the_bit() -> None:
    model = blocks()
    batch = ((torch.randn(3, 16),), {}, torch.randn(3, 16))
    captured = capture(model, batch[0], target=batch[2], loss_fn=square)
    sources = partition(captured, 4, split_points=["1", "2", "3"])
    shared = split_backward(captured, sources)
    assert shared[1].graphs is shared[2].graphs
    assert shared[1].graphs is not shared[3].graphs  # the last one holds the loss
    one_by_one = split_backward(captured, sources, share=False)
    assert one_by_one[1].graphs is not one_by_one[2].graphs
    built = build_stages(model, 4, batch[0], target=batch[2], loss_fn=square, split_points=["1", "2", "3"])
    separate = replace(built, stages=one_by_one)
    for stage, other in zip(built.stages, one_by_one, strict=True):
        for mine, theirs in zip(
            (*stage.inputs, *stage.outputs), (*other.inputs, *other.outputs), strict=True
        ):
            assert mine == theirs
        assert (stage.parameters, stage.buffers, stage.mutated) == (
            other.parameters,
            other.buffers,
            other.mutated,
        )
        assert stage.call_layout == other.call_layout
        assert stage.signature_hash() == other.signature_hash()
    state, twin = state_of(model), {k: v.clone() for k, v in state_of(model).items()}
    left, left_grads = run_stages(built, state, [batch, batch])
    right, right_grads = run_stages(separate, twin, [batch, batch])
    assert torch.equal(left[1]["loss"], right[1]["loss"])
    assert left_grads.keys() == right_grads.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(left_grads[k], right_grads[k]) for k in left_grads)
    assert all(torch.equal(state[f"{i}.seen"], torch.tensor(2.0)) for i in range(4))
    _check(model, built, batch)
