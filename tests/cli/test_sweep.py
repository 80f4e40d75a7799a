"""``zbcompile sweep``: table, JSON, CSV, SVG, and what is refused."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.support.places import ROOT
from zbcompile.cli.main import main

PROFILE = str(ROOT / "examples/profiles/four-unequal-stages.json")
ASKED = ["sweep", PROFILE, "--cap", "1p", "2p", "--microbatches", "4", "8", "--time-limit", "2"]


def test_the_table_marks_the_front_and_draws_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(ASKED) == 0
    out = capsys.readouterr().out
    assert "microbatches" in out
    assert out.count("proved") >= 1
    assert "peak of the fullest rank" in out
    assert any(line.startswith("*") for line in out.splitlines())


def test_json_csv_and_svg_have_the_same_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    svg = tmp_path / "plot.svg"
    assert main([*ASKED, "--json", "--svg", str(svg)]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["microbatches"], row["cap"]) for row in rows] == [
        ("4", "1p"), ("4", "2p"), ("8", "1p"), ("8", "2p"),
    ]  # fmt: skip
    assert all(row["value_ns"] >= row["bound_ns"] > 0 for row in rows)
    circles = [e for e in ElementTree.parse(svg).iter() if e.tag.endswith("circle")]
    assert len(circles) == 4
    assert main([*ASKED, "--csv"]) == 0
    table = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [(r["cap"], int(r["value_ns"]), r["best"]) for r in table] == [
        (row["cap"], row["value_ns"], str(int(row["best"]))) for row in rows
    ]


def test_a_cap_below_one_microbatch_is_a_row_and_a_slip_is_an_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["sweep", PROFILE, "--cap", "1kB", "2p", "--time-limit", "1"]) == 0
    assert "no plan: 1kB: " in capsys.readouterr().out
    assert main(["sweep", PROFILE, "--cap", "1kB", "--time-limit", "1"]) == 1
    capsys.readouterr()
    for wrong, words in (
        (["--cap", "2p", "two"], "--cap two"),
        (["--placement", "linear", "zigzag"], "--placement zigzag"),
        ([], "nothing to choose from"),
        (
            ["--microbatches", *map(str, range(1, 40)), "--cap", *(f"{k}p" for k in range(1, 40))],
            "at most 1000",
        ),
    ):
        assert main(["sweep", PROFILE, *wrong]) == 2
        assert words in capsys.readouterr().err


def test_a_reason_that_combinations_share_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["sweep", "--f", "1ms", "--b", "1ms", "--w", "1ms", "--ranks", "2", "4"]
    asked += [
        "--placement",
        "linear",
        "v",
        "--stages-per-rank",
        "1",
        "2",
        "--microbatches",
        "4",
        "8",
        "--time-limit",
        ".2",
    ]
    assert main(asked) == 0
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("no plan")]
    assert notes == [
        "no plan for 4 of the combinations (2 linear 2 4, 2 linear 2 8, ...): linear with 2 stages per rank",
        "no plan for 4 of the combinations (2 v 1 4, 2 v 1 8, ...): v with 1 stages per rank",
    ]
