"""Costs on the command line in place of a profile file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.places import EXAMPLES
from zbcompile.cli.inputs import load_problem
from zbcompile.cli.main import build_parser, main
from zbcompile.formats import profile_json
from zbcompile.schedule.costs import StageCost
from zbcompile.schedule.problem import Problem

SHORT = "--ranks 8 --f 18.522ms --b 18.086ms --w 9.337ms --comm 0.601ms --microbatches 24"


def problem_of(text: str) -> Problem:
    return load_problem(build_parser({"plan"}).parse_args(["plan", *text.split()]))


def test_the_papers_profile_in_one_line() -> None:
    file = profile_json.loads((EXAMPLES / "profiles/gpt-1.5b-p8-m24.json").read_text())
    stage = file.profile.stages[0]
    memory = f"--activation {stage.saved_bytes}B --weight-activation {stage.saved_for_weight_bytes}B"
    found = problem_of(f"{SHORT} {memory} --cap 1p")
    wanted = file.problem(caps=(8 * stage.saved_bytes,))
    assert found.profile.stages == wanted.profile.stages
    assert found.profile.link == wanted.profile.link
    assert (found.caps, found.num_microbatches) == (wanted.caps, wanted.num_microbatches)


def test_stages_of_a_rank_share_its_value_and_lists_are_per_stage() -> None:
    halves = problem_of(
        "--ranks 2 --f 3ns --b 5ns --w 1ns --bw 5ns --activation 3B --placement v:2 --static 1B"
    )
    assert [s.forward_ns for s in halves.profile.stages] == [1, 1, 2, 2]
    for name in (
        "backward_input_ns",
        "full_backward_ns",
        "saved_bytes",
        "saved_for_weight_bytes",
        "static_bytes",
    ):
        per_rank = [
            sum(getattr(halves.profile.stages[s], name) for s in halves.placement.stages_of(rank))
            for rank in range(2)
        ]
        assert per_rank == [{"saved": 3, "static": 1}.get(name.split("_")[0], 5)] * 2, name
    uneven = problem_of("--f 1ns --b 2ns --w 3ns --activation 1 --placement 0,1,1")
    assert [s.forward_ns for s in uneven.profile.stages] == [1, 0, 1]
    lists = problem_of("--f 1ns,2ns --b 3ns --w 4ns --activation 1,.5 --weight-activation .25")
    assert lists.profile.stages == (
        StageCost(1, 3, 4, 7, 1024, 256, 0),
        StageCost(2, 3, 4, 7, 512, 128, 0),
    )


def test_caps_count_in_activations_where_no_bytes_are_given() -> None:
    assert problem_of(f"{SHORT} --cap 1.5p").caps == (12 * 1024,) * 8
    assert "1024 bytes stand for a factor of 1" in problem_of(SHORT).profile.source


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("plan", "no costs to plan for"),
        ("plan --ranks 2", "no costs to plan for"),
        ("plan --ranks 2 --f 1ms --b 1ms", "--w is missing"),
        ("plan --f 1ms --b 1ms --w 1ms", "--ranks is missing"),
        ("plan --ranks 2 --f 1 --b 1ms --w 1ms", "1 has no unit (--f)"),
        ("plan --ranks 2 --f 1ms,1ms --b 1ms,1ms,1ms --w 1ms", "different lengths"),
        ("plan --ranks 3 --f 1ms,1ms --b 1ms --w 1ms", "3 ranks cannot share 2 stages"),
        ("plan --ranks 2 --f 1ms --b 1ms --w 1ms --comm 1ms,2ms", "no unit of a time (--comm)"),
        ("plan --ranks 2 --f 1ms --b 1ms --w 1ms --cap 4GiB", "a cap in bytes says nothing here"),
        ("plan --ranks 2 --f 1ms --b 1ms --w 1ms --activation 1GiB,2", "mixes bytes and factors"),
        ("plan --ranks 2 --f 1ms --b 1ms --w 1ms --static 1GiB", "--static is in bytes, --activation is not"),
        ("plan --ranks 2 --f 1ms --b 1ms --w 1ms --activation 1GiB --static 1", "--static has no unit"),
        ("plan --ranks 2 --f 1ms --b 1ms --w 1ms --activation x", "is no size (--activation)"),
        ("plan --ranks 2 --f 1ms --b 1ms --w 1ms --activation 1e3", "no unit of a size (--activation)"),
        ("plan --ranks 2 --f 1ms --b 1ms --w 1ms --activation 99999999999", "is no factor"),
        ("plan --ranks 2 --stages 4 --f 1ms --b 1ms --w 1ms", "--stages joins pieces"),
        ("plan --ranks 2 --f 1ms --b 1ms --w 1ms --placement zigzag", "zigzag"),
        ("plan --ranks 4096 --f 1ms --b 1ms --w 1ms --placement v", "too many stages"),
        ("compare absent.json --w 1ms", "both state costs"),
        ("sweep --cap 1p 2p", "no costs to plan for"),
    ],
)
def test_what_does_not_state_costs_is_refused(capsys, text: str, words: str) -> None:
    assert main(text.split()) == 2
    assert words in capsys.readouterr().err


def test_commands_that_take_a_profile_take_the_short_form(tmp_path: Path, capsys) -> None:
    short = ["--ranks", "2", "--f", "3us", "--b", "3us", "--w", "2us"]
    assert main(["plan", *short, "-o", str(tmp_path / "plan.json")]) == 0
    assert main(["check", str(tmp_path / "plan.json"), "--certificate"]) == 0
    capsys.readouterr()
    assert main(["compare", *short, "--time-limit", ".1", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["orders"]) > 3
    assert main(["sweep", *short[2:], "--ranks", "2", "3", "--placement", "linear", "v", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["num_microbatches"] for row in rows] == [4, 4, 6, 6]
    assert all(row["value_ns"] >= row["bound_ns"] >= 32_000 for row in rows)


def test_toml_is_read_where_json_is(tmp_path: Path, capsys) -> None:
    stage = '"repeat" = 2\nforward_ns = "3us"\nbackward_input_ns = "3us"\nbackward_weight_ns = "2us"\n'
    text = f'format = "zbcompile.profile"\nversion = 1\n[[stages]]\n{stage}saved_bytes = 2\n'
    path = tmp_path / "costs.toml"
    path.write_text(text + "saved_for_weight_bytes = 1\n")
    plan = str(tmp_path / "plan.json")
    assert main(["plan", str(path), "-o", plan]) == 0
    assert main(["show", plan, "--profile", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["stages"] == 2
