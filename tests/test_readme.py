"""The README speaks of commands, options, arguments and files that exist."""

from __future__ import annotations

import ast
import json
import re
import shlex

import pytest

from tests.support.places import ROOT
from zbcompile.cli.main import build_parser, main
from zbcompile.formats import profile_json, schedule_json

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
SHELL = [line.split("  #")[0].strip() for kind, text in BLOCKS if not kind for line in text.splitlines()]
COMMANDS = [
    part.strip()
    for line in SHELL
    for part in line.removeprefix("$ ").split("|")
    if part.strip().startswith("zbcompile ")
]
TARGETS = [line.split()[1] for line in SHELL if line.startswith("make ")]


@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_parses(line: str) -> None:
    words = shlex.split(line)
    arguments = build_parser().parse_args(words[1:])
    assert arguments.run
    for word in words:
        if word.startswith("examples/"):
            assert (ROOT / word).is_file(), word


def test_there_are_commands_and_both_make_targets_exist() -> None:
    assert len(COMMANDS) >= 5
    assert {"demo", "test"} <= set(TARGETS)
    makefile = (ROOT / "Makefile").read_text()
    for target in TARGETS:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_every_command_of_the_parser_is_described() -> None:
    actions = build_parser()._subparsers
    assert actions is not None
    for name in actions._group_actions[0].choices:
        assert f"`{name}" in README, name


def test_the_python_example_uses_arguments_that_exist() -> None:
    (source,) = [text for kind, text in BLOCKS if kind == "python"]
    api = ast.parse((ROOT / "zbcompile" / "pipeline.py").read_text())
    (function,) = [n for n in api.body if isinstance(n, ast.FunctionDef) and n.name == "compile"]
    known = {a.arg for a in (*function.args.args, *function.args.kwonlyargs)}
    calls = [
        n
        for n in ast.walk(ast.parse(source))
        if isinstance(n, ast.Call) and ast.unparse(n.func) == "zbcompile.compile"
    ]
    assert calls
    used = {k.arg for call in calls for k in call.keywords}
    assert used <= known
    names = {
        n.name
        for c in api.body
        if isinstance(c, ast.ClassDef)
        for n in c.body
        if isinstance(n, ast.FunctionDef)
    }
    for attribute in re.findall(r"pipeline\.(\w+)", README):
        assert attribute in names, attribute


def test_the_least_profile_is_one() -> None:
    (text,) = [text for kind, text in BLOCKS if kind == "json"]
    assert profile_json.loads(text).profile.num_stages == 4
    json.loads(text)


def test_every_file_that_it_points_to_exists() -> None:
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", README):
        assert (ROOT / target).exists(), target


def test_its_timeline_is_what_show_draws(capsys) -> None:
    picture = next(text for kind, text in BLOCKS if "rank 0" in text)
    path = ROOT / "examples" / "four-unequal-stages.schedule.json"
    assert main(["check", str(path), "--certificate"]) == 0
    capsys.readouterr()
    assert main(["show", str(path), "--width", "96"]) == 0
    assert picture.partition("\n")[2] == capsys.readouterr().out
    profile = profile_json.loads((ROOT / "examples/profiles/four-unequal-stages.json").read_text())
    assert schedule_json.loads(path.read_text()).problem == profile.problem()


def test_exit_codes_are_the_errors_own() -> None:
    from zbcompile import errors

    codes = {getattr(errors, name).exit_code for name in errors.__all__ if name.endswith("Error")}
    table = {int(code) for code in re.findall(r"^\| (\d+) \|", README, re.MULTILINE)}
    assert codes <= table
    assert table == {0, 1, 2, 3, 130}
