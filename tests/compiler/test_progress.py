"""`zbcompile.progress`: one line per step of the compiler, by one process, and never on standard output."""

from __future__ import annotations

import re

import pytest

import zbcompile


@pytest.mark.timeout(20)
def test_each_step_has_a_line_on_standard_error(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    observer = zbcompile.progress()
    for name in ("capture", "backend.stage 0", "plan"):
        observer(name, None)
    shown = capfd.readouterr()
    assert shown.out == ""
    assert re.fullmatch(r"\[ +\d+\.\d s\] capture\n\[ +\d+\.\d s\] plan\n", shown.err)


@pytest.mark.timeout(20)
@pytest.mark.parametrize(("rank", "writes"), [("0", True), ("3", False)])
def test_of_several_processes_the_first_one_writes(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], rank: str, writes: bool
) -> None:
    monkeypatch.setenv("RANK", rank)
    zbcompile.progress()("capture", None)
    assert ("capture" in capfd.readouterr().err) == writes
