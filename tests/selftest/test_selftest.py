"""``zbcompile selftest`` on a CPU: every section runs, and none of them hides another."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest
import torch

from tests.support import selftest_workers
from tests.support.places import ROOT
from zbcompile.cli.main import main
from zbcompile.errors import FormatError, UsageError
from zbcompile.formats import selftest_json
from zbcompile.formats.schemas import schema_text
from zbcompile.formats.selftest_json import SectionReport, SelfTestReport
from zbcompile.selftest.run import SECTIONS, Section, run
from zbcompile.selftest.settings import SIZES

TINY = SIZES["tiny"]


@pytest.mark.timeout(900)
def test_every_section_runs_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "report.json"
    code = main(["selftest", "--device", "cpu", "--time-limit", "2400", "-o", str(file)])
    out, err = capsys.readouterr()
    report = selftest_json.loads(file.read_text())
    assert {s.name: (s.verdict, s.reason) for s in report.sections if s.verdict == "failed"} == {}
    assert code == 0
    assert [s.name for s in report.sections] == [s.name for s in SECTIONS]
    assert [s.name for s in report.sections if s.verdict == "skipped"] == ["overlap"]
    figures = {name: value for s in report.sections for name, value in s.figures.items()}
    compared = [name.rpartition(":")[0] for name in figures if name.endswith("gradients compared")]
    assert len(compared) == 6
    for case in compared:
        assert figures[f"{case}: equal to the bit"] == figures[f"{case}: gradients compared"] > 0
    for name in ("llama, eager: F + B + W: ns", "step: planned ns", "ours: planned ns", "torch ZBV: ns"):
        assert figures[name] > 0
    assert not [path for path in tmp_path.iterdir() if path != file]
    jsonschema.validate(json.loads(file.read_text()), json.loads(schema_text("selftest")))
    assert "gpt2, after F: bytes predicted" in out
    assert all("ratios say nothing about a GPU" in text for text in (out, err))
    assert "says anything about a GPU" in str(report.versions["note"])
    assert all(f"{name}: " in err for name in ("bits", "nccl"))


@pytest.mark.timeout(300)
def test_a_section_that_fails_does_not_hide_the_others() -> None:
    told: list[int] = []
    sections = [
        Section("raises", "", selftest_workers.raises, 2, 120),
        Section("never_ends", "", selftest_workers.never_ends, 1, 2),
        Section("ends", "", selftest_workers.ends_its_process, 1, 120),
        Section("works", "all is well", selftest_workers.works, 2, 120),
    ]
    report = run(TINY, tell=lambda r: told.append(len(r.sections)), sections=sections)
    assert told == [1, 2, 3, 4]
    assert not report.ok
    assert [s.verdict for s in report.sections] == ["failed", "failed", "failed", "passed"]
    raised, late, ended, works = report.sections
    assert "ValueError: on purpose\\x1b[2J" in raised.reason
    assert any("raise ValueError" in line for line in raised.figures["process 1: traceback"])
    assert "did not end within 2 s" in late.reason
    assert "code 7" in ended.reason
    assert works.figures == {"rank 0": 0, "rank 1": 1, "device": "cpu"}
    assert works.reason == "all is well"
    assert selftest_json.loads(selftest_json.dumps(report)) == report


@pytest.mark.timeout(300)
def test_an_order_from_a_file_needs_torch_alone() -> None:
    """In a process of its own: those that the tests fork begin with more."""
    code = "from tests.support.selftest_workers import loads_little_alone as run; run()"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def test_no_time_left_is_a_failure_with_a_name() -> None:
    report = run(TINY, time_limit_s=1e-3, only=["overlap"])
    assert [(s.verdict, s.reason) for s in report.sections] == [("failed", "no time was left")]


def test_what_cannot_be_meant_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match="no section is called 'nothing'"):
        run(TINY, only=["nothing"])
    assert main(["selftest", "--device", "cpu", "--only", "nothing"]) == 2
    assert "held" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert main(["selftest", "--device", "cuda"]) == 2
        assert "there is no CUDA device" in capsys.readouterr().err
    report = SelfTestReport("cpu", "tiny", {}, (SectionReport("held", "passed", "", 0, 0, {}),))
    text = selftest_json.dumps(report).replace('"passed"', '"well"')
    with pytest.raises(FormatError, match="verdict"):
        selftest_json.loads(text)


def test_a_report_is_written_as_it_always_was(golden: Callable[[str, str], None]) -> None:
    figures = {"step: measured ns": 1500, "step: measured over planned": 1.25, "ranks": [0, 1]}
    report = SelfTestReport(
        "cuda",
        "full",
        {"torch": "2.13.0", "devices": 1},
        (
            SectionReport("steps", "passed", "a step, planned and measured", 2_000, 25_000_000_000, figures),
            SectionReport("nccl", "skipped", "needs two devices", 10, 60_000_000_000, {}),
        ),
    )
    golden("selftest.json", selftest_json.dumps(report))
