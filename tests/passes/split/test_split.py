"""Split stages against plain autograd: one model per trait, to the bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.frontend_helpers import compare, run_autograd, run_stages, state_of
from tests.support.split_cases import TRAITS, SkipsAStage, Stack, TiedAcross, mse, total, vectors
from zbcompile.compiler.stages import build_stages
from zbcompile.errors import CaptureError, SplitError, UsageError
from zbcompile.passes.capture.capture import capture
from zbcompile.passes.split.forward_only import forward_stages

ORDER_OF_A_SUM = {"a parameter used several times"}
"""One parameter in several stages, several times in one: partial sums are added in another order."""


@pytest.mark.parametrize("name", TRAITS)
def test_trait_equals_autograd(name: str) -> None:
    trait = TRAITS[name]
    recompute = ("none", "min_memory", "full", 1e9)[list(TRAITS).index(name) % 4]
    torch.manual_seed(0)
    model = trait.build()
    batches = [trait.batch() for _ in range(3)]
    args, kwargs, target = batches[0]
    built = build_stages(
        model, trait.stages, args, kwargs, target=target, loss_fn=trait.loss, recompute=recompute
    )
    torch.manual_seed(1)
    expected, reference = run_autograd(model, copy.deepcopy(batches), trait.loss)
    for fused in (False, True):
        mine = copy.deepcopy(model)
        torch.manual_seed(1)
        results, grads = run_stages(built, state_of(mine), batches, fused=fused)
        verdict = compare(expected, reference, results, grads, mine)
        if name in ORDER_OF_A_SUM:
            assert verdict.text == "bitwise" or float(verdict.text) < 1e-6, verdict
        else:
            assert verdict.text == "bitwise", verdict


def test_edges_are_direct_and_gradients_only_where_asked() -> None:
    args, _, target = vectors()()
    built = build_stages(SkipsAStage(), 4, args, target=target, loss_fn=mse)
    first = next(port for port in built.stages[0].outputs if len(port.targets) == 2)
    assert first.has_gradient
    assert [p.source for p in built.stages[2].inputs if p.name == first.name] == [("stage", 0)]
    trait = TRAITS["integers and masks cross"]
    args, kwargs, target = trait.batch()
    stages = build_stages(trait.build(), 4, args, kwargs, target=target, loss_fn=mse).stages
    crossing = [port for stage in stages for port in stage.outputs if port.targets]
    assert {port.dtype for port in crossing} == {torch.float32, torch.int64, torch.bool}
    assert all(port.has_gradient == port.dtype.is_floating_point for port in crossing)


def test_frozen_stage_has_no_backward_and_no_saved_bytes() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(6)))
    model[:2].requires_grad_(False)
    model[2][0].weight.requires_grad_(False)
    args, _, target = vectors()()
    built = build_stages(model, 3, args, target=target, loss_fn=mse, split_points=["2", "4"])
    first, second, _ = built.stages
    assert first.trainable == ()
    assert (first.saved_bytes, first.saved_for_weight_bytes) == (0, 0)
    assert not any(port.has_gradient for port in (*first.outputs, *first.inputs, *second.inputs))
    assert "2.0.weight" not in second.trainable
    assert "2.0.weight" in second.parameters


def test_first_stage_has_an_empty_b_and_a_whole_w() -> None:
    args, _, target = vectors()()
    built = build_stages(Stack2(), 2, args, target=target, loss_fn=mse)
    first = built.stages[0]
    assert [n.op for n in first.graphs.backward_input.graph.nodes] == ["output"]
    calls = [n for n in first.graphs.backward_weight.graph.nodes if n.op == "call_function"]
    assert any("mm" in str(n.target) for n in calls)


class Stack2(Stack):
    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.c(self.b(self.a(x).tanh()).tanh()).tanh())


def test_w_of_an_inner_stage_is_only_matmuls_sums_and_views() -> None:
    args, _, target = vectors()()
    built = build_stages(Stack2(), 2, args, target=target, loss_fn=mse)
    calls = {
        str(n.target).split(".")[1]
        for n in built.stages[1].graphs.backward_weight.graph.nodes
        if n.op == "call_function"
    }
    assert calls <= {"mm", "sum", "t", "view"}


def test_tied_parameter_has_one_name_in_both_stages() -> None:
    trait = TRAITS["tied across stages"]
    args, kwargs, target = trait.batch()
    built = build_stages(TiedAcross(), 3, args, kwargs, target=target, loss_fn=mse)
    assert "table.weight" in built.stages[0].parameters
    assert "table.weight" in built.stages[2].parameters
    assert not any("head.weight" in stage.parameters for stage in built.stages)


def test_gradients_have_storage_of_their_own() -> None:
    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.randn(4, 8)), nn.Parameter(torch.randn(4, 8))

        def forward(self, x: Tensor) -> Tensor:
            return (x.relu() + self.a + self.b).tanh().sum() + (self.a + x).sum()

    model = Sums()
    built = build_stages(model, 1, (torch.randn(4, 8),))
    with torch.no_grad():
        outs, saved = built.stages[0].run_forward(dict(model.named_parameters()), [torch.randn(4, 8)])
        one: list[Any] = [torch.ones(()) for _ in outs]
        _, after = built.stages[0].run_backward_input(saved, one)
        grads = built.stages[0].run_backward_weight(after)
    storages = {grad.untyped_storage().data_ptr() for grad in grads.values()}
    assert len(storages) == 2
    assert all(grad.is_contiguous() for grad in grads.values())


def test_lists_are_taken_over_and_values_die_after_their_last_use() -> None:
    import weakref

    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    built = build_stages(model, 1, (torch.randn(4, 8),), target=torch.randn(4, 8), loss_fn=mse)
    stage, state = built.stages[0], dict(model.named_parameters())
    inputs = built.flat_inputs((torch.randn(4, 8),), target=torch.randn(4, 8))
    watched = weakref.ref(inputs[1])
    with torch.no_grad():
        outs, saved = stage.run_forward(state, inputs)
        assert inputs == []
        del outs[:]
        grads: list[Tensor | None] = [torch.ones(()) if p.is_loss else None for p in stage.outputs]
        _, after = stage.run_backward_input(saved, grads)
        assert saved == []
        assert grads == []
        stage.run_backward_weight(after)
        assert after == []
    assert watched() is None


def test_gradient_with_other_strides_or_none_is_accepted() -> None:
    trait = TRAITS["a transposed boundary"]
    torch.manual_seed(0)
    model, (args, kwargs, target) = trait.build(), trait.batch()
    built = build_stages(model, 4, args, kwargs, target=target, loss_fn=total)
    stage = built.stages[1]
    with torch.no_grad():
        _, saved = stage.run_forward(state_of(model), [torch.randn(p.shape) for p in stage.inputs])
        twin = list(saved)
        grad = torch.randn(stage.outputs[0].shape)
        other = grad.t().contiguous().t()
        first, a = stage.run_backward_input(saved, [grad])
        second, b = stage.run_backward_input(twin, [other])
        for left, right in zip(first, second, strict=True):
            assert left is not None
            assert torch.equal(left, right)
        assert stage.run_backward_weight(a).keys() == stage.run_backward_weight(b).keys()
        _, saved = stage.run_forward(state_of(model), [torch.randn(p.shape) for p in stage.inputs])
        zero, _ = stage.run_backward_input(saved, [None])
    assert all(float(g.abs().sum()) == 0.0 for g in zero if g is not None)


class InPlaceFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


def test_function_that_changes_its_input_is_refused_by_name() -> None:
    class Uses(Stack):
        def forward(self, x: Tensor) -> Tensor:
            return self.b(InPlaceFunction.apply(self.a(x) * 1))

    args, _, target = vectors()()
    with pytest.raises(CaptureError, match="InPlaceFunction"):
        build_stages(Uses(), 2, args, target=target, loss_fn=mse)


def test_function_bound_before_capture_and_with_setup_context() -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(x: Tensor, factor: float) -> tuple[Tensor, Tensor]:
            return x * factor, x.detach() * 0

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.factor = inputs[1]
            ctx.mark_non_differentiable(output[1])

        @staticmethod
        def backward(ctx: Any, grad: Tensor, unused: Tensor) -> Any:
            return grad * (ctx.factor + 1), None

    apply = Doubled.apply

    class Uses(Stack):
        def forward(self, x: Tensor) -> Tensor:
            for layer in (self.a, self.b, self.c):
                x, zero = apply(layer(x).tanh(), 2.0)
                x = x + zero
            return self.d(x)

    torch.manual_seed(0)
    model, batches = Uses(), [vectors()() for _ in range(2)]
    built = build_stages(model, 3, batches[0][0], target=batches[0][2], loss_fn=mse)
    expected, reference = run_autograd(model, batches, mse)
    mine = copy.deepcopy(model)
    results, grads = run_stages(built, state_of(mine), batches)
    assert compare(expected, reference, results, grads, mine).text == "bitwise"
    assert Doubled.forward(torch.ones(1), 3.0)[0] == 3.0


def test_parameter_changed_in_place_is_refused_by_name() -> None:
    class Renormed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(9, 8, max_norm=0.1), nn.Linear(8, 8)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.table(ids)).sum()

    with pytest.raises(CaptureError, match=r"table\.weight.*embedding_renorm_"):
        build_stages(Renormed(), 1, (torch.arange(4),))


def test_buffer_changed_with_a_gradient_is_refused_by_name() -> None:
    class Leaks(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(8))

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            self.mean.mul_(0.9).add_(y.mean(0))  # type: ignore[operator, union-attr]
            return self.b(y)

    args, _, target = vectors()()
    with pytest.raises(SplitError, match=r"'mean'.*carries a gradient"):
        build_stages(Leaks(), 1, args, target=target, loss_fn=mse)


@pytest.mark.parametrize("recompute", ["some", -1.0, True, None])
def test_unknown_recompute_is_refused(recompute: Any) -> None:
    args, _, target = vectors()()
    with pytest.raises(UsageError, match="recompute"):
        build_stages(Stack2(), 2, args, target=target, loss_fn=mse, recompute=recompute)


def test_signature_hash_is_stable_and_tells_stages_apart() -> None:
    args, _, target = vectors()()

    def build(width: float) -> list[str]:
        model = Stack2()
        with torch.no_grad():
            model.a.weight.fill_(width)
        built = build_stages(model, 2, args, target=target, loss_fn=mse)
        return [stage.signature_hash() for stage in built.stages]

    first, second = build(1.0), build(2.0)
    assert first == second
    assert first[0] != first[1]


@pytest.mark.parametrize("where", ["autocast", "no_grad", "inference_mode"])
def test_modes_around_the_capture(where: str) -> None:
    """Autocast around the call becomes part of the stages; grad modes around it do not matter."""
    torch.manual_seed(0)
    model, batches = Stack2(), [vectors()() for _ in range(2)]
    mode: Any = {
        "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
        "no_grad": torch.no_grad,
        "inference_mode": torch.inference_mode,
    }[where]
    with mode():
        built = build_stages(model, 2, batches[0][0], target=batches[0][2], loss_fn=mse)
    context = mode() if where == "autocast" else torch.enable_grad()
    with context:
        expected, reference = run_autograd(model, batches, mse)
    mine = copy.deepcopy(model)
    results, grads = run_stages(built, state_of(mine), batches)
    assert compare(expected, reference, results, grads, mine).text == "bitwise"


def test_channels_last_and_complex_parameters() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten())
    model = model.to(memory_format=torch.channels_last)

    def batch() -> Any:
        images = torch.randn(2, 4, 8, 8).contiguous(memory_format=torch.channels_last)
        return (images,), {}, torch.randn(2, 64)

    batches = [batch() for _ in range(2)]
    built = build_stages(model, 2, batches[0][0], target=batches[0][2], loss_fn=mse)
    expected, reference = run_autograd(model, batches, mse)
    mine = copy.deepcopy(model)
    results, grads = run_stages(built, state_of(mine), batches)
    assert compare(expected, reference, results, grads, mine).text == "bitwise"

    class Spectral(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
            self.filter = nn.Parameter(torch.randn(5, dtype=torch.complex64))

        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.fft.irfft(torch.fft.rfft(self.a(x)) * self.filter, n=8).tanh())

    other, batches = Spectral(), [vectors()() for _ in range(2)]
    built = build_stages(other, 2, batches[0][0], target=batches[0][2], loss_fn=mse)
    expected, reference = run_autograd(other, batches, mse)
    mine = copy.deepcopy(other)
    results, grads = run_stages(built, state_of(mine), batches)
    assert compare(expected, reference, results, grads, mine).text == "bitwise"


def test_evaluation_takes_a_result_whose_shape_depends_on_data() -> None:
    class Picks(Stack):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = self.d(self.c(self.b(self.a(x).tanh()).tanh()).tanh())
            return h.sum(), h[h.sum(1) > 0]

    torch.manual_seed(0)
    model = Picks().eval()
    args, _, _ = vectors()()
    held = [["a.weight", "a.bias", "b.weight", "b.bias"], ["c.weight", "c.bias", "d.weight", "d.bias"]]
    first, last = forward_stages(capture(model, args), held)
    for x in (args[0], torch.randn(4, 8)):
        (crossing,), _ = first.run_forward(state_of(model), [x])
        outputs, _ = last.run_forward(state_of(model), [crossing])
        assert all(map(torch.equal, outputs, model(x)))


def test_keywords_in_another_order_are_the_same_call() -> None:
    import zbcompile

    class Divides(Stack):
        def forward(self, *, x: Tensor, y: Tensor) -> Tensor:
            return self.b(self.a(x).tanh() - 2 * y)

    torch.manual_seed(0)
    model = Divides()
    x, y = torch.randn(4, 8), torch.randn(4, 8)
    pipeline = zbcompile.compile(
        model,
        2,
        example_kwargs={"x": x, "y": y},
        loss_fn=lambda out, _: out.square().mean(),
        num_microbatches=2,
    )
    first, second = [], []
    pipeline.step(x=x, y=y, losses=first)
    pipeline.step(y=y, x=x, losses=second)
    assert torch.equal(torch.stack(first), torch.stack(second))
