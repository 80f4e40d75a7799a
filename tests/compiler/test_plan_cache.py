"""Plans are found again for the same graphs, options and versions; what does not fit is made anew."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zbcompile
from zbcompile.schedule.costs import Profile, StageCost


def compiled(cache: Path, width: int = 4, **options: Any) -> tuple[zbcompile.Pipeline, list[str]]:
    """Return a pipeline of four layers, and the steps of the compiler that were observed."""
    torch.manual_seed(0)
    seen: list[str] = []
    pipeline = zbcompile.compile(
        nn.Sequential(*(nn.Linear(width, width) for _ in range(4))),
        4,
        example_args=(torch.ones(8, width),),
        example_target=torch.ones(8, width),
        loss_fn=nn.functional.mse_loss,
        observer=lambda name, artifact: seen.append(name),
        cache=cache,
        **{"num_microbatches": 4, "time_limit": 0.3, **options},
    )
    return pipeline, seen


def test_a_plan_is_found_again_without_measuring_searching_or_verifying(tmp_path: Path) -> None:
    first, seen = compiled(tmp_path)
    assert {"measure", "verify", "merge_backward"} <= set(seen)
    again, seen = compiled(tmp_path)
    assert not {"measure", "verify", "merge_backward"} & set(seen)
    assert again.solution == first.solution
    assert [again.source(rank) for rank in range(4)] == [first.source(rank) for rank in range(4)]
    again.step(torch.ones(8, 4), target=torch.ones(8, 4))
    assert "verify" in compiled(tmp_path, verify=True)[1]


def test_another_problem_or_torch_has_another_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    others: list[dict[str, Any]] = [
        {},
        {"width": 5},
        {"num_microbatches": 2},
        {"memory_limit": 1 << 30},
        {"num_ranks": 2},
        {"profile": Profile.uniform(StageCost.simple(1, 1, 1), 4)},
        {"seed": 1},
    ]
    for count, other in enumerate(others, 1):
        compiled(tmp_path, **other)
        assert len(list(tmp_path.glob("*.plan.json"))) == count, other
    monkeypatch.setattr(torch, "__version__", "9.9")
    compiled(tmp_path)
    assert len(list(tmp_path.glob("*.plan.json"))) == len(others) + 1


def test_a_broken_plan_is_made_anew_and_says_so(tmp_path: Path) -> None:
    compiled(tmp_path)
    (file,) = tmp_path.glob("*.plan.json")
    whole = json.loads(file.read_text())
    compiled(tmp_path, num_microbatches=2)
    (other,) = set(tmp_path.glob("*.plan.json")) - {file}
    certificate = {**whole["certificate"], "value_ns": whole["certificate"]["value_ns"] + 1}
    for text, word in (
        (file.read_text()[:-20], "not JSON"),
        (json.dumps({**whole, "certificate": certificate}), "for something else"),
        (other.read_text(), "for something else"),
        (json.dumps({**whole, "order": [row[:-1] for row in whole["order"]]}), "missing|incomplete|lacks"),
    ):
        file.write_text(text)
        with pytest.warns(UserWarning, match=f"(?s)broken, and made anew.*({word})"):
            seen = compiled(tmp_path)[1]
        assert "measure" in seen
        assert "measure" not in compiled(tmp_path)[1]
