"""The list of rewrites of joint graphs: what is checked after each, what is observed, what may be skipped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Node

import zbcompile
from tests.passes.capture.test_constant_masks import batch as llama_batch
from tests.passes.capture.test_constant_masks import llama
from tests.support.model_zoo import cnn
from zbcompile.compiler.stages import build_stages
from zbcompile.errors import SplitError, UsageError
from zbcompile.passes.joint import joint_passes
from zbcompile.passes.joint.joint_pass import JointPass, JointStep, StageFacts
from zbcompile.passes.joint.joint_passes import JOINT_PASSES
from zbcompile.passes.split.rewrites import WRITE_IN_PLACE, rewrite_names, skipped_from_environment
from zbcompile.passes.split.stage_graphs import Graphs
from zbcompile.passes.torch_private import JointGraph
from zbcompile.passes.verify.deviations import VerifyReport
from zbcompile.passes.verify.verify import verify

aten = torch.ops.aten


class Attention(nn.Module):
    """Splits one product into queries, keys and values: gradients of slices."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Chosen(nn.Module):
    """A size that depends on data, which torch checks."""

    def forward(self, x: Tensor) -> Tensor:
        return x[x > 0].square()


class LastState(nn.Module):
    """Hands its gradient back in another layout than its input has."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0][:, -1]


def chain(*layers: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(8, 8), *(layer() for layer in layers), nn.Linear(8, 8))


Build = tuple[Callable[[], nn.Module], tuple[int, ...], str]
"""A model, the shape of its input, and where its second stage begins."""
MODELS: dict[str, Build] = {
    "attention": (chain(Attention, nn.GELU, Attention), (4, 6, 8), "2"),
    "convolutions": (cnn(nn.BatchNorm2d), (4, 3, 8, 8), "4"),
    "chosen": (lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), Chosen()), (4, 8), "1"),
    "recurrent": (chain(LastState), (4, 6, 8), "1"),
}


def square(y: Tensor, target: object) -> Tensor:
    return y.square().mean()


def with_pass(monkeypatch: pytest.MonkeyPatch, run: Callable[[JointGraph, StageFacts], None]) -> None:
    monkeypatch.setattr(joint_passes, "JOINT_PASSES", (*JOINT_PASSES, JointPass("mine", run)))


def tiny(**options: Any) -> Any:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    return build_stages(model, 2, (torch.ones(3, 4),), loss_fn=lambda y, _: y.sum(), **options)


def test_names_are_unique_and_every_required_pass_says_why() -> None:
    names = rewrite_names()
    assert len(set(names)) == len(names)
    assert [p.name for p in JOINT_PASSES if p.required] == [
        "keep_workspaces",
        "own_gradients",
        "flexible_views",
    ]


def first_call(joint: JointGraph) -> Node:
    return next(node for node in joint.module.graph.nodes if node.op == "call_function")


def read_too_early(joint: JointGraph, facts: StageFacts) -> None:
    calls = [node for node in joint.module.graph.nodes if node.op == "call_function"]
    calls[-1].append(calls[0])


def another_argument(joint: JointGraph, facts: StageFacts) -> None:
    with joint.module.graph.inserting_before(first_call(joint)):
        joint.module.graph.placeholder("more")


def no_value(joint: JointGraph, facts: StageFacts) -> None:
    with joint.module.graph.inserting_before(joint.module.graph.output_node()):
        joint.module.graph.call_function(aten.neg.default, (first_call(joint),))


def lost_role(joint: JointGraph, facts: StageFacts) -> None:
    position = min(joint.gradients)
    graph, given = joint.module.graph, joint.gradients[position]
    with graph.inserting_after(given):
        other = graph.call_function(aten.neg.default, (given,))
    other.meta = dict(given.meta)
    joint.gradients[position] = other
    graph.erase_node(other)


def gone_role(joint: JointGraph, facts: StageFacts) -> None:
    del joint.gradients[min(joint.gradients)]


def another_shape(joint: JointGraph, facts: StageFacts) -> None:
    graph, position = joint.module.graph, min(joint.gradients)
    given = joint.gradients[position]
    with graph.inserting_after(given):
        other = graph.call_function(aten.flatten.using_ints, (given,))
    other.meta = {"val": given.meta["val"].flatten()[:2]}
    joint.gradients[position] = other


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (read_too_early, "was used before it has been defined"),
        (another_argument, "its arguments are not those that were traced"),
        (no_value, "has no fake value"),
        (lost_role, "gradient 0 is not in the graph"),
        (gone_role, "gradient 0 came or went"),
        (another_shape, "gradient 0 was torch.float32 [4, 4] on cpu and is torch.float32 [2] on cpu"),
    ],
)
def test_a_pass_that_breaks_the_graph_is_named(
    monkeypatch: pytest.MonkeyPatch, damage: Callable[[JointGraph, StageFacts], None], words: str
) -> None:
    with_pass(monkeypatch, damage)
    with pytest.raises(SplitError) as error:
        tiny()
    assert "the pass mine broke the joint graph" in str(error.value)
    assert words in str(error.value)
    assert "ZBCOMPILE_SKIP=mine" in str(error.value)
    assert tiny(skip=("mine",), verify=True)


def test_an_observer_sees_the_traced_graph_and_every_pass_that_ran() -> None:
    seen: list[tuple[str, JointStep]] = []
    tiny(skip=("simplify",), observer=lambda name, step: seen.append((name, step)))
    steps = [step for name, step in seen if name == "split_backward.joint"]
    ran = ["traced", *(p.name for p in JOINT_PASSES if p.name != "simplify")]
    assert [step.name for step in steps] == ran * (len(steps) // len(ran))
    assert {step.position for step in steps} == {0, *range(1, len(JOINT_PASSES) + 1)} - {2}
    assert {step.stage for step in steps} == {0, 1}


def fires(net: nn.Module, x: Tensor, point: str) -> set[str]:
    """Return the rewrites that change a graph of the model, but `fold_constant_masks`."""
    before: dict[int, str] = {}
    changed: set[str] = set()

    def watch(_: str, step: object) -> None:
        if isinstance(step, JointStep):
            roles = (step.joint.outputs, step.joint.mutations, step.joint.gradients)
            text = f"{step.joint.module.graph} {roles}"
            if step.position and before[step.stage] != text:
                changed.add(step.name)
            before[step.stage] = text

    staged = build_stages(net, 2, (x,), loss_fn=square, split_points=[point], observer=watch)
    runs = [call.__self__.code for stage in staged.stages for call in stage.calls]
    split = [getattr(stage.graphs, name).code for stage in staged.stages for name in Graphs.__slots__]
    return changed | ({WRITE_IN_PLACE} if runs != split else set())


WHERE = {
    "remove_layout_copies": "recurrent",
    "simplify": "attention",
    "cheaper_calls": "attention",
    "simplify_again": "attention",
    "drop_checks": "chosen",
    "separate_convolutions": "convolutions",
    "drop_running_statistics": "convolutions",
    "write_in_place": "attention",
}
"""Optional rewrite -> a model where it changes a graph."""


@pytest.mark.parametrize("name", WHERE)
def test_every_optional_rewrite_may_be_left_out_with_the_same_bits(name: str) -> None:
    build, shape, point = MODELS[WHERE[name]]
    torch.manual_seed(0)
    net, x = build(), torch.randn(shape)
    assert name in fires(net, x, point)
    reports: list[object] = []
    build_stages(
        net, 2, (x,), loss_fn=square, split_points=[point], skip=(name,), verify=True,
        observer=lambda step, artifact: reports.append(artifact) if step == "verify" else None,
    )  # fmt: skip
    (report,) = reports
    assert isinstance(report, VerifyReport)
    assert report.exact


def test_masks_that_are_left_in_round_within_a_named_reason() -> None:
    model = llama()
    staged = build_stages(model, 2, (), llama_batch(use_cache=False), skip=("fold_constant_masks",))
    report = verify(model, staged, (), llama_batch(use_cache=False))
    # on some instruction sets the attention with a mask has the bits of the one without
    assert report.exact or "transformers builds the attention mask" in str(report)


def test_no_optional_rewrite_is_without_a_test() -> None:
    """Masks are tested above, collectives in tests/pipeline/test_peers.py."""
    required = {rewrite.name for rewrite in JOINT_PASSES if rewrite.required}
    assert set(WHERE) | {"fold_constant_masks", "overlap_collectives"} | required == set(rewrite_names())


def test_the_environment_names_what_to_skip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZBCOMPILE_SKIP", " write_in_place,simplify ,")
    assert skipped_from_environment() == ("simplify", "write_in_place")
    monkeypatch.setenv("ZBCOMPILE_SKIP", "simplfy")
    with pytest.raises(UsageError, match="no rewrite is called 'simplfy'"):
        skipped_from_environment()
    for rewrite in JOINT_PASSES:
        if rewrite.required:
            monkeypatch.setenv("ZBCOMPILE_SKIP", rewrite.name)
            with pytest.raises(UsageError, match=f"{rewrite.name} cannot be skipped: {rewrite.required}"):
                skipped_from_environment()
    monkeypatch.delenv("ZBCOMPILE_SKIP")
    assert skipped_from_environment() == ()


def test_compile_leaves_out_what_the_environment_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZBCOMPILE_SKIP", "simplify")
    ran: set[str] = set()

    def watch(_: str, artifact: object) -> None:
        if isinstance(artifact, JointStep):
            ran.add(artifact.name)

    x = torch.ones(4, 4)
    zbcompile.compile(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), 2, example_args=(x,), example_target=x,
        loss_fn=nn.functional.mse_loss, num_microbatches=2, time_limit=0.1, observer=watch,
    )  # fmt: skip
    assert ran == {"traced", *(p.name for p in JOINT_PASSES)} - {"simplify"}
