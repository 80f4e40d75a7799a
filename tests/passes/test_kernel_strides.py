"""Layouts that a trace foretells are those of the kernels: every rule against the real call."""

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import zbcompile
from zbcompile.passes.torch_patches import patched

aten = torch.ops.aten
IMAGES = [
    ((2, 8, 1, 1), (8, 1, 1, 1)),
    ((2, 8, 1, 1), (8, 1, 8, 8)),
    ((2, 8, 2, 2), (32, 4, 2, 1)),
    ((2, 8, 2, 2), (32, 1, 16, 8)),
    ((2, 8, 2, 2), (32, 4, 1, 2)),
    ((2, 1, 4, 4), (16, 1, 4, 1)),
]
ROWS = [((2, 5, 8), (40, 8, 1)), ((2, 5, 8), (8, 16, 1)), ((2, 5, 8), (40, 1, 5))]


def _made(form: tuple[Sequence[int], Sequence[int]]) -> Tensor:
    return torch.empty_strided(*form).uniform_(0.1, 0.9)


def _strides(call: Callable[..., object], tensors: Sequence[Tensor]) -> tuple[int, ...]:
    made = call(*tensors)
    first = made[0] if isinstance(made, tuple) else made
    assert isinstance(first, Tensor)
    return first.stride()


def _foretold(call: Callable[..., object], tensors: Sequence[Tensor]) -> tuple[int, ...]:
    with FakeTensorMode() as mode, patched("fake tensors"):
        return _strides(call, [mode.from_tensor(t) for t in tensors])


def _norm(x: Tensor, grad: Tensor | None) -> object:
    one = torch.ones_like(x[0, :, ..., 0].flatten(1).mean(1))
    made = aten.native_batch_norm(x, one, one, None, None, True, 0.1, 1e-5)
    rest = (made[1], made[2], True, 1e-5, [True] * 3)
    return made if grad is None else aten.native_batch_norm_backward(grad, x, one, None, None, *rest)


def _layer_norm_backward(grad: Tensor, x: Tensor) -> object:
    mean = x.mean(-1, keepdim=True)
    return aten.native_layer_norm_backward(grad, x, [8], mean, mean, None, None, [True, False, False])


ROW_CALLS: list[Callable[[Tensor, Tensor], object]] = [
    lambda grad, y: aten._log_softmax_backward_data(grad, y, -1, torch.float32),
    lambda grad, y: aten._softmax_backward_data(grad, y, -1, torch.float32),
    _layer_norm_backward,
    lambda grad, y: aten.native_dropout_backward(grad, y > 0.5, 2.0),
    lambda grad, y: aten.softplus_backward(grad, y, 1.0, 20.0),
]


@pytest.mark.parametrize("call", ROW_CALLS)
def test_backward_of_rows(call: Callable[..., object]) -> None:
    for first in ROWS:
        for second in ROWS:
            tensors = [_made(first), _made(second)]
            assert _foretold(call, tensors) == _strides(call, tensors), (first, second)


def test_batch_norm() -> None:
    for x in IMAGES:
        assert _foretold(lambda x: _norm(x, None), [_made(x)]) == _strides(
            lambda x: _norm(x, None), [_made(x)]
        )
        for grad in IMAGES:
            if grad[0] == x[0]:
                tensors = [_made(x), _made(grad)]
                assert _foretold(_norm, tensors) == _strides(_norm, tensors), (x, grad)


def _element_wise() -> Iterator[tuple[torch._ops.OpOverload, int]]:
    for name in sorted(torch._C._dispatch_get_all_op_names()):
        base, _, overload = name.removeprefix("aten::").partition(".")
        if not name.startswith("aten::") or not hasattr(aten, base):
            continue
        call = getattr(getattr(aten, base), overload or "default")
        drawn = torch.Tag.nondeterministic_seeded in call.tags
        if torch.Tag.pointwise in call.tags and not call._schema.is_mutable and not drawn:
            kinds = [str(a.type) for a in call._schema.arguments if not a.has_default_value()]
            if set(kinds) == {"Tensor"}:
                yield call, len(kinds)


def test_every_element_wise_call_of_one_pixel() -> None:
    seen = 0
    for call, operands in _element_wise():
        for forms in (IMAGES[:2] * 2, IMAGES[1::-1] * 2, [IMAGES[1]] * 3):
            tensors = [_made(form) for form in forms[:operands]]
            try:
                real = _strides(call, tensors)
            except (RuntimeError, AssertionError, NotImplementedError):
                continue
            assert _foretold(call, tensors) == real, (call, forms)
            seen += 1
    assert seen > 200


class _Turned(nn.Module):
    """Linear, then a norm whose gradient comes back transposed from a convolution over time."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(32, 32), nn.LayerNorm(32)
        self.convolution = nn.Conv1d(32, 32, 3, groups=32)

    def forward(self, x: Tensor) -> Tensor:
        return self.convolution(self.norm(self.linear(x)).transpose(1, 2)).square().sum()


def test_a_gradient_crosses_in_the_layout_of_eager() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 10, 32)
    pipeline = zbcompile.compile(
        _Turned(), 2, example_args=(x,), num_microbatches=2, split_points=["norm"], verify=True
    )
    pipeline.step(x)
    pipeline.close()
