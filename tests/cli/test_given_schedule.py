"""Commands that read a schedule: what they take from it, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from zbcompile.cli.main import main
from zbcompile.formats import profile_json, schedule_json
from zbcompile.formats.profile_json import ProfileFile
from zbcompile.planner.plan import plan
from zbcompile.schedule.costs import Profile, StageCost
from zbcompile.schedule.problem import Problem
from zbcompile.show.timeline import least_columns

STAGE = StageCost(3000, 3000, 2000, 5000, 100, 50, gradient_bytes=10)
PROFILE = Profile.uniform(STAGE, 3, 10)
PLANNED = Problem.of(
    PROFILE, None, 4, None, "makespan", "rendezvous", accumulate="memory", kept_gradients=True
)
ASKED = ("objective", "transport", "accumulate", "kept_gradients")


@pytest.fixture
def schedule(tmp_path: Path) -> str:
    path = tmp_path / "plan.json"
    path.write_text(schedule_json.dumps(plan(PLANNED, level=1)))
    return str(path)


def figures(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["show", *words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_what_a_profile_does_not_state_is_as_the_order_was_planned(
    capsys: pytest.CaptureFixture[str], schedule: str, tmp_path: Path
) -> None:
    costs = tmp_path / "costs.json"
    costs.write_text(profile_json.dumps(PROFILE))
    mine, own = figures(capsys, schedule, "--profile", str(costs)), figures(capsys, schedule)
    assert [mine[name] for name in ASKED] == ["makespan", "rendezvous", "memory", True]
    assert (mine["makespan_ns"], mine["per_rank"]) == (own["makespan_ns"], own["per_rank"])
    stated = ProfileFile(
        PROFILE, objective="span", transport="async", accumulate="order", kept_gradients=False
    )
    costs.write_text(profile_json.dumps(stated))
    assert profile_json.loads(costs.read_text()) == stated
    theirs = figures(capsys, schedule, "--profile", str(costs))
    assert [theirs[name] for name in ASKED] == ["span", "async", "order", False]
    words = (schedule, "--profile", str(costs), "--kept-gradients", "--accumulate", "memory")
    assert [figures(capsys, *words)[name] for name in ASKED] == ["span", "async", "memory", True]


@pytest.mark.parametrize("width", [1, 3, 18, 19])
def test_a_width_that_no_lane_fits_is_refused(
    capsys: pytest.CaptureFixture[str], schedule: str, tmp_path: Path, width: int
) -> None:
    picture = tmp_path / "picture.svg"
    for more in ([], ["--svg", str(picture)]):
        assert main(["show", schedule, "--width", str(width), *more]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert f"needed: at least 20 columns; given: {width}" in " ".join(err.split())
    assert not picture.exists()
    assert least_columns(10_000) == len("rank 9999 ") + 12
    assert main(["show", schedule, "--width", "20"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) == 20
