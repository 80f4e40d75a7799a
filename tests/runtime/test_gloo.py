"""One process per rank over gloo: the bits of one process, and the same error on all ranks when one fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import zbcompile
from tests.support import gloo_workers
from tests.support.clean_process import in_clean_process
from tests.support.gloo_workers import MODELS, NUM_RANKS, even_profile, one_f_one_b, train_steps
from zbcompile.runtime.launch import Outcome, spawn, spawn_outcomes

pytestmark = pytest.mark.timeout(400)
STEPS = 3


def test_processes_of_the_tests_begin_warm_and_with_nothing_drawn() -> None:
    fresh = {"warm": True, "drawn": False, "groups": False, "torch threads": 1}
    assert in_clean_process(gloo_workers.beginning, 0) == fresh
    assert spawn(gloo_workers.beginning, 1, timeout_s=60) == [{**fresh, "groups": True}]


def test_fifty_random_legal_orders_give_the_bits_of_autograd() -> None:
    ran = spawn(gloo_workers.random_orders, 6, (list(range(50)),), timeout_s=300)
    assert ran[0] == ran[1] == 50
    assert 0 < ran[5] < 50


@pytest.mark.parametrize("large_bytes", [1, 41])
def test_messages_sent_by_the_thread_have_the_same_bits(large_bytes: int) -> None:
    """The thread sends all messages, then only the sums of tied weights."""
    ran = spawn(gloo_workers.random_orders, 6, (list(range(12)), large_bytes), timeout_s=120)
    assert ran[0] == ran[1] == 12


def test_large_and_small_messages_share_a_channel() -> None:
    """A receive that met a message of the wrong size would end its process."""
    for ran in spawn(gloo_workers.large_and_small, 2, (), timeout_s=60):
        assert ran == [12, 12]


def compiled(name: str) -> tuple[zbcompile.Pipeline, dict[str, Any]]:
    model, call, loss_fn = MODELS[name]()
    pipeline = zbcompile.compile(
        model, 4, loss_fn=loss_fn, num_microbatches=4, time_limit=0.5, profile=even_profile(), seed=7
    )
    return pipeline.build(call.get("args", ()), call.get("kwargs", {}), call.get("target")), call


def test_three_optimizer_steps_have_the_bits_of_one_process() -> None:
    here, there = in_clean_process(trained_here_and_there)
    for name in MODELS:
        _compare(here[name], [record[name] for record in there])


def trained_here_and_there() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Train four models that were compiled here, in processes that are copies of this one, and here."""
    pipelines = {name: compiled(name) for name in MODELS}
    there = spawn(gloo_workers.inherited, NUM_RANKS, (pipelines, STEPS), timeout_s=280, inherit=True)
    here = {name: train_steps(pipeline, call, STEPS) for name, (pipeline, call) in pipelines.items()}
    return here, there


def test_every_process_compiles_the_same_pipeline() -> None:
    """As under torchrun: nothing is shared but the process group."""
    pipeline, call = compiled("mlp")
    here = train_steps(pipeline, call, STEPS)
    _compare(here, spawn(gloo_workers.from_scratch, NUM_RANKS, ("mlp", STEPS), timeout_s=300))


def _compare(here: dict[str, Any], there: list[dict[str, Any]]) -> None:
    assert there[-1]["losses"] == here["losses"]
    assert len(here["losses"]) == 4 * STEPS
    assert all(record["norms"] == here["norms"] for record in there)
    assert min(here["norms"]) > 0.1
    for step in range(STEPS):
        seen = set()
        for record in there:
            for parameter, grad in record["gradients"][step].items():
                assert torch.equal(grad, here["gradients"][step][parameter]), (step, parameter)
                seen.add(parameter)
        assert seen == set(here["gradients"][step])
    for record in there:
        for buffer, value in record["buffers"].items():
            assert torch.equal(value, here["buffers"][buffer]), buffer


def test_ranks_that_clip_differently_are_refused_and_norms_are_those_of_all_ranks() -> None:
    records = spawn(gloo_workers.clipped_differently, NUM_RANKS, timeout_s=120)
    own = {name: float(grad.abs().max()) for record in records for name, grad in record["own"].items()}
    for record in records:
        assert "the ranks call for different norms" in record["refused"]
        assert record["kept"]
        assert record["norms"] == own
        assert record["largest"] == max(own.values())


def survivors(outcomes: list[Outcome], gone: int | None) -> str:
    """Return the text of the one PipelineError with which, and with exit code 1, all surviving ranks end."""
    messages = set()
    for outcome in outcomes:
        if outcome.rank == gone:
            assert outcome.exit_code == -9
            continue
        assert outcome.exit_code == 1, outcome
        assert outcome.error is not None
        head, _, message = outcome.error.rpartition("PipelineError: ")
        assert head, outcome.error
        messages.add(message)
    assert len(messages) == 1, messages
    return messages.pop()


FAULTS = {
    "killed": ["rank 2 is gone"],
    "raising": ["the loss went to the moon", "rank 2, stage 2, microbatch 2, forward"],
    "stalled": ["stalled: rank", "-> 2; root: rank 2 runs 2F2"],
    "different": ["differ in their plan", "rank 2"],
    "shape": ["ShapeError", "rank 2", "[4096]", "[7, 3]"],
}


@pytest.mark.parametrize("large_bytes", [None, 1], ids=["", "by the thread"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_failing_rank_is_named_on_all_ranks_and_no_step_is_taken(
    fault: str, large_bytes: int | None, tmp_path: Path
) -> None:
    arguments = (fault, 2, 1.5, str(tmp_path), large_bytes)
    outcomes = spawn_outcomes(gloo_workers.train, NUM_RANKS, arguments, timeout_s=200)
    message = survivors(outcomes, 2 if fault == "killed" else None)
    for words in FAULTS[fault]:
        assert words in message, message
    steps = [int((tmp_path / f"steps-{rank}").read_text()) for rank in range(NUM_RANKS)]
    assert steps == [0 if fault == "different" else 1] * NUM_RANKS


def test_a_wrong_shape_on_one_rank_ends_all_before_their_next_message() -> None:
    outcomes = spawn_outcomes(gloo_workers.wrong_shape, NUM_RANKS, (1,), timeout_s=200)
    for outcome in outcomes:
        assert outcome.exit_code == 1
        assert outcome.error is not None
        wanted = "UsageError" if outcome.rank == 1 else "PipelineError: rank 1 refused step 1"
        assert wanted in outcome.error
        assert "[8, 4]" in outcome.error


def test_ranks_that_were_asked_for_different_things_refuse_to_start() -> None:
    outcomes = spawn_outcomes(gloo_workers.different_seed, NUM_RANKS, (), timeout_s=200)
    message = survivors(outcomes, None)
    assert "differ in their options" in message
    assert "rank 2" in message


def test_what_rank_0_cannot_plan_is_told_to_all() -> None:
    outcomes = spawn_outcomes(gloo_workers.cramped, NUM_RANKS, (), timeout_s=200)
    for outcome in outcomes:
        assert outcome.exit_code == 1
        assert outcome.error is not None
        assert "InfeasibleError" in outcome.error


def test_results_come_back_on_the_last_rank_and_the_timeline_on_all() -> None:
    found = spawn(gloo_workers.evaluated, NUM_RANKS, (), timeout_s=200)
    model, call, loss_fn = MODELS["mlp"]()
    pipeline = zbcompile.compile(
        model, 4, loss_fn=loss_fn, num_microbatches=4, profile=even_profile(), time_limit=0.5
    )
    output = pipeline.step(*call["args"], target=call["target"], return_outputs=True)
    evaluated = pipeline.eval(*call["args"])
    for rank, (there, there_eval, measured) in enumerate(found):
        assert measured == found[0][2]
        assert (there is None) == (there_eval is None) == (rank != 3)
    assert torch.equal(found[3][0], output)
    assert torch.equal(found[3][1], evaluated)
    rows = found[0][2].ranks
    for row, planned in zip(rows, pipeline.schedule.order, strict=True):
        mine = [a for a, _, _ in row if a.kind.is_compute]
        assert mine == [a for a in planned if a.kind.is_compute]
        compute = [(s, e) for a, s, e in row if a.kind.is_compute]
        assert all(end <= start for (_, end), (start, _) in zip(compute, compute[1:], strict=False))


def test_the_order_of_the_fault_tests_is_one_f_one_b() -> None:
    assert [str(a) for a in one_f_one_b(2).order[3]] == ["3F0", "3BW0", "3F1", "3BW1"]
