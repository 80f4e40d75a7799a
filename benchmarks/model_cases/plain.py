"""Models of torch alone: layers that people write themselves, and ways to call torch that need care."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from benchmarks.model_cases.case import BATCH, LENGTH, VOCABULARY, Inputs, ModelCase, mean_square, text

__all__ = ["PLAIN"]

WIDTH, HEADS = 32, 4


def _split_heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


class Block(nn.Module):
    """A block of a transformer; ``attend(q, k, v)`` is the attention."""

    def __init__(self, attend: Callable[[Tensor, Tensor, Tensor], Tensor], dropout: float = 0.1) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH), nn.Dropout(dropout))
        self.attend = attend

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (_split_heads(t) for t in self.qkv(self.first(x)).chunk(3, -1))
        x = x + self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.second(x))


def _causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention(q, k, v, score_mod=lambda score, b, h, i, j: torch.where(i >= j, score, -math.inf))


def _flex_blocks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, q.shape[2], k.shape[2], device="cpu")
    return flex_attention(q, k, v, block_mask=mask)


class Language(nn.Module):
    """nanoGPT: returns (logits, loss), and loss is None without targets."""

    def __init__(
        self, attend: Callable[[Tensor, Tensor, Tensor], Tensor] = _causal, compiled: bool = False
    ) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        blocks = [Block(attend) for _ in range(3)]
        self.blocks = nn.ModuleList(torch.compile(b, backend="aot_eager") if compiled else b for b in blocks)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return logits, loss


def _pair_loss(output: Any, target: Any) -> Tensor:
    return output[1]


def _ids_and_targets(model: Any) -> Inputs:
    ids = text()
    return Inputs((ids, ids.clone()))


class Residual(nn.Module):
    """Linear, a body, Linear, in three residual blocks."""

    def __init__(self, body: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), body(), nn.Linear(WIDTH, WIDTH)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


class Calls(nn.Module):
    """A model given as a function of itself and x; three Linears and what is handed in."""

    def __init__(self, body: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        for name, part in parts.items():
            setattr(self, name, part)
        self.body = body

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.body(self, *args, **kwargs)


def _limited_embedding(m: Any, ids: Tensor) -> Tensor:
    x = m.table(ids)
    for layer in m.layers:
        x = layer(x).tanh()
    return x


def _layerdrop(m: Any, x: Tensor) -> Tensor:
    for layer in m.layers:
        if not m.training or torch.rand([]) > 0.1:
            x = x + layer(x).tanh()
    return x


def _stochastic_depth(m: Any, x: Tensor) -> Tensor:
    for layer in m.layers:
        keep = torch.empty(x.shape[0], 1, 1).bernoulli_(0.8) / 0.8
        x = x + layer(x).tanh() * keep
    return x


def _checked(m: Any, x: Tensor) -> Tensor:
    if torch.isnan(x).any():
        raise ValueError("the input has a NaN")
    for layer in m.layers:
        x = layer(x).tanh()
    return x


def _clipped_if_infinite(m: Any, x: Tensor) -> Tensor:
    for layer in m.layers:
        x = layer(x).tanh()
        if torch.isinf(x).any():
            x = x.clamp(-1e4, 1e4)
    return x


def _experts_by_index(m: Any, x: Tensor) -> Tensor:
    x = x.flatten(0, 1)
    weights, chosen = m.router(x).softmax(-1).topk(2, -1)
    out = torch.zeros_like(x)
    for number, expert in enumerate(m.layers):
        row, place = torch.where(chosen == number)
        out.index_add_(0, row, expert(x[row]) * weights[row, place, None])
    return out


def _experts_if_hit(m: Any, x: Tensor) -> Tensor:
    x = x.flatten(0, 1)
    weights, chosen = m.router(x).softmax(-1).topk(2, -1)
    hits = F.one_hot(chosen, 3).permute(2, 1, 0)
    out = torch.zeros_like(x)
    for number in range(3):
        place, row = torch.where(hits[number])
        if row.shape[0] > 0:
            out.index_add_(0, row, m.layers[number](x[row]) * weights[row, place, None])
    return out


def _experts_dense(m: Any, x: Tensor) -> Tensor:
    weights, chosen = m.router(x).softmax(-1).topk(2, -1)
    dense = torch.zeros_like(m.router(x)).scatter(-1, chosen, weights)
    return sum(expert(x) * dense[..., n : n + 1] for n, expert in enumerate(m.layers))


def _quantized(m: Any, x: Tensor) -> Tensor:
    x = m.layers[0](x)
    code = m.table(torch.cdist(x, m.table.weight).argmin(-1))
    return m.layers[2](m.layers[1](x + (code - x).detach()))


def _scan(m: Any, x: Tensor) -> Tensor:
    state = torch.zeros_like(x[:, 0])
    states = []
    for step in x.unbind(1):
        state = torch.tanh(m.layers[0](step) + m.layers[1](state))
        states.append(state)
    return m.layers[2](torch.stack(states, 1))


def _spectral(m: Any, x: Tensor) -> Tensor:
    for layer in m.layers:
        x = x + layer(torch.fft.fft2(x).real)
    return x


def _second_order(m: Any, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    y = x
    for layer in m.layers:
        y = layer(y).tanh()
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return y + slope


def _checkpointed(m: Any, x: Tensor) -> Tensor:
    for layer in m.layers:
        x = x + checkpoint(
            lambda t, layer=layer: F.dropout(layer(t).relu(), 0.1, m.training), x, use_reentrant=False
        )
    return x


def _half(m: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        for layer in m.layers:
            x = layer(x).tanh()
    return x.float()


def _ensemble(m: Any, x: Tensor) -> Tensor:
    x = torch.func.vmap(lambda t: m.layers[0](t).tanh())(x)
    return m.layers[2](m.layers[1](x).tanh())


class Teacher(nn.Module):
    """A student and a frozen teacher."""

    def __init__(self) -> None:
        super().__init__()
        bodies = (nn.Sequential(*(Residual(nn.GELU) for _ in range(2))) for _ in range(2))
        self.student, self.teacher = bodies
        self.teacher.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = self.teacher(x)
        return F.mse_loss(self.student(x), wanted)


class Adapter(nn.Module):
    """LoRA on a frozen Linear."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + self.up(self.down(x))


class Convolutions(nn.Module):
    """An image classifier with a norm."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inside in (3, 16, 16):
            layers += [nn.Conv2d(inside, 16, 3, padding=1), norm(16), nn.ReLU(inplace=True)]
        self.layers = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Recurrent(nn.Module):
    """An embedding, a recurrent layer and a head."""

    def __init__(self, kind: type[nn.RNNBase], **how: Any) -> None:
        super().__init__()
        self.table, self.inside = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.rnn = kind(WIDTH, 16, batch_first=True, **how)
        self.head = nn.Linear(32 if how.get("bidirectional") else 16, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.rnn(self.inside(self.table(ids)).relu())[0])


def _cross(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


def _own(output: Tensor, target: Any) -> Tensor:
    return output


def _plain(name: str, build: Callable[[], nn.Module], batch: Any, loss: Any, stages: int = 3) -> ModelCase:
    return ModelCase(name, "torch alone", build, batch, loss, "", stages)


def _rows(model: Any) -> Inputs:
    return Inputs((torch.randn(BATCH, 6, WIDTH),))


def _pictures(model: Any) -> Inputs:
    return Inputs((torch.randn(BATCH, 3, 16, 16),))


def _next(model: Any) -> Inputs:
    ids = text()
    return Inputs((ids,), target=ids.clone())


def _only_ids(model: Any) -> Inputs:
    return Inputs((text(),))


def _calls(
    name: str, body: Callable[..., Any], batch: Any = _rows, parts: Callable[[], dict[str, Any]] = dict
) -> ModelCase:
    return _plain(name, lambda: Calls(body, **parts()), batch, mean_square)


def _table(**how: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {"table": nn.Embedding(VOCABULARY, WIDTH, **how)}


def _router() -> dict[str, Any]:
    return {"router": nn.Linear(WIDTH, 3)}


PLAIN: list[ModelCase] = [
    _plain("nanoGPT, returns (logits, loss)", Language, _ids_and_targets, None),
    _plain("nanoGPT, loss taken from the result", Language, _ids_and_targets, _pair_loss),
    _plain("nanoGPT, whole model compiled", lambda: torch.compile(Language(), backend="aot_eager"),
         _ids_and_targets, _pair_loss),
    _plain("nanoGPT, every block compiled", lambda: Language(compiled=True), _ids_and_targets, _pair_loss),
    _plain("nanoGPT, flex_attention", lambda: Language(_flex), _ids_and_targets, _pair_loss),
    _plain("nanoGPT, flex_attention with a block mask", lambda: Language(_flex_blocks), _ids_and_targets,
         _pair_loss),
    _plain("TransformerEncoder", lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, HEADS, 64,
         batch_first=True), 3), _rows, mean_square),
    _plain("nn.Transformer", lambda: nn.Transformer(WIDTH, HEADS, 2, 2, 64, batch_first=True),
           lambda m: Inputs((torch.randn(BATCH, 5, WIDTH), torch.randn(BATCH, 6, WIDTH))), mean_square),
    _plain("LSTM", lambda: Recurrent(nn.LSTM, num_layers=2, bidirectional=True), _next, _cross),
    _plain("GRU", lambda: Recurrent(nn.GRU, num_layers=2), _next, _cross),
    _plain("BatchNorm", lambda: Convolutions(nn.BatchNorm2d), _pictures, mean_square),
    _plain("GroupNorm", lambda: Convolutions(lambda n: nn.GroupNorm(4, n)), _pictures, mean_square),
    _plain("InstanceNorm", lambda: Convolutions(lambda n: nn.InstanceNorm2d(n, affine=True)), _pictures,
         mean_square),
    _plain("spectral norm", lambda: Residual(lambda: parametrizations.spectral_norm(nn.Linear(WIDTH,
         WIDTH))), _rows, mean_square),
    _plain("weight norm", lambda: Residual(lambda: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))),
         _rows, mean_square),
    _plain("orthogonal", lambda: Residual(lambda: parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH))),
         _rows, mean_square),
    _plain("LoRA", lambda: Residual(Adapter), _rows, mean_square),
    _plain("RReLU", lambda: Residual(nn.RReLU), _rows, mean_square),
    _plain("student and teacher", Teacher, _rows, _own),
    _calls("Embedding(max_norm)", _limited_embedding, _only_ids, _table(max_norm=1.0)),
    _calls("Embedding(scale_grad_by_freq)", _limited_embedding, _only_ids, _table(scale_grad_by_freq=True)),
    _calls("Embedding(sparse)", _limited_embedding, _only_ids, _table(sparse=True)),
    _calls("LayerDrop", _layerdrop),
    _calls("stochastic depth", _stochastic_depth),
    _calls("a branch that only checks", _checked),
    _calls("a clamp if anything is infinite", _clipped_if_infinite),
    _calls("experts by index", _experts_by_index, parts=_router),
    _calls("experts by index where hit", _experts_if_hit, parts=_router),
    _calls("experts, dense", _experts_dense, parts=_router),
    _calls("vector quantization", _quantized, parts=_table()),
    _calls("a loop over time", _scan),
    _calls("Fourier layers", _spectral),
    _calls("a gradient in the forward", _second_order),
    _calls("checkpoints with dropout", _checkpointed),
    _calls("autocast", _half),
    _calls("vmap", _ensemble),
]  # fmt: skip
