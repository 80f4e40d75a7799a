"""The graph view: module paths and source lines on emitted nodes, readable files per stage and phase."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from zbcompile.compiler.graph_text import dump_graphs, graph_text
from zbcompile.compiler.stages import build_stages
from zbcompile.errors import UsageError
from zbcompile.passes.split.staged_model import StagedModel


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.proj(x))


@pytest.fixture(scope="module")
def front() -> StagedModel:
    model = nn.Sequential(Layer(), Layer(), Layer(), Layer())
    return build_stages(
        model, 4, (torch.ones(3, 4),), target=torch.ones(3, 4), loss_fn=nn.functional.mse_loss,
        split_points=["1", "2", "3"],
    )  # fmt: skip


def test_nodes_keep_module_path_and_source(front: StagedModel) -> None:
    for graph in (front.stages[0].graphs.forward, front.stages[1].graphs.backward_input):
        calls = [node for node in graph.graph.nodes if node.op == "call_function"]
        assert calls
        product = next(node for node in calls if "mm" in str(node.target))
        assert product.meta["module_path"].endswith("proj")
        assert product.meta["source"].startswith("torch/nn/modules/linear.py:")


def test_print_readable_names_the_module(front: StagedModel) -> None:
    text = front.stages[0].graphs.forward.print_readable(print_output=False)
    assert " in 0.proj, code: return F.linear(" in text
    assert "f32[3, 4]" in text


def test_files_per_stage_and_phase(front: StagedModel, tmp_path: Path) -> None:
    paths = dump_graphs(front, tmp_path / "dump")
    names = ["forward", "backward_input", "backward_weight", "full_backward"]
    assert [str(p.relative_to(tmp_path / "dump")) for p in paths] == [
        f"stage-{s}/{name}.txt" for s in range(4) for name in names
    ]
    text = (tmp_path / "dump" / "stage-1" / "backward_weight.txt").read_text()
    assert text.startswith("# stage 1: held F to B ")
    assert "# parameters: 1.proj.weight, 1.proj.bias" in text
    assert "aten.mm.default" in text
    assert text.endswith(graph_text(front.stages[1].graphs.backward_weight))
    shared = (tmp_path / "dump" / "stage-2" / "forward.txt").read_text()
    assert "# same structure as stage 1" in shared
    assert not list(tmp_path.rglob("*.tmp*"))


def test_a_place_that_cannot_be_written(front: StagedModel, tmp_path: Path) -> None:
    (tmp_path / "stage-0").mkdir()
    (tmp_path / "stage-0" / "forward.txt").mkdir()
    with pytest.raises(UsageError):
        dump_graphs(front, tmp_path)
