"""The graph view: module paths and source lines on emitted nodes, readable files per stage and phase."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import zbcompile
from zbcompile.compiler import stages
from zbcompile.compiler.dump import dump_to
from zbcompile.compiler.graph_text import graph_text
from zbcompile.compiler.stages import build_stages
from zbcompile.errors import UsageError
from zbcompile.passes.joint.joint_passes import JOINT_PASSES
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
    dump_to(tmp_path)("split_backward", front.stages)
    folder = tmp_path / "00-split_backward"
    names = ["forward", "backward_input", "backward_weight", "full_backward"]
    assert sorted(str(p.relative_to(folder)) for p in folder.rglob("*.txt")) == sorted(
        f"stage-{s}/{name}.txt" for s in range(4) for name in names
    )
    text = (folder / "stage-1" / "backward_weight.txt").read_text()
    assert text.startswith("# stage 1: held F to B ")
    assert "# parameters: 1.proj.weight, 1.proj.bias" in text
    assert "aten.mm.default" in text
    assert text.endswith(graph_text(front.stages[1].graphs.backward_weight))
    shared = (folder / "stage-2" / "forward.txt").read_text()
    assert "# same structure as stage 1" in shared
    assert not list(tmp_path.rglob("*.tmp*"))


def test_every_rewrite_of_a_joint_graph_is_written_as_a_diff(tmp_path: Path) -> None:
    model = nn.Sequential(Layer(), Layer())
    build_stages(
        model, 2, (torch.ones(3, 4),), loss_fn=lambda y, _: y.sum(), split_points=["1"],
        observer=dump_to(tmp_path),
    )  # fmt: skip
    for stage in range(2):
        folder = tmp_path / "03-split_backward" / f"stage-{stage}" / "joint"
        names = [f"{i:02d}-{p.name}.diff" for i, p in enumerate(JOINT_PASSES, 1)]
        assert sorted(path.name for path in folder.iterdir()) == ["00-traced.txt", *names]
        traced = (folder / "00-traced.txt").read_text()
        assert traced.startswith("# output 0: ")
        assert "# gradient 0: " in traced
        removed = [line for line in (folder / names[1]).read_text().splitlines() if line.startswith("-")]
        assert any("aten.detach.default" in line for line in removed)
        assert (folder / "07-separate_convolutions.diff").read_text() == "\n"


def test_a_place_that_cannot_be_written(front: StagedModel, tmp_path: Path) -> None:
    (tmp_path / "00-split_backward" / "stage-0" / "forward.txt").mkdir(parents=True)
    with pytest.raises(UsageError):
        dump_to(tmp_path)("split_backward", front.stages)


def test_every_step_is_observed_before_the_next_begins() -> None:
    """The artifact is as its own step left it, and the steps come in the order of the spine."""
    seen: list[tuple[str, int]] = []

    def watch(name: str, artifact: object) -> None:
        graph = getattr(getattr(artifact, "module", None), "graph", None)
        seen.append((name, len(graph.nodes) if graph is not None else -1))

    model = nn.Sequential(Layer(), Layer())
    zbcompile.compile(
        model,
        2,
        example_args=(torch.ones(4, 4),),
        example_target=torch.ones(4, 4),
        loss_fn=nn.functional.mse_loss,
        num_microbatches=2,
        observer=watch,
    )
    assert {name for name, _ in seen if "." in name} == {"split_backward.joint"}
    assert [name for name, _ in seen if "." not in name] == [
        "capture",
        "fold_constant_masks",
        "partition",
        "split_backward",
        "backend",
        "verify",
        "measure",
        "plan",
        "merge_backward",
        "insert_comm",
        "check",
        "codegen",
    ]


def test_masks_are_still_there_when_the_capture_is_observed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The observer of ``capture`` runs before ``fold_constant_masks`` changes the graph."""
    events: list[str] = []
    real = stages.fold_constant_masks
    monkeypatch.setattr(stages, "fold_constant_masks", lambda c: (events.append("fold"), real(c))[1])
    model = nn.Sequential(Layer(), Layer())
    build_stages(model, 2, (torch.ones(3, 4),), observer=lambda name, _: events.append(name))
    assert events[:3] == ["capture", "fold", "fold_constant_masks"]
