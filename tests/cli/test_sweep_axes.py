"""Sweeps over recompute, speeds of ranks and stages per rank, and ``compare`` with speeds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from zbcompile.cli.main import main
from zbcompile.formats import profile_json
from zbcompile.formats.profile_json import ProfileFile
from zbcompile.planner.plan import plan
from zbcompile.schedule.costs import Profile, StageCost
from zbcompile.schedule.ir import Placement
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.speeds import on_ranks

SHORT = ["--ranks", "2", "--f", "4us", "--b", "4us", "--w", "2us", "--microbatches", "4"]
LEAN = StageCost(4000, 8000, 2000, 10_000, 100, 100, name="recompute=full")
PROFILE = Profile.uniform(StageCost(4000, 4000, 2000, 6000, 1000, 500, variants=(LEAN,)), 2, 10)


def rows(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    assert main(["sweep", *words, "--time-limit", "1", "--json"]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["rows"]
    return found


@pytest.fixture
def profile(tmp_path: Path) -> str:
    path = tmp_path / "profile.json"
    path.write_text(profile_json.dumps(ProfileFile(PROFILE, num_microbatches=4)))
    return str(path)


def test_recompute_is_left_out_or_chosen(capsys: pytest.CaptureFixture[str], profile: str) -> None:
    none, auto = rows(capsys, profile, "--recompute", "none", "auto", "--cap", "1000B")
    problem = Problem.of(PROFILE, None, 4, 1000)
    for row, own in ((none, problem.with_(profile=PROFILE.choose((0, 0)))), (auto, problem)):
        assert row["value_ns"] == plan(own, time_limit_s=1).certificate.value_ns
    assert auto["value_ns"] < none["value_ns"]
    assert main(["sweep", *SHORT, "--recompute", "auto"]) == 2
    assert "no stage offers variants (--recompute auto)" in capsys.readouterr().err


def test_ranks_of_different_speed(capsys: pytest.CaptureFixture[str], profile: str) -> None:
    asked = ("--recompute", "none", "--rank-speeds", "1,1", "1,.5", "2,2")
    for row, speeds in zip(rows(capsys, profile, *asked), ((10, 10), (10, 5), (20, 20)), strict=True):
        own = PROFILE.choose((0, 0))
        there = on_ranks(own, Placement.linear(2), [speed * 100_000 for speed in speeds])
        assert row["value_ns"] == plan(Problem.of(there, None, 4), time_limit_s=1).certificate.value_ns
    assert main(["sweep", profile, "--rank-speeds", "1,1", "1"]) == 2
    assert "one speed per rank (--rank-speeds 1)" in capsys.readouterr().err


def test_compare_gives_every_placement_the_speeds_of_its_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--placement", "v", "--rank-speeds", "1,.5", "--time-limit", ".2", "--json"]
    assert main(["compare", *SHORT, *words]) == 0
    found = json.loads(capsys.readouterr().out)["orders"]
    placements = {order["placement"] for order in found}
    assert len(placements) == 2
    work = 4 * 20_000  # four microbatches of 10 us, at half the speed
    for order in found:
        busy = order["span_ns"] * (1 - order["bubble"])
        assert round(busy) == work, order["name"]


def test_stages_per_rank_share_the_rank(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("--placement", "linear", "v", "looped", "--stages-per-rank", "1", "2", "4")
    found = {(row["placement"], row["stages_per_rank"]): row for row in rows(capsys, *SHORT, *asked)}
    assert {key for key, row in found.items() if row["value_ns"] is not None} == {
        ("linear", "1"), ("v", "2"), ("v", "4"), ("looped", "2"), ("looped", "4"),
    }  # fmt: skip
    assert all(row["value_ns"] >= 4 * 10_000 for row in found.values() if row["value_ns"] is not None)
    for words, wrong in (
        (["--stages-per-rank", "2"], "--stages-per-rank goes with"),
        (["--placement", "auto"], "sweep names every placement"),
        (["--placement", "v:2", "--stages-per-rank", "2"], "--stages-per-rank goes with"),
    ):
        assert main(["sweep", *SHORT, *words]) == 2
        assert wrong in capsys.readouterr().err


def test_compare_leaves_out_what_deadlocks(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--placement", "v", "--transport", "batched", "--time-limit", ".2", "--json"]
    assert main(["compare", *SHORT, *words]) == 0
    names = {order["name"] for order in json.loads(capsys.readouterr().out)["orders"]}
    assert "zbcompile" in names
    assert "ZB-V" not in names
