"""What crosses a cut, what a loss is and what is frozen (data/public-failures.md), against autograd.

The test ids carry the number of the report.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.pipeline_oracle import SIZE, Calls, assert_right, batch_of, joined, mean_square, same


def report(*rows: tuple[str, Any]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("body", [row[1] for row in rows], ids=[row[0] for row in rows])


# Values that skip stages or are not used, and what needs no gradient.


def skipping(m: Calls, x: Tensor) -> Tensor:
    kept = m.first(x)
    return m.third(torch.relu(m.second(torch.relu(kept)))) + kept


def skipping_twice(m: Calls, x: Tensor) -> Tensor:
    one = torch.tanh(m.first(x))
    two = torch.tanh(m.second(one))
    return m.third(torch.tanh(m.norm(two)) + one) * one + two


def skipping_to_the_loss(m: Calls, x: Tensor) -> tuple[Tensor, Tensor]:
    one = m.first(x)
    return m.third(m.second(one).relu()), one


def unused_by_the_next(m: Calls, x: Tensor) -> Tensor:
    one, two = torch.tanh(m.first(x)), torch.sigmoid(m.first(x))
    return m.third(m.second(one).relu() + two)


def unused_at_all(m: Calls, x: Tensor) -> Tensor:
    one, two = m.first(x).chunk(2, dim=1)
    extra = m.norm(torch.cat([two, two], 1))
    del extra
    return m.third(m.second(torch.cat([one, one], 1)).relu())


def two_results_one_unused(m: Calls, x: Tensor) -> Tensor:
    values, _ = torch.max(m.first(x).unflatten(1, (3, 2)), dim=2)
    return m.third(m.second(values.repeat(1, 2)).relu())


@report(
    ("pytorch#127964-PiPPy#969-stage-0-in-stage-2", skipping),
    ("pytorch#127964-several-skips", skipping_twice),
    ("pytorch#127964-skip-to-the-loss", skipping_to_the_loss),
    ("pytorch#152827-unused-by-the-next", unused_by_the_next),
    ("pytorch#152827-unused-at-all", unused_at_all),
    ("pytorch#152827-one-of-two-results", two_results_one_unused),
)
def test_values_that_skip_stages(body: Any) -> None:
    pipeline = assert_right(
        Calls(body),
        batch_of(SIZE),
        stages=3,
        loss=mean_square,
        split_points=["second", "third"],
        exact=body is not skipping_twice,
    )
    if body is skipping:
        assert any(p.targets == (2,) or p.targets == (1, 2) for p in pipeline[0].compiled.outputs)


def choose_by_activation(m: Calls, x: Tensor) -> Tensor:
    """Integers and a mask that come of activations: they cannot be computed again, so they cross."""
    y = m.first(x)
    order, mask = y.argsort(dim=1), y > 0
    z = torch.relu(m.second(y))
    return m.third(torch.where(mask, z.gather(1, order), 0.5 * z))


def masks_and_positions(m: Calls, x: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
    y = m.first(x) + positions.unsqueeze(1)
    y = torch.relu(m.second(y)).masked_fill(mask, 0.0)
    return m.third(y) * positions.unsqueeze(1)


def counted_in_stage_one(m: Calls, x: Tensor) -> Tensor:
    y = m.first(x)
    chosen = torch.zeros_like(y, dtype=torch.bool).scatter(1, y.topk(2, dim=1).indices, True)
    return m.third(torch.relu(m.second(y))) * chosen + chosen.sum(1, keepdim=True)


@report(
    ("pytorch#183024-computed", choose_by_activation),
    ("pytorch#183024-given", masks_and_positions),
    ("pytorch#183024-skipping", counted_in_stage_one),
)
def test_integers_and_masks_cross_without_gradient(body: Any) -> None:
    x = batch_of(SIZE)
    extra = (
        {"positions": torch.arange(6), "mask": torch.rand(6, SIZE) > 0.5}
        if body is masks_and_positions
        else {}
    )
    pipeline = assert_right(
        Calls(body), x, stages=3, loss=mean_square, split_points=["second", "third"], kwargs=extra
    )
    ports = [p for stage in pipeline for p in (*stage.compiled.inputs, *stage.compiled.outputs)]
    plain = [p for p in ports if not p.dtype.is_floating_point]
    assert plain
    assert not any(p.has_gradient for p in plain)
    carried = [e for e in pipeline.profile.edges if e.forward_bytes > e.backward_bytes]
    assert carried or body is masks_and_positions


class Rotary(nn.Module):
    """Angles computed once at the top and used by every block."""

    def __init__(self, blocks: int, learned: bool) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.scale = nn.Parameter(torch.ones(4)) if learned else None
        self.register_buffer("frequencies", 1.0 / 10 ** (torch.arange(4) / 4), persistent=False)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(blocks))

    def angles(self, length: int) -> tuple[Tensor, Tensor]:
        frequencies = self.frequencies if self.scale is None else self.frequencies * self.scale
        angle = torch.arange(length).unsqueeze(1) * frequencies
        return angle.cos(), angle.sin()

    def forward(self, x: Tensor) -> Tensor:
        cos, sin = self.angles(x.shape[1])
        for block in self.blocks:
            left, right = block(x).chunk(2, dim=-1)
            x = x + torch.cat([left * cos - right * sin, left * sin + right * cos], -1)
        return x


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("learned", [False, True], ids=["pytorch#184361-fixed", "pytorch#184361-learned"])
def test_rotary_module_used_by_every_block(learned: bool, stages: int) -> None:
    pipeline = assert_right(
        Rotary(4, learned), batch_of(5, 8), stages=stages, loss=mean_square, exact=not learned
    )
    if not learned:
        crossing = [p.shape for stage in pipeline for p in stage.compiled.inputs if p.source[0] == "stage"]
        assert (5, 4) not in crossing


@report(
    (
        "pytorch-PR#182644-parameter-before-second-input",
        lambda m, x, y: (m.second(m.first(x) * m.b)) + y * m.a.sum(),
    ),
    ("pytorch-PR#182644-second-input-first", lambda m, x, y: m.second(m.first(y) - m.b) @ m.a + x),
    ("pytorch-PR#182644-keyword-order", lambda m, y=None, x=None: m.second(m.first(x) * m.b) + y),
    ("pytorch-PR#182644-inputs-in-the-last-stage", lambda m, x, y, z: m.second(m.first(z)) * (x - y)),
)
def test_order_of_parameters_and_inputs(body: Any) -> None:
    x, y, z = batch_of(SIZE), batch_of(SIZE) * 2 + 1, batch_of(SIZE).sin()
    names = body.__code__.co_varnames[1 : body.__code__.co_argcount]
    if body.__defaults__:
        assert_right(Calls(body), loss=mean_square, kwargs={"x": x, "y": y})
    else:
        assert_right(Calls(body), *(x, y, z)[: len(names)], loss=mean_square)


# Losses.


class OwnLoss(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.form = form
        self.table, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.head(torch.tanh(self.table(ids)))
        if labels is None:
            return logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        if self.form == "scalar":
            return loss
        if self.form == "tuple":
            return loss, logits
        if self.form == "dict":
            return {"logits": logits, "loss": loss}
        from transformers.modeling_outputs import CausalLMOutput

        return CausalLMOutput(loss=loss, logits=logits)


@pytest.mark.parametrize(
    "form", ["scalar", "tuple", "dict", "model-output"], ids=lambda f: f"pytorch-PR#128115-{f}"
)
def test_model_returns_its_own_loss(form: str) -> None:
    torch.manual_seed(2)
    ids = torch.randint(0, 11, (6, 5))
    model = OwnLoss(form)
    pipeline = assert_right(model, ids, microbatches=3, kwargs={"labels": ids.roll(1, 1)})
    result = pipeline.step(ids, labels=ids.roll(1, 1), return_outputs=True)
    if form != "scalar":
        found = result[1] if form == "tuple" else result["logits"]
        assert torch.equal(found, joined([model(part) for part in ids.chunk(3)]))
    if form == "model-output":
        assert type(result).__name__ == "CausalLMOutput"
        assert result.loss.dim() == 0


def token_sum(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")


@pytest.mark.parametrize("loss_scale", [1.0, 1024.0], ids=["torchtitan#2972", "torchtitan#803-loss-scale"])
@pytest.mark.parametrize("microbatches", [2, 3])
def test_sum_over_valid_tokens(loss_scale: float, microbatches: int) -> None:
    """Unequal numbers of valid tokens: the sum loss with ``scale_grads=False``, divided once at the end."""
    torch.manual_seed(4)
    ids = torch.randint(0, 11, (6, 5))
    labels = ids.clone()
    for row, count in enumerate((0, 5, 1, 4, 2, 5)):
        labels[row, :count] = -100
    model = OwnLoss("scalar")
    assert_right(
        model,
        ids,
        target=labels,
        loss=token_sum,
        microbatches=microbatches,
        scale_grads=False,
        loss_scale=loss_scale,
    )
    whole = copy.deepcopy(model)
    whole.zero_grad()
    token_sum(whole(ids), labels).backward()
    valid = int((labels != -100).sum())
    for name, p in whole.named_parameters():
        found = model.get_parameter(name).grad / loss_scale / valid
        same(name, found, p.grad / valid, exact=False)  # one sum over the whole batch, in another order


# Frozen parameters.


def test_Megatron_PR548_frozen_stage_and_weight() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    for p in model[0].parameters():
        p.requires_grad_(False)
    model[1].requires_grad_(False)
    model[2].weight.requires_grad_(False)
    pipeline = assert_right(model, batch_of(8), loss=mean_square, split_points=["2"])
    assert all(p.grad is None for p in (*model[0].parameters(), *model[1].parameters(), model[2].weight))
    assert model[2].bias.grad is not None
    first = pipeline[0].compiled
    assert not first.trainable
    assert not any(p.has_gradient for p in first.outputs)
    assert not list(
        first.graphs.backward_weight.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
    )
    assert first.saved_bytes == first.saved_for_weight_bytes == 0
    assert pipeline.profile.edges[0].backward_bytes == 0
    assert not pipeline.profile.edges[0].has_gradient


class Lora(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, base.in_features) / 3)
        self.up = nn.Parameter(torch.randn(base.out_features, 2) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + F.linear(F.linear(x, self.down), self.up)


@pytest.mark.parametrize(
    "kind", ["lora", "only-the-last", "only-the-first", "norms"], ids=lambda k: f"Megatron-PR#548-{k}"
)
def test_partly_frozen(kind: str) -> None:
    torch.manual_seed(6)
    layers: list[nn.Module] = [nn.Linear(8, 8) for _ in range(3)]
    if kind == "lora":
        layers = [Lora(layer) for layer in layers]  # type: ignore[arg-type]
    model = nn.Sequential(layers[0], nn.LayerNorm(8), nn.Tanh(), layers[1], nn.Tanh(), layers[2])
    keep = {"only-the-last": "5.", "only-the-first": "0.", "norms": "1."}.get(kind)
    if keep:
        for name, p in model.named_parameters():
            p.requires_grad_(name.startswith(keep))
    assert_right(
        model, batch_of(8), stages=3, loss=mean_square, steps=2, optimizer=lambda ps: torch.optim.SGD(ps, 0.1)
    )
