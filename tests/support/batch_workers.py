"""Steps whose batches change, or are given in parts, on the ranks of a pipeline; the same in one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zbcompile
from tests.support.gloo_workers import even_profile
from zbcompile import Microbatches
from zbcompile.errors import ZBCompileError

WIDTH = 6
NUM_RANKS = 4


class Masked(nn.Module):
    """Four stages' worth of layers; the last two also take a mask."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(11, WIDTH)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(3))
        self.dropout, self.last = nn.Dropout(0.2), nn.Linear(WIDTH, 11)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        hidden = self.table(x)
        for layer in self.layers:
            hidden = layer(hidden)
        logits: Tensor = self.last(self.dropout(hidden) * mask[..., None])
        return logits


def loss_of(logits: Tensor, target: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    loss = F.cross_entropy(logits.flatten(0, 1), target.flatten())
    return loss, {"right": (logits.argmax(-1) == target).float().mean()}


def batch(rows: int, length: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randint(0, 11, (rows, length), generator=generator) for _ in range(2))
    return {"x": x, "mask": torch.rand(rows, length, generator=generator), "y": y}


STEPS: list[tuple[int, int]] = [(8, 5), (6, 5), (7, 5), (8, 9), (8, 5), (7, 5)]
"""Rows and length of the batches that all ranks run."""


def step(pipeline: zbcompile.Pipeline, given: dict[str, Any], **more: Any) -> list[Tensor]:
    losses: list[Tensor] = []
    args = () if given["x"] is None and given["mask"] is None else (given["x"], given["mask"])
    pipeline.step(*args, target=given["y"], losses=losses, **more)
    return losses


def compiled() -> zbcompile.Pipeline:
    first = batch(8, 5, 99)
    return zbcompile.compile(
        Masked(), NUM_RANKS, example_args=(first["x"], first["mask"]), example_target=first["y"],
        loss_fn=loss_of, num_microbatches=4, split_points=["layers.0", "layers.1", "layers.2"],
        profile=even_profile(), time_limit=0.3, stall_limit=20.0,
    )  # fmt: skip


def trained(pipeline: zbcompile.Pipeline, rank: int | None) -> dict[str, Any]:
    """Run all steps; rank 1 gives nothing, the last two what their stages take."""
    losses, metrics = [], []
    for number, (rows, length) in enumerate(STEPS):
        given: dict[str, Any] = dict(batch(rows, length, number))
        if rank == 0 and number % 2:
            given["y"] = given["mask"] = None
        if rank == 1:
            given = dict.fromkeys(given)
        if rank in (2, 3):
            given["x"] = None
        found: dict[str, Tensor] = {}
        losses.append(step(pipeline, given, share_losses=True, metrics=found))
        metrics.append(found)
    grads = {n: p.grad.clone() for n, p in pipeline.named_parameters() if p.grad is not None}
    return {"losses": losses, "metrics": metrics, "grads": grads}


def run(rank: int) -> dict[str, Any]:
    pipeline = compiled()
    with pipeline:
        found = trained(pipeline, rank)
        found["apart"] = _apart(pipeline, rank)
        found["evaluated"] = [_evaluated(pipeline, rank, rows) for rows in (8, 6)]
        found["refused"] = [_refused(pipeline, case, rank) for case in range(len(CASES))]
        good = batch(8, 5, 0)
        found["after"] = [float(loss) for loss in step(pipeline, dict(good), share_losses=True)]
    return found


def _other_values(given: dict[str, Any], rank: int) -> None:
    if rank == 3:
        given["y"] = 10 - given["y"]


def _other_shape(given: dict[str, Any], rank: int) -> None:
    if rank == 0:
        given["mask"] = given["y"] = None
    if rank == 3:
        given.update(x=None, y=given["y"][:6], mask=given["mask"][:6])


def _nothing_on_rank_0(given: dict[str, Any], rank: int) -> None:
    if rank == 0:
        given.update(x=None, mask=None, y=None)


def _target_missing(given: dict[str, Any], rank: int) -> None:
    if rank == 3:
        given["y"] = None


def _cut_otherwise(given: dict[str, Any], rank: int) -> None:
    if rank == 0:
        given.update(mask=None, y=None)
    else:
        given.update(x=None, mask=Microbatches(given["mask"].split(4)), y=Microbatches(given["y"].split(4)))


def _apart(pipeline: zbcompile.Pipeline, rank: int) -> str:
    """Step on all ranks but the last one, which evaluates."""
    given = batch(8, 5, 0)
    try:
        if rank == 3:
            pipeline.eval(given["x"], given["mask"])
        else:
            step(pipeline, dict(given))
        pipeline.synchronize()
    except ZBCompileError as error:
        return str(error)
    return "ran"


def _evaluated(pipeline: zbcompile.Pipeline, rank: int, odd: int) -> str:
    """Evaluate a batch that has 8 rows on all ranks but the last one, and other values there."""
    given = batch(odd if rank == 3 else 8, 5, rank // 3)
    try:
        pipeline.eval(given["x"], given["mask"])
        pipeline.synchronize()
    except ZBCompileError as error:
        return str(error)
    return "ran"


def _other_scale(given: dict[str, Any], rank: int) -> None:
    if rank == 2:
        given["scale"] = 2.0


CASES: Sequence[tuple[Any, set[int], str]] = (
    (_other_values, {3}, "the batch differs from that of rank 0 (target)"),
    (_other_shape, {3}, "the ranks cut the batch into different microbatches"),
    (_nothing_on_rank_0, {0}, "rank 0 tells the others the shape of the batch"),
    (
        _target_missing,
        {3},
        "stage 3 runs on this rank and takes a tensor that it was not given (rank 3, target)",
    ),
    (_other_scale, {2}, "the ranks differ in loss_scale"),
    (_cut_otherwise, {1, 2, 3}, "the ranks cut the batch into different microbatches"),
)
"""What makes a batch wrong, the ranks that see it, and their words."""


def _refused(pipeline: zbcompile.Pipeline, case: int, rank: int) -> str:
    given: dict[str, Any] = dict(batch(8, 5, 0))
    CASES[case][0](given, rank)
    pipeline.loss_scale = given.pop("scale", 1.0)
    try:
        step(pipeline, given, share_losses=True)
        pipeline.synchronize()
    except ZBCompileError as error:
        return str(error)
    return "ran"
