"""One docstring form: numpydoc sections that an API tool reads, and parameters that exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.places import ROOT

SECTIONS = (
    "Parameters",
    "Attributes",
    "Returns",
    "Yields",
    "Raises",
    "Notes",
    "Examples",
    "References",
    "See Also",
)
SOURCES = sorted([*(ROOT / "zbcompile").glob("**/*.py"), *(ROOT / "passes").glob("**/*.py")])
FILES = [path for path in SOURCES if "zbcompile/passes" not in path.as_posix()]
Documented = ast.Module | ast.ClassDef | ast.FunctionDef

_RUN = re.compile(r"^\s*\w+(, \w+)* : \S", re.MULTILINE)
"""`name : text` in a line: the form that no tool reads."""


def documented(path: Path) -> Iterator[tuple[Documented, str]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, Documented) and (text := ast.get_docstring(node)):
            yield node, text


def sections(text: str) -> dict[str, list[str]]:
    """Section -> names of its entries: the lines that are not indented."""
    found: dict[str, list[str]] = {}
    lines = text.splitlines()
    for k, line in enumerate(lines):
        if k + 1 < len(lines) and line in SECTIONS and set(lines[k + 1]) == {"-"}:
            entries: list[str] = []
            for entry in lines[k + 2 :]:
                if entry in SECTIONS:
                    break
                if entry and not entry.startswith(" "):
                    entries.append(entry)
            found[line] = entries
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_docstrings_have_one_form(path: Path) -> None:
    wrong = []
    for node, text in documented(path):
        name = getattr(node, "name", "module")
        if _RUN.search(text):
            wrong.append(f"{name}: `name : text` outside a section")
        for k, line in enumerate(text.splitlines()):
            if set(line) == {"-"} and len(line) > 2 and text.splitlines()[k - 1] not in SECTIONS:
                wrong.append(f"{name}: unknown section {text.splitlines()[k - 1]!r}")
        if isinstance(node, ast.FunctionDef):
            args = node.args
            real = {
                a.arg for a in (*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg) if a
            }
            for entry in sections(text).get("Parameters", ()):
                names = [word.strip().lstrip("*") for word in entry.split(":")[0].split(",")]
                wrong += [f"{name}: no parameter {word!r}" for word in names if word not in real]
    assert not wrong, "\n".join(wrong)
