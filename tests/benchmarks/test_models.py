"""`benchmarks/models.py`: its configurations are many and distinct, and a sample of them runs."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.model_cases import CASES
from benchmarks.model_cases.case import BATCH, Inputs
from benchmarks.model_cases.check import Row, Verdict, check, compared
from benchmarks.models import table

BY_NAME = {case.name: case for case in CASES}


def verdict(name: str) -> Row:
    return check(BY_NAME[name], lambda step: None)


def test_there_are_at_least_300_configurations_with_names_of_their_own() -> None:
    assert len(BY_NAME) == len(CASES) >= 300


def test_one_of_each_verdict() -> None:
    assert verdict("stochastic depth").verdict is Verdict.RIGHT
    fixed = verdict("a clamp if anything is infinite")
    assert fixed.verdict is Verdict.OPTION
    assert fixed.detail == "bitwise; fixed_branches=True"
    sparse = verdict("Embedding(sparse)")
    assert sparse.verdict is Verdict.REFUSED
    assert "sparse=False" in sparse.detail
    lines = table(
        [sparse, fixed, Row("other", "torch alone", Verdict.CRASH, "KeyError: 1", "capture")]
    ).splitlines()
    assert "| torch alone | 3 | 0 | 1 | 1 | 1 |" in lines
    assert "Bitwise: 1 of the 1 that are right." in lines
    assert "* other (torch alone): crash after capture: KeyError: 1" in lines


def test_a_value_that_differs_or_is_missing_is_wrong() -> None:
    one: dict[str, Tensor | None] = {"gradient of w": torch.ones(3), "gradient of b": None}
    assert compared(one, dict(one)) == (Verdict.RIGHT, "bitwise")
    assert compared(one, one | {"gradient of w": torch.ones(3) + 1e-5})[0] is Verdict.WRONG
    assert compared(one, one | {"gradient of w": torch.ones(3) * torch.nan})[0] is Verdict.WRONG
    assert compared(one, one | {"gradient of b": torch.zeros(3)})[0] is Verdict.WRONG
    assert compared(one, {"gradient of w": torch.ones(3)})[0] is Verdict.WRONG


def test_whole_arguments_are_not_cut() -> None:
    given = Inputs((torch.ones(BATCH, 2),), {"ids": torch.ones(BATCH, 3)}, whole=("ids",))
    first, second = given.microbatches(2)
    assert first.args[0].shape == second.args[0].shape == (BATCH // 2, 2)
    assert first.kwargs["ids"].shape == (BATCH, 3)
