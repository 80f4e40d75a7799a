"""`explain` and `diff` as a user runs them; hints, completion, and the examples of ``--help``."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.places import EXAMPLES, ROOT
from zbcompile.cli.completion import SHELLS, script
from zbcompile.cli.main import COMMANDS, build_parser, main
from zbcompile.formats import schedule_json

EXAMPLE = str(EXAMPLES / "four-unequal-stages.schedule.json")
TEXT = "placement 0 1\nmicrobatches 2\nrank 0: 0F0 0F1 0B0 0W0 0BW1\nrank 1: 1F0 1B0 1W0 1F1 1BW1\n"


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    code = main([str(word) for word in words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def put(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_explain_prints_eighty_columns_and_the_same_facts_as_json(capsys) -> None:
    code, out, err = run(capsys, "explain", EXAMPLE)
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    code, out, err = run(capsys, "explain", EXAMPLE, "--json", "--bubbles", "2", "--rank", "0", "--at", "30%")
    facts = json.loads(out)
    assert (code, err, facts["format"], facts["version"]) == (0, "", "zbcompile.explanation", 1)
    assert facts["certificate"]["status"] == "OPTIMAL"
    assert [bubble["rank"] for bubble in facts["bubbles"]] == [0, 0]
    assert [moment["rank"] for moment in facts["moments"]] == [0]
    assert facts["least_cap_bytes"] == 8375186227


def test_a_certificate_that_does_not_hold_ends_with_1(capsys, tmp_path: Path) -> None:
    document = json.loads(Path(EXAMPLE).read_text())
    document["certificate"]["witness"]["work_ns"] += 1
    path = put(tmp_path / "a.json", json.dumps(document))
    code, out, err = run(capsys, "explain", path)
    assert code == 1
    assert "does not hold" in out
    assert "OPTIMAL" not in out
    assert err.startswith("fault: ")
    code, out, _ = run(capsys, "explain", path, "--json")
    assert code == 1
    assert json.loads(out)["certificate"]["status"] is None


BAD = [
    ("explain", EXAMPLE, "--rank", "4"),
    ("explain", EXAMPLE, "--rank", "-1"),
    ("explain", EXAMPLE, "--at", "2s"),
    ("explain", EXAMPLE, "--at", "soon"),
    ("explain", EXAMPLE, "--seed", "1"),
    ("explain", EXAMPLE, "--time-limit", "1"),
    ("explain", EXAMPLE, "--what-if", "split=all", "--rank", "1"),
    ("explain", EXAMPLE, "--what-if", "split=all", "--bubbles", "1"),
    ("explain", EXAMPLE, "--what-if", "more"),
    ("explain", "--what-if", EXAMPLE),
    ("explain", EXAMPLE, "--measured", "absent.json"),
    ("explain", "absent.json"),
    ("diff", EXAMPLE),
    ("diff", EXAMPLE, "absent.json"),
    ("diff", "-", "-"),
    ("completion", "tcsh"),
]


@pytest.mark.parametrize("words", BAD, ids=lambda words: " ".join(w for w in words if w != EXAMPLE))
def test_what_makes_no_sense_ends_with_2(capsys, words: tuple[str, ...]) -> None:
    code, out, err = run(capsys, *words)
    assert (code, out) == (2, "")
    assert err


def test_a_deadlock_is_told_and_an_order_over_its_cap_is_noted(capsys, tmp_path: Path) -> None:
    path = put(tmp_path / "a.txt", "placement 0 1\nmicrobatches 1\nrank 0: 0BW0 0F0\nrank 1: 1F0 1BW0\n")
    code, _, err = run(capsys, "explain", path)
    assert code == 1
    assert "deadlock" in err
    code, out, err = run(capsys, "explain", EXAMPLE, "--cap", "9GiB")
    assert code == 0
    assert "no certificate" in out
    assert "over its cap" in err


def test_explain_reads_what_show_reads(capsys, tmp_path: Path) -> None:
    code, out, _ = run(capsys, "explain", put(tmp_path / "a.txt", TEXT))
    assert code == 0
    assert "units" in out
    code, _, err = run(capsys, "explain", tmp_path / "a.txt", "--what-if", "split=all")
    assert code == 2
    assert "needs costs" in err


def test_a_measured_step_is_told_against_the_plan(capsys, tmp_path: Path) -> None:
    from zbcompile.formats import measured_json
    from zbcompile.schedule.simulate import simulate

    file = schedule_json.loads(Path(EXAMPLE).read_text())
    timeline = simulate(file.schedule, file.problem)
    rows = [
        [(a, 2 * s, 2 * e) for a, s, e in zip(row, timeline.start[r], timeline.end[r], strict=True)]
        for r, row in enumerate(file.schedule.order)
    ]
    path = put(tmp_path / "m.json", measured_json.dumps(measured_json.Measured.of(rows)))
    code, out, _ = run(capsys, "explain", EXAMPLE, "--measured", path)
    assert code == 0
    assert "the step took 1786 ms, planned 893.1 ms: +100.0 %" in out
    assert "rank 3 computed 800 ms longer than planned" in out


def test_what_if_prints_a_row_per_change(capsys) -> None:
    words = (
        "explain",
        EXAMPLE,
        "--what-if",
        "memory=+20%",
        "--what-if",
        "link=2-3:+10ms",
        "--time-limit",
        "6",
    )
    code, out, err = run(capsys, *words)
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    rows = [re.sub(" +", " ", line.strip()) for line in out.splitlines()]
    assert rows[1] == "as it is 881.2 ms 881.2 ms proved"
    assert rows[2] == "20 % more memory 806.2 ms 806.2 ms proved -75 ms (-8.5 %)"
    assert rows[3] == "the link 2-3 slower by 10ms 901.2 ms 901.2 ms proved +20 ms (+2.3 %)"
    other = EXAMPLE.replace(".schedule", ".11GiB.schedule")  # proved by a solver, in more time than this
    rows = run(capsys, "explain", other, "--what-if", "microbatches=+1", "--time-limit", "0.1")[1]
    assert re.search("as it is .* proved", rows)
    code, out, _ = run(capsys, *words, "--json")
    table = json.loads(out)
    assert (table["format"], table["version"]) == ("zbcompile.what_if", 1)
    assert [row["against_as_it_is_ns"] for row in table["changes"]] == [-75_000_000, 20_000_000]


def test_what_if_that_is_interrupted_prints_what_there_is_and_ends_with_130(capsys, monkeypatch) -> None:
    from zbcompile.planner import what_if
    from zbcompile.planner.incumbent import PlanState, Progress

    plan, calls = what_if.plan, list[float]()

    def interrupted(problem, *, observer, **options):
        calls.append(options["time_limit_s"])
        if len(calls) == 2:
            observer(Progress(1, 1, 0.0, "", PlanState.INTERRUPTED))
        return plan(problem, observer=observer, **options)

    monkeypatch.setattr(what_if, "plan", interrupted)
    words = ("--what-if", "memory=+1", "--what-if", "split=all", "--time-limit", "3")
    code, out, err = run(capsys, "explain", EXAMPLE, *words)
    assert (code, err, calls) == (130, "", [1.0, 1.0])
    assert "memory for 1 more microbatch" in out
    assert "every backward split" not in out


def test_diff_says_where_orders_differ_and_ends_as_diff_does(capsys, tmp_path: Path) -> None:
    one = put(tmp_path / "a.txt", TEXT)
    assert run(capsys, "diff", one, one)[:2] == (0, "the same order of the same problem\n")
    other = put(tmp_path / "b.txt", TEXT.replace("0F1 0B0", "0B0 0F1").replace("1BW1", "1B1 1W1"))
    code, out, _ = run(capsys, "diff", one, other)
    assert code == 1
    assert "the problem is the same" in out
    assert "on rank 0 at 1 units, compute action 1: 0F1 against 0B0" in out
    code, out, _ = run(capsys, "diff", one, other, "--json")
    found = json.loads(out)
    assert (code, found["same"], found["moved"], found["format"]) == (1, False, 1, "zbcompile.difference")
    assert [(row["rank"], row["only_first"], row["only_second"]) for row in found["ranks"]] == [
        (0, 0, 0),
        (1, 1, 2),
    ]
    broken = put(tmp_path / "c.txt", TEXT.replace("0F0 0F1", "0F1"))
    code, _, err = run(capsys, "diff", one, broken)
    assert code == 2
    assert "cannot run" in err


def test_diff_tells_other_problems(capsys, tmp_path: Path) -> None:
    document = json.loads(Path(EXAMPLE).read_text())
    document["caps_bytes"] = [13 << 30] * 4
    document["profile"]["stages"][0]["forward_ns"] += 1
    document["profile"]["link"]["latency_ns"] += 1
    document["certificate"] = None
    path = put(tmp_path / "a.json", json.dumps(document))
    code, out, _ = run(capsys, "diff", EXAMPLE, path)
    assert code == 1
    for words in (
        "cap of every rank: 12 GiB",
        "stage 0: forward_ns 27000000 against 27000001",
        "link differs",
    ):
        assert words in out
    assert "the orders are the same" in out
    assert "only the first has a certificate" in out
    code, out, _ = run(capsys, "diff", EXAMPLE, put(tmp_path / "b.txt", TEXT))
    assert code == 1
    assert "not compared action by action" in out.replace("\n", " ")
    assert "span" not in out


NEAR = {
    ("plan", "x.json", "--microbatch", "4"): "did you mean --microbatches?",
    ("plan", "x.json", "--microbatches", "4", "--quite"): "did you mean --quiet?",
    ("plan", "x.json", "--time-limt=3"): "did you mean --time-limit?",
    ("plan", "x.json", "--transport", "asnyc"): "did you mean async?",
    ("shwo", "x.json"): "did you mean show?",
    ("explian", "x.json"): "did you mean explain?",
}


@pytest.mark.parametrize("words", NEAR, ids=" ".join)
def test_near_misses_get_a_hint(capsys, words: tuple[str, ...]) -> None:
    code, out, err = run(capsys, *words)
    assert (code, out) == (2, "")
    assert err.splitlines()[-1] == NEAR[words]


def test_what_is_near_nothing_gets_none(capsys) -> None:
    for words in (("plan", "x.json", "--zzz"), ("qqqq",), ("schema", "a", "b")):
        code, _, err = run(capsys, *words)
        assert code == 2
        assert "did you mean" not in err


def test_completion_of_bash_completes_commands_options_and_choices(tmp_path: Path) -> None:
    put(tmp_path / "c.sh", script("bash"))
    asked = {
        "ex": "explain",
        "plan --obj": "--objective",
        "plan --objective mak": "makespan",
        "explain plan.json --what": "--what-if",
        "completion f": "fish",
        "plan --cap ": "",
    }
    lines = ["source ./c.sh"]
    for text in asked:
        words = ["zbcompile", *text.split(" ")]
        lines.append(f"COMP_WORDS=({' '.join(shlex.quote(w) for w in words)}); COMP_CWORD={len(words) - 1}")
        lines.append('_zbcompile; echo "${COMPREPLY[*]}"')
    done = subprocess.run(
        ["bash", "-c", "\n".join(lines)], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.split("\n")[:-1] == list(asked.values())
    assert done.stderr == ""


@pytest.mark.parametrize("shell", SHELLS)
def test_completion_names_every_command_and_option(shell: str, tmp_path: Path) -> None:
    text = script(shell)
    for action in build_parser()._actions:
        for name, parser in (action.choices or {}).items() if isinstance(action.choices, dict) else ():
            assert name in text
            for option in parser._option_string_actions:
                fish = f"-l {option[2:]} " if option[:2] == "--" else f"-s {option[1:]} "
                assert (fish if shell == "fish" else option) in text
    if shutil.which(shell):
        subprocess.run([shell, "-n", put(tmp_path / "script", text)], check=True, timeout=20)


STARTS_PROCESSES = {"demo", "rehearse"}
"""Half a minute each; tests/cli/test_demo.py runs them smaller."""

CODES = {"diff": (0, 1)}


def test_every_help_ends_with_an_example_and_all_of_them_run(capsys, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    order = sorted(COMMANDS, key=lambda command: command.name != "plan")
    for command in order:
        code, out, _ = run(capsys, command.name, "--help")
        assert code == 0
        assert out.rstrip().endswith(f"example:\n  {command.example}")
        words = shlex.split(command.example)
        assert words[:2] == ["zbcompile", command.name]
        if command.name in STARTS_PROCESSES:
            assert build_parser({command.name}).parse_args(words[1:]).run
        else:
            assert run(capsys, *words[1:])[0] in CODES.get(command.name, (0,)), command.name


def test_explain_and_diff_import_nothing_heavy() -> None:
    for words in (["explain", EXAMPLE], ["explain", EXAMPLE, "--json"], ["diff", EXAMPLE, EXAMPLE]):
        code = (
            f"import sys; from zbcompile.cli.main import main; assert main({words!r}) == 0; "
            "assert not {'torch', 'numpy', 'numba', 'networkx', 'ortools'} & set(sys.modules), sys.modules"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=False, env={**os.environ}
        )
        assert done.returncode == 0, done.stderr[-2000:]
