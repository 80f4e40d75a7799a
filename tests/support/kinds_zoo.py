"""Small models of kinds that people train, each as a function that builds it, with its microbatch."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrizations, parametrize

SIZE = 8


class Of(nn.Module):
    """A model given as a function of itself; three Linears a, b, c and what is handed in."""

    def __init__(self, body: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(SIZE, SIZE) for _ in range(3))
        for name, part in parts.items():
            setattr(self, name, part)
        self.body = body

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.body(self, *args, **kwargs)


def layers(make: Callable[[nn.Linear], nn.Module]) -> nn.Module:
    """Three Linears, each changed by ``make``, with tanh between."""
    return nn.Sequential(*(part for _ in range(3) for part in (make(nn.Linear(SIZE, SIZE)), nn.Tanh())))


class LowRank(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Parameter(torch.randn(SIZE, 2)), nn.Parameter(torch.randn(2, SIZE))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.left @ self.right


def adapted(layer: nn.Linear) -> nn.Module:
    layer.weight.requires_grad_(False)
    parametrize.register_parametrization(layer, "weight", LowRank())
    return layer


def recurrent(kind: type[nn.RNNBase], **how: Any) -> nn.Module:
    model = Of(
        lambda m, x: m.out(m.rnn(m.a(x))[0].relu()),
        rnn=kind(SIZE, SIZE, 2, batch_first=True, dropout=0.3, **how),
    )
    model.out = nn.Linear(how.get("proj_size", SIZE) * (2 if how.get("bidirectional") else 1), SIZE)
    return model


def gru_cell(m: Of, x: Tensor) -> Tensor:
    h = torch.zeros(2, SIZE)
    for step in x.unbind(1):
        h = m.cell(step, h)
    return m.c(h)


def einsum_attention(m: Of, x: Tensor) -> Tensor:
    q, k, v = (part(x).view(2, 5, 2, 4) for part in (m.a, m.b, m.c))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / 2
    hidden = torch.ones(5, 5, dtype=torch.bool).triu(1)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("bhij,bjhd->bihd", weights, v).reshape(2, 5, SIZE) + x


def scans(m: Of, x: Tensor) -> Tensor:
    gate = m.a(x).sigmoid()
    return m.c(gate.log().cumsum(1).exp() * m.b(x) + gate.cumprod(1) + x.logcumsumexp(1))


def complex_layer(m: Of, x: Tensor) -> Tensor:
    spectrum = torch.fft.rfft(m.a(x)) * m.filter
    turned = torch.view_as_complex(m.b(x).view(2, 5, 4, 2)) * torch.polar(torch.ones(4), torch.rand(4))
    return m.c(torch.fft.irfft(spectrum, n=SIZE) + torch.view_as_real(turned).flatten(-2))


def vector_quantized(m: Of, x: Tensor) -> Tensor:
    x = m.a(x)
    chosen = torch.cdist(x, m.codes.weight).argmin(1)
    m.count.index_add_(0, chosen, torch.ones(len(x)))
    code = m.codes(chosen)
    return m.b(x + (code - x).detach() + 0.1 * F.mse_loss(code, x.detach()))


def graph_network(m: Of, x: Tensor) -> Tensor:
    source, target = m.edges
    for layer in (m.a, m.b, m.c):
        h = layer(x)
        index = target[:, None].expand(-1, SIZE)
        x = torch.zeros_like(h).scatter_add(0, index, h[source]).relu()
        x = x + torch.zeros_like(h).scatter_reduce(0, index, h[source], "amax")
    return torch.sparse.mm(m.adjacent, x)


def sampled(m: Of, x: Tensor) -> Tensor:
    normal = torch.distributions.Normal(m.a(x), F.softplus(m.b(x)))
    drawn = normal.rsample()
    return m.c(drawn) + normal.log_prob(drawn)


def teacher(m: Of, x: Tensor) -> Tensor:
    with torch.inference_mode():
        wanted = m.b(x)
    with torch.no_grad():
        shift = m.a(x).mean()
    return m.c(torch.tanh(m.a(x))) - wanted.clone() + shift


def chosen_kernel(m: Of, x: Tensor) -> Tensor:
    q, k, v = (part(x).view(2, 5, 2, 4).transpose(1, 2) for part in (m.a, m.b, m.c))
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def ensemble(m: Of, x: Tensor) -> Tensor:
    many = torch.vmap(lambda weight, bias: torch.tanh(x @ weight + bias))(m.weights, m.biases)
    return m.c(m.a(many.mean(0)) + torch.func.jvp(lambda v: m.b(v).tanh(), (x,), (x,))[1])


def solved(m: Of, x: Tensor) -> Tensor:
    weight = m.a.weight + 3 * torch.eye(SIZE)
    x = torch.linalg.solve(weight, m.b(x).T).T
    lower = torch.linalg.cholesky(weight @ weight.T + torch.eye(SIZE))
    return m.c(x @ torch.linalg.inv(weight)) + torch.linalg.svd(m.c.weight)[1] + x @ lower


@dataclasses.dataclass
class Outcome:
    value: Tensor
    parts: dict[str, Any]


def structured(m: Of, batch: dict[str, Any], flag: bool) -> Outcome:
    first, (second, third) = batch["x"], batch["rest"]
    value = m.c(torch.relu(m.b(m.a(first) + second)))
    return Outcome(value, {"side": m.a(third) if flag else None, "count": 3})


def remembered(m: Of, x: Tensor) -> Tensor:
    m.seen = m.a(x).tanh()
    m.penalty = m.seen.pow(2).mean()
    return m.c(m.b(m.seen)) + m.penalty


@torch.jit.script
def scripted(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def grouped_experts(m: Of, x: Tensor) -> Tensor:
    """Experts in one product of float32 groups whose sizes depend on data."""
    x, chosen = m.a(x), m.b(x)[:, :4].argmax(1)
    order = chosen.argsort(stable=True)
    ends = F.one_hot(chosen, 4).sum(0).cumsum(0).to(torch.int32)
    return m.c(F.grouped_mm(x[order], m.experts, offs=ends))


class Averages(nn.Module):
    """Buffers that the forward assigns anew, changes in place and reads."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(SIZE, SIZE)
        self.mean, self.last = nn.Buffer(torch.zeros(SIZE)), nn.Buffer(torch.zeros(3, SIZE))

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x).tanh()
        self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
        with torch.no_grad():
            self.last[1:] = self.last[:-1].clone()
            self.last[0] = y.mean(0)
        return y + self.mean + self.last.mean(0)


def narrow() -> nn.Module:
    parts = (nn.Sequential(nn.Linear(SIZE, SIZE), nn.LayerNorm(SIZE), nn.Dropout(0.1)) for _ in range(3))
    return nn.Sequential(*parts).bfloat16()


class Hooking(nn.Module):
    """Puts a hook on its layer and fills a cache when it is called for the first time."""

    ready = False

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.cache = nn.Linear(SIZE, SIZE), dict[str, Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        if not self.ready:
            self.ready = True
            self.inner.register_forward_hook(lambda layer, args, value: value * 1.5)
        if "shift" not in self.cache:
            self.cache["shift"] = torch.arange(SIZE) / SIZE
        return self.inner(x).tanh() + self.cache["shift"]


def unread_draws(m: Of, x: Tensor) -> Tensor:
    """Masks that nothing reads move the random state; a rate of 1 does not."""
    x = F.dropout(m.a(x), 0.3)
    F.dropout(m.a(x), 0.5)
    return m.c(F.dropout(m.b(x) + F.dropout(x, 1.0), 0.3))


class Windowed(nn.Module):
    """Sets an attribute from the shape of its input, as often as it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.shift = nn.Linear(SIZE, SIZE), 2

    def forward(self, x: Tensor) -> Tensor:
        self.shift = 0 if x.shape[1] <= 5 else 2
        return self.inner(x.roll(self.shift, 1)).tanh()


class ReadOnly(dict[str, Any]):
    """A dict that nothing can be written to, as configurations of models are."""

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise TypeError("read-only")

    __setitem__ = __delitem__ = update = clear = pop = popitem = setdefault = _refuse

    def __deepcopy__(self, _: Any) -> ReadOnly:
        return self


def chosen_rows(m: Of, x: Tensor) -> Tensor:
    """How many rows are added to the one of m.shift depends on data."""
    x = m.a(x)
    kept = x[x[:, 0] > 0] + m.shift
    return m.c(x + m.b(kept).tanh().sum(0))


def normed_transpose(m: Of, x: Tensor) -> Tensor:
    """The real result of the norm is dense, the one that torch foretells is transposed."""
    return m.c(m.norm(m.a(x).tanh().transpose(1, 2)).transpose(1, 2))


def first_kernel(m: Of, x: Tensor) -> Tensor:
    q, k, v = (part(x).view(2, 5, 2, 4).transpose(1, 2) for part in (m.a, m.b, m.c))
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(y, k, v)


def experts(m: Of, x: Tensor) -> Tensor:
    """Every expert gets the rows that chose it."""
    x = m.a(x)
    chosen, y = x.argmax(1) % 2, torch.zeros_like(x)
    for index, expert in enumerate((m.b, m.c)):
        (place,) = torch.where(chosen == index)
        y = y.index_add(0, place, expert(x[place]))
    return y


class Redone(torch.autograd.Function):
    """Computes its forward again in the backward and differentiates that, on leaves of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return (x @ weight).tanh()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight = (tensor.detach().requires_grad_(True) for tensor in ctx.saved_tensors)
        with torch.enable_grad():
            torch.autograd.backward((x @ weight).tanh(), grads)
        return x.grad, weight.grad


def spoken(m: Of, x: Tensor) -> Tensor:
    """CTC losses of padded, joined, single and hopeless targets."""
    x = m.c(m.b(m.a(x)).tanh()).log_softmax(-1)  # five steps of two samples
    steps, x = torch.tensor([5, 4]), x.transpose(0, 1)
    padded = torch.tensor([[1, 2, 0], [3, 3, 4]])
    return (
        F.ctc_loss(x, padded, steps, torch.tensor([2, 3]), zero_infinity=True)
        + F.ctc_loss(x, torch.tensor([1, 2, 7]), (5, 4), (2, 1), reduction="sum")
        + F.ctc_loss(x, padded, steps, torch.tensor([2, 1]), reduction="none").sum()
        + F.ctc_loss(x[:, 0], padded[0, :2], steps[0], torch.tensor(2), blank=7)
        + nn.CTCLoss()(x, padded[padded > 0], steps, (padded > 0).sum(1))
    )


@functools.lru_cache
def phases(size: int) -> Tensor:
    return torch.arange(size) / size


class Phases(nn.Module):
    """Keeps tables in caches of functions, as rotary tables are kept."""

    @functools.lru_cache(maxsize=4)  # noqa: B019
    def table(self, size: int) -> Tensor:
        return torch.linspace(0, 1, size)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table(x.shape[-1]) * phases(x.shape[-1])


def rows(*shape: int) -> Callable[[], Any]:
    return lambda: ((torch.randn(*shape),), {})


def numbers(*shape: int) -> Callable[[], Any]:
    return lambda: ((torch.randint(0, 9, shape),), {})


def nested() -> Any:
    batch = {"x": torch.randn(6, SIZE), "rest": [torch.randn(6, SIZE), torch.randn(6, SIZE)]}
    return (), {"batch": batch, "flag": True}


FLAT, SEQUENCE, IMAGE = rows(6, SIZE), rows(2, 5, SIZE), rows(2, 3, 8, 8)

KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "weight norm": (lambda: layers(parametrizations.weight_norm), FLAT),
    "spectral norm": (lambda: layers(parametrizations.spectral_norm), FLAT),
    "spectral norm, by hook": (lambda: layers(nn.utils.spectral_norm), FLAT),
    "orthogonal": (lambda: layers(parametrizations.orthogonal), FLAT),
    "adapters as parametrization": (lambda: layers(adapted), FLAT),
    "embedding bag": (
        lambda: nn.Sequential(nn.EmbeddingBag(9, SIZE), nn.Linear(SIZE, SIZE), nn.Tanh()), numbers(6, 4)
    ),
    "embedding, padded and scaled": (
        lambda: nn.Sequential(
            nn.Embedding(9, SIZE, padding_idx=0, scale_grad_by_freq=True), nn.Linear(SIZE, SIZE), nn.Tanh()
        ),
        numbers(6, 4),
    ),
    "GRU, both ways, dropout": (lambda: recurrent(nn.GRU, bidirectional=True), SEQUENCE),
    "RNN, dropout": (lambda: recurrent(nn.RNN), SEQUENCE),
    "LSTM, projected, dropout": (lambda: recurrent(nn.LSTM, proj_size=4), SEQUENCE),
    "GRU cell": (lambda: Of(gru_cell, cell=nn.GRUCell(SIZE, SIZE)), SEQUENCE),
    "transposed convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1), nn.GroupNorm(2, 8), nn.SiLU(), nn.ConvTranspose2d(8, 8, 4, 2, 1),
            nn.InstanceNorm2d(8, affine=True), nn.ConvTranspose2d(8, 4, 3, 1, 1), nn.PixelShuffle(2),
        ),
        IMAGE,
    ),
    "pools and channel dropout": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1), nn.Dropout2d(0.3), nn.SELU(), nn.AvgPool2d(2), nn.Conv2d(4, 4, 1),
            nn.FeatureAlphaDropout(0.2), nn.FractionalMaxPool2d(2, output_size=2), nn.RReLU(), nn.Flatten(),
            nn.Linear(16, 4),
        ),
        IMAGE,
    ),
    "dropout in bfloat16": (narrow, lambda: ((torch.randn(6, SIZE, dtype=torch.bfloat16),), {})),
    "grouped experts": (
        lambda: Of(grouped_experts, experts=nn.Parameter(torch.randn(4, SIZE, SIZE))), FLAT
    ),
    "draws that nothing reads": (lambda: Of(unread_draws), FLAT),
    "an attribute set from a shape": (lambda: nn.Sequential(Windowed(), Windowed(), Windowed()), SEQUENCE),
    "hooks and caches made at the first call": (
        lambda: nn.Sequential(Hooking(), Hooking(), Hooking()), FLAT
    ),
    "assigned buffers": (lambda: nn.Sequential(*(Averages() for _ in range(3))), FLAT),
    "einsum attention": (lambda: Of(einsum_attention), SEQUENCE),
    "scans": (lambda: Of(scans), SEQUENCE),
    "complex": (
        lambda: Of(complex_layer, filter=nn.Parameter(torch.randn(5, dtype=torch.cfloat))), SEQUENCE
    ),
    "vector quantization": (
        lambda: Of(vector_quantized, codes=nn.Embedding(5, SIZE), count=nn.Buffer(torch.zeros(5))), FLAT
    ),
    "graph network, sparse matrix": (
        lambda: Of(graph_network, edges=torch.randint(0, 6, (2, 12)), adjacent=torch.eye(6).to_sparse()), FLAT
    ),
    "distributions": (lambda: Of(sampled), FLAT),
    "teacher under inference_mode": (lambda: Of(teacher), FLAT),
    "chosen attention kernel": (lambda: Of(chosen_kernel), SEQUENCE),
    "a dict that cannot be written": (
        lambda: Of(lambda m, x: m.c(m.b(m.a(x)) * m.config["by"]), config=ReadOnly(by=2.0)), FLAT
    ),
    "rows chosen by data": (lambda: Of(chosen_rows, shift=nn.Parameter(torch.randn(1, SIZE))), FLAT),
    "a norm of a transpose": (lambda: Of(normed_transpose, norm=nn.BatchNorm1d(SIZE)), SEQUENCE),
    "log sigmoid of a transpose": (
        lambda: Of(lambda m, x: m.c(F.logsigmoid(m.a(x).transpose(1, 2)).transpose(1, 2).exp())), SEQUENCE
    ),
    "attention kernels that the CPU takes first": (lambda: Of(first_kernel), SEQUENCE),
    "experts by torch.where": (lambda: Of(experts), FLAT),
    "a Function that differentiates by itself": (
        lambda: Of(lambda m, x: m.c(Redone.apply(m.a(x), m.b.weight))), FLAT
    ),
    "vmap and jvp": (
        lambda: Of(
            ensemble, weights=nn.Parameter(torch.randn(3, SIZE, SIZE)),
            biases=nn.Parameter(torch.randn(3, SIZE)),
        ),
        FLAT,
    ),
    "linear algebra": (lambda: Of(solved), FLAT),
    "tables in caches of functions": (
        lambda: Of(lambda m, x: m.c(m.phases(m.b(m.phases(m.a(x))))), phases=Phases()), FLAT
    ),
    "CTC losses": (lambda: Of(spoken), SEQUENCE),
    "nested arguments and results": (lambda: Of(structured), nested),
    "values kept in attributes": (lambda: Of(remembered), FLAT),
    "rows repeated by data": (
        lambda: Of(lambda m, x: m.c(m.b(x) + x.repeat_interleave((m.a(x)[:, 0] > 0).long() + 1, 0).sum(0))),
        FLAT,
    ),
    "gumbel": (lambda: Of(lambda m, x: m.c(F.gumbel_softmax(m.a(x), hard=True) @ m.b.weight)), FLAT),
    "functional call": (
        lambda: Of(
            lambda m, x: m.c(torch.func.functional_call(m.b, {"weight": m.a.weight * 2}, (m.a(x).relu(),)))
        ),
        FLAT,
    ),
    "parameters in .data": (lambda: Of(lambda m, x: m.c(m.b(x) * m.a.weight.data.norm() + m.a(x))), FLAT),
}  # fmt: skip
