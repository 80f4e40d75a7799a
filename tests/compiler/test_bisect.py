"""A fault in any rewrite is named, with the value that it makes wrong; one elsewhere is not blamed on any."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from zbcompile.cli.main import main
from zbcompile.compiler import bisect as bisection
from zbcompile.compiler import stages
from zbcompile.compiler.bisect import Bisection, bisect
from zbcompile.errors import UsageError
from zbcompile.passes.capture.captured import Captured
from zbcompile.passes.joint import joint_passes
from zbcompile.passes.joint.joint_pass import JointPass, StageFacts
from zbcompile.passes.joint.joint_passes import JOINT_PASSES
from zbcompile.passes.split import backends
from zbcompile.passes.split.rewrites import FOLD_MASKS, WRITE_IN_PLACE, rewrite_names
from zbcompile.passes.torch_private import JointGraph

aten = torch.ops.aten


def doubled(graph: Graph, value: Node) -> Node:
    """Return a new node, twice the value, which all that read the value read instead."""
    with graph.inserting_after(value):
        made = graph.call_function(aten.mul.Scalar, (value, 2))
    made.meta = dict(value.meta)
    value.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)
    return made


def double_first_gradient(joint: JointGraph, facts: StageFacts) -> None:
    """Make the gradient of the first parameter of the last stage, the one with the loss, wrong."""
    if len(joint.tangents) == 1 and joint.outputs[min(joint.tangents)].meta["val"].dim() == 0:
        position = min(joint.gradients)
        joint.gradients[position] = doubled(joint.module.graph, joint.gradients[position])


def double_a_product(graph: Graph) -> None:
    call = next(n for n in graph.nodes if n.op == "call_function" and "mm" in str(n.target))
    doubled(graph, call)


def and_then(first: JointPass, damage: Callable[[JointGraph, StageFacts], None]) -> JointPass:
    def run(joint: JointGraph, facts: StageFacts) -> None:
        first.run(joint, facts)
        damage(joint, facts)

    return replace(first, run=run)


def put_fault_into(
    names: Collection[str],
    monkeypatch: pytest.MonkeyPatch,
    damage: Callable[[JointGraph, StageFacts], None] = double_first_gradient,
) -> None:
    """Let the rewrites of these names do their work and damage the graph."""
    passes = tuple(and_then(p, damage) if p.name in names else p for p in JOINT_PASSES)
    monkeypatch.setattr(joint_passes, "JOINT_PASSES", passes)
    if FOLD_MASKS in names:

        def fold(captured: Captured) -> int:
            graph = captured.module.graph
            call = next(n for n in graph.nodes if n.op == "call_function" and "linear" in str(n.target))
            doubled(graph, call)
            return 0

        monkeypatch.setattr(bisection, "fold_constant_masks", fold)
    if WRITE_IN_PLACE in names:
        real = backends.written_in_place

        def written(module: GraphModule) -> GraphModule:
            made = real(module)
            if any("mm" in str(n.target) for n in made.graph.nodes):
                double_a_product(made.graph)
                made.recompile()
            return made

        monkeypatch.setattr(backends, "written_in_place", written)


def bisected() -> Bisection:
    torch.manual_seed(0)
    return bisect(nn.Sequential(nn.Linear(4, 4)), 1, (torch.randn(3, 4),), loss_fn=mean)


def mean(y: Tensor, target: object) -> Tensor:
    return y.square().mean()


def test_nothing_is_wrong() -> None:
    found = bisected()
    assert found == Bisection(None, (), None, False, 1)
    assert str(found).startswith("nothing is wrong")


@pytest.mark.parametrize("name", rewrite_names())
def test_a_fault_in_any_rewrite_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    put_fault_into([name], monkeypatch)
    found = bisected()
    assert found.rewrites == (name,)
    assert found.fault is not None
    if name in (FOLD_MASKS, WRITE_IN_PLACE):
        return
    assert (found.fault.what, found.fault.where) == ("gradient of 0.weight", "stage 0, weight of module 0")
    assert found.fault.relative_error == pytest.approx(1.0)
    assert str(found).startswith(
        f"{name}: without it everything is right; with it, wrong: the gradient of 0.w"
    )
    assert "(stage 0, weight of module 0, relative error 1.0e+00, largest difference " in str(found)


def test_a_rewrite_that_breaks_the_graph_or_raises_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(joint: JointGraph, facts: StageFacts) -> None:
        del joint.gradients[min(joint.gradients)]

    put_fault_into(["cheaper_calls"], monkeypatch, broken)
    found = bisected()
    assert found.rewrites == ("cheaper_calls",)
    assert "the pass cheaper_calls broke the joint graph: gradient 0 came or went" in str(found)

    def raises(joint: JointGraph, facts: StageFacts) -> None:
        raise KeyError("lost")

    put_fault_into(["simplify_again"], monkeypatch, raises)
    found = bisected()
    assert found.rewrites == ("simplify_again",)
    assert "KeyError: 'lost'" in str(found)


def test_of_two_faulty_rewrites_the_first_is_named_as_the_end_of_a_wrong_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    put_fault_into(["drop_checks", "cheaper_calls"], monkeypatch)
    found = bisected()
    assert found.rewrites == ()
    assert found.first_wrong == "cheaper_calls"
    assert "the first ones up to cheaper_calls are wrong together" in str(found)


def test_two_faults_in_required_rewrites_are_told_from_one_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    put_fault_into(["own_gradients", "flexible_views"], monkeypatch)
    found = bisected()
    assert (found.rewrites, found.first_wrong, found.in_required) == ((), None, True)
    assert "in the required rewrites (keep_workspaces, own_gradients, flexible_views)" in str(found)


def test_a_fault_that_no_rewrite_makes_is_not_blamed_on_one(monkeypatch: pytest.MonkeyPatch) -> None:
    real = stages.with_backend

    def wrong(split: object, backend: str, skip: object) -> object:
        for stage in split:  # type: ignore[attr-defined]
            double_a_product(stage.graphs.backward_weight.graph)
            stage.graphs.backward_weight.recompile()
        return real(split, backend, skip)  # type: ignore[arg-type]

    monkeypatch.setattr(stages, "with_backend", wrong)
    found = bisected()
    assert (found.rewrites, found.first_wrong, found.in_required) == ((), None, False)
    assert found.fault is not None
    assert "not in the rewrites" in str(found)


def test_a_model_that_cannot_run_is_an_error_and_no_fault_of_a_rewrite() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to("meta")
    with pytest.raises(UsageError, match="meta device"):
        bisect(model, 2, (torch.randn(3, 4),), loss_fn=mean)


FACTORY = """
import torch
from torch import nn

def net():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    return model, (torch.randn(3, 4),), nn.functional.mse_loss, torch.zeros(3, 4)
"""


def test_the_command_names_the_rewrite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "nets.py"
    path.write_text(FACTORY)
    words = ["bisect", f"{path}:net", "--stages", "2", "--split-points", "1"]
    assert main(words) == 0
    assert capsys.readouterr().out.startswith("nothing is wrong")
    put_fault_into(["simplify"], monkeypatch)
    assert main([*words, "--json"]) == 1
    out, err = capsys.readouterr()
    assert "without simplify: right" in err
    found = json.loads(out)
    assert (found["ok"], found["rewrites"], found["trials"]) == (
        False,
        ["simplify"],
        1 + len(rewrite_names()),
    )
    assert (found["fault"]["what"], found["fault"]["where"]) == (
        "gradient of 1.weight",
        "stage 1, weight of module 1",
    )
    assert found["fault"]["relative_error"] == pytest.approx(1.0)
    assert main(["bisect", f"{path}:other", "--stages", "2"]) == 2
    err = capsys.readouterr().err
    assert "has no function other" in err
    assert "Traceback" not in err


def test_the_command_ends_with_2_where_the_model_cannot_be_cut(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """1 says that a value is wrong: a script that asks must not take a refusal for it."""
    path = tmp_path / "nets.py"
    path.write_text(FACTORY)
    assert main(["bisect", f"{path}:net", "--stages", "50"]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert "50 stages wanted" in err


def test_the_command_refuses_a_rewrite_that_is_left_out_already(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "nets.py"
    path.write_text(FACTORY)
    monkeypatch.setenv("ZBCOMPILE_SKIP", "simplify")
    assert main(["bisect", f"{path}:net", "--stages", "2"]) == 2
    assert "unset ZBCOMPILE_SKIP" in capsys.readouterr().err
