"""The self-check: passes on right stages, names the parameter on wrong ones, leaves the model alone."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zbcompile.compiler.stages import build_stages
from zbcompile.errors import SplitError, UsageError
from zbcompile.passes.split.staged_model import StagedModel
from zbcompile.passes.verify.rounding_reasons import GAPS, SHARED, SMOOTHED, reasons_of
from zbcompile.passes.verify.verify import verify


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(torch.tanh(self.up(self.norm(x)))))


class Model(nn.Module):
    """Blocks around a batch norm: dropout draws, a buffer that changes, a parameter used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Block(6)
        self.norm = nn.BatchNorm1d(6)
        self.second = Block(6)
        self.head = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.norm(self.first(self.head(x)))))


def built(model: nn.Module, stages: int = 3) -> tuple[StagedModel, dict[str, Any]]:
    torch.manual_seed(5)
    call = {"args": (torch.randn(8, 6),), "target": torch.randn(8, 6), "loss_fn": nn.functional.mse_loss}
    front = build_stages(model, stages, call["args"], target=call["target"], loss_fn=call["loss_fn"])
    return front, call


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(3)
    return Model().train()


def test_right_stages_agree_to_the_bit_but_for_named_sums(model: nn.Module) -> None:
    front, call = built(model)
    report = verify(model, front, **call)
    names = {value.name for value in report.values if value.kind == "gradient"}
    assert names == {name for name, _ in model.named_parameters()}
    assert {value.name for value in report.values if value.kind == "buffer"} >= {"norm.running_mean"}
    inexact = {value.name for value in report.values if value.error}
    assert inexact <= {"head.weight", "head.bias"}
    assert all(value.reason for value in report.values if value.error)
    assert "autograd" in str(report)


def test_it_leaves_buffers_gradients_and_random_state_alone(model: nn.Module) -> None:
    front, call = built(model)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 7.0)
    before = copy.deepcopy(dict(model.state_dict()))
    random = torch.get_rng_state()
    verify(model, front, **call)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(bool((p.grad == 7.0).all()) for p in model.parameters() if p.grad is not None)
    assert all(p.grad is not None for p in model.parameters())


def corrupted(front: StagedModel, graph: str, target: str, position: int, value: Any) -> StagedModel:
    """``front`` with one constant of the first call of ``target`` in a graph changed."""
    stage, node = next(
        (held.index, node)
        for held in front.stages
        for node in getattr(held.graphs, graph).graph.nodes
        if str(node.target) == target
    )
    held = front.stages[stage]
    module = getattr(held.graphs, graph)
    node.args = (*node.args[:position], value, *node.args[position + 1 :])
    module.recompile()
    calls = tuple(getattr(held.graphs, f.name).forward for f in dataclasses.fields(held.graphs))
    stages = list(front.stages)
    stages[stage] = dataclasses.replace(held, calls=calls)
    return dataclasses.replace(front, stages=tuple(stages))


def test_a_fault_in_the_fused_backward_alone_is_found(model: nn.Module) -> None:
    """Merged B and W run as BW: it is compared as well, and the error says which of the two is wrong."""
    front, call = built(model)
    stage = next(s for s in front.stages if "head.weight" in s.trainable)
    right = stage.calls[3]

    def doubled(arguments: list[Any]) -> Any:
        return tuple(None if value is None else value * 2 for value in right(arguments))

    stages = list(front.stages)
    stages[stage.index] = dataclasses.replace(stage, calls=(*stage.calls[:3], doubled))
    with pytest.raises(SplitError, match="computed by BW, differs from plain autograd"):
        verify(model, dataclasses.replace(front, stages=tuple(stages)), **call)


def test_a_changed_constant_of_forward_is_found_in_the_output(model: nn.Module) -> None:
    front, call = built(model)
    norm = corrupted(front, "forward", "aten.native_layer_norm.default", 4, 1e-2)
    with pytest.raises(SplitError, match="output of") as caught:
        verify(model, norm, **call)
    assert "stage 2 or earlier" in str(caught.value)


def test_a_changed_call_of_backward_names_parameter_module_and_stage(model: nn.Module) -> None:
    front, call = built(model)
    stage = next(s for s in front.stages if "second.up.weight" in s.trainable)
    module = stage.graphs.backward_weight
    node = next(n for n in module.graph.nodes if str(n.target) == "aten.mm.default")
    with module.graph.inserting_after(node):
        scaled = module.graph.call_function(torch.ops.aten.mul.Tensor, (node, 1.001))
    node.replace_all_uses_with(scaled, delete_user_cb=lambda user: user is not scaled)
    module.recompile()
    calls = (*stage.calls[:2], module.forward, stage.calls[3])
    stages = tuple(dataclasses.replace(s, calls=calls) if s is stage else s for s in front.stages)
    with pytest.raises(SplitError) as caught:
        verify(model, dataclasses.replace(front, stages=stages), **call)
    told = str(caught.value)
    assert f"stage {stage.index}" in told
    assert "weight of module" in told
    assert "1.0e-03" in told


def test_a_difference_below_the_tolerance_needs_a_reason(model: nn.Module) -> None:
    front, call = built(model)
    stage = next(s for s in front.stages if "second.up.weight" in s.trainable)
    given = stage.calls[2]

    def off_by_a_bit(arguments: list[Any]) -> list[Tensor]:
        grads = list(given(arguments))
        grads[stage.call_layout.late.index("second.up.weight")].view(torch.int32).view(-1)[0] ^= 1
        return grads

    stages = list(front.stages)
    stages[stage.index] = dataclasses.replace(stage, calls=(*stage.calls[:2], off_by_a_bit, stage.calls[3]))
    wrong = dataclasses.replace(front, stages=tuple(stages))
    with pytest.raises(SplitError, match="second.up.weight differs") as caught:
        verify(model, wrong, **call)
    assert "needed: equal to the bit" in str(caught.value)
    assert "weight of module second.up" in str(caught.value)
    assert "largest difference" in str(caught.value)
    report = verify(model, wrong, **call, tolerance=1e-6)
    assert 0 < report.worst.error < 1e-6


class Shared(nn.Module):
    """A value of the first stage that the second uses twice and the third once."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        a, b, c, d, e, f = self.layers
        y = a(x)
        z = c(torch.tanh(b(y)) + y.sin()) * y.cos()
        return f(torch.tanh(e(torch.tanh(d(z)))) + y.exp())


def test_a_value_shared_by_stages_is_a_reason_for_what_comes_before_it_alone() -> None:
    torch.manual_seed(0)
    model = Shared()
    call = {"args": (torch.randn(8, 16),), "target": torch.randn(8, 16), "loss_fn": nn.functional.mse_loss}
    points = ["layers.1", "layers.4"]
    front = build_stages(
        model, 3, call["args"], target=call["target"], loss_fn=call["loss_fn"], split_points=points
    )
    reason = reasons_of(front)
    assert [reason("gradient", f"layers.{k}.weight") for k in (0, 1, 5)] == [SHARED, "", ""]
    assert reason("output", ".loss") == ""
    assert {v.name for v in verify(model, front, **call).values if v.error} <= {
        "layers.0.weight",
        "layers.0.bias",
    }


class Doubled(torch.autograd.Function):
    """A backward that is not the derivative of its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


class WithFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.bend = True

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return self.second(Doubled.apply(hidden) if self.bend else hidden.sin())


def test_a_dropped_custom_function_is_found() -> None:
    """Stages of the same model with the Function's forward alone: what a capture that drops it gives."""
    torch.manual_seed(0)
    model = WithFunction()
    model.bend = False
    front, call = built(model, 2)
    assert verify(model, front, **call).exact
    model.bend = True
    with pytest.raises(SplitError, match=r"gradient of first\.(weight|bias)") as caught:
        verify(model, front, **call)
    assert "module first" in str(caught.value)


def test_a_custom_function_that_is_kept_passes() -> None:
    torch.manual_seed(0)
    model = WithFunction()
    front, call = built(model, 2)
    assert verify(model, front, **call).exact


def test_weights_on_meta_and_hooks_are_refused(model: nn.Module) -> None:
    front, call = built(model)
    with pytest.raises(UsageError, match="meta device"):
        verify(copy.deepcopy(model).to("meta"), front, **call)
    model.head.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(UsageError, match="gradient hook"):
        verify(model, front, **call)


def test_gpt2_with_dropout_and_tied_table() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=2, n_embd=32, n_head=2, vocab_size=61, n_positions=16, bos_token_id=1, eos_token_id=2
    )
    torch.manual_seed(1)
    model = transformers.GPT2LMHeadModel(config).train()
    tokens = torch.randint(0, 61, (2, 12))
    kwargs = {"input_ids": tokens, "labels": tokens}
    front = build_stages(model, 2, (), kwargs)
    report = verify(model, front, (), kwargs)
    assert {v.name for v in report.values if v.error} <= {"transformer.wte.weight", "lm_head.weight"}
    assert report.worst.error <= 1e-6


class Halves(nn.Module):
    """Every other row of a value goes its own way: slices with gaps in memory, and joined gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.even, self.odd = (nn.Linear(6, 6) for _ in range(3))
        self.scale, self.shift = nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x) * self.scale + self.shift
        return self.even(y[:, ::2]) + self.odd(y[:, 1::2])  # type: ignore[no-any-return]


def test_gaps_in_memory_at_a_cut_are_a_reason() -> None:
    """Every cut of two stages passes the check: to the bit, or where a slice crosses for that reason."""
    x = torch.randn(4, 6, 6)
    found: list[str] = []
    places = itertools.count()
    many = 1
    while (k := next(places)) < many:

        def at(cuts: Any, _: Any, k: int = k) -> Any:
            nonlocal many
            many = len(cuts)
            return [cuts[k]]

        model = Halves()
        split = build_stages(model, 2, (x,), {}, loss_fn=lambda y, _: y.square().mean(), split_points=at)
        found.append(reasons_of(split)("gradient", "first.weight"))
        verify(model, split, (x,), {}, None, lambda y, _: y.square().mean())
    assert GAPS in found
    assert "" in found


class Pooled(nn.Module):
    """Rows are pooled right after an activation: its gradient is one row for all rows."""

    def __init__(self, pool: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.pool = nn.Linear(20, 20), nn.Linear(20, 20), pool

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(nn.functional.silu(self.second(nn.functional.silu(self.first(x)))))


@pytest.mark.parametrize("name", ["mean", "sum"])
def test_a_broadcast_gradient_is_exact_inside_a_stage_and_a_reason_at_a_cut(name: str) -> None:
    x = torch.randn(3, 7, 20)

    def at(place: int) -> tuple[bool, str]:
        torch.manual_seed(0)
        model = Pooled(lambda y: getattr(y, name)(1))
        split = build_stages(
            model,
            2,
            (x,),
            {},
            loss_fn=lambda y, _: y.square().sum(),
            split_points=lambda cuts, _: [cuts[place]],
        )
        exact = verify(model, split, (x,), {}, None, lambda y, _: y.square().sum()).exact
        return exact, reasons_of(split)("gradient", "first.weight")

    before_second, before_pool = at(1), at(3)
    assert before_second == (True, "")
    assert before_pool[1] == (GAPS if name == "sum" else "")
    assert before_pool[0] or before_pool[1]


def test_weights_of_a_smoothed_cross_entropy_are_a_reason() -> None:
    for smoothing in (0.0, 0.1):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 6))
        x, labels = torch.randn(64, 8), torch.randint(0, 6, (64,))
        loss = nn.CrossEntropyLoss(weight=torch.rand(6), label_smoothing=smoothing, ignore_index=2)
        front = build_stages(model, 2, (x,), target=labels, loss_fn=loss)
        assert reasons_of(front)("output", ".loss") == (SMOOTHED if smoothing else "")
        assert verify(model, front, (x,), target=labels, loss_fn=loss).exact or smoothing
