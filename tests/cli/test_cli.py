"""The command line: data on standard output, talk on standard error, exit codes, what it never imports."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest

from tests.support.places import EXAMPLES
from zbcompile.cli.inputs import parse_caps, parse_placement, parse_time
from zbcompile.cli.main import COMMANDS, build_parser, main
from zbcompile.errors import UsageError
from zbcompile.formats import measured_json, profile_json, schedule_json, torch_csv
from zbcompile.formats.profile_json import ProfileFile
from zbcompile.formats.schedule_json import ScheduleFile
from zbcompile.formats.schemas import SCHEMAS
from zbcompile.planner.core.instance import to_schedule
from zbcompile.planner.starts.classic import zb_h1
from zbcompile.schedule.costs import Edge, Profile, StageCost
from zbcompile.schedule.ir import Action, Kind, Placement, Schedule
from zbcompile.schedule.problem import TRANSPORTS, Problem
from zbcompile.schedule.simulate import simulate
from zbcompile.schedule.solution import Certificate

HEAVY = ("torch", "ortools", "networkx", "numpy", "pandas", "numba", "transformers")


@pytest.fixture
def profile_path(tmp_path: Path) -> Path:
    profile = Profile.uniform(StageCost.simple(3000, 3000, 2000, 2048, 1024), 3, 10, "made by hand")
    path = tmp_path / "profile.json"
    path.write_text(profile_json.dumps(ProfileFile(profile, num_microbatches=4)))
    return path


@pytest.fixture
def schedule_path(tmp_path: Path) -> Path:
    profile = Profile.uniform(StageCost.simple(3000, 3000, 2000, 2048, 1024), 3, 10)
    problem = Problem.of(profile, num_microbatches=4, cap=3 * 2048)
    schedule = to_schedule(zb_h1(3, 4), problem)
    value = simulate(schedule, problem).span_ns
    path = tmp_path / "schedule.json"
    path.write_text(
        schedule_json.dumps(
            ScheduleFile(schedule, problem, Certificate("span", value, value, "memory_windows"))
        )
    )
    return path


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    code = main([str(w) for w in words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize("text", ["", "[1]", "NaN", "1e999", "[" * 100_000])
@pytest.mark.parametrize("command", ["show", "check", "convert"])
def test_a_file_named_json_is_read_as_json(capsys, tmp_path: Path, command: str, text: str) -> None:
    path = tmp_path / "broken.json"
    path.write_text(text)
    code, out, err = run(capsys, command, path, *(["--to", "csv"] if command == "convert" else []))
    assert (code, out) == (2, "")
    assert "broken.json" in err
    assert "action" not in err
    assert "None" not in err


def test_plan_writes_a_schedule_and_talks_elsewhere(capsys, profile_path: Path) -> None:
    code, out, err = run(capsys, "plan", profile_path, "--cap", "1p", "--time-limit", "20")
    assert code == 0
    file = schedule_json.loads(out)
    assert file.problem.caps == (3 * 2048,) * 3
    assert file.schedule.has_communication
    assert file.certificate.value_ns == simulate(file.schedule, file.problem).value_ns
    assert file.certificate.is_optimal
    assert "best" in err
    assert "bound" in err
    assert "proved optimal" in err


def test_the_same_seed_gives_the_same_bytes_and_the_file_equals_the_pipe(
    capsys, profile_path, tmp_path
) -> None:
    words = ("plan", profile_path, "--microbatches", "3", "--quiet", "--time-limit", "20", "--seed", "5")
    first = run(capsys, *words)
    assert run(capsys, *words) == first
    assert first[2] == ""
    target = tmp_path / "out.json"
    assert run(capsys, *words, "-o", target) == (0, "", "")
    assert target.read_text() == first[1]


def test_options_win_over_the_file(capsys, profile_path: Path) -> None:
    words = (
        "--microbatches",
        "2",
        "--objective",
        "makespan",
        "--transport",
        "batched",
        "--placement",
        "0,1,1",
    )
    code, out, _ = run(capsys, "plan", profile_path, *words, "--time-limit", "5")
    problem = schedule_json.loads(out).problem
    assert code == 0
    assert (problem.num_microbatches, problem.objective, problem.transport) == (2, "makespan", "batched")
    assert problem.placement == Placement((0, 1, 1))


def test_costs_of_microbatches_are_planned_shown_and_checked(
    capsys, profile_path: Path, tmp_path: Path
) -> None:
    out, option = tmp_path / "plan.json", "--microbatch-costs"
    code, _, _ = run(capsys, "plan", profile_path, option, "1,2.5,.4,1x2", "--time-limit", 1, "-o", out)
    assert code == 0
    written = json.loads(out.read_text())["microbatch_costs"]
    assert written[1:3] == [{"time_ppm": [2_500_000]}, {"time_ppm": [400_000]}]
    assert written[3] == {"time_ppm": [1_000_000], "bytes_ppm": [2_000_000]}
    assert run(capsys, "check", out, "--certificate")[0] == 0
    code, shown, _ = run(capsys, "show", out)
    assert code == 0
    assert "microbatches of different cost" in shown
    code, _, err = run(capsys, "plan", profile_path, option, "1,two")
    assert code == 2
    assert "--microbatch-costs, microbatch 1" in err
    code, _, err = run(capsys, "rehearse", out)
    assert code == 2
    assert "sleeps as long for every microbatch" in err


def test_auto_tries_the_placements_that_fit_and_keeps_the_best(capsys, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(profile_json.dumps(Profile.uniform(StageCost.simple(3000, 3000, 2000, 2, 1), 4, 10)))
    words = ("--ranks", "2", "--placement", "auto", "--microbatches", "3", "--time-limit", "4", "--cap", "2p")
    code, out, err = run(capsys, "plan", path, *words)
    assert code == 0
    file = schedule_json.loads(out)
    assert file.problem.num_ranks == 2
    assert file.problem.caps == (16, 16)
    for name in ("contiguous", "v", "looped"):
        assert any(line.startswith(f"{name}: ") for line in err.splitlines()), name
    code, out, _ = run(capsys, "plan", path, "--ranks", "2", "--placement", "v", *words[4:])
    assert code == 0
    assert schedule_json.loads(out).problem.placement == Placement.v(2, 2)


def test_a_cap_that_nothing_fits_under_ends_with_1_and_the_least_cap(capsys, profile_path: Path) -> None:
    code, out, err = run(capsys, "plan", profile_path, "--cap", "2047,none,none")
    assert (code, out) == (1, "")
    assert "rank 0" in err
    assert "2048" in err
    assert "Traceback" not in err


def test_check_says_ok_or_names_the_faults(capsys, schedule_path: Path) -> None:
    code, out, _ = run(capsys, "check", schedule_path)
    words = "complete, in order, free of deadlock, under the cap, value as certified"
    assert (code, out) == (0, f"ok: 36 actions on 3 ranks: {words}\n")
    code, out, _ = run(capsys, "check", schedule_path, "--json")
    assert code == 0
    assert json.loads(out)["ok"] is True
    code, out, err = run(capsys, "check", schedule_path, "--cap", "5000,none,none")
    assert (code, out) == (1, "")
    assert "over the memory cap" in err
    assert "rank 0" in err
    code, out, err = run(capsys, "check", schedule_path, "--json", "--cap", "5000")
    verdict = json.loads(out)
    assert code == 1
    assert err == ""
    assert not verdict["ok"]
    assert "over the memory cap" in verdict["faults"][0]["what"]


def test_check_proves_a_certificate_line_by_line(capsys, schedule_path: Path) -> None:
    document = json.loads(schedule_path.read_text())
    path = schedule_path.with_name("planned.json")
    words = ("--microbatches", "4", "--cap", "1p", "--time-limit", "20", "--quiet", "-o", path)
    profile = schedule_path.with_name("costs.json")
    profile.write_text(
        json.dumps(
            {"format": profile_json.FILE.name, "version": profile_json.FILE.version, **document["profile"]}
        )
    )
    assert run(capsys, "plan", profile, *words)[0] == 0
    code, out, err = run(capsys, "check", path, "--certificate")
    assert (code, err) == (0, "")
    assert "certificate proved again" in out.splitlines()[0]
    assert "no order has a span below" in out.splitlines()[1]
    bound = json.loads(path.read_text())["certificate"]["bound_ns"]
    assert out.splitlines()[-1].endswith(f"= {bound:,} ns")
    document = json.loads(path.read_text())
    document["certificate"]["method"] = "magic"
    path.write_text(json.dumps(document))
    code, out, err = run(capsys, "check", path, "--certificate")
    assert (code, out) == (1, "")
    assert "fault: " in err
    assert run(capsys, "check", path)[0] == 0


BROKEN = {
    "a missing op": ("0W0", "", "missing"),
    "W before B": ("0B0 0W0", "0W0 0B0", "0W0"),
    "an op twice": ("0W0", "0W0 0W0", "twice"),
    "an op on another rank": ("0W0", "1W0", ""),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_orders_are_faults_not_tracebacks(capsys, monkeypatch, case: str) -> None:
    text = "placement 0 1\nmicrobatches 1\nrank 0: 0F0 0B0 0W0\nrank 1: 1F0 1B0 1W0\n"
    old, new, words = BROKEN[case]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.replace(old, new, 1).encode())))
    code, out, err = run(capsys, "check", "-")
    assert (code, out) == (1, "")
    assert "fault: " in err
    assert words in err


def test_a_deadlock_is_told_as_who_waits_for_whom(capsys, tmp_path: Path) -> None:
    path = tmp_path / "deadlock.csv"
    path.write_text("0F0,0F1,0I0,0W0,0I1,0W1\n1F1,1I1,1F0,1I0,1W0,1W1\n")
    assert run(capsys, "check", path)[0] == 0
    path.write_text("0F0,0I0,0F1,0W0,0I1,0W1\n1F1,1I1,1F0,1I0,1W0,1W1\n")
    code, _, err = run(capsys, "check", path)
    assert code == 1
    assert "deadlock" in err
    assert "waits for" in err
    assert run(capsys, "show", path)[0] == 1


def test_messages_that_would_be_mixed_up_are_found_in_torchs_csv(capsys, tmp_path: Path) -> None:
    """Receives posted in another order than the sends give wrong data without a word."""
    path = tmp_path / "lowered.csv"
    first = "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
    last = "1F0,1B0,1SEND_B0,1F1,1B1,1SEND_B1\n"
    path.write_text(f"{first}1RECV_F0,1RECV_F1,{last}")
    assert run(capsys, "check", path)[0] == 0
    path.write_text(f"{first}1RECV_F1,1RECV_F0,{last}")
    code, _, err = run(capsys, "check", path)
    assert code == 1
    assert "mixed up" in err
    assert "channel from rank 0 to rank 1" in err


def test_check_reads_a_lineage_and_concludes_nothing_from_it(capsys, tmp_path: Path) -> None:
    example, path = EXAMPLES / "four-unequal-stages.schedule.json", tmp_path / "other.json"
    document, plain = json.loads(example.read_text()), run(capsys, "check", example, "--certificate")
    assert plain[0] == 0
    for lineage, code in ((["list_schedule", "anneal"], 0), (["\x1b[2J"], 2), ("anneal", 2), (["a"] * 65, 2)):
        document["certificate"]["lineage"] = lineage
        path.write_text(json.dumps(document))
        found = run(capsys, "check", path, "--certificate")
        assert found == plain if code == 0 else found[0] == code
        assert code == 0 or "certificate.lineage" in found[2]


def test_a_certificate_of_another_value_fails_the_check(capsys, schedule_path: Path) -> None:
    document = json.loads(schedule_path.read_text())
    document["certificate"]["value_ns"] += 1
    schedule_path.write_text(json.dumps(document))
    code, _, err = run(capsys, "check", schedule_path)
    assert code == 1
    assert "another value" in err
    code, out, _ = run(capsys, "show", schedule_path, "--width", 100)
    assert code == 0
    assert "it proves nothing here" in out.replace("\n", " ")


def test_show_draws_and_gives_figures(capsys, schedule_path: Path, tmp_path: Path) -> None:
    code, out, err = run(capsys, "show", schedule_path, "--width", 90)
    assert (code, err) == (0, "")
    assert "shorter than 1F1B" in out.splitlines()[0]
    assert max(map(len, out.splitlines())) <= 90
    code, out, _ = run(capsys, "show", schedule_path, "--json")
    figures = json.loads(out)
    file = schedule_json.loads(schedule_path.read_text())
    timeline = simulate(file.schedule, file.problem)
    assert figures["span_ns"] == timeline.span_ns
    assert figures["makespan_ns"] == timeline.makespan_ns
    assert figures["certificate"]["status"] == "OPTIMAL"
    assert [row["peak_bytes"] for row in figures["per_rank"]] == list(timeline.peak_bytes)
    svg, html = tmp_path / "a.svg", tmp_path / "a.html"
    assert run(capsys, "show", schedule_path, "--svg", svg, "--html", html) == (0, "", "")
    assert svg.read_text().startswith("<svg")
    assert html.read_text().startswith("<!DOCTYPE html>")


def test_show_draws_what_is_asked_and_refuses_what_is_not_there(
    capsys, schedule_path: Path, tmp_path: Path
) -> None:
    ranks = json.loads(run(capsys, "show", schedule_path, "--json")[1])["ranks"]
    code, out, _ = run(capsys, "show", schedule_path, "--ranks", f"0,{ranks - 1}", "--width", 90)
    assert code == 0
    assert [line.split()[1] for line in out.splitlines() if line.startswith("rank ")] == ["0", str(ranks - 1)]
    assert "not microbatch 1" in run(capsys, "show", schedule_path, "--follow", 1, "--width", 90)[1]
    for option, value, words in (
        ("--ranks", "0-x", "no rank and no range of ranks"),
        ("--ranks", f"0-{ranks}", "ranks that are not there"),
        ("--ranks", "2-1", "ranks that are not there"),
        ("--follow", "1000", "names no microbatch"),
        ("--follow", "-1", ""),
        ("--against", schedule_path, "name the page with --html"),
    ):
        code, out, err = run(capsys, "show", schedule_path, option, value)
        assert (code, out) == (2, "")
        assert words in err
    code, _, err = run(capsys, "show", schedule_path, "--json", "--follow", 1)
    assert code == 2
    assert "--follow is of pictures" in err


def test_show_writes_a_page_of_two_schedules(capsys, schedule_path: Path, tmp_path: Path) -> None:
    page, other = tmp_path / "page.html", tmp_path / "<b>other.json"
    other.write_bytes(schedule_path.read_bytes())
    assert run(capsys, "show", schedule_path, "--html", page, "--against", other) == (0, "", "")
    data = json.loads(
        re.search('<script type="application/json" id="data">(.*?)</script>', page.read_text())[1]
    )
    assert [view["name"] for view in data["views"]] == [str(schedule_path), str(other)]
    assert "<b>" not in page.read_text()
    code, _, err = run(capsys, "show", "-", "--html", page, "--against", "-")
    assert code == 2


def test_show_lays_a_measurement_over_the_plan(capsys, schedule_path: Path, tmp_path: Path) -> None:
    file = schedule_json.loads(schedule_path.read_text())
    timeline = simulate(file.schedule, file.problem)
    rows = [
        [(a, 2 * s, 2 * e) for a, s, e in zip(row, timeline.start[r], timeline.end[r], strict=True)]
        for r, row in enumerate(file.schedule.order)
    ]
    path = tmp_path / "measured.json"
    path.write_text(measured_json.dumps(measured_json.Measured.of(rows, "a test")))
    code, out, _ = run(capsys, "show", schedule_path, "--measured", path, "--width", 90)
    assert code == 0
    assert "+100.0 %" in out
    assert "  real" in out
    code, out, _ = run(capsys, "show", schedule_path, "--measured", path, "--json")
    assert json.loads(out)["measured"]["over_plan"] == pytest.approx(1.0)
    path.write_text(measured_json.dumps(measured_json.Measured.of(rows[:2])))
    code, _, err = run(capsys, "show", schedule_path, "--measured", path)
    assert code == 2
    assert "another plan" in err


def test_colour_obeys_the_environment(schedule_path: Path) -> None:
    command = [sys.executable, "-m", "zbcompile", "show", str(schedule_path), "--width", "80"]
    base = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR")}
    base.update(TERM="xterm-256color", COLORTERM="truecolor")

    def shown(**extra: str) -> str:
        return subprocess.run(
            command, env={**base, **extra}, capture_output=True, text=True, check=True
        ).stdout

    assert "\x1b[" not in shown()
    assert "\x1b[" in shown(FORCE_COLOR="1")
    quiet = shown(FORCE_COLOR="1", NO_COLOR="1")
    assert "38;2" not in quiet
    assert "48;2" not in quiet
    assert "F0" in quiet


def test_convert_goes_round(capsys, schedule_path: Path, tmp_path: Path) -> None:
    file = schedule_json.loads(schedule_path.read_text())
    code, text, _ = run(capsys, "convert", schedule_path, "--to", "text")
    assert code == 0
    assert Schedule.parse(text) == file.schedule
    code, csv_text, _ = run(capsys, "convert", schedule_path, "--to", "csv", "--communication")
    assert torch_csv.loads(csv_text).schedule.compute_only() == file.schedule
    assert "SEND_F" in csv_text
    path = tmp_path / "torch.csv"
    path.write_text(csv_text)
    code, csv_text, _ = run(capsys, "convert", path, "--to", "csv-compute")
    assert "SEND" not in csv_text
    profile = tmp_path / "p.json"
    profile.write_text(profile_json.dumps(file.problem.profile))
    words = ("--profile", profile, "--cap", "1p", "--to", "schedule", "--no-communication")
    code, out, _ = run(capsys, "convert", path, *words)
    assert code == 0
    assert schedule_json.loads(out).problem == file.problem
    code, out, _ = run(capsys, "convert", schedule_path, "--to", "schedule")
    assert out == schedule_path.read_text()
    code, out, _ = run(capsys, "convert", schedule_path, "--to", "chrome")
    assert len([e for e in json.loads(out)["traceEvents"] if e["ph"] == "X"]) == 36


def test_what_is_left_out_of_a_csv_is_said(capsys, tmp_path: Path) -> None:
    path = tmp_path / "sharded.csv"
    path.write_text("0UNSHARD,0F0,0RESHARD,0UNSHARD,0B0,0REDUCE_GRAD,0RESHARD\n")
    code, out, err = run(capsys, "convert", path, "--to", "text")
    assert code == 0
    assert out.endswith("rank 0: 0UNSHARD 0F0 0BW0 0REDUCE_GRAD 0RESHARD\n")
    assert "left out 2 actions that gather or free parameters again, such as 0RESHARD" in err


def test_compare_shows_every_order_and_ours_at_equal_memory(capsys, profile_path: Path) -> None:
    words = ("compare", profile_path, "--cap", "1p", "--microbatches", "6", "--time-limit", "1")
    code, out, err = run(capsys, *words)
    assert (code, err) == (0, "")
    assert "shorter than 1F1B" in out.splitlines()[0]
    for name in ("zbcompile", "1F1B", "GPipe", "ZB-H1", "ZB-H2"):
        assert any(line.startswith(name + " ") for line in out.splitlines()), name
    assert max(map(len, out.splitlines())) <= 110
    code, out, _ = run(capsys, *words, "--json")
    table = json.loads(out)
    rows = {row["name"]: row for row in table["orders"]}
    assert rows["zbcompile"]["fits"]
    assert max(rows["zbcompile"]["peak_bytes"]) <= 3 * 2048
    for row in rows.values():
        assert row["bound_ns"] <= row["ours_ns"] <= row["span_ns"]
    assert not rows["GPipe"]["fits"]


def test_compare_shows_choices_of_splits_under_every_send_mode_and_says_why(capsys, profile_path) -> None:
    words = ("compare", profile_path, "--transport", "each", "--microbatches", "4", "--time-limit", ".3")
    code, out, err = run(capsys, *words)
    assert (code, err) == (0, "")
    reasons = out[out.index("\nasync:\n") :]
    for mode, following in zip(TRANSPORTS, (*TRANSPORTS[1:], "times in"), strict=True):
        own = reasons[reasons.index(f"\n{mode}:\n") : reasons.index(f"\n{following}")]
        assert {rank for rank in "012" if re.search(rf"ranks? [0-9, and]*\b{rank}\b", own)} == {*"012"}, own
    for name in ("none split", "all split", "rule of thumb", "zbcompile"):
        assert out.count(f" {name} ") == 3
    code, out, _ = run(capsys, *words, "--json")
    found = json.loads(out)["transports"]
    assert [made["transport"] for made in found] == list(TRANSPORTS)
    for made in found:
        assert len(made["rows"]) == 4
        assert [rank["rank"] for rank in made["ranks"]] == [0, 1, 2]
        assert all(made["bound_ns"] <= row["value_ns"] for row in made["rows"])


def test_compare_rehearses_choices_of_splits_and_refuses_what_it_cannot(capsys, tmp_path: Path) -> None:
    stage, path = StageCost(3_000_000, 3_000_000, 2_000_000, 4_900_000, 2, 1), tmp_path / "p.json"
    path.write_text(profile_json.dumps(ProfileFile(Profile((stage,) * 2), num_microbatches=2)))
    words = ("--transport", "each", "--time-limit", ".2")
    code, out, err = run(capsys, "compare", path, *words, "--rehearse", "--json")
    assert code == 0, err
    rows = [row for made in json.loads(out)["transports"] for row in made["rows"]]
    assert len(rows) == 12
    assert all(row["rehearsed_ns"] > 0 for row in rows)
    assert "rehearsing 12 orders" in err
    code, out, err = run(capsys, "compare", path, "--rehearse")
    assert (code, out, "--transport each" in err) == (2, "", True)
    code, out, err = run(capsys, "compare", path, *words, "--cap", "1")
    assert (code, "does not fit" in out, "rank 0" in out) == (1, True, True)
    path.write_text(profile_json.dumps(ProfileFile(Profile((stage,)), num_microbatches=2)))
    code, out, err = run(capsys, "compare", path, *words, "--rehearse")
    assert (code, out, "nothing to rehearse" in err) == (2, "", True)


def test_cuts_between_layers_become_megatrons_layout(capsys, tmp_path: Path) -> None:
    names = ("embed", "layers.0", "layers.1", "layers.2", "layers.3", "norm, head")
    pieces = tuple(replace(StageCost.simple(3, 3, 2), name=name) for name in names)
    path, out = tmp_path / "pieces.json", tmp_path / "plan.json"
    path.write_text(profile_json.dumps(ProfileFile(Profile(pieces), num_microbatches=4)))
    assert run(capsys, "plan", path, "--stages", "2", "--time-limit", ".5", "-o", out)[0] == 0
    code, text, err = run(capsys, "convert", out, "--to", "megatron-layout")
    assert (code, err) == (0, "")
    assert re.fullmatch(r"Et+\|t+L\n", text)
    assert text.count("t") == 4
    assert run(capsys, "plan", path, "--time-limit", ".5", "-o", out)[0] == 0
    code, text, err = run(capsys, "convert", out, "--to", "megatron-layout")
    assert (code, text, "which layers its stages hold" in err) == (2, "", True)


def test_schemas_are_printed(capsys) -> None:
    code, out, _ = run(capsys, "schema")
    assert (code, out.split()) == (0, list(SCHEMAS))
    for name in SCHEMAS:
        code, out, _ = run(capsys, "schema", name)
        jsonschema.Draft202012Validator.check_schema(json.loads(out))
    assert run(capsys, "schema", "nothing")[0] == 2


USAGE = [
    ("show", "absent.json"),
    ("show", "/"),
    ("plan", "absent.json"),
    ("check", "absent.json"),
    ("convert", "absent.json", "--to", "csv"),
]


@pytest.mark.parametrize("words", USAGE, ids=" ".join)
def test_files_that_are_not_there_end_with_2(capsys, words: tuple[str, ...]) -> None:
    code, out, err = run(capsys, *words)
    assert (code, out) == (2, "")
    assert err.startswith(f"zbcompile {words[0]}: cannot read")


BAD_OPTIONS = [
    ("--microbatches", "1048576"),
    ("--microbatches", "99999999"),
    ("--ranks", "4"),
    ("--ranks", "2", "--placement", "v"),
    ("--ranks", "2", "--placement", "linear"),
    ("--ranks", "2", "--placement", "0,1,2"),
    ("--cap", "much"),
    ("--cap", "3 parsecs"),
    ("--cap", "1p,1p"),
    ("--cap", "9e99"),
    ("--placement", "spiral"),
    ("--placement", "0,2,1,0"),
    ("--placement", "0,5,1"),
    ("--placement", "v:2"),
    ("--placement", "0,1,x"),
]


@pytest.mark.parametrize("words", BAD_OPTIONS, ids=" ".join)
def test_options_that_mean_nothing_end_with_2(capsys, profile_path: Path, words: tuple[str, ...]) -> None:
    code, out, err = run(capsys, "plan", profile_path, *words)
    assert (code, out) == (2, "")
    assert "Traceback" not in err


REFUSED = [
    ("--microbatches", "0"),
    ("--microbatches", "1_0"),
    ("--microbatches", "\u0663"),
    ("--time-limit", "-1"),
    ("--time-limit", "nan"),
    ("--time-limit", "1e-300"),
    ("--objective", "speed"),
    ("--seed", "2147483648"),
    ("--seed", "-1"),
    ("--seed", "x"),
    ("--micro", "4"),
    ("--quie",),
    ("--cap", ""),
    ("--cap", " "),
    ("--cap=",),
    ("--placement", ""),
    ("--transport", ""),
    ("-o", ""),
    ("--", "second"),
]


@pytest.mark.parametrize("words", REFUSED, ids=" ".join)
def test_options_that_the_parser_refuses_end_with_2(
    capsys, profile_path: Path, words: tuple[str, str]
) -> None:
    code, out, err = run(capsys, "plan", profile_path, *words)
    assert (code, out) == (2, "")
    assert err.startswith("usage: zbcompile")


def test_a_seed_of_31_bits_is_taken(capsys, profile_path: Path) -> None:
    words = ("--seed", (1 << 31) - 1, "--time-limit", 1, "--quiet")
    assert run(capsys, "plan", profile_path, *words)[0] == 0


@pytest.mark.parametrize("option", ["--profile", "--cap", "--measured", "--from", "--to", "--svg", "--width"])
def test_an_option_that_is_given_says_something(capsys, schedule_path: Path, option: str) -> None:
    assert run(capsys, "show", schedule_path, option, "")[:2] == (2, "")


def test_a_window_behind_the_step_is_refused(capsys, schedule_path: Path) -> None:
    code, out, err = run(capsys, "show", schedule_path, "--from", "500s", "--to", "600s")
    assert (code, out) == (2, "")
    assert "--from lies behind the end of the step" in err


def test_a_foreign_file_is_named_as_such(capsys, profile_path: Path, schedule_path: Path) -> None:
    code, _, err = run(capsys, "show", profile_path)
    assert code == 2
    assert "not a zbcompile.schedule file" in err
    code, _, err = run(capsys, "plan", schedule_path)
    assert code == 2
    assert "not a zbcompile.profile file" in err


def test_caps_have_units_and_1p_is_what_1f1b_holds() -> None:
    stages = (StageCost(1, 1, 1, 2, 100, 50, 7), StageCost(1, 1, 1, 2, 200, 50, 9))
    problem = Problem.of(Profile(stages), num_microbatches=4)
    assert parse_caps("1p", problem) == (207, 409)
    assert parse_caps("1.5P", problem) == (307, 609)
    assert parse_caps("2KiB, none", problem) == (2048, None)
    assert parse_caps("1.5kB", problem) == (1500, 1500)
    assert parse_caps("8e3", problem) == (8000, 8000)
    folded = problem.with_(placement=Placement((0, 0)), caps=())
    assert parse_caps("1p", folded) == (316,)


def test_times_and_placements_are_read() -> None:
    assert parse_time("20ms", 10) == 20_000_000
    assert parse_time("1.5us", 10) == 1500
    assert parse_time("30%", 1000) == 300
    with pytest.raises(UsageError, match="unit of time"):
        parse_time("3 days", 10)
    assert parse_placement("looped:2", 4) == Placement.looped(2, 2)
    assert parse_placement("v", 4) == Placement.v(2, 2)
    assert parse_placement("0,1,1,0", 4) == Placement.v(2, 2)


def test_help_names_every_command() -> None:
    text = build_parser().format_help()
    assert build_parser(()).format_help() == text
    for command in COMMANDS:
        assert command.name in text


def test_options_about_costs_need_costs(capsys, tmp_path: Path) -> None:
    path = tmp_path / "order.txt"
    path.write_text("placement 0\nmicrobatches 1\nrank 0: 0F0 0BW0\n")
    for words in (("--cap", "1GiB"), ("--transport", "batched")):
        code, out, err = run(capsys, "check", path, *words)
        assert (code, out) == (2, "")
        assert f"{words[0]} needs costs" in err


LOADED_BY_HALF = """
import sys
import zbcompile.__main__ as command
class Interrupted:
    def find_spec(self, name, path=None, target=None):
        if name == "zbcompile.cli.main":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupted())
sys.exit(command.main())
"""


def test_an_interrupt_while_the_command_line_is_loaded_has_no_traceback() -> None:
    done = subprocess.run([sys.executable, "-c", LOADED_BY_HALF], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "zbcompile: interrupted\n")


IMPORTS = """
import sys
from zbcompile.cli.main import main
code = main({words!r})
loaded = [name for name in {heavy!r} if name in sys.modules]
assert code == 0, code
assert not loaded, loaded
"""
HELP = """
import sys
from zbcompile.cli.main import main
try:
    main({words!r})
except SystemExit as done:
    assert done.code == 0, done.code
loaded = [name for name in {heavy!r} if name in sys.modules]
assert not loaded, loaded
"""


@pytest.mark.parametrize(
    "words",
    [["show"], ["show", "--json"], ["check"], ["convert", "--to", "csv"], ["schema", "schedule"]],
    ids=" ".join,
)
def test_queries_import_nothing_heavy(schedule_path: Path, words: list[str]) -> None:
    others = [c.module for c in COMMANDS if c.name != words[0]]
    if words[0] != "schema":
        words = [words[0], str(schedule_path), *words[1:]]
    script = IMPORTS.format(words=words, heavy=(*HEAVY, *others))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("words", [[], *([c.name] for c in COMMANDS)], ids=" ".join)
def test_help_imports_nothing_heavy_and_no_other_command(words: list[str]) -> None:
    others = [c.module for c in COMMANDS if c.name not in words]
    script = HELP.format(words=[*words, "--help"], heavy=(*HEAVY, *others))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: zbcompile")


def test_planning_never_imports_torch_nor_a_solver_that_is_not_asked(profile_path: Path) -> None:
    """A published order meets the bound here."""
    words = ["plan", str(profile_path), "--time-limit", "5", "-o", os.devnull]
    script = IMPORTS.format(words=words, heavy=("torch", "transformers", "ortools", "pandas"))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_reader_that_goes_away_is_no_traceback(schedule_path: Path) -> None:
    command = f"{sys.executable} -m zbcompile convert {schedule_path} --to chrome | head -c 1 > /dev/null"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr


def test_an_interrupt_writes_the_best_so_far_and_ends_with_130(tmp_path: Path) -> None:
    """Stages that differ leave a gap, so that the search goes on until it is interrupted."""
    stages = tuple(
        StageCost.simple(7919 + 613 * k, 6101 + 977 * (k % 3), 3 + 811 * k, 5, 2) for k in range(8)
    )
    path, out = tmp_path / "profile.json", tmp_path / "out.json"
    path.write_text(profile_json.dumps(Profile(stages)))
    command = [sys.executable, "-m", "zbcompile", "plan", str(path), "--microbatches", "24", "--cap", "11"]
    process = subprocess.Popen(
        [*command, "--time-limit", "90", "-o", str(out)], stderr=subprocess.PIPE, text=True, bufsize=1
    )
    assert process.stderr is not None
    line = process.stderr.readline()
    while line and "best" not in line:
        line = process.stderr.readline()
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    rest = process.communicate(timeout=60)[1]
    assert process.returncode == 130, rest
    assert "Traceback" not in rest
    file = schedule_json.loads(out.read_text())
    assert file.certificate.value_ns == simulate(file.schedule, file.problem).value_ns


@pytest.mark.parametrize("cause", [KeyboardInterrupt(), OSError("no such file")])
def test_an_interrupt_while_a_package_is_loaded(
    cause: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled packages turn Ctrl-C into a failed import; other failed imports stay what they are."""

    def load(name: str) -> None:
        raise ImportError("initialization failed") from cause

    monkeypatch.setattr("zbcompile.cli.main.importlib.import_module", load)
    if isinstance(cause, KeyboardInterrupt):
        assert main(["schema", "profile"]) == 130
        return
    with pytest.raises(ImportError):
        main(["schema", "profile"])


def test_a_converted_order_keeps_a_certificate_only_of_its_own_value(
    capsys, schedule_path: Path, tmp_path: Path
) -> None:
    """The bound holds for every order; the value follows the sends and receives that were put in."""
    out = tmp_path / "out.json"
    for communication in ("--communication", "--no-communication"):
        words = ("convert", schedule_path, "--to", "schedule", communication, "-o", out)
        assert run(capsys, *words) == (0, "", "")
        file = schedule_json.loads(out.read_text())
        assert file.certificate is not None
        assert file.certificate.value_ns == simulate(file.schedule, file.problem).value_ns
        assert run(capsys, "check", out)[0] == 0
    document = json.loads(schedule_path.read_text())
    document["certificate"]["value_ns"] += 5
    schedule_path.write_text(json.dumps(document))
    code, _, err = run(capsys, "convert", schedule_path, "--to", "schedule", "-o", out)
    assert (code, err) == (0, "note: the certificate is of another order: left out\n")
    assert schedule_json.loads(out.read_text()).certificate is None
    assert run(capsys, "check", out)[0] == 0


def test_the_variants_that_were_offered_are_in_the_file(capsys, tmp_path: Path) -> None:
    lean = StageCost(4000, 4000, 2000, 6000, 10, 10, name="recompute")
    stage = StageCost(3000, 3000, 2000, 5000, 100, 50, variants=(lean,))
    offered = Profile((stage, stage))
    path, out = tmp_path / "p.json", tmp_path / "out.json"
    path.write_text(profile_json.dumps(ProfileFile(offered, num_microbatches=3)))
    words = ("plan", path, "--cap", "40", "--time-limit", "3", "--quiet", "-o", out)
    assert run(capsys, *words) == (0, "", "")
    file = schedule_json.loads(out.read_text())
    assert file.offered == offered
    assert file.variants == (1, 1)
    assert file.problem.profile == offered.choose((1, 1))
    assert run(capsys, "check", out)[0] == 0
    assert run(capsys, "check", out, "--profile", path, "--cap", "40")[0] == 0
    again = tmp_path / "again.json"
    assert run(capsys, "convert", out, "--to", "schedule", "-o", again)[0] == 0
    assert again.read_bytes() == out.read_bytes()


def test_problems_that_no_time_limit_could_hold_are_refused_at_once(capsys, tmp_path: Path) -> None:
    """By the limits of the library (`zbcompile.schedule.limits`), with the file's name."""
    stage, path = StageCost.simple(3, 3, 2), tmp_path / "p.json"
    skips = (*(Edge(s, s + 1) for s in range(599)), Edge(0, 599))
    for profile, microbatches, words in (
        (Profile.uniform(stage, 64), 513, "at most 32768; given: 64 x 513 = 32832"),
        (Profile((stage,) * 600, skips), 2, "at most 512 stages; given: 600"),
    ):
        path.write_text(profile_json.dumps(ProfileFile(profile, num_microbatches=microbatches)))
        for command in ("plan", "compare"):
            code, out, err = run(capsys, command, path)
            assert (code, out) == (2, "")
            assert words in err
            assert "p.json" in err
    path.write_text(profile_json.dumps(ProfileFile(Profile.uniform(stage, 2000), num_microbatches=2)))
    code, _, err = run(capsys, "compare", path)
    assert (code, "at most 1024 stages" in err) == (2, True)
    path = tmp_path / "s.json"
    rows = [[Action(Kind.FORWARD, s, 0), Action(Kind.FULL_BACKWARD, s, 0)] for s in range(600)]
    wide = Problem.of(Profile((stage,) * 600, skips), num_microbatches=1)
    order, certificate = Schedule.of(wide.placement, 1, rows), Certificate("span", 9, 1, "work", {"rank": 0})
    path.write_text(schedule_json.dumps(ScheduleFile(order, wide, certificate)))
    code, _, err = run(capsys, "check", path, "--certificate")
    assert (code, "too many stages to plan" in err) == (2, True)


HOLDING = """placement 0
microbatches 3
rank 0: 0F0 0F1 0F2 0B0 0BW1 0BW2 0W0
"""


def test_gradients_held_beyond_the_plan_are_said_and_nothing_where_there_are_none(
    capsys, schedule_path: Path, tmp_path: Path
) -> None:
    words = "beyond the plan it holds up to 1 gradient of stage 0's weights"
    (tmp_path / "s.txt").write_text(HOLDING)
    for command in ("show", "check"):
        code, out, _ = run(capsys, command, tmp_path / "s.txt")
        assert (code, words in out) == (0, True)
        assert "beyond the plan" not in run(capsys, command, schedule_path)[1]
    code, out, _ = run(capsys, "show", tmp_path / "s.txt", "--json")
    assert [rank["waiting_gradients"] for rank in json.loads(out)["per_rank"]] == [[1]]
    stage = {"forward_ns": 20, "backward_input_ns": 20, "backward_weight_ns": 20, "full_backward_ns": 37}
    stage |= {"repeat": 4, "saved_bytes": 4, "saved_for_weight_bytes": 2}
    profile = {
        "format": profile_json.FILE.name,
        "version": profile_json.FILE.version,
        "stages": [stage],
        "microbatches": 8,
    }
    (tmp_path / "p.json").write_text(json.dumps(profile))
    args = ("plan", tmp_path / "p.json", "--cap", "16", "--time-limit", "2", "-o", tmp_path / "plan.json")
    code, _, err = run(capsys, *args)
    assert (code, "beyond the plan it holds up to" in err) == (0, True)
    (tmp_path / "one.json").write_text(json.dumps(profile | {"microbatches": 1}))
    code, _, err = run(capsys, "plan", tmp_path / "one.json", "-o", tmp_path / "plan.json")
    assert (code, "beyond the plan" in err) == (0, False)


UNWRITABLE = [
    ("plan", "-o"),
    ("convert", "-o"),
    ("show", "--svg"),
    ("show", "--html"),
    ("profile", "-o"),
    ("rehearse", "--measured"),
    ("rehearse", "--calibrated"),
]


@pytest.mark.parametrize(("command", "option"), UNWRITABLE)
def test_every_output_is_checked_before_anything_is_read(
    capsys, tmp_path: Path, command: str, option: str
) -> None:
    more = {"convert": ("--to", "csv"), "profile": ("--stages", "2")}
    (tmp_path / "kept").write_text("kept")
    (tmp_path / "kept").chmod(0o400)
    for place, why in (("absent/out", "No such file"), ("", "Is a directory"), ("kept", "read-only")):
        words = (command, "absent.json", *more.get(command, ()), option, tmp_path / place)
        code, out, err = run(capsys, *words)
        assert (code, out) == (2, "")
        assert why in err
        assert "absent.json" not in err
    assert os.listdir(tmp_path) == ["kept"]


def test_two_results_at_one_place_and_one_pipe_for_two_files(
    capsys, schedule_path: Path, tmp_path: Path
) -> None:
    for words in (
        ("show", schedule_path, "--svg", tmp_path / "a", "--html", tmp_path / "a"),
        ("show", schedule_path, "--svg", "-", "--json"),
        ("rehearse", schedule_path, "--measured", tmp_path / "a", "--calibrated", tmp_path / "a"),
        ("rehearse", schedule_path, "--measured", "-"),
    ):
        code, out, err = run(capsys, *words)
        assert (code, out) == (2, "")
        assert "two results go to the same place" in err
    assert not (tmp_path / "a").exists()
    for words in (("check", "-", "--profile", "-"), ("show", "-", "--measured", "-")):
        code, _, err = run(capsys, *words)
        assert code == 2
        assert "only once" in err


def test_show_writes_figures_and_pictures_together(capsys, schedule_path: Path, tmp_path: Path) -> None:
    code, out, _ = run(capsys, "show", schedule_path, "--json", "--svg", tmp_path / "a.svg")
    assert code == 0
    assert json.loads(out)["ranks"] == 3
    assert (tmp_path / "a.svg").read_text().startswith("<svg")


ESCAPED = {
    "text": "placement 0\nmicrobatches 1\nrank 0: 0F0 \x1b[2J\x07\n",
    "head of the text": "placement 0\nmicrobatches 1\n\x1b]0;x\x07\n",
    "cell": "0F0,\x1b[2J\x07\n",
    "pair": "(\x1b[2J)OVERLAP_F_B\n",
    "key": '{"format": "zbcompile.schedule", "version": 1, "\x1b[2J": 1}',
    "key, escaped": '{"format": "zbcompile.schedule", "version": 1, "\\u001b[2J": 1}',
    "twice": '{"\\u001b[2J": 1, "\\u001b[2J": 1}',
    "format": '{"format": "\\u001b[2J"}',
    "kind": '{"format": "zbcompile.schedule", "version": 1, "placement": [0], "microbatches": 1,'
    ' "order": [[["\\u001b[2J", 0, 0]]]}',
}


@pytest.mark.parametrize("case", ESCAPED)
@pytest.mark.parametrize("command", ["show", "check", "convert"])
def test_nothing_of_a_file_steers_the_terminal(capsys, tmp_path: Path, command: str, case: str) -> None:
    path = tmp_path / "order \x1b[31m"
    path.write_text(ESCAPED[case])
    code, out, err = run(capsys, command, path, *(["--to", "text"] if command == "convert" else []))
    assert code == 2
    assert all(line.isprintable() for line in (out + err).splitlines())


def test_names_in_a_profile_never_reach_the_terminal_raw(capsys, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    for name in ("source", "name"):
        document = json.loads(profile_json.dumps(Profile.uniform(StageCost.simple(3, 3, 2), 2)))
        (document if name == "source" else document["stages"][0])[name] = "\x1b[2J"
        path.write_text(json.dumps(document))
        code, out, err = run(capsys, "plan", path)
        assert (code, out) == (2, "")
        assert "printable" in err
        assert "\x1b" not in err


def test_show_draws_an_action_on_a_foreign_rank_and_says_so(capsys, tmp_path: Path) -> None:
    path = tmp_path / "order.txt"
    path.write_text("placement 0 1\nmicrobatches 1\nrank 0: 0F0 1F0 1BW0\nrank 1: 0BW0\n")
    code, out, err = run(capsys, "show", path, "--width", 60)
    assert code == 0
    assert "3 actions stand on another rank than their stage's" in err
    assert "rank 1" in out
    profile = tmp_path / "p.json"
    profile.write_text(profile_json.dumps(Profile.uniform(StageCost.simple(3, 3, 2), 2)))
    for transport in ("rendezvous", "batched"):
        words = ("show", path, "--profile", profile, "--transport", transport)
        code, out, err = run(capsys, *words)
        assert (code, out) == (1, "")
        assert "1F0 stands on the wrong rank (rank 0, position 1)" in err


def test_a_measured_timeline_from_a_pipe_becomes_a_trace(capsys, monkeypatch) -> None:
    text = measured_json.dumps(measured_json.Measured.of([[(Action(Kind.FORWARD, 0, 0), 0, 5)]]))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    code, out, _ = run(capsys, "convert", "-", "--to", "chrome")
    assert code == 0
    assert any(event["ph"] == "X" for event in json.loads(out)["traceEvents"])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    code, _, err = run(capsys, "convert", "-", "--to", "chrome", "--cap", "1p")
    assert code == 2
    assert "takes no --cap" in err


def test_an_interrupt_while_the_order_is_lowered_writes_it_as_it_is(
    capsys, profile_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("zbcompile.cli.plan.lower", interrupted)
    out = tmp_path / "out.json"
    assert run(capsys, "plan", profile_path, "--time-limit", "2", "--quiet", "-o", out)[0] == 130
    assert run(capsys, "check", out)[0] == 0
