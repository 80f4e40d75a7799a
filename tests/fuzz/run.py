"""Runs a case, in this process or as one of its own, and says what is wrong with how it ended."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import resource
import shlex
import signal
import stat
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType

from tests.fuzz.cases import Case
from zbcompile.cli.main import main
from zbcompile.errors import ZBCompileError
from zbcompile.formats import profile_json, schedule_json
from zbcompile.schedule.check import faults

__all__ = ["run_here", "run_process"]

CODES = (0, 1, 2, 3, 130)
CPU_SECONDS = 10.0
PROCESS_SECONDS = 120.0
MEMORY_BYTES = 600 << 20
_READ_ONLY = "readonly"
_STYLE = re.compile("\x1b\\[[0-9;]*m")
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_LONGER = ("FORCE_COLOR", "NO_COLOR", "COLORTERM", "TERM", "COLUMNS", "LINES")


class _TooSlowError(BaseException):
    """A case took more processor time than it may."""


def run_here(case: Case) -> list[str]:
    """Run a case in this process and return what is wrong; empty when all is well."""
    with _folder(case) as folder, _environment(case.environment), contextlib.chdir(folder):
        streams = (
            io.TextIOWrapper(io.BytesIO(case.stdin), "utf-8"),
            io.TextIOWrapper(io.BytesIO(), case.encoding, newline=""),
            io.TextIOWrapper(io.BytesIO(), "utf-8", "backslashreplace", newline=""),
        )
        held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        kept = sys.stdin, sys.stdout, sys.stderr
        sys.stdin, sys.stdout, sys.stderr = streams
        try:
            with _cpu_limit():
                code: object = main(list(case.words))
        except _TooSlowError:
            return [f"more than {CPU_SECONDS:.0f} s of processor time"]
        except BaseException:
            return ["Traceback: " + traceback.format_exc(limit=-6)]
        finally:
            sys.stdin, sys.stdout, sys.stderr = kept
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - held) << 10
        texts = [stream.buffer.getvalue().decode(stream.encoding) for stream in streams[1:]]  # type: ignore[attr-defined]
        wrong = _wrong(case, code, *texts) + _wrong_files(case, code, Path(folder))
        wrong += _wrong_result(case, code, texts[0], Path(folder))
        return wrong + ([f"{grown >> 20} MiB more memory"] if grown > MEMORY_BYTES else [])


def run_process(case: Case) -> list[str]:
    """Run a case as a process under its redirection and return what is wrong."""
    with _folder(case) as folder:
        words = shlex.join((sys.executable, "-m", "zbcompile", *case.words))
        script = f"set -o pipefail; {words} {case.redirection}; exit ${{PIPESTATUS[0]}}"
        environment = {k: v for k, v in os.environ.items() if k not in _LONGER}
        environment.update(case.environment, PYTHONPATH=str(Path(__file__).parents[2]))
        try:
            done = subprocess.run(
                ["bash", "-c", script],
                cwd=folder,
                input=case.stdin,
                capture_output=True,
                env=environment,
                timeout=PROCESS_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return [f"more than {PROCESS_SECONDS:.0f} s as a process"]
        texts = (done.stdout.decode("utf-8", "replace"), done.stderr.decode("utf-8", "replace"))
        silent = case.redirection not in ("", "<&-")
        return _wrong(case, done.returncode, *texts, silent=silent) + _wrong_files(
            case, done.returncode, Path(folder)
        )


def _wrong(case: Case, code: object, out: str, err: str, *, silent: bool = False) -> list[str]:
    """Return what is wrong with an exit code and with what was printed."""
    wrong = []
    if code not in CODES:
        wrong.append(f"exit code {code}")
    if "Traceback" in err or "Traceback" in out:
        wrong.append("Traceback: " + err[-800:])
    coloured = "FORCE_COLOR" in case.environment
    for name, text in (("output", out), ("error", err)):
        left = _CONTROL.search(_STYLE.sub("", text) if coloured else text)
        if left is not None:
            wrong.append(f"control character {left[0]!r} on standard {name}")
    said = err or (out and "diff" in case.words[:1])
    if code not in (0, 130) and not (said or silent or "--json" in case.words):
        wrong.append(f"exit code {code} without a word")
    return wrong


def _wrong_files(case: Case, code: object, folder: Path) -> list[str]:
    """Return what is wrong with the files: temporary ones, changed inputs, results of a failed run."""
    wrong = []
    before = {**_before(case), **case.files}
    named = {word.rstrip("/") for word in case.words}
    for path in sorted(p for p in folder.rglob("*") if not p.is_dir() and "__pycache__" not in p.parts):
        name = str(path.relative_to(folder))
        if name.endswith(".tmp") and name not in before:
            wrong.append(f"temporary file {name} is left")
        elif name in before:
            ours = {name, "old" if name == "link" else "link"} if name in ("old", "link") else {name}
            if path.read_bytes() != before[name] and not ours & named:
                wrong.append(f"{name} is changed")
        elif code != 0:
            wrong.append(f"{name} is written in spite of code {code}")
        elif name not in named:
            wrong.append(f"{name} is written unasked")
    if (folder / _READ_ONLY).read_bytes() != before[_READ_ONLY]:
        wrong.append("a read-only file is changed")
    return wrong


def _wrong_result(case: Case, code: object, out: str, folder: Path) -> list[str]:
    """Return what is wrong with data: what a command writes can be read, and is legal."""
    if code != 0 or {"-h", "--help", "--version"} & set(case.words):
        return []
    if "--json" in case.words:
        try:
            json.loads(out)
        except ValueError as error:
            return [f"no JSON: {error}"]
    command = case.words[0] if case.words else ""
    if command == "convert" and "schedule" not in case.words:
        return []
    places = [case.words[k + 1] for k, word in enumerate(case.words[:-1]) if word == "-o"]
    place = places[-1] if places else "-"
    if command not in ("plan", "convert", "profile") or place.startswith("/dev/"):
        return []
    text = out if place == "-" else (folder / place).read_text()
    try:
        if command == "profile":
            profile_json.loads(text)
            return []
        file = schedule_json.loads(text)
        found = [] if file.problem is None else faults(file.schedule, file.problem)
    except ZBCompileError as error:
        return [f"the result cannot be read: {error}"]
    return [f"the result is at fault: {fault}" for fault in found[:1]]


def _before(case: Case) -> dict[str, bytes]:
    """Return the files that stand in every folder."""
    return {
        "old": b"old\n",
        "link": b"old\n",
        _READ_ONLY: b"kept\n",
        f".zbcompile-{os.getpid()}-0.tmp": b"stale\n",
        "folder/inside": b"",
    }


@contextlib.contextmanager
def _folder(case: Case) -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="zbcompile-fuzz-") as folder:
        root = Path(folder)
        (root / "folder").mkdir()
        for name, data in {**_before(case), **case.files}.items():
            if name != "link":
                (root / name).write_bytes(data)
        (root / "link").symlink_to("old")
        (root / _READ_ONLY).chmod(stat.S_IRUSR)
        yield folder


@contextlib.contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    kept = dict(os.environ)
    for name in _LONGER:
        os.environ.pop(name, None)
    os.environ.update(changes)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(kept)


@contextlib.contextmanager
def _cpu_limit() -> Iterator[None]:
    """Raise where a case takes too much processor time, whatever else the machine does."""

    def stop(signum: int, frame: FrameType | None) -> None:
        raise _TooSlowError

    usual = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, CPU_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, usual)
