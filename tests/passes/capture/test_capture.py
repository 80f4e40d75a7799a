"""Capture: roles, regions, provenance, results; and that it leaves the model alone."""

from __future__ import annotations

import copy
import signal
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from tests.support.model_zoo import PLAIN, gpt2, labelled
from tests.support.split_cases import TRAITS, Stack, mse, vectors
from zbcompile.errors import CaptureError, UsageError
from zbcompile.passes.capture.capture import capture
from zbcompile.passes.capture.nested_values import NotCarried, flatten, unflatten


def test_roles_provenance_and_results() -> None:
    args, kwargs, _ = labelled()()
    captured = capture(gpt2(), args, kwargs)
    kinds = {role.kind for role in captured.roles.values()}
    assert kinds >= {"parameter", "batch"}
    names = {role.name for role in captured.roles.values() if role.kind == "parameter"}
    assert "transformer.wte.weight" in names
    assert "lm_head.weight" not in names
    assert captured.loss == 0
    attention = [n for n in captured.module.graph.nodes if "attention" in str(n.target)]
    assert attention[0].meta["module_path"] == "transformer.h.0.attn"
    assert "modeling_gpt2.py:" in attention[0].meta["source"]


def test_regions_are_inlined_and_remembered() -> None:
    case = PLAIN["autocast bf16 over half"]
    args, _, target = case.batch()
    captured = capture(case.build(), args, target=target, loss_fn=case.loss)
    linears = [n for n in captured.module.graph.nodes if str(n.target) == "aten.linear.default"]
    assert [len(n.meta["region"]) for n in linears] == [0, 0, 1, 1, 1, 0]
    assert linears[2].meta["region"][0].settings[:2] == ("cpu", torch.bfloat16)
    assert not any("wrap_with" in str(n.target) for n in captured.module.graph.nodes)


@pytest.mark.parametrize("name", ["changed buffers", "random draws", "a changed input", "parametrizations"])
def test_capturing_touches_neither_model_nor_batch_nor_random_state(name: str) -> None:
    trait = TRAITS[name]
    torch.manual_seed(0)
    model, batch = trait.build(), trait.batch()
    before, batch_before = copy.deepcopy(model.state_dict()), copy.deepcopy(batch)
    attributes = {key: dict(module.__dict__) for key, module in model.named_modules()}
    random_before = torch.get_rng_state()
    args, kwargs, target = batch
    capture(model, args, kwargs, target=target, loss_fn=trait.loss)
    assert torch.equal(torch.get_rng_state(), random_before)
    assert model.state_dict().keys() == before.keys()
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), key
    for key, module in model.named_modules():
        assert module.__dict__.keys() == attributes[key].keys()
    left, right = flatten(batch)[0], flatten(batch_before)[0]
    assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_custom_functions_are_restored_after_a_failed_capture() -> None:
    from tests.support.model_zoo import ClippedGradient

    class Fails(Stack):
        def forward(self, x: Tensor) -> Tensor:
            x = ClippedGradient.apply(self.a(x), 1.0)
            if x.sum() > 0:
                x = -x
            return x

    before = ClippedGradient.__dict__["forward"]
    with pytest.raises(CaptureError, match="tensor data"):
        capture(Fails(), (torch.randn(4, 8),))
    assert ClippedGradient.__dict__["forward"] is before
    assert float(ClippedGradient.apply(torch.ones(1), 1.0)) == 1.0


def test_failure_in_the_models_own_code_names_line_and_module() -> None:
    class Inner(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x @ torch.randn(3, 3)

    model = nn.Sequential(nn.Linear(8, 8), Inner())
    with pytest.raises(CaptureError) as caught:
        capture(model, (torch.randn(4, 8),))
    text = str(caught.value)
    assert "test_capture.py:" in text
    assert "(1)" in text


class Lengths(nn.Module):
    """Asks whether all texts of a batch are of one length."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.layer(x) if len(set(mask.sum(1).tolist())) > 1 else x


def test_a_set_of_sizes_that_data_gives_is_told_in_plain_words() -> None:
    with pytest.raises(CaptureError, match="tensor data.*test_capture.py") as caught:
        capture(Lengths(), (torch.randn(2, 3, 4), torch.ones(2, 3, dtype=torch.long)))
    assert "SymInt" not in str(caught.value)


def test_example_without_tensors_is_refused() -> None:
    with pytest.raises(UsageError, match="no tensor"):
        capture(Stack1(), (1, "x"))


def test_hooks_on_gradients_are_refused_by_name() -> None:
    model = Stack1()
    model.b.weight.register_hook(lambda grad: grad * 2)
    with pytest.raises(CaptureError, match=r"b\.weight"):
        capture(model, (torch.randn(4, 8),))
    model = Stack1()
    model.b.register_full_backward_hook(lambda *args: None)
    with pytest.raises(CaptureError, match="backward hooks") as caught:
        capture(model, (torch.randn(4, 8),))
    assert "(b)" in str(caught.value)


def test_lazy_parameters_are_refused_by_name() -> None:
    with pytest.raises(CaptureError, match="lazy parameter"):
        capture(nn.Sequential(nn.LazyLinear(4)), (torch.randn(4, 8),))


def test_a_compiled_submodule_is_looked_through() -> None:
    model = nn.Sequential(nn.Linear(8, 8), torch.compile(nn.Linear(8, 8), backend="eager"), nn.Linear(8, 8))
    captured = capture(model, (torch.randn(4, 8),))
    calls = [str(n.target) for n in captured.module.graph.nodes if n.op == "call_function"]
    assert calls == ["aten.linear.default"] * 3


def test_a_models_own_loss_is_found() -> None:
    args, _, target = vectors()()
    assert capture(Stack1(), args).loss is None
    assert capture(Stack1(), args, target=target, loss_fn=mse).loss == 0

    class Scalar(Stack):
        def forward(self, x: Tensor) -> Any:
            y = self.a(x)
            return y.sum(), y

    assert capture(Scalar(), args).loss == 0


class Stack1(Stack):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


@dataclass
class Box:
    tensor: Tensor
    name: str


class Point(NamedTuple):
    x: Tensor
    y: int


class Cache:
    def __init__(self) -> None:
        self.keys = [torch.ones(2)]


def test_values_round_trip() -> None:
    one, two, three = torch.ones(1), torch.ones(2), torch.ones(3)
    value = {"a": [one, None, (two, 3)], "b": Point(three, 4), "c": Box(one, "n"), "d": slice(1, 2)}
    tensors, spec = flatten(value)
    assert [t.numel() for t in tensors] == [1, 2, 3, 1]
    assert list(spec.paths()) == [".a[0]", ".a[2][0]", ".b[0]", ".c.tensor"]
    back = unflatten(spec, [t * 2 for t in tensors])
    assert isinstance(back["b"], Point)
    assert isinstance(back["c"], Box)
    assert (back["b"].y, back["c"].name, back["a"][2][1], back["d"]) == (4, "n", 3, slice(1, 2))
    assert float(back["c"].tensor) == 2.0
    assert float(value["c"].tensor) == 1.0  # type: ignore[union-attr]


def test_unknown_objects_in_results_say_that_they_are_not_carried() -> None:
    _, spec = flatten({"logits": torch.ones(1), "cache": Cache()}, results=True)
    back = unflatten(spec, [torch.ones(1)])
    assert isinstance(back["cache"], NotCarried)
    with pytest.raises(UsageError, match="Cache is not carried"):
        _ = back["cache"].keys


def test_an_interrupt_waits_for_the_end_of_the_trace() -> None:
    """In the middle of some of its calls torch would abort the process."""

    class Interrupted(nn.Linear):
        ends = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            signal.raise_signal(signal.SIGINT)
            y = super().forward(x)
            type(self).ends += 1
            return y

    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        capture(Interrupted(4, 4), (torch.randn(2, 4),))
    assert Interrupted.ends
    assert signal.getsignal(signal.SIGINT) is handler
