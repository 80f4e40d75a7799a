"""Cuts: balanced against brute force, legal only where they may be, and under the user's control."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from tests.support.split_cases import TRAITS, Stack, mse, vectors
from zbcompile.compiler.stages import build_stages
from zbcompile.errors import CutError, UsageError
from zbcompile.passes.aliasing import StorageGroups
from zbcompile.passes.capture.capture import capture
from zbcompile.passes.partition.auxiliary import auxiliary_nodes
from zbcompile.passes.partition.cut_points import CallOrder, CutPoint, call_order
from zbcompile.passes.partition.cuts import TOLERANCE, balanced_cuts
from zbcompile.passes.partition.partition import partition


def _order(seed: int) -> CallOrder:
    rng = random.Random(seed)
    costs = [rng.choice([0.0, 1.0, 2.0, 3.0, 5.0]) for _ in range(12)]
    before = [0.0, *itertools.accumulate(costs)]
    cuts = tuple(
        CutPoint(i, rng.randrange(1, 9), before[i], "", "", rng.randrange(3))
        for i in range(1, 12)
        if rng.random() < 0.8
    )
    return CallOrder((), tuple(costs), cuts, before[-1])


def _largest_stage(order: CallOrder, cuts: Sequence[CutPoint]) -> float:
    ends = [0.0, *(cut.seconds_before for cut in cuts), order.total]
    return max(b - a for a, b in itertools.pairwise(ends))


@pytest.mark.parametrize("seed", range(60))
def test_balanced_cuts_against_brute_force(seed: int) -> None:
    order = _order(seed)
    for stages in (2, 3, 4):
        choices = [
            chosen
            for chosen in itertools.combinations(order.cuts, stages - 1)
            if all(
                b > a for a, b in itertools.pairwise([0.0, *(c.seconds_before for c in chosen), order.total])
            )
        ]
        if not choices:
            with pytest.raises(CutError, match=f"{stages} stages wanted"):
                balanced_cuts(order, stages)
            continue
        found = balanced_cuts(order, stages)
        best = min(_largest_stage(order, chosen) for chosen in choices)
        limit = best * (1 + TOLERANCE) * (1 + 1e-9)
        assert _largest_stage(order, found) <= limit
        fewest = min(
            sum(cut.live_bytes for cut in chosen)
            for chosen in choices
            if _largest_stage(order, chosen) <= limit
        )
        assert sum(cut.live_bytes for cut in found) == fewest


def _legal(model: nn.Module, args: tuple[Tensor, ...]) -> tuple[CallOrder, list[str]]:
    captured = capture(model, args)
    groups = StorageGroups(captured.module.graph)
    auxiliary = auxiliary_nodes(captured, groups)
    main = [n for n in captured.module.graph.nodes if n.op == "call_function" and n not in auxiliary]
    return call_order(main, groups), [str(node.target) for node in main]


def test_no_cut_between_a_value_and_its_change_in_place() -> None:
    class Changes(Stack):
        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            view = y.view(2, -1)
            z = self.b(x)
            view.add_(1.0)
            return self.c(y + z)

    order, names = _legal(Changes(), (torch.randn(4, 8),))
    change = names.index("aten.add_.Tensor")
    positions = {cut.position for cut in order.cuts}
    assert not positions & set(range(1, change + 1))
    assert change + 1 in positions


def test_no_cut_between_two_uses_of_a_changed_buffer_or_inside_a_tuple() -> None:
    class Uses(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(8)

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(self.a(x))
            left, right = self.b(y).unbind(0)[:2]
            return self.d(self.norm(self.c(y * left * right)))

    order, names = _legal(Uses(), (torch.randn(4, 8),))
    norms = [i for i, name in enumerate(names) if name.startswith("aten.batch_norm")]
    first = names.index("aten.add_.Tensor")
    positions = {cut.position for cut in order.cuts}
    assert not positions & set(range(first + 1, norms[1] + 1))
    plain, names = _legal(nn.Sequential(nn.Linear(8, 8), nn.LSTM(8, 8)), (torch.randn(2, 4, 8),))
    assert names.index("aten.lstm.input") + 1 not in {cut.position for cut in plain.cuts}


def test_split_points_cut_before_the_named_modules() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(6)))
    args, _, target = vectors()()
    built = build_stages(model, 3, args, target=target, loss_fn=mse, split_points=["1", "4"])
    assert [stage.parameters for stage in built.stages] == [
        ("0.0.weight", "0.0.bias"),
        ("1.0.weight", "1.0.bias", "2.0.weight", "2.0.bias", "3.0.weight", "3.0.bias"),
        ("4.0.weight", "4.0.bias", "5.0.weight", "5.0.bias"),
    ]


@pytest.mark.parametrize(
    ("points", "error", "words"),
    [
        (["4"], UsageError, "needed: 2"),
        (["1", "nowhere"], UsageError, "nowhere"),
        (["4", "1"], UsageError, "order"),
        (["1", "1"], UsageError, "order"),
    ],
)
def test_wrong_split_points_are_refused(points: list[str], error: type[Exception], words: str) -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    args, _, target = vectors()()
    with pytest.raises(error, match=words):
        build_stages(model, 3, args, target=target, loss_fn=mse, split_points=points)


def test_illegal_split_point_names_the_nearest_legal_one() -> None:
    class Changes(Stack):
        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            z = self.b(x)
            y.add_(1.0)
            return self.c(y + z)

    args, _, target = vectors()()
    with pytest.raises(CutError, match="cannot be cut before 'b'") as caught:
        build_stages(Changes(), 2, args, target=target, loss_fn=mse, split_points=["b"])
    assert "nearest legal cuts are before c (" in str(caught.value)


def test_cuts_that_no_name_can_ask_for_are_not_named() -> None:
    class Changes(Stack):
        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x).tanh() * 2
            z = self.b(x)
            y.add_(1.0)
            return (y + z).tanh() * 2

    args, _, target = vectors()()
    with pytest.raises(CutError, match="cannot be cut before 'b'") as caught:
        build_stages(Changes(), 2, args, target=target, loss_fn=mse, split_points=["b"])
    assert "no module starts at a legal cut: give a function" in str(caught.value)


def test_policy_chooses_among_legal_cuts() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(6)))
    args, _, target = vectors()()

    def first_two(cuts: tuple[CutPoint, ...], num_stages: int) -> Sequence[CutPoint]:
        assert num_stages == 3
        return [next(cut for cut in cuts if cut.module_path.startswith(f"{i}.")) for i in (1, 2)]

    built = build_stages(model, 3, args, target=target, loss_fn=mse, split_points=first_two)
    assert [len(stage.parameters) for stage in built.stages] == [2, 2, 8]
    with pytest.raises(UsageError, match="policy"):
        build_stages(model, 3, args, target=target, loss_fn=mse, split_points=lambda cuts, n: cuts[:1])
    with pytest.raises(UsageError, match="order"):
        build_stages(
            model, 3, args, target=target, loss_fn=mse, split_points=lambda cuts, n: [cuts[3], cuts[1]]
        )


@pytest.mark.parametrize("stages", [0, -1, True, 2.0, "2"])
def test_wrong_number_of_stages_is_refused(stages: object) -> None:
    args, _, target = vectors()()
    with pytest.raises(UsageError, match="num_stages"):
        build_stages(nn.Linear(8, 8), stages, args, target=target, loss_fn=mse)  # type: ignore[arg-type]


def test_every_call_runs_once_and_auxiliary_ones_where_they_are_needed() -> None:
    trait = TRAITS["rotary tables made once"]
    args, _, target = trait.batch()
    captured = capture(trait.build(), args, target=target, loss_fn=mse)
    sources = partition(captured, 4)
    groups = StorageGroups(captured.module.graph)
    auxiliary = {node.name for node in auxiliary_nodes(captured, groups)}
    runs: dict[str, int] = {}
    for source in sources:
        for node in source.module.graph.nodes:
            if node.op == "call_function":
                runs[node.name] = runs.get(node.name, 0) + 1
    assert all(count == 1 for name, count in runs.items() if name not in auxiliary)
    assert any(count > 1 for name, count in runs.items() if name in auxiliary)
    for source in sources[1:]:
        assert [wire.source for wire in source.inputs if wire.source[0] == "stage"] == [
            ("stage", source.index - 1)
        ]


def test_gpt2_sends_only_the_residual_stream() -> None:
    from tests.support.model_zoo import gpt2, labelled

    args, kwargs, _ = labelled()()
    captured = capture(gpt2(), args, kwargs)
    for source in partition(captured, 3)[1:]:
        assert len([wire for wire in source.inputs if wire.source[0] == "stage"]) == 1


def test_reports_say_what_each_stage_holds() -> None:
    args, _, target = vectors()()
    built = build_stages(TRAITS["a value skips a stage"].build(), 4, args, target=target, loss_fn=mse)
    lines = [str(report) for report in built.reports]
    assert len(lines) == 4
    assert sum(report.num_parameters for report in built.reports) == 4 * 72
    for line, stage in zip(lines, built.stages, strict=True):
        assert f"stage {stage.index}" in line
        assert f"F to B {stage.saved_bytes} B" in line
