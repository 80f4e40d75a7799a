"""Small models, each with one trait that a split can get wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = tuple[tuple[Any, ...], dict[str, Any], Any]


@dataclass(frozen=True)
class Trait:
    """A model class, a function that makes one microbatch, the loss, and how many stages to ask for."""

    build: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    loss: Callable[..., Tensor]
    stages: int = 3
    split_points: tuple[str, ...] | None = None


def mse(output: Any, target: Any) -> Tensor:
    return F.mse_loss(output, target)


def total(output: Any, target: Any) -> Tensor:
    """Sum of all floating results: an expanded gradient."""
    leaves: list[Tensor] = []

    def walk(value: Any) -> None:
        if isinstance(value, Tensor):
            leaves.append(value)
        elif isinstance(value, dict):
            for item in value.values():
                walk(item)
        elif isinstance(value, tuple | list):
            for item in value:
                walk(item)

    walk(output)
    return torch.stack([leaf.abs().sum() for leaf in leaves if leaf.is_floating_point()]).sum()


def vectors(width: int = 8, rows: int = 4) -> Callable[[], Batch]:
    return lambda: ((torch.randn(rows, width),), {}, torch.randn(rows, width))


class Stack(nn.Module):
    """Four linear layers; subclasses say what happens between them."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(width, width) for _ in range(4))


class SkipsAStage(Stack):
    def forward(self, x: Tensor) -> Tensor:
        first = self.a(x).tanh()
        return self.d(self.c(self.b(first).tanh()).tanh() + first)


class TwoBoundaryTensors(Stack):
    """The second is not used by the next stage but by the one after; the third by nobody's gradient."""

    def forward(self, x: Tensor) -> Tensor:
        first = self.a(x)
        left, right = first.tanh(), first.sigmoid()
        middle = self.c(self.b(left).tanh()).tanh()
        return self.d(middle * right) + (right.detach() > 0.5)


class UnusedOutput(Stack):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first = self.a(x)
        side = self.b(first)
        return self.d(self.c(first.tanh()).tanh()), side.detach().argmax(-1)


class IntegersCross(Stack):
    """Indices and a mask made from activations in the first stage and used in the last."""

    def forward(self, x: Tensor) -> Tensor:
        first = self.a(x)
        order, mask = first.argsort(-1), first > 0
        return self.d(self.c(self.b(first).tanh()).gather(1, order)).masked_fill(mask, 0.0)


class InPlace(Stack):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        y.add_(1.0)
        y[:, 0] = 0.5
        z = self.b(F.relu(y, inplace=True))
        view = z.view(2, -1)
        view.mul_(2.0)
        w = self.c(z)
        w += z
        return self.d(w.masked_fill_(w > 3, 0.0))


class ViewsAtTheCut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(4, 4), nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        left, right = y.view(4, 6, 2, 4).transpose(1, 2).chunk(2, -1)
        z = self.b(torch.cat([right, left], -1))
        return self.c(z[:, :, 1:, :3].transpose(2, 3).transpose(2, 3).contiguous())


class TransposedOutput(Stack):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x).t()
        z = self.b(y.t()).t()
        return self.d(self.c(z.t()).tanh()).t()


class ExpandedOutput(Stack):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x).mean(0, keepdim=True).expand(4, 8)
        return self.d(self.c(self.b(y) + x).tanh())


class Counter(Stack):
    """A step counter, a running mean kept by hand and a buffer that is assigned, not changed."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("last", torch.zeros(8), persistent=False)
        self.mean: Tensor
        self.steps: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.steps.add_(1)
        y = self.a(x) / self.steps
        y = y - self.mean
        with torch.no_grad():
            self.mean.lerp_(y.mean(0), 0.1)
        self.last = y.detach().mean(0) + self.last
        z = self.b(y).tanh()
        return self.d(self.c(z).tanh())


class SharedBuffer(Stack):
    """One constant buffer read in every stage, one buffer changed in the last."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 8))
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.b(self.a(x).tanh() * self.scale).tanh() * self.scale
        return self.norm(self.d(self.c(y) * self.scale))


class TiedAcross(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(13, 8)
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 13, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.b(self.a(self.table(ids)).tanh()).tanh())


class TwiceTheSame(nn.Module):
    """``x @ w @ w`` in one stage, ``w`` again two stages later, one norm around a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(8, 8) / 3)
        self.norm, self.a, self.b = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x @ self.w @ self.w)
        return self.b(self.norm(self.a(y)) @ self.w).relu() @ self.w


class OneBlockThreeTimes(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.b(self.a(x).tanh()).tanh() + x
        return x


class Complex(Stack):
    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(self.a(x))
        spectrum = spectrum * torch.polar(torch.ones(5), torch.linspace(0, 1, 5))
        y = self.b(torch.fft.irfft(spectrum, n=8)).tanh()
        phase = torch.view_as_complex(self.c(y).view(4, 4, 2))
        return self.d(torch.view_as_real(phase * phase.conj()).flatten(1))


@dataclass
class Extra:
    """Travels as a keyword argument."""

    mask: Tensor
    scale: float
    name: str = "extra"


class Keywords(Stack):
    def forward(self, x: Tensor, *, extra: Extra, flags: dict[str, Any], power: int = 2) -> Tensor:
        y = self.a(x) * extra.mask * extra.scale
        y = self.b(y).tanh() if flags["tanh"] else self.b(y)
        return self.d(self.c(y).pow(power) + flags["shift"][0])


class Pair(NamedTuple):
    first: Tensor
    rest: dict[str, Any]


class NestedResults(Stack):
    """Results of several stages, an argument handed back, and values that are no tensors."""

    def forward(self, x: Tensor) -> Pair:
        y = self.a(x)
        z = self.b(y.tanh())
        w = self.d(self.c(z.tanh()).tanh())
        return Pair(
            w, {"middle": [z, y.detach()], "same": x, "note": "kept", "count": 3, "twice": w, "none": None}
        )


class StopsGradient(Stack):
    """A part under no_grad, a detached value and a parameter that needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(8, 8)
        self.b.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        with torch.no_grad():
            wanted = self.teacher(y)
        return self.d(self.c(self.b(y).tanh() + y.detach()).tanh()) - wanted


class Noisy(Stack):
    def forward(self, x: Tensor) -> Tensor:
        y = F.dropout(self.a(x), 0.3, self.training)
        y = self.b(y + torch.randn_like(y) * 0.1)
        y = F.dropout(y.tanh() * 2, 0.2, self.training, inplace=True)
        return self.d(F.alpha_dropout(self.c(y), 0.1, self.training) * torch.rand(8).bernoulli())


class Routed(nn.Module):
    """Mixture of experts with sizes that depend on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.outside = nn.Linear(8, 8), nn.Linear(8, 8)
        self.gate = nn.Linear(8, 3)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inside(x).tanh()
        weight, chosen = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            (rows,) = torch.where(chosen == number)
            out = out.index_add(0, rows, expert(x[rows]) * weight[rows, None])
        return self.outside(out + x)


class MixedDtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8, dtype=torch.float64), nn.Linear(8, 8, dtype=torch.bfloat16)
        self.c = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x.double()).tanh().bfloat16()).tanh().float())


class UnusedParameter(Stack):
    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.b(self.a(x).tanh()).tanh())


class Scalars(Stack):
    """A scalar parameter, a list of parameters, a constant made in forward, a parameter as a result."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.shifts = nn.ParameterList(nn.Parameter(torch.randn(8)) for _ in range(2))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.b(self.a(x) * self.gain + self.shifts[0]).tanh()
        table = torch.tensor([0.5, 1.0] * 4)
        return {"y": self.d(self.c(y) * table + self.shifts[1]), "gain": self.gain * 1}


class Parametrized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        self.b = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
        self.c = nn.utils.parametrizations.orthogonal(nn.Linear(8, 8), orthogonal_map="householder")

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x).tanh()).tanh())


class SecondInputLater(Stack):
    """A parameter is read before the second input is used."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        first = self.a(x).tanh()
        scaled = self.d.weight * 0.5
        return self.c(self.b(first + y).tanh()) @ scaled


class RotaryOnce(Stack):
    """cos and sin made once at the top and used by every block."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.linspace(0.1, 1, 4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        angle = torch.arange(x.shape[0])[:, None] * self.frequencies
        cos, sin = torch.cat([angle.cos()] * 2, -1), torch.cat([angle.sin()] * 2, -1)
        for layer in (self.a, self.b, self.c, self.d):
            y = layer(x)
            x = y * cos + torch.cat([-y[:, 4:], y[:, :4]], -1) * sin
        return x


class MaskMadeInPlace(Stack):
    def forward(self, x: Tensor) -> Tensor:
        mask = torch.zeros(4, 4)
        mask.masked_fill_(torch.ones(4, 4).triu(1).bool(), float("-inf"))
        mask[0] = 0.0
        for layer in (self.a, self.b, self.c, self.d):
            x = (x @ x.t() / 9 + mask).softmax(-1) @ layer(x)
        return x


class ChangesItsInput(Stack):
    """Works on a copy of the batch: the caller's tensor is not changed by the pipeline."""

    def forward(self, x: Tensor) -> Tensor:
        x.clamp_(-1, 1)
        return self.d(self.c(self.b(self.a(x) + x).tanh()) + x)


class GroupedConvolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(4, 8, 3, groups=2, padding=1)
        self.b = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.c = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.norm = nn.InstanceNorm2d(4, affine=True, track_running_stats=True)
        self.act = nn.PReLU(4)

    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool2d(self.c(self.act(self.norm(self.b(self.a(x))))), 2)


def extra_batch() -> Batch:
    extra = Extra((torch.rand(4, 8) > 0.5).float(), 0.7)
    kwargs = {"extra": extra, "flags": {"tanh": True, "shift": [torch.randn(8), None]}, "power": 3}
    return (torch.randn(4, 8),), kwargs, torch.randn(4, 8)


TRAITS: dict[str, Trait] = {
    "a value skips a stage": Trait(SkipsAStage, vectors(), mse, 4),
    "two boundary tensors": Trait(TwoBoundaryTensors, vectors(), mse, 4),
    "an output without gradient": Trait(UnusedOutput, vectors(), total, 4),
    "integers and masks cross": Trait(IntegersCross, vectors(), mse, 4),
    "in-place operations": Trait(InPlace, vectors(), mse, 3),
    "views at the cut": Trait(ViewsAtTheCut, lambda: ((torch.randn(4, 6, 8),), {}, None), total, 3),
    "a transposed boundary": Trait(TransposedOutput, vectors(), total, 4),
    "an expanded boundary": Trait(ExpandedOutput, vectors(), total, 4),
    "changed buffers": Trait(Counter, vectors(), mse, 3),
    "a buffer shared by stages": Trait(SharedBuffer, vectors(), mse, 4),
    "tied across stages": Trait(
        TiedAcross, lambda: ((torch.randint(13, (2, 5)),), {}, torch.randn(2, 5, 13)), mse, 3
    ),
    "a parameter used several times": Trait(TwiceTheSame, vectors(), mse, 4),
    "one block three times": Trait(OneBlockThreeTimes, vectors(), mse, 3),
    "complex tensors": Trait(Complex, vectors(), mse, 4),
    "keywords and objects": Trait(Keywords, extra_batch, mse, 3),
    "nested results": Trait(NestedResults, vectors(), total, 3),
    "gradients stop": Trait(StopsGradient, vectors(), mse, 4),
    "random draws": Trait(Noisy, vectors(), mse, 4),
    "sizes that depend on data": Trait(Routed, vectors(rows=9), mse, 3),
    "mixed dtypes": Trait(MixedDtypes, vectors(), mse, 3),
    "an unused parameter": Trait(UnusedParameter, vectors(), mse, 3),
    "scalars, lists and constants": Trait(Scalars, vectors(), total, 3),
    "parametrizations": Trait(Parametrized, vectors(), mse, 3),
    "a second input used late": Trait(
        SecondInputLater, lambda: ((torch.randn(4, 8), torch.randn(4, 8)), {}, torch.randn(4, 8)), mse, 3
    ),
    "rotary tables made once": Trait(RotaryOnce, vectors(), mse, 4),
    "a mask made in place": Trait(MaskMadeInPlace, vectors(), mse, 4),
    "a changed input": Trait(ChangesItsInput, vectors(), mse, 3),
    "convolutions and norms": Trait(
        GroupedConvolutions, lambda: ((torch.randn(2, 4, 6, 6),), {}, torch.randn(2, 4, 6, 6)), mse, 3
    ),
}
