"""Gradients of weights: what ranks hold of them is what the plan says, however they are summed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zbcompile
from benchmarks import held_memory
from tests.support.gloo_workers import OUT_OF_TURN, summed_as_asked
from zbcompile.errors import CheckError
from zbcompile.runtime.launch import spawn
from zbcompile.runtime.verbs import Rank
from zbcompile.schedule.costs import Profile, StageCost
from zbcompile.schedule.held_gradients import held_sets
from zbcompile.schedule.ir import Action, Kind
from zbcompile.schedule.memory import memory_after, memory_peaks

MSE = nn.functional.mse_loss
VERBS = {
    "forward": Kind.FORWARD,
    "backward_input": Kind.BACKWARD_INPUT,
    "backward_weight": Kind.BACKWARD_WEIGHT,
    "full_backward": Kind.FULL_BACKWARD,
}


def loops() -> list[dict[str, Tensor]]:
    """What `summed_as_asked` returns, of the plain model and a loop over the microbatches."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 8))
    found: list[dict[str, Tensor]] = []
    for batch in torch.randn(3, 12, 8):
        model.zero_grad()
        for rows in batch.chunk(4):
            MSE(model(rows), rows).backward()
        step = {name: p.grad / 4 for name, p in model.named_parameters()}
        found.append({name: found[-1][name] + grad if found else grad for name, grad in step.items()})
    return found


@pytest.mark.filterwarnings("ignore:gradients of an earlier step")
def test_in_order_sums_have_the_bits_of_a_loop_and_as_they_come_they_are_as_good() -> None:
    """Three steps that keep their gradients, the order's W's out of turn; the same over gloo."""
    wanted, ordered, come = loops(), summed_as_asked(0, "order"), summed_as_asked(0, "memory")
    differ = 0
    for loop, exact, close in zip(wanted, ordered, come, strict=True):
        for name, grad in loop.items():
            assert torch.equal(exact[name], grad), name
            torch.testing.assert_close(close[name], grad, rtol=1e-5, atol=1e-6)
            differ += not torch.equal(close[name], grad)
    assert differ > 0
    for there in spawn(summed_as_asked, 2, ("memory",), timeout_s=120):
        for here, step in zip(come, there, strict=True):
            assert step
            assert all(torch.equal(here[name], grad) for name, grad in step.items())


@pytest.mark.filterwarnings("ignore:gradients of an earlier step")
def test_an_order_is_judged_by_how_gradients_are_summed() -> None:
    """A profile without gradient bytes gets those of the stages; a number that it states is kept."""
    stage, size = StageCost.simple(1000, 1000, 1000, 4, 2), 4 * (33 * 8 + 33 * 32 + 33 * 8)
    assert held_sets(OUT_OF_TURN) == (1, 1)
    stated = Profile((replace(stage, gradient_bytes=30),) * 2)
    for profile, needed in ((stated, 6 + 30), (Profile((stage,) * 2), 6 + 4 * 9 * 32)):
        assert summed_as_asked(0, "order", profile=profile, memory_limit=[needed, size])
        with pytest.raises(
            CheckError, match=rf'(?s)over the memory cap at 0BW2.*{needed} bytes.*accumulate="mem'
        ):
            summed_as_asked(0, "order", profile=profile, memory_limit=[needed - 1, size])
    assert summed_as_asked(0, "memory", profile=Profile((stage,) * 2), memory_limit=16)


def test_the_best_order_under_a_limit_lets_nothing_wait_beyond_it() -> None:
    """BW saves 3 us: without gradient bytes the best order lets up to nine sets of a stage wait.

    Summed as they come, gradients leave every order that plain autograd's order of the sum leaves, and more.
    """
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.Tanh())]
    x = torch.randn(16, 64)
    times = (20_000, 20_000, 20_000, 37_000)
    profile = Profile.uniform(StageCost(*times, saved_bytes=4000, saved_for_weight_bytes=2000), 4)
    values = {}
    for accumulate in ("order", "memory"):
        pipeline = zbcompile.compile(
            nn.Sequential(*layers),
            4,
            example_args=(x,),
            example_target=x,
            loss_fn=MSE,
            num_microbatches=8,
            profile=profile,
            memory_limit=14_000,
            accumulate=accumulate,
            time_limit=1.0,
        )
        assert pipeline.profile.stages[1].gradient_bytes == 64 * 65 * 4
        problem = pipeline.solution.problem
        assert max(memory_peaks(pipeline.schedule, problem)) <= 14_000
        values[accumulate] = pipeline.certificate.value_ns
        head = "gradients are summed as they come" in pipeline.source(0)
        assert head == (accumulate == "memory")
    assert values["memory"] <= values["order"]


def storages(values: Iterator[Tensor | None]) -> dict[int, int]:
    found = [value.untyped_storage() for value in values if value is not None]
    return {storage.data_ptr(): storage.nbytes() for storage in found}


def held_by(rank: Rank, x: Tensor) -> int:
    """Bytes that a rank holds between two actions, without messages, weights and the batch."""
    own = rank.spec.placement.stages_of(rank.index)
    parameters = {n: rank.state[n] for s in own for n in rank.spec.stages[s].parameters}
    saved = [
        v for table in (rank._saved, rank._saved_for_weight) for values in table.values() for v in values
    ]
    sums = [total for totals in rank.sums.totals.values() for total in totals.values()]
    waiting = [g for sets in rank.sums._early.values() for grads in sets.values() for g in grads.values()]
    kept = [p.grad for p in parameters.values()]
    found = storages(v for v in (*saved, *sums, *waiting, *kept) if isinstance(v, Tensor))
    for pointer in storages(iter([*parameters.values(), x])):
        found.pop(pointer, None)
    return sum(found.values())


def watch(monkeypatch: pytest.MonkeyPatch, see: Callable[[Rank, Action], None]) -> None:
    """Have ``see`` called after every compute action."""
    for verb, kind in VERBS.items():
        usual = getattr(Rank, verb)

        def plain(self: Rank, stage: int, i: int, usual: Any = usual, kind: Kind = kind) -> None:
            usual(self, stage, i)
            see(self, Action(kind, stage, i))

        def waits(self: Rank, stage: int, i: int, usual: Any = usual, kind: Kind = kind) -> Iterator[Any]:
            yield from usual(self, stage, i)
            see(self, Action(kind, stage, i))

        monkeypatch.setattr(Rank, verb, plain if kind is Kind.BACKWARD_WEIGHT else waits)


@pytest.mark.parametrize("number", [2, 5, 8, 11, 12])
def test_ranks_hold_what_random_plans_say(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """`benchmarks.held_memory` asks the allocator, in processes of their own, for fifty of them."""
    case = held_memory.random_case(number, 3, width=8)
    pipeline, x = held_memory.compiled(case)
    problem, schedule = pipeline.solution.problem, pipeline.schedule
    said: dict[Action, int] = {}
    for rank, row in enumerate(schedule.order):
        own = [problem.profile.stages[s] for s in problem.placement.stages_of(rank)]
        sets = sum(stage.gradient_bytes for stage in own)
        counted = problem.static_bytes(rank) - sets * (2 if problem.kept_gradients else 1)
        after = zip(row, memory_after(schedule, problem, rank), strict=True)
        said |= {action: most - counted for action, most in after}
    spare: list[int] = []

    def see(rank: Rank, action: Action) -> None:
        spare.append(said[action] - held_by(rank, x))
        assert spare[-1] >= 0, action

    watch(monkeypatch, see)
    for _ in range(3):
        pipeline.step(x, target=x)
        if not problem.kept_gradients:
            for p in pipeline.parameters():
                p.grad = None
    assert len(spare) == 3 * sum(a.kind.is_compute for _, _, a in schedule.actions())
    assert min(spare) < 64, "the plan says more than is ever held"
    assert (
        sum(peak <= cap for peak, cap in zip(memory_peaks(schedule, problem), case.problem.caps, strict=True))
        == 3
    )


def test_gradients_of_an_earlier_step_are_counted_or_said() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    x, size = torch.randn(4, 8), 8 * 9 * 4

    def pipeline(**options: Any) -> zbcompile.Pipeline:
        return zbcompile.compile(
            model,
            2,
            example_args=(x,),
            example_target=x,
            loss_fn=MSE,
            num_microbatches=2,
            profile=Profile((StageCost.simple(1000, 1000, 1000, 4, 2),) * 2),
            time_limit=0.2,
            **options,
        )

    counted = pipeline(memory_limit=size + 8, kept_gradients=True)
    assert counted.solution.problem.static_bytes(0) == size
    counted.step(x, target=x)
    counted.step(x, target=x)
    with pytest.warns(
        UserWarning, match=rf"rank 0 holds {size} bytes beside \d+, its limit is 10.*kept_gradients"
    ):
        pipeline(memory_limit=10).step(x, target=x)
    pipeline(memory_limit=size + 20).step(x, target=x)
    for parameter in model.parameters():
        parameter.grad = None
    pipeline(memory_limit=10).step(x, target=x)
