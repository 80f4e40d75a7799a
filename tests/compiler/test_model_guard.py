"""A model, loss, mode or call that changed after it was compiled is refused by name; training never is."""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import zbcompile
from zbcompile import Pipeline
from zbcompile.compiler.model_guard import ModelGuard
from zbcompile.errors import UsageError

MSE = nn.functional.mse_loss


class Settings:
    """An object that a forward reads."""

    def __init__(self) -> None:
        self.gain, self.note = 1.0, "not read"


class Model(nn.Module):
    """Plain attributes of every kind; it counts its calls and keeps its last mean."""

    shift = 0.5

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.drop = nn.Dropout(0.1)
        self.tau, self._slope, self.sizes = 1.0, 2.0, [1, 2]
        self.settings, self.act = Settings(), torch.tanh
        self.cache: dict[str, float] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.width = x.shape[-1]
        self.cache[str(len(x))] = 1.0
        x = self.act(self.first(x)) * self.tau * self._slope + self.shift
        return self.second(self.drop(x)) * self.settings.gain * self.sizes[0]


class Loss(nn.Module):
    """A loss without tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = 1.0

    def forward(self, y: Tensor, target: Tensor) -> Tensor:
        return MSE(y, target) * self.weight


def data(rows: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, 8, generator=generator), torch.randn(rows, 8, generator=generator)


def compiled(model: nn.Module, *args: Any, loss: Any = MSE, **options: Any) -> Pipeline:
    args, target = (args[:-1], args[-1]) if args else (data()[:1], data()[1])
    return zbcompile.compile(
        model,
        options.pop("stages", 1),
        example_args=args,
        example_target=target,
        loss_fn=loss,
        num_microbatches=2,
        time_limit=0.2,
        verify=False,
        **options,
    )


@functools.cache
def guarded() -> tuple[Model, Loss, Pipeline]:
    model, loss = Model(), Loss()
    return model, loss, compiled(model, loss=loss)


class Undo:
    """Changes a model and its loss; every change is undone afterwards."""

    def __init__(self, model: nn.Module, *more: object) -> None:
        objects = [*model.modules(), *more]
        tables = [vars(o) for o in objects]
        inner = [v for t in tables for v in t.values() if isinstance(v, dict)]
        self.kept = [(t, dict(t)) for t in (*tables, *inner)]
        self.classes = [(o, type(o)) for o in objects]

    def __enter__(self) -> None: ...

    def __exit__(self, *exc: object) -> None:
        for owner, kind in self.classes:
            owner.__class__ = kind
        for table, old in self.kept:
            table.clear()
            table.update(old)


def set_to(path: str, value: object) -> Callable[[Model, Loss], None]:
    def change(model: Model, loss: Loss) -> None:
        owner, _, name = path.rpartition(".")
        setattr(functools.reduce(getattr, filter(None, owner.split(".")), model), name, value)

    return change


CHANGES: dict[str, tuple[Callable[[Model, Loss], object], str]] = {
    "attribute": (set_to("tau", 4.0), r"attribute 'tau' .*\(tau\)\n.*needed: 1.0, as compiled; given: 4.0"),
    "private attribute": (set_to("_slope", 3.0), r"\(_slope\)"),
    "attribute of the class": (set_to("shift", 0.1), r"\(shift\)\n.*needed: 0.5, as compiled; given: 0.1"),
    "function": (set_to("act", torch.relu), r"\(act\)"),
    "list in place": (lambda m, loss: m.sizes.append(3), r"\(sizes\)\n.*\[1, 2\], as compiled.*\[1, 2, 3\]"),
    "object": (set_to("settings.gain", 2.0), r"\(settings.gain\)"),
    "dropout": (set_to("drop.p", 0.9), r"\(drop.p\)\n.*0.1, as compiled; given: 0.9"),
    "attribute removed": (lambda m, loss: delattr(m, "tau"), r"\(tau\)"),
    "loss": (lambda m, loss: setattr(loss, "weight", 0.0), r"\(loss_fn.weight\)"),
    "module replaced": (set_to("second", nn.Linear(8, 8)), r"replaced .*\(second\).*\n.*another Linear"),
    "module added": (lambda m, loss: m.first.add_module("extra", nn.Tanh()), r"'extra' was added.*\(first\)"),
    "parametrization": (
        lambda m, loss: parametrizations.weight_norm(m.second), r"\(second\)\n.*ParametrizedLinear",
    ),
    "parameter removed": (set_to("second.bias", None), r"'bias' was removed .*\(second.bias\)"),
    "parameter added": (lambda m, loss: setattr(m.drop, "w", m.first.weight), r"drop.w"),
    "model.eval()": (lambda m, loss: m.eval(), "in training mode"),
    "mode of one module": (lambda m, loss: m.drop.eval(), r"in training mode \(drop\)"),
    "mode of the loss": (lambda m, loss: loss.eval(), r"in training mode \(loss_fn\)"),
    "forward replaced": (set_to("second.forward", torch.tanh), r"\(second.forward\)"),
    "forward hook": (
        lambda m, loss: m.second.register_forward_hook(lambda m, i, o: o * 2), r"a forward hook .*\(second\)",
    ),
    "forward pre-hook": (
        lambda m, loss: m.second.register_forward_pre_hook(print), r"forward pre-hook .*\(second\)",
    ),
    "backward hook": (
        lambda m, loss: m.first.register_full_backward_hook(print), r"backward hook .*\(first\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", CHANGES)
def test_a_change_is_refused_by_name(kind: str) -> None:
    model, loss, pipeline = guarded()
    change, words = CHANGES[kind]
    sizes = list(model.sizes)
    with Undo(model, loss, model.settings):
        change(model, loss)
        with pytest.raises(UsageError, match=f"(?s){words}") as caught:
            pipeline.step(data()[0], target=data()[1])
        assert "compile another pipeline" in str(caught.value)
        if "mode" not in kind and kind != "model.eval()":
            with pytest.raises(UsageError, match=f"(?s){words}"):
                pipeline.eval(data()[0])
        model.sizes[:] = sizes
    pipeline.step(data()[0], target=data()[1])


def test_a_gradient_hook_is_refused_by_name() -> None:
    model, _, pipeline = guarded()
    handle = model.second.weight.register_hook(lambda value: None)
    with pytest.raises(UsageError, match=r"gradient hook was added .*\(second.weight\)"):
        pipeline.step(data()[0], target=data()[1])
    handle.remove()
    pipeline.step(data()[0], target=data()[1])


def test_what_a_forward_sets_itself_is_free() -> None:
    model, loss, pipeline = guarded()
    model(torch.randn(3, 8))
    assert model.width == 8
    model.width, model.settings.note = 9, "changed"
    vars(model).update(score=0.1, _seen_batches=5)
    pipeline.step(data()[0], target=data()[1])
    pipeline.eval(data()[0])


def test_an_input_that_requires_a_gradient_is_refused_by_name() -> None:
    _, _, pipeline = guarded()
    x, y = data()
    with pytest.raises(UsageError, match=r"(?s)requires a gradient.*\(args\[0\]\).*detach"):
        pipeline.step(x.requires_grad_(), target=y)
    pipeline.step(x.detach(), target=y)


def test_a_number_that_changes_is_named_with_both_values() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: Tensor, count: int) -> Tensor:  # type: ignore[override]
            return super().forward(x) / count

    x, y = data()
    pipeline = compiled(Scaled(8, 8), x, 4, y)
    with pytest.raises(UsageError, match=r"(?s)args\[1\].*needed: 4, as compiled; given: 5.*pass a tensor"):
        pipeline.step(x, 5, target=y)
    pipeline.step(x, 4, target=y)


def test_autocast_around_step_only_and_inference_mode_are_refused() -> None:
    model, _, pipeline = guarded()
    x, y = data()
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(UsageError, match=r"without autocast, .* under autocast\(cpu, bfloat16\)"):
            pipeline.step(x, target=y)
        half = pipeline.eval(x)
    assert half.dtype == torch.bfloat16
    assert pipeline.eval(x).dtype == torch.float32
    with torch.inference_mode(), pytest.raises(UsageError, match="inference_mode"):
        pipeline.step(x, target=y)
    with torch.no_grad():
        pipeline.step(x, target=y)


def test_compiled_under_autocast_steps_and_evaluates_with_its_bits() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Softmax(-1), nn.Linear(8, 8))
    reference, (x, y) = copy.deepcopy(model), data()
    with torch.autocast("cpu", torch.bfloat16):
        pipeline = compiled(model, x, y)
        pipeline.step(x, target=y)
        for a, b in zip(x.chunk(2), y.chunk(2), strict=True):
            torch.autograd.backward([MSE(reference(a), b) / 2])
        assert torch.equal(pipeline.eval(x), reference(x))
    for ours, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, expected.grad, rtol=0, atol=0)
    with pytest.raises(UsageError, match=r"under autocast\(cpu, bfloat16\), step\(\) runs without autocast"):
        pipeline.step(x, target=y)
    with (
        torch.autocast("cpu", torch.float16),
        pytest.raises(UsageError, match=r"bfloat16\).*under autocast\(cpu, float16\)"),
    ):
        pipeline.step(x, target=y)


class LastOf(nn.LSTM):
    """The outputs of an LSTM alone."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)[0]


def gpt() -> tuple[nn.Module, Tensor, Tensor]:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=11, n_positions=8)
    ids = torch.arange(16).reshape(4, 4) % 11
    return transformers.GPT2LMHeadModel(config), ids, ids


def cnn() -> tuple[nn.Module, Tensor, Tensor]:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 8))
    return model, torch.randn(4, 1, 4, 4), torch.randn(4, 8)


def lstm() -> tuple[nn.Module, Tensor, Tensor]:
    return LastOf(4, 4, batch_first=True), torch.randn(4, 3, 4), torch.randn(4, 3, 4)


def any_loss(output: Any, target: Tensor) -> Tensor:
    if hasattr(output, "logits"):
        return nn.functional.cross_entropy(output.logits.flatten(0, 1), target.flatten())
    return MSE(output, target)


@pytest.mark.parametrize("build", [gpt, cnn, lstm])
def test_ordinary_training_is_never_refused(build: Callable[[], tuple[nn.Module, Tensor, Tensor]]) -> None:
    torch.manual_seed(0)
    model, x, y = build()
    pipeline = compiled(model, x, y, loss=any_loss)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    rate = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    saved = copy.deepcopy(model.state_dict())

    def step() -> None:
        pipeline.step(x, target=y)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rate.step()
        optimizer.zero_grad()

    step()
    model.eval()
    pipeline.eval(x)
    with torch.no_grad():
        model(x)
    model.train()
    step()
    model.load_state_dict(saved)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    step()
    model.load_state_dict(saved, assign=build is not gpt)  # it would untie GPT-2's head
    model.zero_grad(set_to_none=False)
    pipeline.step(x, target=y)
    model.to("cpu").requires_grad_(True)
    model(x)
    copy.deepcopy(model)
    pipeline.step(x, target=y)
    assert all(p.grad is not None for p in model.parameters())


def test_a_thousand_modules_are_compared_in_a_millisecond() -> None:
    rows = [nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Dropout(0.1)) for _ in range(250)]
    model = nn.Sequential(*rows)
    guard, times = ModelGuard(model, MSE), []
    for _ in range(20):
        start = time.perf_counter()
        guard.check()
        times.append(time.perf_counter() - start)
    assert min(times) < 5e-3  # a margin for busy machines
    vars(model.get_submodule("249.2"))["p"] = 0.2
    with pytest.raises(UsageError, match=r"249\.2\.p"):
        guard.check()
