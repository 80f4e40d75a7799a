"""The command line as a shell runs it: closed, full and broken streams, pipes by name, no folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from zbcompile.formats import schedule_json
from zbcompile.schedule.ir import Schedule

TEXT = "placement 0 1\nmicrobatches 1\nrank 0: 0F0 0B0 0W0\nrank 1: 1F0 1B0 1W0\n"
ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "s.txt").write_text(TEXT)
    (tmp_path / "s.json").write_text(schedule_json.dumps(Schedule.parse(TEXT)))
    return tmp_path


def shell(script: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a script in which ``$Z`` is the command line; standard input is empty."""
    usual = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "FORCE_COLOR")}
    return subprocess.run(
        ["bash", "-c", f"set -o pipefail\n{script}"],
        cwd=folder,
        env={**usual, "Z": f"{sys.executable} -m zbcompile", "PYTHONPATH": str(ROOT), **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


SHELLS = {
    "no output": ("$Z check s.json >&-", 2, "it is closed (standard output)"),
    "no output, none needed": ("$Z convert s.json --to csv -o out >&-; cat out", 0, "0F0,0I0,0W0"),
    "full output": ("$Z check s.json >/dev/full", 2, "No space left on device (standard output)"),
    "full output of a picture": ("$Z show s.json >/dev/full", 2, "No space left on device"),
    "full output of help": ("$Z --help >/dev/full", 2, "No space left on device"),
    "output that is read only": ("$Z schema profile 1</dev/null", 2, "Bad file descriptor"),
    "a reader that goes": ("$Z schema profile | true; exit ${PIPESTATUS[0]}", 2, ""),
    "no input": ("$Z check - <&-", 2, "it is closed (standard input)"),
    "no error": ("$Z check absent.json 2>&-", 2, ""),
    "full error": ("$Z check absent.json 2>/dev/full", 2, ""),
    "nothing at all": ("$Z check s.json <&- >&- 2>&-", 2, ""),
    "no error, all well": ("$Z check s.json 2>&-", 0, "ok: 6 actions"),
    "help without output": ("$Z schema --help >&-", 0, "usage: zbcompile schema"),
}


@pytest.mark.parametrize("case", SHELLS)
def test_streams_that_are_closed_or_full_end_with_a_code_of_the_table(folder: Path, case: str) -> None:
    script, code, words = SHELLS[case]
    done = shell(script, folder)
    both = done.stdout + done.stderr
    assert done.returncode == code, both
    assert words in both
    assert "Traceback" not in both
    assert "Exception ignored" not in both


def test_pipes_by_name_carry_data_both_ways(folder: Path) -> None:
    scripts = (
        "$Z convert s.json --to text -o /dev/stdout | cat",
        "$Z convert s.json --to text -o >(cat); sleep .1; wait",
        "$Z convert <(cat s.txt) --to text",
        "$Z convert - --to text -o - < s.json",
    )
    done = shell("\n".join(scripts), folder)
    assert (done.stdout, done.stderr, done.returncode) == (TEXT * 4, "", 0)


def test_a_closed_descriptor_is_not_taken_by_a_file(folder: Path) -> None:
    """Otherwise the result gets number 1 or 2, and what libraries print ends up in it."""
    (folder / "opens.py").write_text(
        "from zbcompile.cli.main import main\n"
        "main(['schema'])\n"
        "print(open('s.txt').fileno() > 2, file=open('n', 'w'))\n"
    )
    shell(f"{sys.executable} opens.py <&- >&- 2>&-", folder)
    assert (folder / "n").read_text() == "True\n"


def test_a_working_directory_that_is_gone(folder: Path) -> None:
    gone = f"mkdir gone; cd gone; rmdir ../gone; $Z check {folder}/s.json && $Z rehearse {folder}/s.json"
    done = shell(gone, folder)
    assert done.stdout.startswith("ok: 6 actions")
    assert done.returncode == 2
    assert "no working directory" in done.stderr


def test_the_width_is_bounded(folder: Path) -> None:
    done = shell("$Z show s.json", folder, COLUMNS="1000000000")
    assert done.returncode == 0
    assert "note: drawn 2000 columns wide, not 1000000000" in done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 2000
    done = shell("$Z show s.json", folder, COLUMNS="\u00b2", LINES="x")
    assert (done.returncode, done.stderr) == (0, "")
    assert shell("$Z show s.json --width 100000000", folder).returncode == 2
