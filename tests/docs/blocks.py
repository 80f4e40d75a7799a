"""The fenced blocks of a page, and how they are run: each page in one folder and one namespace.

What a block is follows from its language:

=============  ===============================================================================================
``python``     runs, in the namespace of the page's blocks before it
``sh``         every line is a command that ends with exit code 0
``console``    lines that begin with ``$ `` are commands; what follows is what they print, and ``...`` stands
               for lines that are left out
``json``       a file of a format of ours
``toml``       a profile
``text``       shows something, is not run
=============  ===============================================================================================

A comment before the block says what is otherwise: ``<!-- not run: REASON -->``, ``<!-- file: NAME -->`` (the
block is also written to that file), ``<!-- exit: 1 -->``, ``<!-- prints: differently each time -->`` (only
that the command ends with its exit code is tested).
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.places import ROOT
from zbcompile.cli.main import main
from zbcompile.formats import measured_json, profile_json, schedule_json

__all__ = ["LANGUAGES", "Block", "PageRun", "blocks_of"]

LANGUAGES = ("python", "sh", "console", "json", "toml", "text")
_FENCE = re.compile(r"((?:^<!-- [^\n]* -->\n)*)^```(\w*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
_MARK = re.compile(r"<!-- (not run|file|exit|prints): (.*?) -->")
_READERS: dict[str, Callable[[str], object]] = {
    "zbcompile.profile": profile_json.loads,
    "zbcompile.schedule": schedule_json.loads,
    "zbcompile.measured": measured_json.loads,
}


@dataclass(frozen=True)
class Block:
    """A fenced block: language, text, line of the page, marks."""

    language: str
    text: str
    line: int
    marks: dict[str, str] = field(default_factory=dict)

    @property
    def runs(self) -> bool:
        """Whether a test runs it."""
        return self.language != "text" and "not run" not in self.marks


def blocks_of(page: Path) -> list[Block]:
    """Return the blocks of a page in their order."""
    text = page.read_text()
    return [
        Block(found[2], found[3], text[: found.start(2)].count("\n") + 1, dict(_MARK.findall(found[1])))
        for found in _FENCE.finditer(text)
    ]


class PageRun:
    """Runs blocks of one page in a folder that has the examples of the repository in it."""

    def __init__(self, page: str, folder: Path, setup: str = "") -> None:
        self.page, self.folder = page, folder
        self.names: dict[str, Any] = {"__name__": "page"}
        (folder / "examples").symlink_to(ROOT / "examples")
        if setup:
            exec(compile(setup, f"setup of {page}", "exec"), self.names)  # noqa: S102

    def run(self, block: Block) -> None:
        """Run a block; an assertion fails where it does not do what the page says."""
        if "file" in block.marks:
            (self.folder / block.marks["file"]).write_text(block.text)
        if block.language == "json":
            _READERS[json.loads(block.text)["format"]](block.text)
        elif block.language == "toml":
            profile_json.loads(block.text, "block.toml")
        elif block.language == "python" and "file" not in block.marks:
            code = compile("\n" * block.line + block.text, self.page, "exec")
            with contextlib.redirect_stdout(io.StringIO()):
                exec(code, self.names)  # noqa: S102
        elif block.language in ("sh", "console"):
            wanted = int(block.marks.get("exit", "0"))
            for command, shown in _commands(block):
                code, printed = self._command(command)
                assert code == wanted, f"{self.page}:{block.line}: {command}\n{printed}"
                if block.language == "console" and "prints" not in block.marks:
                    _compare(f"{self.page}:{block.line}: {command}", printed, shown)

    def _command(self, command: str) -> tuple[int, str]:
        words = shlex.split(command, comments=True)
        if words[0] == "zbcompile" and "|" not in words:
            with contextlib.redirect_stdout(io.StringIO()) as out:
                code = main(words[1:])
            return code, out.getvalue()
        done = subprocess.run(
            _PREAMBLE + command,
            shell=True,
            cwd=self.folder,
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "80"},
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        return done.returncode, done.stdout + (done.stderr[-3000:] if done.returncode else "")


_PREAMBLE = "".join(
    f'{name}() {{ {shlex.quote(sys.executable)} {how} "$@"; }}; '
    for name, how in (("zbcompile", "-m zbcompile"), ("python", ""), ("torchrun", "-m torch.distributed.run"))
)


def _commands(block: Block) -> Iterator[tuple[str, str]]:
    """Yield commands and what the page shows below them; a line may go on after a backslash."""
    text = block.text.replace("\\\n", " ")
    if block.language == "sh":
        for line in text.splitlines():
            if line.strip() and not line.startswith("#"):
                yield line, ""
        return
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, _, shown = part.partition("\n")
        yield command, shown


def _compare(where: str, printed: str, shown: str) -> None:
    text = "\n".join(line.rstrip() for line in printed.splitlines())
    pieces = "\n".join(line.rstrip() for line in shown.splitlines()).split("...")
    if len(pieces) == 1:
        assert text.strip("\n") == pieces[0].strip("\n"), where
        return
    place = 0
    for piece in pieces:
        found = text.find(piece.strip("\n"), place)
        assert found >= 0, f"{where}\n{piece}\nis not in\n{text}"
        place = found + len(piece.strip("\n"))
