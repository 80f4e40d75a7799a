"""Reported failures that need processes: four gloo ranks, every case in one launch, against autograd.

The test ids carry the number of the report in data/public-failures.md.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
from torch import nn

import zbcompile
from tests.support.failure_workers import CASES, REFUSALS, Case, Dropped, descend, run_cases
from tests.support.pipeline_oracle import Batch, autograd, same
from zbcompile.runtime.launch import spawn


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    """What every rank found. A hang anywhere ends as an error after the time limit."""
    return spawn(run_cases, 4, timeout_s=240.0)


def reference(case: Case) -> tuple[nn.Module, dict[str, Any], list[Any]]:
    """The untouched model after as many SGD steps; the last gradients; all losses.

    With dropout it is a pipeline in this process: the masks must be the same.
    """
    model = case.model()
    losses: list[Any] = []
    pipeline = None
    if case.body is Dropped:
        pipeline = zbcompile.compile(
            model, case.stages, example_args=case.batch(), num_microbatches=case.microbatches,
            loss_fn=case.loss(), time_limit=0.5,
        )  # fmt: skip
    for _ in range(case.steps):
        model.zero_grad()
        if pipeline is None:
            parts = Batch(case.batch()).cut(case.microbatches)
            losses += autograd(model, parts, case.loss(), scale=case.microbatches)[1]
        else:
            pipeline.step(*case.batch(), losses=losses)
        grads = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
        descend(model.parameters())
    return copy.deepcopy(model), grads, losses


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", list(CASES))
def test_over_gloo_as_in_autograd(name: str, found: list[dict[str, Any]]) -> None:
    case = CASES[name]
    results = [found[rank][name] for rank in case.ranks]
    model, grads, losses = reference(case)
    held: dict[str, list[Any]] = {}
    for result in results:
        assert not result["foreign"]
        for parameter, grad in result["grads"].items():
            held.setdefault(parameter, []).append((grad, result["parameters"][parameter]))
    for parameter, wanted in grads.items():
        copies = held.get(parameter, [])
        assert copies or wanted is None, f"no rank holds {parameter}"
        for grad, value in copies:
            same(f"{parameter}.grad", grad, wanted, case.exact)
            same(parameter, value, model.get_parameter(parameter).detach(), case.exact)
            same(f"{parameter}, copies", value, copies[0][1], exact=True)
    with_losses = [result["losses"] for result in results if result["losses"]]
    assert len(with_losses) == 1
    for i, (mine, theirs) in enumerate(zip(with_losses[0], losses, strict=True)):
        same(f"loss {i}", mine, theirs, case.exact)


def test_PiPPy_32_the_table_lives_on_two_ranks(found: list[dict[str, Any]]) -> None:
    holders = [
        rank for rank in range(4) if "table.weight" in found[rank]["PiPPy#32-piper#13-tied-table"]["grads"]
    ]
    assert holders == [0, 3]


def test_pytorch_172668_placements_are_those_asked_for(found: list[dict[str, Any]]) -> None:
    placed = {name: found[case.ranks[0]][name]["placement"] for name, case in CASES.items()}
    assert placed["pytorch#172668-v-rendezvous"] == (0, 1, 1, 0)
    assert (
        placed["pytorch#172668-looped-rendezvous"] == placed["pytorch#172668-looped-batched"] == (0, 1, 0, 1)
    )
    assert placed["pytorch#172668-any-map"] == (1, 0, 0, 1)


@pytest.mark.parametrize("name", list(REFUSALS))
def test_a_wrong_batch_is_refused_on_every_rank(name: str, found: list[dict[str, Any]]) -> None:
    texts = [found[rank][REFUSALS[name]]["refused"] for rank in range(4)]
    assert all(text.startswith(("ShapeError", "UsageError", "PipelineError")) for text in texts)
    assert all("args[0]" in text for text in texts)
