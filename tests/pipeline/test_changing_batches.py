"""Batches that change from step to step, are cut by the user, or have their batch in another dimension."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zbcompile
from tests.support.pipeline_oracle import same_state
from zbcompile import Microbatches
from zbcompile.compiler import form_table
from zbcompile.errors import InfeasibleError, PipelineError, ShapeError, UsageError

WIDTH = 6


def tokens(rows: int, length: int = 5, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed + 100 * rows + length)
    x, y = (torch.randint(0, 11, (rows, length), generator=generator) for _ in range(2))
    return x, y


def model_of() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU()) for _ in range(2)]
    return nn.Sequential(nn.Embedding(11, WIDTH), *layers, nn.Linear(WIDTH, 11))


def loss_of(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def compiled(model: nn.Module, rows: int = 8, count: int = 4, **options: Any) -> zbcompile.Pipeline:
    x, y = tokens(rows)
    given = {"example_args": (x,), "example_target": y, "loss_fn": loss_of, "time_limit": 0.3} | options
    return zbcompile.compile(model, 2, num_microbatches=count, **given)


def plain(model: nn.Module, pieces: Sequence[tuple[Tensor, Tensor]], loss_fn: Any = loss_of) -> list[Tensor]:
    """The loop that a step stands for: microbatches count by their rows."""
    total = sum(len(x) for x, _ in pieces)
    losses = []
    for x, y in pieces:
        loss = loss_fn(model(x), y)
        loss.backward(gradient=torch.full_like(loss, len(x) * len(pieces) / total))
        losses.append(loss.detach())
    for p in model.parameters():
        assert p.grad is not None
        p.grad.div_(len(pieces))
    return losses


def cut(x: Tensor, y: Tensor, rows: int) -> list[tuple[Tensor, Tensor]]:
    return list(zip(x.split(rows), y.split(rows), strict=True))


@pytest.mark.parametrize(
    ("rows", "length"), [(6, 5), (12, 5), (7, 5), (1, 5), (8, 9), (5, 3)], ids=lambda n: str(n)
)
def test_a_batch_of_another_size_or_length_has_the_gradients_of_the_plain_loop(
    rows: int, length: int
) -> None:
    model = model_of()
    reference = copy.deepcopy(model)
    pipeline = compiled(model)
    for batch in (tokens(8), tokens(rows, length), tokens(8, seed=1), tokens(rows, length, seed=1)):
        losses: list[Tensor] = []
        for m in (model, reference):
            m.zero_grad()
        output = pipeline.step(batch[0], target=batch[1], losses=losses, return_outputs=True)
        wanted = plain(reference, cut(*batch, rows=2))
        assert all(map(torch.equal, losses, wanted))
        assert torch.equal(output, torch.cat([reference(x) for x in batch[0].split(2)]).detach())
        same_state(model, reference)
    assert pipeline.step_number == 4


def test_a_batch_cut_by_the_user_counts_by_rows_and_keeps_its_order() -> None:
    model = model_of()
    reference = copy.deepcopy(model)
    pipeline = compiled(model)
    x, y = tokens(9)
    pieces = list(zip(x.split([2, 2, 1, 4]), y.split([2, 2, 1, 4]), strict=True))
    pipeline.step(Microbatches([p for p, _ in pieces]), target=Microbatches([t for _, t in pieces]))
    plain(reference, pieces)
    same_state(model, reference)

    model.zero_grad()
    reference.zero_grad()
    pipeline.step(Microbatches(x[:8].split(2)), target=y[:8])
    plain(reference, cut(x[:8], y[:8], 2))
    same_state(model, reference)

    example = {"example_args": (Microbatches(x.split(3)),), "example_target": Microbatches(y.split(3))}
    with pytest.raises(UsageError, match=r"another number of microbatches(?s:.)*4, as asked for; given: 3"):
        compiled(model_of(), **example)
    whole = zbcompile.compile(model := model_of(), 2, loss_fn=loss_of, time_limit=0.3, **example)
    whole.step(x, target=y)
    plain(reference := model_of(), cut(x, y, 3))
    same_state(model, reference)


def test_a_loss_that_is_a_sum_adds_up_whatever_the_sizes_are() -> None:
    def summed(logits: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum")

    model = model_of()
    reference = copy.deepcopy(model)
    pipeline = compiled(model, loss_fn=summed, scale_grads=False)
    x, y = tokens(7)
    total = pipeline.step(x, target=y, losses=(losses := []), return_outputs=True)
    assert total.shape == (7, 5, 11)
    for piece, target in cut(x, y, 2):
        summed(reference(piece), target).backward()
    same_state(model, reference)
    assert len(losses) == 4


class Tied(nn.Module):
    """A tied table over two stages, dropout and running statistics: what a step carries along."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.norm = nn.Embedding(11, WIDTH), nn.BatchNorm1d(WIDTH)
        self.inner, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.table(x).transpose(1, 2)).transpose(1, 2)
        return F.linear(self.dropout(torch.tanh(self.inner(hidden))), self.table.weight)


def test_tied_tables_running_statistics_and_dropout_go_on_from_run_to_run() -> None:
    """Microbatch 3 of a step draws the same numbers whether the step is one run or two."""
    x, y = tokens(12)
    found = []
    for given in ((x, y), (Microbatches(x.split(3)), Microbatches(y.split(3)))):
        model = Tied()
        pipeline = compiled(model, rows=12)
        pipeline.step(given[0], target=given[1], losses=(losses := []))
        found.append((losses, [p.grad for p in model.parameters()], [b.clone() for b in model.buffers()]))
    ragged = Tied()
    pipeline = compiled(ragged, rows=12)
    pieces = [*x[:9].split(3), x[9:11]], [*y[:9].split(3), y[9:11]]
    pipeline.step(Microbatches(pieces[0]), target=Microbatches(pieces[1]), losses=(losses := []))
    assert all(map(torch.equal, losses[:3], found[0][0][:3]))
    for one, other in zip(found[0], found[1], strict=True):
        assert all(map(torch.equal, one, other))
    assert ragged.norm.num_batches_tracked == 4
    assert ragged.table.weight.grad is not None


def test_forms_that_are_not_used_make_room_for_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(form_table, "MAX_FORMS", 2)
    pipeline = compiled(model_of())
    for length in range(2, 8):
        x, y = tokens(8, length)
        pipeline.step(x, target=y)
    assert len(pipeline._ready()._forms.names) == 3
    x, y = tokens(8)
    pipeline.step(x, target=y)


def test_what_cannot_be_followed_is_refused_and_the_next_step_runs() -> None:
    model = model_of()
    pipeline = compiled(model, memory_limit=200_000)
    x, y = tokens(8)
    long = tokens(8, 4000)
    with pytest.raises(InfeasibleError):
        pipeline.step(long[0], target=long[1])
    with pytest.raises(UsageError, match=r"differ in their rows.*target"):
        pipeline.step(x, target=y[:6])
    with pytest.raises(UsageError, match="empty"):
        pipeline.step(x[:0], target=y[:0])
    with pytest.raises(UsageError, match="microbatches"):
        pipeline.step(Microbatches(x.split(2)), target=Microbatches(y.split(4)))
    with pytest.raises(UsageError, match="one tensor for each microbatch"):
        Microbatches([x, x.float()])
    with pytest.raises(ShapeError, match=r"\[8, 5\] torch.int64"):
        pipeline.step(x[0], target=y)
    assert all(p.grad is None for p in model.parameters())
    pipeline.step(x, target=y)

    refusing = compiled(model_of(), other_shapes="refuse")
    with pytest.raises(ShapeError, match=r"args\[0\].*\n.*\[8, 5\].*\[6, 5\]"):
        refusing.step(x[:6], target=y[:6])
    with pytest.raises(UsageError, match="unknown other_shapes"):
        compiled(model_of(), other_shapes="guess")


class Sequences(nn.Module):
    """Sequences in [S, B, D], with a bias for each place that has no batch dimension."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 12, dropout=0.0)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        return self.last(self.layer(x) + bias)


@pytest.mark.parametrize("batch_dim", [1, {0: 1, "bias": None, "target": 1}], ids=["one", "each"])
def test_the_batch_may_be_another_dimension(batch_dim: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(4, 8, WIDTH, generator=generator) for _ in range(2))
    bias = torch.randn(4, 1, WIDTH, generator=generator)
    model = Sequences()
    reference = copy.deepcopy(model)
    pipeline = zbcompile.compile(
        model, 2, example_args=(x, bias), example_target=y, loss_fn=F.mse_loss, num_microbatches=4,
        batch_dim=batch_dim, result_dim=1, time_limit=0.3,
    )  # fmt: skip
    for rows in (8, 5):
        model.zero_grad()
        reference.zero_grad()
        output = pipeline.step(x[:, :rows], bias, target=y[:, :rows], return_outputs=True)
        pieces = list(zip(x[:, :rows].split(2, 1), y[:, :rows].split(2, 1), strict=True))
        outputs = []
        for piece, target in pieces:
            outputs.append(reference(piece, bias))
            loss = F.mse_loss(outputs[-1], target)
            loss.backward(gradient=torch.full_like(loss, piece.shape[1] * len(pieces) / rows))
        for p in reference.parameters():
            assert p.grad is not None
            p.grad.div_(len(pieces))
        same_state(model, reference)
        assert torch.equal(output, torch.cat(outputs, 1))
    reference.eval()
    found = pipeline.eval(x[:, :4], bias)  # without the target, whose dimension is named
    assert torch.equal(found, torch.cat([reference(piece, bias) for piece in x[:, :4].split(1, 1)], 1))


def test_a_batch_dimension_that_cannot_be_is_refused() -> None:
    x = torch.randn(4, 8, WIDTH)
    example: dict[str, Any] = {"example_args": (x, x[:, :1]), "example_target": x, "loss_fn": F.mse_loss}
    for batch_dim, words in (
        ({"nothing": 1}, "names no tensor"),
        ({"bias": 1, 0: 1}, "another size"),
        ({0: 3}, "lacks its batch dimension|no batch dimension"),
        ("x", "must be a dimension"),
    ):
        with pytest.raises(UsageError, match=words):
            zbcompile.compile(Sequences(), 2, batch_dim=batch_dim, **example)  # type: ignore[arg-type]


def test_metrics_of_the_loss_come_beside_it() -> None:
    def with_metrics(logits: Tensor, target: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        loss = loss_of(logits, target)
        right = (logits.argmax(-1) == target).float()
        return loss, {"perplexity": loss.exp(), "right": right.mean(1)}

    model = model_of()
    reference = copy.deepcopy(model)
    pipeline = compiled(model, loss_fn=with_metrics, verify=True)
    x, y = tokens(7)
    metrics: dict[str, Tensor] = {}
    assert pipeline.step(x, target=y, losses=(losses := []), metrics=metrics) is None
    wanted = plain(reference, cut(x, y, 2))
    same_state(model, reference)
    assert torch.equal(metrics["perplexity"], torch.stack(losses).exp())
    assert torch.equal(torch.stack(losses), torch.stack(wanted))
    each = [with_metrics(reference(p), t)[1]["right"] for p, t in cut(x, y, 2)]
    assert torch.equal(metrics["right"], torch.cat(each))
    pipeline.eval(x, target=y, metrics=(found := {}))
    assert set(found) == {"perplexity", "right"}

    def with_number(logits: Tensor, target: Tensor) -> tuple[Tensor, dict[str, Any]]:
        return loss_of(logits, target), {"rows": len(target)}

    with pytest.raises((UsageError, PipelineError), match="metric"):
        compiled(model_of(), loss_fn=with_number)
