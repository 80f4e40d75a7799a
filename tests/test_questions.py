"""Every command of docs/howto/questions.md prints what the page says; ``...`` stands for lines left out."""

from __future__ import annotations

import json
import re
import shlex

import pytest

from tests.support.places import ROOT
from zbcompile.cli.main import main

PAGE = (ROOT / "docs" / "howto" / "questions.md").read_text()
BLOCKS = re.findall(r"^```\n\$ (.*)\n((?:.*\n)*?)```", PAGE, re.MULTILINE)
SEARCHED = "placement v"
"""What begins a row that no proof ends: its numbers depend on how far the search gets."""


def comparable(text: str) -> list[str]:
    lines = [re.sub(" +", " ", line.rstrip()) for line in text.rstrip().splitlines()]
    return [re.sub("[ 0-9.,~+-]+", "#", line) if line.startswith(SEARCHED) else line for line in lines]


@pytest.mark.parametrize(("command", "shown"), BLOCKS, ids=[command for command, _ in BLOCKS])
def test_a_command_answers_as_the_page_says(capsys, monkeypatch, command: str, shown: str) -> None:
    monkeypatch.chdir(ROOT)
    words = shlex.split(command)
    assert words[0] == "zbcompile"
    assert main(words[1:]) in (0, 1)
    printed, wanted = comparable(capsys.readouterr().out), comparable(shown)
    pieces = "\n".join(wanted).split("...")
    text, place = "\n".join(printed), 0
    if not shown.startswith("..."):
        assert text.startswith(pieces[0].rstrip("\n"))
    for piece in pieces:
        found = text.find(piece.strip("\n"), place)
        assert found >= 0, f"{command}\n{piece}\nis not in\n{text}"
        place = found + len(piece.strip("\n"))
    if len(pieces) == 1:
        assert text == pieces[0].rstrip("\n")


def test_the_page_has_the_twelve_questions() -> None:
    assert len(re.findall(r"^## .*\?$", PAGE, re.MULTILINE)) == 12
    assert len(BLOCKS) == 13  # and one on random latency


def names_in(value: object) -> set[str]:
    if isinstance(value, dict):
        return {*value, *(name for part in value.values() for name in names_in(part))}
    return {name for part in value for name in names_in(part)} if isinstance(value, list) else set()


@pytest.mark.parametrize(
    "words",
    [
        ["explain", "--at", "30%", "--measured", "examples/four-unequal-stages.measured.json"],
        ["explain", "--what-if", "split=none", "--time-limit", "1"],
        ["explain", "--jitter", "1ms"],
        ["diff", "examples/four-unequal-stages.11GiB.schedule.json"],
    ],
    ids=" ".join,
)
def test_the_page_names_every_field_of_the_json(capsys, monkeypatch, words: list[str]) -> None:
    monkeypatch.chdir(ROOT)
    main([words[0], "examples/four-unequal-stages.schedule.json", *words[1:], "--json"])
    document = json.loads(capsys.readouterr().out)
    assert f"`{document['format']}` {document['version']}" in PAGE
    said = set(re.findall(r"`\.?(\w+)(?:\[\])?`", PAGE))
    assert not names_in(document) - said - {"format", "version"}
