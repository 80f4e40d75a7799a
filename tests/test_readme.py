"""The README speaks of commands, options, arguments and files that exist."""

from __future__ import annotations

import ast
import inspect
import json
import re
import shlex
from pathlib import Path

import pytest
import torch

import zbcompile
from tests.support.clean_process import in_clean_process
from tests.support.places import ROOT
from tests.support.torchrun import run_script, torchrun
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
PYTHON = [text for kind, text in BLOCKS if kind == "python"]
TARGETS = [line.split()[1] for line in SHELL if line.startswith("make ")]


@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_parses(line: str) -> None:
    words = shlex.split(line)
    arguments = build_parser().parse_args(words[1:])
    assert arguments.run
    for word in words:
        if word.startswith("examples/"):
            assert (ROOT / word).is_file(), word


def test_there_are_commands_and_make_targets_exist() -> None:
    assert len(COMMANDS) >= 5
    assert "demo" in TARGETS
    makefile = (ROOT / "Makefile").read_text()
    for target in TARGETS:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_every_command_of_the_parser_is_described() -> None:
    actions = build_parser()._subparsers
    assert actions is not None
    for name in actions._group_actions[0].choices:
        assert f"`{name}" in README, name


def test_the_python_example_uses_arguments_that_exist() -> None:
    known = set(inspect.signature(zbcompile.compile).parameters)
    calls = [
        n
        for n in ast.walk(ast.parse("\n".join(PYTHON)))
        if isinstance(n, ast.Call) and ast.unparse(n.func) == "zbcompile.compile"
    ]
    assert calls
    assert {k.arg for call in calls for k in call.keywords} <= known
    for attribute in re.findall(r"(?<![/\w])pipeline\.(\w+)", README):
        assert hasattr(zbcompile.Pipeline, attribute), attribute


BEFORE = """
import sys, torch, zbcompile.api
zbcompile.api.compile.__kwdefaults__["time_limit"] = 0.5  # the bits do not depend on the order that is found
from torch import nn
torch.manual_seed(0)
def build_model():
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.Tanh())))
model = build_model()
loss_fn = nn.functional.mse_loss
inputs, targets = torch.randn(16, 256), torch.randn(16, 256)
data = [(inputs, targets), (-inputs, targets)]
"""
AFTER = """
pipeline.eval(inputs)
pipeline.timeline()
torch.save(pipeline.state_dict(), f"{sys.argv[1]}/{pipeline.rank or 0}.pt")
pipeline.synchronize()
pipeline.close()
"""
PLAIN = """
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for inputs, targets in data:
    optimizer.zero_grad()
    for x, y in zip(inputs.chunk(8), targets.chunk(8)):
        loss_fn(model(x), y).backward()
    for parameter in model.parameters():
        parameter.grad.div_(8)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
torch.save(model.state_dict(), f"{sys.argv[1]}/0.pt")
"""


@pytest.mark.timeout(300)
def test_the_python_example_trains_like_the_plain_loop_alone_and_under_torchrun(tmp_path: Path) -> None:
    (example,) = PYTHON
    states = []
    for name, ranks, body in (
        ("plain", 0, PLAIN),
        ("alone", 0, example + AFTER),
        ("ranks", 4, example + AFTER),
    ):
        folder = tmp_path / name
        folder.mkdir()
        script = folder / "train.py"
        script.write_text(BEFORE + body)
        if ranks:
            ended = torchrun(ranks, script, [str(folder)], tmp_path / "logs", timeout_s=150)
            assert ended.failed is None, ended.stderr[-3000:]
        else:
            in_clean_process(run_script, script, [str(folder)], timeout_s=150)
        parts = [torch.load(file) for file in sorted(folder.glob("*.pt"))]
        assert len(parts) == (ranks or 1)
        states.append({key: value for part in parts for key, value in part.items()})
    for state in states[1:]:
        assert state.keys() == states[0].keys()
        assert all(torch.equal(value, states[0][key]) for key, value in state.items())


def test_the_least_profile_is_one() -> None:
    (text,) = [text for kind, text in BLOCKS if kind == "json"]
    assert profile_json.loads(text).profile.num_stages == 4
    json.loads(text)


def test_its_picture_is_what_the_tool_draws(tmp_path: Path) -> None:
    path = ROOT / "examples" / "four-unequal-stages.schedule.json"
    assert main(["check", str(path), "--certificate"]) == 0
    picture = tmp_path / "timeline.svg"
    assert main(["show", str(path), "--svg", str(picture)]) == 0
    assert picture.read_bytes() == (ROOT / "docs" / "timeline.svg").read_bytes()
    profile = profile_json.loads((ROOT / "examples/profiles/four-unequal-stages.json").read_text())
    assert schedule_json.loads(path.read_text()).problem == profile.problem()


def test_its_figures_are_those_of_the_results() -> None:
    results = (ROOT / "benchmarks" / "RESULTS.md").read_text()
    rows = re.findall(
        r"^\| (.+) \| `(.+)` \|$", README.partition("| figure | command |")[2].partition("\n\n")[0], re.M
    )
    assert len(rows) == 5
    for _, command in rows:
        words = command.split()
        if words[0] == "python":
            script = words[2].replace(".", "/") + ".py" if words[1] == "-m" else words[1]
            assert (ROOT / script).is_file()
            assert command.partition(" [")[0] in results or script in results, command
    for figure in (".0017", ".0039", "33.0", "| 275 | 240 | 18 | 17 | 0 |"):
        assert figure in results, figure
