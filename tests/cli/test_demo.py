"""The demo on a small GPT-2, its oracle, and the commands that start processes."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from zbcompile import demo
from zbcompile.autograd_oracle import autograd_step, count_draws
from zbcompile.cli.main import main
from zbcompile.errors import CheckError, UsageError
from zbcompile.formats import measured_json, profile_json, schedule_json
from zbcompile.formats.schedule_json import ScheduleFile
from zbcompile.planner.core.instance import to_schedule
from zbcompile.planner.starts.classic import zb_h1
from zbcompile.schedule.costs import Edge, Link, Profile, StageCost
from zbcompile.schedule.problem import Problem

pytestmark = pytest.mark.timeout(600)
SMALL = demo.Settings(
    steps=2, num_microbatches=3, memory_limit=None, blocks=4, hidden=32, vocabulary=64, sequence=16, seed=3
)


@pytest.fixture(scope="module")
def trained() -> tuple[list[int], list[dict[str, Any]]]:
    """Random operators per stage, and what four processes recorded."""
    pipeline = demo.compiled(SMALL, demo.gpt2(SMALL), time_limit=2.0)
    return [count_draws(stage) for stage in pipeline], demo.run_processes(SMALL, pipeline.solution)


def test_four_processes_train_as_plain_autograd_does(trained) -> None:
    draws, records = trained
    assert sum(draws) > 0
    lines: list[str] = []
    result = demo.compare(SMALL, records, draws, lines.append)
    assert result.ok, result.wrong
    assert len(lines) == SMALL.steps
    assert result.losses == result.reference_losses
    model = demo.gpt2(SMALL)
    names = [name for name, _ in model.named_parameters()]
    holders = sum(name in record["gradients"][0] for name in names for record in records)
    assert result.compared == SMALL.steps * holders
    assert holders >= len(names)
    assert result.equal >= result.compared - 2 * SMALL.steps
    assert result.tied <= demo.TIED_TOLERANCE


def test_one_wrong_bit_is_found(trained) -> None:
    draws, records = trained
    broken = copy.deepcopy(records)
    name = next(n for n in broken[1]["gradients"][1] if n.endswith("mlp.c_fc.weight"))
    value = broken[1]["gradients"][1][name].view(-1)
    value[0] = torch.nextafter(value[0], torch.tensor(torch.inf))
    broken[3]["losses"][0][1] += 1e-6
    result = demo.compare(SMALL, broken, draws, lambda _: None)
    assert not result.ok
    assert any(f"step 1: {name} differs" in line for line in result.wrong)
    assert "step 0: the losses differ" in result.wrong


def test_other_streams_are_not_equal(trained) -> None:
    """The oracle would see masks from another seed: equality above is no accident of small numbers."""
    draws, records = trained
    other = demo.Settings(**{**SMALL.__dict__, "seed": SMALL.seed})
    model = demo.gpt2(other)
    parts = [{k: v[i : i + 1] for k, v in demo.batch(SMALL).items()} for i in range(SMALL.num_microbatches)]
    losses = autograd_step(model, parts, lambda r: r.loss, draws, seed=SMALL.seed + 1, step=0)
    assert [float(x) for x in losses] != next(r["losses"][0] for r in records if r["losses"][0])


def test_the_oracle_refuses_a_model_that_draws_otherwise() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5))
    state = torch.get_rng_state()
    with pytest.raises(CheckError, match="another number of random tensors"):
        autograd_step(model, [{"input": torch.ones(2, 4)}], torch.sum, [1, 1], seed=0, step=0)
    assert torch.equal(torch.get_rng_state(), state)


def rehearsed(tmp_path: Path) -> Path:
    """Two ranks, actions of 20 ms, messages of 4 KB."""
    stage = StageCost.simple(20_000_000, 20_000_000, 10_000_000)
    profile = Profile((stage, stage), (Edge(0, 1, 4096, 4096),), Link(200_000, 10**9))
    problem = Problem.of(profile, num_microbatches=3)
    path = tmp_path / "schedule.json"
    path.write_text(schedule_json.dumps(ScheduleFile(to_schedule(zb_h1(2, 3), problem), problem)))
    return path


def test_rehearse_runs_real_processes_and_writes_what_it_measured(capsys, tmp_path: Path) -> None:
    path, measured, calibrated = rehearsed(tmp_path), tmp_path / "measured.json", tmp_path / "profile.json"
    words = ["rehearse", path, "--steps", 2, "--json", "--measured", measured, "--calibrated", calibrated]
    assert main([str(w) for w in words]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["measured_makespan_ns"] >= figures["planned_makespan_ns"]
    assert {(row["rank"], row["kind"]) for row in figures["rows"]} == {
        (rank, kind) for rank in (0, 1) for kind in ("forward", "backward_input", "backward_weight")
    }
    timeline = measured_json.loads(measured.read_text())
    assert timeline.makespan_ns == figures["measured_makespan_ns"]
    profile = profile_json.loads(calibrated.read_text()).profile
    assert profile.overhead_ns == figures["overhead_ns"]
    assert main(["show", str(path), "--measured", str(measured), "--width", "80"]) == 0
    assert "measured makespan" in capsys.readouterr().out


def test_rehearse_needs_costs(capsys, tmp_path: Path) -> None:
    path = tmp_path / "order.txt"
    path.write_text("placement 0\nmicrobatches 1\nrank 0: 0F0 0BW0\n")
    assert main(["rehearse", str(path)]) == 2
    assert "carries no profile" in capsys.readouterr().err


FACTORY = """
import torch
from torch import nn

def mlp():
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    return model, (torch.randn(8, 16),), nn.functional.mse_loss, torch.randn(8, 16)

def nothing():
    return 3
"""


def test_profile_measures_a_model_of_ones_own(capsys, tmp_path: Path) -> None:
    path = tmp_path / "models.py"
    path.write_text(FACTORY)
    assert main(["profile", f"{path}:mlp", "--stages", "2", "--microbatches", "4"]) == 0
    captured = capsys.readouterr()
    file = profile_json.loads(captured.out)
    assert file.num_microbatches == 4
    assert file.profile.num_stages == 2
    assert all(s.forward_ns > 0 and s.saved_bytes > 0 for s in file.profile.stages)
    assert "stage 1:" in captured.err


@pytest.mark.parametrize(
    "factory", ["nowhere:f", "nowhere.py:f", "{}:absent", "{}:nothing", "f", "os:getcwd"]
)
def test_factories_that_make_no_model_end_with_2(capsys, tmp_path: Path, factory: str) -> None:
    path = tmp_path / "models.py"
    path.write_text(FACTORY)
    assert main(["profile", factory.format(path), "--stages", "2"]) == 2
    assert capsys.readouterr().err.startswith("zbcompile profile: ")


def test_the_demo_needs_transformers_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UsageError, match="needs transformers"):
        demo.gpt2(SMALL)


def test_rehearse_runs_under_torchrun(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0"]
    words = ["-m", "zbcompile", "rehearse", str(rehearsed(tmp_path)), "--steps", "1", "--json"]
    done = subprocess.run(
        [*command, "--standalone", *words], capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout)["measured_makespan_ns"] > 0
