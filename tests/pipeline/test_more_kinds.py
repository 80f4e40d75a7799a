"""More kinds of models: the bits of plain autograd, or a refusal that names op, line and module."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.frontend_helpers import compare, run_autograd, run_stages, state_of
from tests.support.kinds_zoo import KINDS, SIZE, Of, Outcome, scripted
from tests.support.pipeline_oracle import Batch, compiled, mean_square
from zbcompile.compiler.stages import build_stages
from zbcompile.errors import CaptureError, SplitError, UsageError
from zbcompile.passes.split.sequence import run_forward
from zbcompile.passes.verify.verify import verify


def loss(output: Any, target: Any = None) -> Tensor:
    return mean_square(vars(output) if isinstance(output, Outcome) else output)


CUT_BEFORE = {"GRU cell": ["c"]}
"""A cut inside its loop would divide the uses of a parameter, and the sum of its gradient."""


@pytest.mark.parametrize("name", KINDS)
def test_it_equals_autograd_to_the_bit(name: str) -> None:
    build, batch = KINDS[name]
    torch.manual_seed(0)
    model = build().train()
    batches = [(*batch(), None) for _ in range(2)]
    args, kwargs, _ = batches[0]
    before = {path: dict(vars(module)) for path, module in model.named_modules()}
    built = build_stages(model, 2, args, kwargs, loss_fn=loss, split_points=CUT_BEFORE.get(name))
    assert verify(model, built, args, kwargs, loss_fn=loss).exact
    for path, module in model.named_modules():
        assert vars(module).keys() == before[path].keys()
        assert all(vars(module)[key] is value for key, value in before[path].items())
    torch.manual_seed(1)
    expected, reference = run_autograd(model, batches, loss)
    mine = copy.deepcopy(model)
    torch.manual_seed(1)
    results, grads = run_stages(built, state_of(mine), batches)
    assert compare(expected, reference, results, grads, mine).text == "bitwise"


def scaled_keys(m: Of, x: Tensor) -> Tensor:
    """The product with the transposed keys hands their gradient back transposed."""
    keys = m.b(x) * m.scale + m.shift
    return m.c((m.a(x) @ keys.transpose(1, 2)).softmax(-1) @ x)


def test_gradients_cross_every_cut_in_the_layout_that_they_have_without_it() -> None:
    model = Of(scaled_keys, scale=nn.Parameter(torch.randn(SIZE)), shift=nn.Parameter(torch.randn(SIZE)))
    x = torch.randn(2, 5, SIZE)
    sizes: list[int] = []

    def cut_at(place: int) -> Any:
        def policy(cuts: Any, _: int) -> Any:
            sizes.append(len(cuts))
            return [cuts[place]]

        built = build_stages(model, 2, (x,), loss_fn=loss, split_points=policy)
        assert verify(model, built, (x,), loss_fn=loss).exact
        return built

    cut_at(0)
    ports = [port for place in range(1, sizes[0]) for port in cut_at(place).stages[0].outputs]
    assert any(port.has_gradient and port.grad_stride != port.stride for port in ports)


def test_scripted_functions_are_differentiated() -> None:
    """(Their own optimiser rounds otherwise from its third call on: eager alone is not the same twice.)"""
    model = Of(lambda m, x: m.c(scripted(m.b(scripted(m.a(x))))))
    x = torch.randn(6, SIZE)
    built = build_stages(model, 3, (x,), loss_fn=loss)
    assert verify(model, built, (x,), loss_fn=loss, tolerance=1e-6).worst.error < 1e-6


def test_a_singular_matrix_raises_as_in_eager() -> None:
    model = Of(lambda m, x: m.c(torch.linalg.solve(m.matrix, m.a(x).T).T), matrix=nn.Buffer(torch.eye(SIZE)))
    x = torch.randn(6, SIZE)
    pipeline = compiled(model, Batch((x,)), 2, 1, loss_fn=mean_square)
    pipeline.step(x)
    model.matrix.zero_()
    with pytest.raises(Exception, match="singular"):
        pipeline.step(x)


class Inner(nn.Module):
    """The call that fails sits in a module of its own, so that its path is told."""

    def __init__(self, body: Callable[..., Tensor]) -> None:
        super().__init__()
        self.body, self.count, self.kept = body, 0, torch.zeros(SIZE)
        self.weight = nn.Parameter(torch.randn(SIZE, SIZE))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


def counts(m: Inner, x: Tensor) -> Tensor:
    m.count += 1
    return x


def keeps(m: Inner, x: Tensor) -> Tensor:
    m.kept = m.kept + x.detach().mean(0)
    return x + m.kept


def changes(m: Inner, x: Tensor) -> Tensor:
    m.kept.add_(1.0)
    return x + m.kept


def packs(m: Inner, x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.half(), lambda t: t.float()):
        return x.exp()


def penalized(m: Inner, x: Tensor) -> Tensor:
    leaf = x.detach().requires_grad_(True)
    return torch.autograd.grad((leaf @ m.weight).tanh().sum(), leaf, create_graph=True)[0]


def per_sample(m: Inner, x: Tensor) -> Tensor:
    return torch.func.vmap(torch.func.grad(lambda row: (row @ m.weight).tanh().sum()))(x)


def drawn(m: Inner, x: Tensor) -> Tensor:
    return x + torch.randn(SIZE, generator=torch.Generator().manual_seed(0))


class Reruns(torch.autograd.Function):
    """Reaches a parameter through a function, and leaves its gradient in .grad."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, block: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.block = block
        return block(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_(True)
            torch.autograd.backward(ctx.block(x), grads)
        return x.grad, None


class HandsBack(Reruns):
    """Reaches the parameter in the backward alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, block: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.block = block
        return x * 2


class Differentiates(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf = x.detach().requires_grad_(True)
            (grad,) = torch.autograd.grad((leaf @ weight).tanh().sum(), leaf)
        ctx.save_for_backward(grad)
        return x * grad

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] * ctx.saved_tensors[0], None


def summed_over_ranks(m: Inner, x: Tensor) -> Tensor:
    import torch.distributed.nn.functional as collectives

    return collectives.all_reduce(x @ m.weight)


def replaces(m: Inner, x: Tensor) -> Tensor:
    m.kind = nn.Identity()
    return m.kind(x)


REFUSED: dict[str, tuple[Callable[..., Tensor], type[Exception], tuple[str, ...]]] = {
    "item in a branch": (
        lambda m, x: x if x.sum().item() > 0 else -x, CaptureError, ("tensor data", "Tensor.item", "(inner)")
    ),
    "bool": (lambda m, x: x * 2 if (x > 0).any() else x, CaptureError, ("Tensor.__bool__", "(inner)")),
    "numpy": (lambda m, x: x + float(x.detach().numpy().sum()), CaptureError, ("numpy", "(inner)")),
    "lstsq": (
        lambda m, x: torch.linalg.lstsq(m.weight, x.T)[0].T, CaptureError,
        ("shape of a result depends on tensor data", "torch.linalg.lstsq", "(inner)"),
    ),
    "no derivative": (
        lambda m, x: torch.special.zeta(x.abs() + 2, m.weight[0].abs() + 1), SplitError,
        ("no derivative for special_zeta", "(inner"),
    ),
    "no derivative, told by another name": (
        lambda m, x: torch.special.gammainc(m.weight[0].abs() + 1, x.abs() + 1), SplitError,
        ("no derivative for special_gammainc", "(inner"),
    ),
    "a mask of nested tensors": (
        lambda m, x: torch.nested.nested_tensor([x[:2], x[2:]]).to_padded_tensor(0.0).sum(0), CaptureError,
        ("nested_tensor", "(inner)"),
    ),
    "cond": (
        lambda m, x: torch.cond(x.sum() > 0, lambda v: v.sin(), lambda v: v.cos(), (x,)), CaptureError,
        ("takes functions",),
    ),
    "gradients of samples": (per_sample, CaptureError, ("torch.func",)),
    "a gradient of its own": (penalized, CaptureError, ("leaves the graph",)),
    "hooks on what is saved": (packs, CaptureError, ("hooks", "recompute=")),
    "an assignment to .data": (
        lambda m, x: setattr(m.weight, "data", m.weight * 2) or x @ m.weight, CaptureError, (".data",)
    ),
    "a parameter through .data": (
        lambda m, x: x @ m.weight.data.mul_(0.9), CaptureError, ("parameter 'inner.weight' in place",)
    ),
    "a parameter that an embedding scales": (
        lambda m, x: F.embedding(torch.arange(6), m.weight, max_norm=1.0), CaptureError,
        ("parameter 'inner.weight' in place", "embedding_renorm_"),
    ),
    "a block inside a Function": (
        lambda m, x: Reruns.apply(x, lambda v: v @ m.weight), CaptureError,
        ("Function Reruns reaches 'inner.weight'", "hand every parameter to apply()"),
    ),
    "a block inside a backward": (
        lambda m, x: HandsBack.apply(x, lambda v: v @ m.weight), CaptureError,
        ("Function HandsBack reaches 'inner.weight'",),
    ),
    "a gradient inside a Function": (
        lambda m, x: Differentiates.apply(x, m.weight), CaptureError,
        ("autograd.Function Differentiates computes a gradient in its forward",),
    ),
    "a collective": (summed_over_ranks, CaptureError, ("torch.distributed.nn (_AllReduce)",)),
    "a generator": (drawn, CaptureError, ("torch.Generator",)),
    "Python's random numbers": (
        lambda m, x: x * random.random(), CaptureError, ("the random module", "draw with torch")
    ),
    "seeding": (
        lambda m, x: x + (torch.manual_seed(1) and torch.rand(SIZE)), CaptureError, ("torch.manual_seed",)
    ),
    "a count in an attribute": (counts, CaptureError, ("'count' from 0 to 1", "(inner.count)")),
    "a cast of a module": (
        lambda m, x: x + m.to(torch.float64).weight.sum().float(), CaptureError,
        ("moved or cast inside the forward", "(inner)"),
    ),
    "a new module": (replaces, CaptureError, ("the module Identity (inner.kind)", "run the model once")),
    "a tensor that is read and replaced": (keeps, CaptureError, ("'inner.kept'", "buffer")),
    "a tensor that is changed": (changes, CaptureError, ("'inner.kept' in place", "buffer")),
}  # fmt: skip

LINELESS = (
    "a count in an attribute",
    "a new module",
    "Python's random numbers",
    "seeding",
    "a gradient inside a Function",
)


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_by_name(name: str) -> None:
    body, error, words = REFUSED[name]
    model = nn.Sequential()
    for part in ("first", "inner", "last"):
        model.add_module(part, Inner(body) if part == "inner" else nn.Linear(SIZE, SIZE))
    state, seeds = copy.deepcopy(model.state_dict()), (torch.get_rng_state(), random.getstate())
    with pytest.raises(error) as caught:
        build_stages(model, 2, (torch.randn(6, SIZE),), loss_fn=loss)
    text = str(caught.value)
    for word in (*words, *(() if name in LINELESS else ("test_more_kinds.py:",))):
        assert word in text, text
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert random.getstate() == seeds[1]
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("verified", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_buffer_that_changes_inside_a_checkpoint_is_refused(reentrant: bool, verified: bool) -> None:
    """Eager counts the batch twice: in the forward, and when the block is computed again."""
    block = nn.Sequential(nn.Linear(SIZE, SIZE), nn.BatchNorm1d(SIZE), nn.ReLU())
    model = Of(lambda m, x: m.c(checkpoint(m.block, m.a(x), use_reentrant=reentrant)), block=block)
    with pytest.raises(CaptureError, match=r"buffer 'block\.1\.\w+' inside torch.utils.checkpoint"):
        build_stages(model, 2, (torch.randn(6, SIZE),), loss_fn=loss, verify=verified)


@pytest.mark.parametrize("what", ["model", "block", "helper"])
def test_compiled_code_is_taken_as_it_was(what: str) -> None:
    def backend(*_: Any) -> Any:
        raise AssertionError("compiled")

    helper = torch.compile(lambda x: torch.sin(x) * 2, backend=backend)
    model: Any = Of(lambda m, x: m.c(helper(m.b(m.a(x))) if what == "helper" else m.b(m.a(x)).sin()))
    if what == "block":
        model.b.compile(backend=backend)
    if what == "model":
        model = torch.compile(model, backend=backend)
    x = torch.randn(6, SIZE)
    name = {"model": "Of", "block": "Linear", "helper": "<lambda>"}[what]
    with pytest.warns(UserWarning, match=rf"as it was before torch.compile: .*{name}.*backend=\"inductor\""):
        built = build_stages(model, 2, (x,), loss_fn=loss)
    assert verify(model, built, (x,), loss_fn=loss).exact
    if what != "block":  # torch leaves a plain Linear alone
        with pytest.raises(Exception, match="compiled"):
            model(x)


def test_what_crosses_a_cut_has_the_strides_that_were_traced() -> None:
    build, batch = KINDS["a norm of a transpose"]
    torch.manual_seed(0)
    model, ((x,), _) = build().train(), batch()
    built = build_stages(model, 2, (x,), loss_fn=loss)
    (port,) = [port for port in built.stages[0].outputs if port.targets]
    assert port.name == "batch_norm"
    real = model.norm(model.a(x).tanh().transpose(1, 2))
    assert port.stride == real.stride() == (5 * SIZE, 5, 1)
    for stride in (port.stride, (5 * SIZE, 1, SIZE)):
        first = replace(built.stages[0], outputs=(replace(port, stride=stride),))
        outputs, _ = run_forward([first], state_of(model), [x])
        assert outputs[0][0].stride() == stride
        assert torch.equal(outputs[0][0], real)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_scalar_of_a_tuple_is_the_loss(order: tuple[int, int]) -> None:
    """(logits, loss), as nanoGPT returns them, and (loss, logits)."""

    def both(m: Of, x: Tensor) -> tuple[Tensor, ...]:
        logits = m.c(m.b(m.a(x)).relu())
        values = logits, logits.pow(2).mean()
        return tuple(values[i] for i in order)

    model, x = Of(both), torch.randn(6, SIZE)
    built = build_stages(model, 2, (x,))
    assert built.loss == order.index(1)
    assert verify(model, built, (x,)).exact


def test_a_buffer_of_another_shape_is_told() -> None:
    """Observers of quantization get their channels at the first call."""
    from torch.ao.quantization import default_fused_per_channel_wt_fake_quant

    seen = default_fused_per_channel_wt_fake_quant()
    model = Of(lambda m, x: m.c(F.linear(m.b(x).tanh(), m.seen(m.a.weight))), seen=seen)
    x = torch.randn(6, SIZE)
    built = build_stages(model, 2, (x,), loss_fn=loss)
    with pytest.raises(UsageError, match=r"FakeQuantize.scale \[1\] to \[8\]"):
        verify(model, built, (x,), loss_fn=loss)
    assert seen.activation_post_process.min_val.shape == (0,)
    model(x)
    assert verify(model, build_stages(model, 2, (x,), loss_fn=loss), (x,), loss_fn=loss).exact


def test_a_model_that_fails_by_itself_is_told_so() -> None:
    class Fussy(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if not torch.compiler.is_compiling() and type(x) is Tensor and bool((x > 9).any()):
                raise ValueError("out of range")
            return F.linear(x, self.weight, self.bias)

    model = nn.Sequential(Fussy(SIZE, SIZE), nn.Tanh(), nn.Linear(SIZE, SIZE))
    x = torch.full((6, SIZE), 10.0)
    front = build_stages(model, 2, (x,), loss_fn=loss)
    with pytest.raises(UsageError, match="fails on the example: ValueError: out of range"):
        verify(model, front, (x,), loss_fn=loss)
