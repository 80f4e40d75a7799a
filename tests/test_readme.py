"""The README speaks of commands, options, arguments and files that exist."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

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
    source = "\n".join(PYTHON)
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


BEFORE = """
import sys, torch
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
from safetensors.torch import save_file
save_file(model.state_dict(), "model.safetensors")
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
    example, meta = PYTHON
    meta = "import zbcompile\n" + meta.replace("H100", "CPU")  # for which each of these stages has a layer
    loop = example[example.index("optimizer =") :]
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "4", "--standalone"]
    states = []
    for name, how, body in (
        ("plain", [], PLAIN),
        ("alone", [], example + AFTER),
        ("torchrun", torchrun, example + AFTER),
        ("meta", torchrun, meta + loop + AFTER),
    ):
        folder = tmp_path / name
        folder.mkdir()
        script = folder / "train.py"
        script.write_text(BEFORE + body)
        done = subprocess.run(
            [sys.executable, *how, str(script), str(folder)],
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            timeout=150,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        parts = [torch.load(file) for file in sorted(folder.glob("*.pt"))]
        assert len(parts) == (4 if how else 1)
        states.append({key: value for part in parts for key, value in part.items()})
    for state in states[1:]:
        assert state.keys() == states[0].keys()
        assert all(torch.equal(value, states[0][key]) for key, value in state.items())


def test_the_least_profile_is_one() -> None:
    (text,) = [text for kind, text in BLOCKS if kind == "json"]
    assert profile_json.loads(text).profile.num_stages == 4
    json.loads(text)


def test_every_file_that_it_points_to_exists() -> None:
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", README):
        assert (ROOT / target.partition("#")[0]).exists(), target


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
