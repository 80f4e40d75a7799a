"""``zbcompile profile --device``: costs of another machine, counted without running anything of the model."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from zbcompile.cli.main import main
from zbcompile.formats import profile_json

FACTORY = """
import torch
from torch import nn

SEEN, MADE = [], []

class Net(nn.Module):
    def __init__(self, shift=1.0):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.register_buffer("scale", torch.full((16,), 2.0))
        self.shift = shift

    def forward(self, x):
        SEEN.append(type(x))
        for layer in self.layers:
            x = torch.tanh(layer(x)) * self.scale + self.shift
        return x

def net():
    MADE.append(Net())
    loss = nn.CrossEntropyLoss(weight=torch.rand(16))
    return MADE[-1], (torch.randn(8, 16),), loss, torch.zeros(8, dtype=torch.long)

def with_weights():
    with torch.device("cpu"):
        return net()

def needs_values():
    MADE.append(Net(torch.arange(0, 1, 0.5)[1].item()))
    return MADE[-1], (torch.randn(8, 16),), nn.functional.mse_loss, torch.randn(8, 16)

def loses_values():
    made = Net()
    made.plain = torch.ones(3)
    MADE.append(made)
    return made, (torch.randn(8, 16),), nn.functional.mse_loss, torch.randn(8, 16)

def breaks():
    raise ValueError("the reason")
"""


@pytest.fixture
def module(tmp_path: Path) -> Iterator[Path]:
    """A file of models; each test imports its own, which no later test finds under the same name."""
    path = tmp_path / "own_models.py"
    path.write_text(FACTORY)
    yield path
    for name in [name for name in sys.modules if name.startswith("own_models")]:
        del sys.modules[name]


def test_levels_of_recompute_become_variants(capsys: pytest.CaptureFixture[str], module: Path) -> None:
    words = ["profile", f"{module}:net", "--stages", "2", "--device", "A100", "--recompute", "auto"]
    assert main(words) == 0
    profile = profile_json.loads(capsys.readouterr().out).profile
    assert [s.name for s in profile.stages] == ["stage 0", "stage 1"]
    for s, stage in enumerate(profile.stages):
        assert stage.variants[-1].name == f"stage {s}, recompute=full"
        assert stage.variants[-1].saved_bytes < stage.saved_bytes


@pytest.mark.parametrize(
    ("factory", "on_meta"), [("net", True), ("needs_values", False), ("loses_values", False)]
)
def test_nothing_of_the_model_runs(
    capsys: pytest.CaptureFixture[str], module: Path, factory: str, on_meta: bool
) -> None:
    import torch

    assert main(["profile", f"{module}:{factory}", "--stages", "2", "--device", "A100"]) == 0
    captured = capsys.readouterr()
    profile = profile_json.loads(captured.out).profile
    assert "A100" in profile.source
    assert all(s.forward_ns > 0 and s.backward_weight_ns > 0 for s in profile.stages)
    own = sys.modules["own_models"]
    assert own.SEEN
    assert not {torch.Tensor, torch.nn.Parameter} & set(own.SEEN)
    assert all(p.is_meta == on_meta for p in own.MADE[-1].parameters())
    assert ("built with weights, not run" in captured.err) == (not on_meta)


def test_weights_make_no_difference_to_counted_costs(
    capsys: pytest.CaptureFixture[str], module: Path
) -> None:
    texts = []
    for factory in ("net", "with_weights"):
        assert main(["profile", f"{module}:{factory}", "--stages", "2", "--device", "H100"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]


def test_unknown_devices_and_broken_factories(capsys: pytest.CaptureFixture[str], module: Path) -> None:
    assert main(["profile", f"{module}:net", "--stages", "2", "--device", "abacus"]) == 2
    assert "abacus" in capsys.readouterr().err
    assert main(["profile", f"{module}:breaks", "--stages", "2", "--device", "A100"]) == 2
    assert "the reason" in capsys.readouterr().err
