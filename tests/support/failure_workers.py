"""What the processes of `test_failures_processes` run: small models, one pipeline after the other."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import zbcompile
from tests.support.pipeline_oracle import SIZE, Calls, batch_of, mean_square
from zbcompile.errors import ZBCompileError

__all__ = ["CASES", "REFUSALS", "Case", "descend", "run_cases"]


@dataclass(frozen=True)
class Case:
    """One pipeline. body : the model's forward, or its class. ranks : those of the group that runs it."""

    body: Any
    stages: int = 4
    microbatches: int = 3
    ranks: tuple[int, ...] = (0, 1, 2, 3)
    steps: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    exact: bool = True

    def model(self) -> nn.Module:
        """The same weights in every process."""
        torch.manual_seed(7)
        return self.body() if isinstance(self.body, type) else Calls(self.body)

    def batch(self) -> tuple[Any, ...]:
        """The whole batch, the same in every process."""
        torch.manual_seed(11)
        if self.body is Tied:
            return (torch.randint(0, 13, (6, 5)),)
        return (batch_of(SIZE),)

    def loss(self) -> Any:
        """The loss function; None where the model returns its own."""
        return None if self.body is Tied else self.options.get("loss_fn", mean_square)


class Tied(nn.Module):
    """Embedding and head share one table, as far apart as stages can be; returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(13, SIZE)
        self.layers = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(3))
        self.head = nn.Linear(SIZE, 13, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.roll(1, 1).flatten())


class Dropped(nn.Module):
    """Dropout in every stage."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(part for _ in range(4) for part in (nn.Linear(SIZE, SIZE), nn.Tanh(), nn.Dropout(0.5)))
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def everything(m: Calls, x: Tensor) -> Tensor:
    """Every boundary carries two tensors and more: skips, integers, a mask, transposed values."""
    one, left = m.first(x), torch.sigmoid(m.second(x)).t()
    order, mask = one.argsort(dim=1), one > 0
    two, left = torch.tanh(m.second(torch.relu(one))), torch.tanh(left.t() @ m.a).t()
    three = torch.where(mask, m.third(two).gather(1, order), 0.5 * one)
    left = m.first(left.t()).exp()
    return m.norm(three * left) @ m.a + one * mask


def chain(m: Calls, x: Tensor) -> Tensor:
    return m.norm(torch.relu(m.third(torch.relu(m.second(torch.relu(m.first(x))))))) @ m.a


def total(out: Tensor, target: Any) -> Tensor:
    return out.sum()


CASES: dict[str, Case] = {
    "pytorch#132644-two-tensors+pytorch#127964-skips+pytorch#183024-integers+pytorch#62283-transposed": Case(
        everything, options={"loss_fn": total}, exact=False
    ),
    "torchtitan#775-1-microbatch": Case(chain, microbatches=1),
    "torchtitan#775-2-microbatches": Case(chain, microbatches=2),
    "PiPPy#32-piper#13-tied-table": Case(Tied, steps=3, exact=False),
    "dropout-as-in-one-process": Case(Dropped, steps=2),
    "pytorch#172668-v-rendezvous": Case(
        chain, ranks=(0, 1), options={"placement": "v", "transport": "rendezvous"}
    ),
    "pytorch#172668-looped-rendezvous": Case(
        chain, ranks=(2, 3), options={"placement": "looped", "transport": "rendezvous"}
    ),
    "pytorch#172668-looped-batched": Case(
        chain, ranks=(0, 1), options={"placement": "looped", "transport": "batched"}
    ),
    "pytorch#172668-any-map": Case(chain, ranks=(2, 3), options={"placement": (1, 0, 0, 1)}),
}
REFUSALS = {
    "torchtitan#431-longer": "torchtitan#775-1-microbatch",
    "torchtitan#431-dtype": "torchtitan#775-2-microbatches",
}
"""Wrong batches, each given to the pipeline of a case after its own steps."""


def run_cases(rank: int) -> dict[str, Any]:
    """Every case that this rank belongs to: what it found, or the error as text."""
    groups = {ranks: dist.new_group(list(ranks)) for ranks in ((0, 1), (2, 3))}
    found: dict[str, Any] = {}
    for name, case in CASES.items():
        if rank in case.ranks:
            found[name] = _run(name, case, groups.get(case.ranks))
    return found


def _compiled(case: Case, model: nn.Module, group: Any) -> zbcompile.Pipeline:
    return zbcompile.compile(
        model,
        case.stages,
        example_args=case.batch(),
        num_microbatches=case.microbatches,
        group=group,
        time_limit=0.5,
        verify=False,
        stall_limit=60.0,
        **({"loss_fn": case.loss()} | case.options),
    )


def _run(name: str, case: Case, group: Any) -> dict[str, Any]:
    model = case.model()
    with _compiled(case, model, group) as pipeline:
        losses: list[Tensor] = []
        for _ in range(case.steps):
            pipeline.zero_grad()
            pipeline.step(*case.batch(), losses=losses)
            descend(pipeline.parameters())
        own = dict(pipeline.named_parameters())
        pipeline.synchronize()
        return {
            "losses": losses,
            "grads": {n: p.grad for n, p in own.items()},
            "parameters": {n: p.detach() for n, p in own.items()},
            "foreign": [n for n, p in model.named_parameters() if n not in own and p.grad is not None],
            "placement": pipeline.schedule.placement.rank_of,
            "refused": _refused(pipeline, case, name),
        }


def descend(parameters: Iterable[nn.Parameter]) -> None:
    """One step of SGD; a rank may hold no parameter, which torch's optimizers refuse."""
    with torch.no_grad():
        for p in parameters:
            if p.grad is not None:
                p.sub_(p.grad, alpha=0.5)


def _refused(pipeline: zbcompile.Pipeline, case: Case, name: str) -> str:
    """What a wrong batch gives: it must be refused before the first message, on every rank."""
    if name not in REFUSALS.values():
        return ""
    (x,) = case.batch()
    try:
        pipeline.step(x.repeat(1, 2)[:, :9] if case.microbatches == 1 else x.double())
    except ZBCompileError as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"
