"""examples/train.py: the bits of a plain loop, alone and under torchrun, also when it is killed on the way.

``TRAIN_STEPS=200 TRAIN_KILL=50 pytest tests/examples`` does the same at length.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from tests.support.examples import load_example
from tests.support.places import EXAMPLES, ROOT
from tests.support.torchrun import torchrun

STEPS, KILL = int(os.environ.get("TRAIN_STEPS", "6")), int(os.environ.get("TRAIN_KILL", "3"))
SAVE_EVERY = max(2, KILL // 2 - 1)  # the kill loses steps
WORDS = ["--steps", str(STEPS), "--clip", "0", "--save-every", str(SAVE_EVERY), "--time-limit", "1"]
SMALL = ["--batch", "8", "--microbatches", "4"] if STEPS < 100 else []

pytestmark = [
    pytest.mark.timeout(max(300, 12 * STEPS)),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]


@pytest.fixture(scope="module")
def train() -> ModuleType:
    return load_example("train")


@pytest.fixture(scope="module")
def plain(train: ModuleType) -> dict[str, Tensor]:
    """The weights after a plain loop over the same microbatches."""
    args = train.arguments([*WORDS, *SMALL])
    torch.manual_seed(args.seed)
    model, batches = train.GPT(), train.Batches(args.batch, args.seed)
    optimizer, schedule = train.optimizer_and_schedule(model.parameters(), args)
    for _ in range(args.steps):
        optimizer.zero_grad()
        for inputs, targets in zip(*(part.chunk(args.microbatches) for part in batches.next()), strict=True):
            train.loss_fn(model(inputs), targets).backward()
        for parameter in model.parameters():
            parameter.grad.div_(args.microbatches)
        optimizer.step()
        schedule.step()
    return model.state_dict()


def saved(train: ModuleType, folder: Path) -> dict[str, Tensor]:
    state = train.GPT().state_dict()
    dcp.load({"model": state}, checkpoint_id=folder, no_dist=True)
    return state


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_stopped_and_started_again_in_one_process(
    train: ModuleType, plain: dict[str, Tensor], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "gpt"
    common = [*WORDS, *SMALL, "--checkpoint", str(folder)]
    train.train(train.arguments([*common, "--steps", str(KILL), "--sample", "0"]))
    train.train(train.arguments([*common, "--sample", "20"]))
    assert_equal(saved(train, folder), plain)
    shown = capsys.readouterr().out
    assert f"{STEPS}/{STEPS}" in shown
    assert "tokens/s" in shown
    assert len(shown.rpartition("The ")[2].rstrip("\n")) >= 18


def test_killed_and_started_again_under_torchrun(
    train: ModuleType, plain: dict[str, Tensor], tmp_path: Path
) -> None:
    folder = tmp_path / "gpt"
    common = [*WORDS, *SMALL, "--checkpoint", str(folder), "--sample", "20"]
    script, limit = ROOT / "tests/support/train_killed.py", 280 + 6 * STEPS
    killed = torchrun(4, script, [str(KILL), *common], tmp_path / "killed", limit)
    assert killed.failed is not None
    assert killed.failed[1] == -signal.SIGKILL
    assert json.loads((folder / "training.json").read_text())["step"] == KILL // SAVE_EVERY * SAVE_EVERY
    ended = torchrun(4, EXAMPLES / "train.py", common, tmp_path / "ended", limit)
    assert ended.failed is None, ended.stderr
    assert_equal(saved(train, folder), plain)
    assert "measured" in ended.stdout
    assert "] capture" in ended.stderr
    assert "\nThe " in ended.stdout


def test_clipping_dropout_and_bf16_train_too(train: ModuleType, tmp_path: Path) -> None:
    options = ["--clip", "0.1", "--dropout", "0.1", "--bf16", "--steps", "2", "--sample", "0", *SMALL]
    train.train(train.arguments([*options, "--checkpoint", str(tmp_path / "gpt")]))
    torch.manual_seed(0)
    before, after = train.GPT().state_dict(), saved(train, tmp_path / "gpt")
    assert all(tensor.isfinite().all() for tensor in after.values())
    assert not [name for name, tensor in after.items() if torch.equal(tensor, before[name])]
