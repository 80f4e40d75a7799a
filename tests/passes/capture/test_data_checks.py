"""Branches on data: those that only raise run as checks at every step, all others are refused.

PYTEST_DONT_REWRITE: the assert statements of the models stand in their source as they run.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import random
import types
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.frontend_helpers import state_of
from tests.support.kinds_zoo import SIZE, Of
from tests.support.pipeline_oracle import Batch, compiled, mean_square
from zbcompile.compiler.stages import build_stages
from zbcompile.errors import CaptureError, DataError, PipelineError
from zbcompile.passes.capture import data_checks
from zbcompile.passes.capture.capture import capture
from zbcompile.passes.capture.data_checks import is_check
from zbcompile.passes.split.sequence import run_forward
from zbcompile.passes.verify.verify import verify


def loss(output: Any, target: Any = None) -> Tensor:
    return mean_square(output)


def body(m: Of, x: Tensor) -> Tensor:
    return m.c(m.b(m.a(x)).tanh())


def raises_if(m: Of, x: Tensor) -> Tensor:
    if m.a is not None and x.max() >= 100:
        message = f"{x.max()} is too large"
        raise ValueError(message)
    return body(m, x)


def raises_else(m: Of, x: Tensor) -> Tensor:
    if torch.isfinite(x).all() and bool((x < 100).all()):
        x = x * 1
    else:
        raise ValueError
    return body(m, x)


def raises_either(m: Of, x: Tensor) -> Tensor:
    if not torch.isfinite(x).all() or (x >= 100).any():
        raise ValueError
    return body(m, x)


def asserts(m: Of, x: Tensor) -> Tensor:
    assert x.dim() == 2 and (x < 100).all(), "too large"  # noqa: PT018
    return body(m, x)


def between(m: Of, x: Tensor) -> Tensor:
    if not (-100 <= x.min() <= x.max() <= 100):
        raise ValueError
    return body(m, x)


def calls_assert(m: Of, x: Tensor) -> Tensor:
    torch._assert((x < 100).all(), "too large")
    return body(m, x)


def asserts_later(m: Of, x: Tensor) -> Tensor:
    torch._assert_async((x < 100).all())
    return body(m, x)


def checks_all(m: Of, x: Tensor) -> Tensor:
    torch._check_tensor_all(x < 100)
    return body(m, x)


def checks_number(m: Of, x: Tensor) -> Tensor:
    torch._check(x.max().item() < 100)
    return body(m, x)


def asks_number(m: Of, x: Tensor) -> Tensor:
    if x.max().item() >= 100:
        raise ValueError
    return body(m, x)


def compares(m: Of, x: Tensor) -> Tensor:
    if not torch.equal(x, x.clamp(max=100)):
        raise ValueError
    return body(m, x)


def inside_torch(m: Of, x: Tensor) -> Tensor:
    return body(m, x) + F.gaussian_nll_loss(m.a(x), m.b(x), 100 - x.detach())


def within(m: Of, x: Tensor) -> Tensor:
    try:
        with torch.no_grad():
            assert x.max() < 100
    except AssertionError:
        raise ValueError from None
    return body(m, x)


KEPT = (
    raises_if, raises_else, raises_either, asserts, between, calls_assert, asserts_later, checks_all,
    checks_number, asks_number, compares, inside_torch, within,
)  # fmt: skip


@pytest.mark.parametrize("check", KEPT, ids=lambda f: f.__name__)
def test_a_branch_that_only_raises_is_kept(check: Callable[..., Tensor]) -> None:
    torch.manual_seed(0)
    model, x = Of(check), torch.rand(6, SIZE)
    built = build_stages(model, 2, (x,), loss_fn=loss)
    assert verify(model, built, (x,), loss_fn=loss).exact
    bad = x.clone()
    bad[4, 2] = 200.0
    with pytest.raises((ValueError, AssertionError, RuntimeError)):
        model(bad)
    with pytest.raises(DataError, match=r" at test_data_checks.py:\d+"):
        run_forward(built.stages, state_of(model), [bad])
    run_forward(built.stages, state_of(model), [x])


@pytest.mark.parametrize("names", ["unknown", "shifted"])
@pytest.mark.parametrize("check", [raises_if, raises_else, asserts, between])
def test_bytecode_that_is_not_known_is_refused(
    check: Callable[..., Tensor], names: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new interpreter may name its branches otherwise, or ask at another instruction than it jumps at."""
    known = data_checks._instructions

    def strange(code: CodeType) -> list[str]:
        found = ["NEW_BRANCH" if name.startswith("POP_JUMP") else name for name in known(code)]
        return found if names == "unknown" else [*known(code)[1:], "COMPARE_OP"]

    monkeypatch.setattr(data_checks, "_instructions", strange)
    with pytest.raises(
        CaptureError, match=r"branch or loop depends on tensor data.* at .*test_data_checks.py"
    ):
        capture(Of(check), (torch.rand(6, SIZE),))


def test_every_instruction_has_its_name_at_its_place() -> None:
    code = raises_if.__code__
    names = data_checks._instructions(code)
    assert len(names) == len(code.co_code) // 2
    assert {i.offset: i.opname for i in dis.get_instructions(code)} == {
        2 * k: name for k, name in enumerate(names) if name != "CACHE"
    }


@pytest.mark.parametrize("check", [raises_if, checks_number])
def test_a_refused_microbatch_is_named_in_steps_and_evaluations(check: Callable[..., Tensor]) -> None:
    model, x = Of(check), torch.rand(6, SIZE)
    pipeline = compiled(model, Batch((x,)), 2, 3, loss_fn=mean_square)
    bad = x.clone()
    bad[4, 2] = 200.0
    with pytest.raises(PipelineError, match=r"DataError.* at test_data_checks.py:\d+(?s:.*)microbatch 2"):
        pipeline.step(bad)
    with pytest.raises(PipelineError, match="microbatch 2"):
        pipeline.eval(bad)
    pipeline.step(x)


def test_the_condition_is_told() -> None:
    model, x = Of(raises_if), torch.rand(6, SIZE)
    pipeline = compiled(model, Batch((x,)), 2, 3, loss_fn=mean_square)
    with pytest.raises(PipelineError, match=r"needed: x.max\(\) >= 100 to be False; given: True"):
        pipeline.step(x + 100)


def test_a_check_of_the_middle_runs_in_its_stage() -> None:
    def middle(m: Of, x: Tensor) -> Tensor:
        y = m.b(m.a(x).tanh())
        if not torch.isfinite(y).all():
            raise FloatingPointError
        return m.c(y.tanh())

    model, x = Of(middle), torch.rand(6, SIZE)
    built = build_stages(model, 3, (x,), loss_fn=loss, split_points=["b", "c"])
    assert verify(model, built, (x,), loss_fn=loss).exact
    checks = [[n for n in s.graphs.forward.graph.nodes if is_check(n.target)] for s in built.stages]
    assert [len(found) for found in checks] == [0, 1, 0]
    for stage in built.stages:
        for name in ("backward_input", "backward_weight", "full_backward"):
            graph = getattr(stage.graphs, name).graph
            assert not any(is_check(n.target) for n in graph.nodes)


def goes_on(m: Of, x: Tensor) -> Tensor:
    if x.max() >= 100:
        x = x.clamp(max=100)
    return body(m, x)


def caught(m: Of, x: Tensor) -> Tensor:
    try:
        assert x.max() < 100
    except AssertionError:
        x = x.clamp(max=100)
    return body(m, x)


def caught_outside(m: Of, x: Tensor) -> Tensor:
    try:
        return raises_if(m, x)
    except ValueError:
        return x


def suppressed(m: Of, x: Tensor) -> Tensor:
    with contextlib.suppress(AssertionError):
        assert x.max() < 100
        x = x + 1
    return body(m, x)


def one_of_two(m: Of, x: Tensor) -> Tensor:
    if x.max() >= 100 and x.min() < 0:
        raise ValueError
    return body(m, x)


def counts_first(m: Of, x: Tensor) -> Tensor:
    if x.max() >= 100:
        m.bad = True
        raise ValueError
    return body(m, x)


def yields(m: Of, x: Tensor) -> Tensor:
    def parts() -> Iterator[Tensor]:
        if x.max() >= 100:
            yield x
            raise ValueError

    return body(m, sum(parts(), x))


def chosen_value(m: Of, x: Tensor) -> Tensor:
    return body(m, x * (2 if x.max() >= 100 else 1))


def larger(m: Of, x: Tensor) -> Tensor:
    if sorted((x.max(), x.sum()))[1]:
        raise ValueError
    return body(m, x)


REFUSED = (
    goes_on, caught, caught_outside, suppressed, one_of_two, counts_first, yields, chosen_value, larger,
)  # fmt: skip


@pytest.mark.parametrize("branch", REFUSED, ids=lambda f: f.__name__)
def test_a_branch_that_does_more_than_raise_is_refused(branch: Callable[..., Tensor]) -> None:
    with pytest.raises(CaptureError, match=r"branch or loop depends on tensor data(?s:.*)test_data_checks"):
        capture(Of(branch), (torch.rand(6, SIZE),))


def test_code_without_source_is_refused() -> None:
    scope: dict[str, Any] = {"body": body}
    exec("def f(m, x):\n    assert x.max() < 100\n    return body(m, x)", scope)  # noqa: S102
    with pytest.raises(CaptureError, match="branch or loop depends on tensor data"):
        capture(Of(scope["f"]), (torch.rand(6, SIZE),))


def dropped_layer(m: Of, x: Tensor) -> Tensor:
    """As decoders of transformers drop their layers."""
    x, draw = m.a(x), torch.rand([])
    skipped = m.training and draw < m.rate
    if not skipped:
        x = m.b(x)
    return m.c(F.dropout(x, 0.3))


def test_a_layer_that_is_dropped_at_a_rate_of_zero_always_runs() -> None:
    model, x = Of(dropped_layer, rate=0.0), torch.rand(6, SIZE)
    built = build_stages(model, 2, (x,), loss_fn=loss)
    assert verify(model, built, (x,), loss_fn=loss).exact  # the draw moves the masks of the dropout
    with pytest.raises(
        CaptureError, match=r"random draw decides(?s:.*)test_data_checks.py(?s:.*)layerdrop=0.0"
    ):
        capture(Of(dropped_layer, rate=0.1), (x,))


@pytest.mark.parametrize(
    ("compare", "known"),
    [
        (lambda draw: draw < 0.0, False),
        (lambda draw: draw >= 0, True),
        (lambda draw: draw <= 1.0, True),
        (lambda draw: draw > 1, False),
        (lambda draw: 0.0 > draw, False),  # noqa: SIM300
        (lambda draw: draw < 1e-9, None),
        (lambda draw: draw <= 0.0, None),
    ],
)
def test_what_is_known_of_a_draw(compare: Callable[[Tensor], Tensor], known: bool | None) -> None:
    def forward(m: Of, x: Tensor) -> Tensor:
        return m.a(x) if compare(torch.rand(1)) else m.b(x)

    model, x = Of(forward), torch.rand(6, SIZE)
    if known is None:
        with pytest.raises(CaptureError, match="random draw decides"):
            capture(model, (x,))
    else:
        captured = capture(model, (x,))
        read = captured.module.graph.find_nodes(op="placeholder")
        names = {captured.roles[node.name].name for node in read}
        assert ("a.weight" in names) is known
        assert ("b.weight" in names) is not known


@pytest.mark.parametrize(
    "draw", [lambda: random.random(), lambda: random.uniform(0, 1), lambda: np.random.rand()]
)  # the names are looked up when they are called, as in models
def test_a_draw_of_python_that_is_compared_with_zero_is_known(draw: Callable[[], float]) -> None:
    def forward(m: Of, x: Tensor) -> Tensor:
        return m.a(x) if m.training and draw() < m.rate else m.b(x)

    x = torch.rand(6, SIZE)
    state = random.getstate()
    built = build_stages(Of(forward, rate=0.0), 1, (x,), loss_fn=loss)
    assert built.stages[0].parameters == ("b.weight", "b.bias")
    assert random.getstate() == state
    with pytest.raises(CaptureError, match=r"random draw decides(?s:.*)test_data_checks.py"):
        capture(Of(forward, rate=0.1), (x,))


class Router(nn.Module):
    """As Switch and NLLB-MoE cast the classifier of their router in every forward."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.classifier, self.dtype = nn.Linear(SIZE, SIZE), dtype

    def forward(self, x: Tensor) -> Tensor:
        self.classifier = self.classifier.to(self.dtype)
        return self.classifier(x.to(self.dtype)).softmax(-1).to(x.dtype)


def test_a_cast_that_changes_nothing_is_left_out() -> None:
    model, x = Of(lambda m, x: m.c(m.router(m.a(x))), router=Router(torch.float32)), torch.rand(6, SIZE)
    built = build_stages(model, 2, (x,), loss_fn=loss)
    assert verify(model, built, (x,), loss_fn=loss).exact
    with pytest.raises(CaptureError, match="moved or cast inside the forward"):
        capture(Of(lambda m, x: m.router(x), router=Router(torch.float64)), (x,))


def loops(m: Of, x: Tensor) -> Tensor:
    """As experts of transformers run in their "eager" implementation."""
    x = m.a(x)
    chosen, y = F.one_hot(x.argmax(1) % 2, 2).T, torch.zeros_like(x)
    for index in (chosen.sum(1) > 0).nonzero():
        (rows,) = torch.where(chosen[index[0]])
        y = y.index_add(0, rows, m.b(x[rows]))
    return y


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
        self.config = types.SimpleNamespace(_experts_implementation="eager")

    @functools.wraps(loops)
    def forward(self, x: Tensor) -> Tensor:
        return loops(self, x)  # type: ignore[arg-type]


def test_a_loop_over_what_data_chose_is_refused() -> None:
    words = r"Python loop runs over a tensor whose length(?s:.*)test_data_checks.py:\d+(?s:.*)"
    with pytest.raises(CaptureError, match=words + "all experts"):
        capture(Of(loops), (torch.rand(6, SIZE),))
    with pytest.raises(CaptureError, match=words + r'\(part\)\n.*set_experts_implementation\("grouped_mm"\)'):
        capture(Of(lambda m, x: m.part(x), part=Experts()), (torch.rand(6, SIZE),))
