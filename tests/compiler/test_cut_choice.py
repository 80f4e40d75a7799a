"""Cuts and orders chosen together by `compile`, and ranks of different speed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zbcompile
from zbcompile.errors import InfeasibleError, UsageError
from zbcompile.schedule.costs import Profile
from zbcompile.schedule.cuts import Cuts
from zbcompile.schedule.devices import device_named
from zbcompile.schedule.solution import Solution

CPU = device_named("CPU")


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down, self.norm = (
            nn.Linear(width, 2 * width),
            nn.Linear(2 * width, width),
            nn.LayerNorm(width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def make() -> tuple[nn.Module, Tensor, Tensor]:
    """Equal blocks and a large head, whose weights take memory."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), *(Block(32) for _ in range(9)), nn.Linear(32, 600))
    return model, torch.randn(16, 8), torch.randint(0, 600, (16,))


def compiled(seen: dict[str, Any], **asked: Any) -> zbcompile.pipeline.Pipeline:
    """The model on three ranks; ``seen`` gets what the observer is told."""
    model, x, y = make()
    options: dict[str, Any] = {
        "loss_fn": nn.functional.cross_entropy,
        "num_microbatches": 4,
        "profile": CPU,
        "time_limit": 1,
        "verify": False,
        "observer": seen.__setitem__,
        "placement": "linear",
        **asked,
    }
    return zbcompile.compile(model, 3, example_args=(x,), example_target=y, **options)


def test_cuts_are_planned_under_a_limit_that_the_balanced_cut_exceeds() -> None:
    seen: dict[str, Any] = {}
    with pytest.raises(InfeasibleError) as caught:
        compiled({}, memory_limit=1)
    assert isinstance(caught.value.needed, int)
    limit = caught.value.needed - 1000
    model, x, y = make()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    losses: list[Tensor] = []
    with compiled(seen, memory_limit=limit, cuts="plan") as pipeline:
        pipeline.step(x, target=y, losses=losses)
        grads = {name: p.grad for stage in pipeline for name, p in stage.named_parameters()}
    assert all(peak <= limit for peak in map(seen["plan"].problem.static_bytes, range(3)))
    torch.testing.assert_close(torch.stack(losses).mean(), loss.detach())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad)


class Wave(nn.Module):
    """A residual block whose activations outweigh its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        wave = self.line(x)
        for _ in range(4):
            wave = torch.sin(wave) * torch.cos(wave)
        return x + wave


def test_cuts_are_planned_for_what_fits_with_recompute_alone() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(4000, 16), *(Wave() for _ in range(8)))
    x, y = torch.arange(2048), torch.zeros(2048, 16)
    limit, seen = 1_030_000, dict[str, Any]()

    def on_three_ranks(**asked: Any) -> zbcompile.pipeline.Pipeline:
        options: dict[str, Any] = {"loss_fn": nn.functional.mse_loss, "num_microbatches": 4, "profile": CPU}
        options |= {"placement": "linear", "time_limit": 0.2, "verify": False, "memory_limit": limit}
        return zbcompile.compile(model, 3, example_args=(x,), example_target=y, **options, **asked)

    with pytest.raises(InfeasibleError):
        on_three_ranks(cuts="plan", recompute="none")
    with pytest.raises(InfeasibleError):
        on_three_ranks(cuts="balance")
    with on_three_ranks(cuts="plan", observer=seen.__setitem__) as pipeline:
        pipeline.step(x, target=y)
        assert "cuts" in seen
        assert all(peak <= limit for peak in pipeline._compiled.plan.timeline.peak_bytes)


def test_pieces_cost_together_what_the_stages_cost() -> None:
    first: dict[str, Any] = {}
    compiled(first, cuts="plan").close()
    cuts: Cuts = first["cuts"]
    assert len(cuts.pieces.stages) >= 9
    solution: Solution = first["plan"]
    joined = cuts.profile(solution.problem.placement).stages
    real = solution.problem.profile.stages
    for ours, stage in zip(joined, real, strict=True):
        assert (ours.forward_ns, ours.static_bytes) == (stage.forward_ns, stage.static_bytes)
    for ours, stage in zip(joined[1:], real[1:], strict=True):  # the first stage has no B: all of it is W
        assert ours.saved_bytes == stage.saved_bytes
        assert ours.full_backward_ns == pytest.approx(stage.full_backward_ns, rel=0.15)
        assert ours.saved_for_weight_bytes >= stage.saved_for_weight_bytes
    assert joined[0].saved_bytes >= real[0].saved_bytes


def test_a_slow_rank_gets_less_of_the_model_and_the_plan_has_its_times() -> None:
    seen: dict[str, Any] = {}
    with compiled(seen, rank_speeds=(1, 0.5, 1)) as pipeline:
        sizes, solution = seen["cuts"].sizes, seen["plan"]
        assert sizes[1] < sizes[0]
        counted: Profile = seen["counted"]
        rank_of = solution.problem.placement.rank_of
        for stage, (plain, here) in enumerate(
            zip(counted.stages, solution.problem.profile.stages, strict=True)
        ):
            factor = 2 if rank_of[stage] == 1 else 1
            assert here.forward_ns == factor * plain.forward_ns
            assert here.saved_bytes == plain.saved_bytes
        assert "1 0.5 1" in solution.problem.profile.source
        assert pipeline.certificate.value_ns == solution.certificate.value_ns


def test_measured_times_are_those_of_rank_0() -> None:
    seen: dict[str, Any] = {}
    compiled(seen, profile=None, rank_speeds=(0.5, 1, 1), split_points=["4", "8"]).close()
    measured, planned = seen["measure"].stages, seen["plan"].problem.profile.stages
    assert planned[0].forward_ns == measured[0].forward_ns
    assert planned[1].forward_ns == -(-measured[1].forward_ns // 2)
    assert "cuts" not in seen


def test_other_shapes_are_planned_with_the_times_of_the_ranks_once() -> None:
    _, x, y = make()
    with compiled({}, rank_speeds=(1, 0.25, 1)) as pipeline:
        whole = pipeline._compiled.plan.problem.profile
        pipeline.step(x[:8], target=y[:8])
        shorter = pipeline._compiled._last.plan.problem
    assert shorter.num_microbatches == 2
    assert shorter.profile.stages == whole.stages


@pytest.mark.parametrize(
    "speeds", [(1, 1), (1, 0, 1), (1, -1, 1), (1, float("nan"), 1), (1, float("inf"), 1), (1, True, 1), "111"]
)
def test_speeds_that_cannot_be_meant_are_refused(speeds: Any) -> None:
    with pytest.raises(UsageError, match="speed"):
        compiled({}, rank_speeds=speeds)


def test_cuts_that_are_given_are_not_planned() -> None:
    with pytest.raises(UsageError, match="split_points are given"):
        compiled({}, cuts="plan", split_points=["4", "8"])
    with pytest.raises(UsageError, match="balance or plan"):
        compiled({}, cuts="best")
