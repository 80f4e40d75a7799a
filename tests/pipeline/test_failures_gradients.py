"""Wrong gradients that users of pipelines reported (data/public-failures.md): each kind, against autograd.

The test ids carry the number of the report.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.support.pipeline_oracle import (
    SIZE,
    Batch,
    Calls,
    assert_right,
    autograd,
    batch_of,
    compiled,
    mean_square,
    same_state,
)
from zbcompile.passes.partition.cut_points import CutPoint


def report(*rows: tuple[str, Any]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("body", [row[1] for row in rows], ids=[row[0] for row in rows])


# One parameter used several times in a stage.


@report(
    ("pytorch#180952-x@w@w", lambda m, x: x @ m.a @ m.a),
    ("pytorch#180952-w-relu-w", lambda m, x: torch.relu(x @ m.a) @ m.a),
    ("pytorch#180952-w-and-its-transpose", lambda m, x: torch.relu(x @ m.a) @ m.a.t() + m.a[0]),
    ("pytorch#180952-weight-and-bias", lambda m, x: F.linear(x, m.a, m.a.sum(0)) * m.a.mean()),
    ("pytorch#180952-thrice-and-after-the-next-layer", lambda m, x: m.first(x @ m.a @ m.a) @ m.a),
    ("pytorch-PR#181365-norm-before-and-after", lambda m, x: m.norm(m.first(m.norm(x)))),
    ("pytorch-PR#181365-norm-thrice", lambda m, x: m.norm(m.second(m.norm(m.first(m.norm(x))))) + x),
)
@pytest.mark.parametrize("stages", [1, 2])
def test_parameter_used_several_times(body: Any, stages: int) -> None:
    assert_right(Calls(body), batch_of(SIZE), stages=stages, loss=mean_square, exact=stages == 1)


class Block(nn.Module):
    """Attention over the sequence, a feed-forward part, residuals and norms."""

    def __init__(self) -> None:
        super().__init__()
        self.attend, self.feed = (
            nn.Linear(8, 24),
            nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)),
        )
        self.one, self.two = nn.LayerNorm(8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.scaled_dot_product_attention(*self.attend(self.one(x)).chunk(3, -1))
        return x + self.feed(self.two(x))


class Albert(nn.Module):
    """One block applied several times, a classifier at the end."""

    def __init__(self, times: int) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.block = Block()
        self.head = nn.Linear(8, 3)
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = self.block(x)
        return self.head(x[:, 0])


@pytest.mark.parametrize(
    ("stages", "times"), [(1, 3), (3, 3), (2, 4)], ids=lambda n: f"pytorch-PR#181365-{n}"
)
def test_block_applied_several_times(stages: int, times: int) -> None:
    """Across stages the copies' gradients are summed per stage: another order than autograd's."""
    target = torch.arange(6) % 3
    assert_right(
        Albert(times), batch_of(4, 8), stages=stages, loss=F.cross_entropy, target=target, exact=stages == 1
    )


STEPS = (
    lambda m, x, y: x @ m.a,
    lambda m, x, y: torch.tanh(x) * m.b,
    lambda m, x, y: m.norm(x + y),
    lambda m, x, y: m.first(x) + m.b,
    lambda m, x, y: F.linear(y, m.a, m.b) * x,
    lambda m, x, y: m.first(F.gelu(m.second(x))),
    lambda m, x, y: (x.t() @ y) @ m.a,
)


@settings(max_examples=6)
@given(
    st.lists(st.integers(0, len(STEPS) - 2), min_size=2, max_size=6), st.integers(0, 3), st.integers(0, 99)
)
def test_pytorch_180952_any_use_of_shared_weights(steps: list[int], back: int, seed: int) -> None:
    """Random programs over a few shared weights; ``back`` says which earlier value a step reads besides."""

    def body(m: Calls, x: Tensor) -> Tensor:
        values = [x]
        for k in steps:
            values.append(STEPS[k](m, values[-1], values[max(0, len(values) - 1 - back)]))
        return m.third(values[-1])

    model = Calls(body, torch.float64)
    x = batch_of(SIZE, dtype=torch.float64)
    assert_right(model, x, stages=2, loss=lambda out, _: out.pow(2).mean(), exact=False, seed=seed)


# Views at the cut.

VIEWS: dict[str, Callable[[Tensor], Any]] = {
    "view": lambda y: y.view(4, 24).view(4, 6, 4).relu(),
    "plain-view": lambda y: y.view(y.shape[0], 4, 6).transpose(1, 2),
    "transpose": lambda y: y.transpose(0, 1).transpose(0, 1),
    "transpose-kept": lambda y: y.transpose(1, 2),
    "slice": lambda y: y[:, 1:],
    "chunk": lambda y: y.chunk(2, dim=1),
    "permute-flip": lambda y: y.permute(0, 2, 1).unsqueeze(1).squeeze(1)[:, ::2],
    "expand": lambda y: y[:, :1].expand(-1, 4, -1),
    "unbind": lambda y: y.unbind(1),
    "overlapping-views": lambda y: (y[:, :3], y[:, 1:], y),
    "diagonal": lambda y: y.diagonal(dim1=1, dim2=2),
    "detached-alias": lambda y: (y, y.detach()),
    "twice-the-same": lambda y: (y, y),
    "imaginary-view": lambda y: torch.view_as_real(torch.view_as_complex(y.view(*y.shape[:-1], -1, 2))),
}


def after_first(cuts: tuple[CutPoint, ...], count: int) -> Sequence[CutPoint]:
    """The last legal cut before the first call of the module ``second``."""
    at = next(i for i, cut in enumerate(cuts) if cut.module_path == "second")
    return cuts[at : at + 1]


def before_views(cuts: tuple[CutPoint, ...], count: int) -> Sequence[CutPoint]:
    """The cut right after the module ``first``: the views belong to the stage that receives."""
    at = max(i for i, cut in enumerate(cuts) if cut.module_path == "second")
    first = next(cut for cut in cuts if cut.module_path != "first")
    return [first if cuts.index(first) <= at else cuts[at]]


def through_cut(view: Callable[[Tensor], Any]) -> Callable[..., Any]:
    def body(m: Calls, x: Tensor) -> Tensor:
        parts = view(m.first(x))
        if isinstance(parts, Tensor):
            parts = (parts,)
        total = torch.zeros(())
        for k, part in enumerate(parts):
            flat = part.reshape(part.shape[0], -1)
            flat = F.pad(flat, (0, -flat.shape[1] % SIZE)).unflatten(1, (-1, SIZE))
            total = total + (k + 1) * torch.tanh(m.second(flat)).mean()
        return total

    return body


@pytest.mark.parametrize("cut", [after_first, before_views], ids=["sent-as-view", "viewed-after"])
@pytest.mark.parametrize("view", list(VIEWS), ids=lambda name: f"pytorch#142229-{name}")
def test_views_at_the_cut(view: str, cut: Any) -> None:
    if view == "view":
        x = torch.randn(12, 4, SIZE)
    else:
        x = batch_of(4, SIZE)
    model = Calls(through_cut(VIEWS[view]))
    assert_right(
        model, x, split_points=cut, exact=len(view.split("-")) == 1 and view not in ("chunk", "unbind")
    )


# What W returns, and what a step leaves behind.


def test_pytorch_153833_gradients_of_w_are_those_in_grad() -> None:
    """Driving F, B and W of the stages by hand gives, summed, what a step leaves in ``param.grad``."""
    model = Calls(lambda m, x: m.second(m.norm(torch.relu(m.first(x)))))
    x = batch_of(SIZE)
    pipeline = assert_right(model, x, stages=2, loss=mean_square, microbatches=2, scale_grads=False)
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    state = dict(model.named_parameters())
    total: dict[str, Tensor] = {}
    returned = []
    with torch.no_grad():
        for part in x.chunk(2):
            (sent,), saved_0 = pipeline[0].compiled.run_forward(state, [part])
            outputs, saved_1 = pipeline[1].compiled.run_forward(state, [sent])
            tangents = [torch.ones(p.shape) if p.is_loss else None for p in pipeline[1].compiled.outputs]
            back, saved_1 = pipeline[1].compiled.run_backward_input(saved_1, tangents)
            _, saved_0 = pipeline[0].compiled.run_backward_input(saved_0, list(back))
            for stage, saved in ((pipeline[0], saved_0), (pipeline[1], saved_1)):
                own = stage.compiled.run_backward_weight(saved)
                returned.append(own)
                for name, grad in own.items():
                    total[name] = total[name] + grad if name in total else grad.clone()
    assert set(total) == set(grads)
    for name, grad in grads.items():
        assert torch.equal(total[name], grad), name
    stores = [g.untyped_storage().data_ptr() for own in returned for g in own.values()]
    assert len(set(stores)) == len(stores)


@pytest.mark.parametrize("spoil", ["zero_", "in-place-clip", "none"], ids=lambda n: f"pytorch#153833-{n}")
def test_gradients_are_fresh_each_step(spoil: str) -> None:
    """What happens to ``param.grad`` between steps does not reach the next step's gradients."""
    model = Calls(lambda m, x: m.second(torch.relu(m.first(x))))
    x = batch_of(SIZE)
    pipeline = assert_right(model, x, loss=mean_square)
    wanted = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    for p in model.parameters():
        if p.grad is not None and spoil == "zero_":
            p.grad.zero_()
        elif p.grad is not None and spoil == "in-place-clip":
            p.grad.mul_(-3.0)
            p.grad = None
        else:
            p.grad = None
    pipeline.step(x)
    for name, grad in wanted.items():
        assert torch.equal(model.get_parameter(name).grad, grad), name


def swap_data(model: nn.Module) -> None:
    for p in model.parameters():
        p.data = torch.randn_like(p.data)


def copy_into(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p))


def load(model: nn.Module) -> None:
    model.load_state_dict({k: torch.randn_like(v) for k, v in model.state_dict().items()})


def load_assigning(model: nn.Module) -> None:
    model.load_state_dict({k: torch.randn_like(v) for k, v in model.state_dict().items()}, assign=True)


def replace(model: nn.Module) -> None:
    model.second.weight = nn.Parameter(torch.randn_like(model.second.weight))


@pytest.mark.parametrize(
    "change",
    [swap_data, copy_into, load, load_assigning, replace],
    ids=lambda f: f"torchtitan#545-{f.__name__}",
)
def test_parameters_changed_between_steps(change: Callable[[nn.Module], None]) -> None:
    """Three steps; the pipeline trains the tensors that the model holds at each of them."""
    model = Calls(lambda m, x: m.third(torch.relu(m.second(m.first(x)))))
    reference = copy.deepcopy(model)
    x = batch_of(SIZE)
    pipeline = compiled(model, Batch((x,)), 3, 3, loss_fn=mean_square)
    for turn in range(3):
        model.zero_grad()
        reference.zero_grad()
        pipeline.step(x)
        autograd(reference, Batch((x,)).cut(3), mean_square, scale=3)
        same_state(model, reference)
        used = {n: p for n, p in model.named_parameters() if p.grad is not None}
        listed = dict(pipeline.named_parameters())
        assert all(listed[name] is p for name, p in used.items())
        for m in (model, reference):
            torch.manual_seed(turn)
            change(m)


# Steps without zero_grad.


@pytest.mark.parametrize("scale_grads", [True, False])
@pytest.mark.parametrize("preset", [False, True], ids=["torchtitan#1733-two-steps", "torchtitan#1733-preset"])
def test_gradients_accumulate_over_steps(preset: bool, scale_grads: bool) -> None:
    model = Calls(lambda m, x: m.second(torch.relu(m.first(x))))
    reference = copy.deepcopy(model)
    xs = batch_of(SIZE), batch_of(SIZE).cos()
    pipeline = compiled(model, Batch((xs[0],)), 2, 3, loss_fn=mean_square, scale_grads=scale_grads)
    if preset:
        for m in (model, reference):
            for p in m.parameters():
                p.grad = torch.ones_like(p)
    for x in xs:
        pipeline.step(x)
        autograd(reference, Batch((x,)).cut(3), mean_square, scale=3 if scale_grads else None)
    same_state(model, reference)
