"""Ctrl-C while CP-SAT runs: a real signal, on the main thread's questions and on the command line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from zbcompile.cli.main import main
from zbcompile.formats import profile_json
from zbcompile.planner.core.instance import Instance
from zbcompile.planner.exact.model import solve_exact
from zbcompile.schedule.costs import Profile, StageCost
from zbcompile.schedule.problem import Problem

STAGE = StageCost.simple(18_522_000, 18_086_000, 9_337_000, 201_216, 73_728)
PROFILE = Profile.uniform(STAGE, 4)
CAP = 3 * STAGE.saved_bytes


def test_a_question_leaves_the_signal_as_it_was() -> None:
    """The first ends by itself, the second is interrupted; after both, Ctrl-C is Python's."""
    running = set(threading.enumerate())  # earlier tests may have left some
    solve_exact(Instance.of(Problem.of(PROFILE, None, 1, CAP)), lower=0)
    hard = Instance.of(Problem.of(PROFILE, None, 24, CAP))
    begin = time.monotonic()
    timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        solve_exact(hard, lower=0, time_limit_s=100)
    assert time.monotonic() - begin < 90
    timer.join()
    assert set(threading.enumerate()) <= running
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_an_interrupted_plan_is_written_and_legal(tmp_path: Path) -> None:
    profile, out = tmp_path / "profile.json", tmp_path / "plan.json"
    profile.write_text(profile_json.dumps(PROFILE))
    words = [
        sys.executable,
        "-m",
        "zbcompile",
        "plan",
        str(profile),
        "--cap",
        str(CAP),
        "--microbatches",
        "16",
    ]
    with subprocess.Popen(
        [*words, "--time-limit", "60", "-o", str(out)], stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "crossing" in line:
                break
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
    assert process.returncode == 130, rest
    assert "Traceback" not in rest
    assert main(["check", str(out)]) == 0


@pytest.mark.parametrize("words", [(), ("--transport", "each")])
def test_a_comparison_of_plans_that_were_cut_short_is_not_printed(
    words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = tmp_path / "profile.json"
    profile.write_text(profile_json.dumps(PROFILE))
    given = ["compare", str(profile), "--cap", str(CAP), "--microbatches", "16", "--time-limit", "60", *words]
    timer = threading.Timer(2.0, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    assert main(given) == 130
    timer.join()
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "compare: interrupted" in shown.err
