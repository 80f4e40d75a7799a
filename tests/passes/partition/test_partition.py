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
from zbcompile.passes.partition.balance import Work, least_span_ns
from zbcompile.passes.partition.cut_points import CallOrder, CutPoint, call_order
from zbcompile.passes.partition.cuts import TOLERANCE, balanced_cuts
from zbcompile.passes.partition.partition import partition
from zbcompile.planner.plan import plan
from zbcompile.schedule.costs import Edge, Link, Profile, StageCost
from zbcompile.schedule.ir import Placement
from zbcompile.schedule.problem import Problem


def _order(seed: int) -> CallOrder:
    rng = random.Random(seed)
    pieces = [0, 1000, 2000, 3000, 5000]
    works = [Work(*(rng.choice(pieces) for _ in range(3))) for _ in range(12)]
    before = list(itertools.accumulate(works, initial=Work(0, 0, 0)))
    share = rng.choice([0.0, 0.3, 0.7])
    reads = [int(work.total_ns > 0 and rng.random() < share) for work in works]
    trained = list(itertools.accumulate(reads, initial=0))
    cuts = tuple(
        CutPoint(i, rng.randrange(1, 9), before[i], "", "", rng.randrange(3), trained[i])
        for i in range(1, 12)
        if rng.random() < 0.8
    )
    return CallOrder((), tuple(works), cuts, before[-1], trained[-1])


def _span(order: CallOrder, cuts: Sequence[CutPoint], link: Link, num_microbatches: int | None) -> int:
    ends = [Work(0, 0, 0), *(cut.work_before for cut in cuts), order.total]
    stages = [b - a for a, b in itertools.pairwise(ends)]
    return least_span_ns(stages, [link.transfer_ns(cut.live_bytes) for cut in cuts], num_microbatches)


def _choices(order: CallOrder, num_stages: int) -> list[tuple[CutPoint, ...]]:
    """Return all ways to cut in which every stage costs something; trains something, if it can."""
    found, training = [], []
    for chosen in itertools.combinations(order.cuts, num_stages - 1):
        ends = [0, *(cut.work_before.total_ns for cut in chosen), order.total.total_ns]
        if all(b > a for a, b in itertools.pairwise(ends)):
            found.append(chosen)
        reads = [0, *(cut.trained_before for cut in chosen), order.trained]
        if all(b > a for a, b in itertools.pairwise(reads)):
            training.append(chosen)
    return training or found


@pytest.mark.parametrize("num_microbatches", [None, 1, 4, 30])
@pytest.mark.parametrize("seed", range(30))
def test_balanced_cuts_against_brute_force(seed: int, num_microbatches: int | None) -> None:
    order, link = _order(seed), Link(100, 10**9 * (seed % 3))
    for stages in (2, 3, 4):
        choices = _choices(order, stages)
        if not choices:
            with pytest.raises(CutError, match=f"{stages} stages wanted"):
                balanced_cuts(order, stages, link, num_microbatches)
            continue
        spans = {chosen: _span(order, chosen, link, num_microbatches) for chosen in choices}
        mean = (num_microbatches or 1) * order.total.total_ns / stages
        limit = min(spans.values()) + TOLERANCE * mean
        near = [chosen for chosen in choices if spans[chosen] <= limit]
        found = balanced_cuts(order, stages, link, num_microbatches)
        assert spans[found] <= limit * 1.0001

        def price(chosen: Sequence[CutPoint]) -> tuple[int, int]:
            return sum(cut.live_bytes for cut in chosen), sum(cut.depth for cut in chosen)

        cheapest = min(map(price, near))
        assert price(found) <= cheapest
        least = min(spans[chosen] for chosen in near if price(chosen) == cheapest)
        assert price(found) < cheapest or spans[found] <= least * 1.0001


@pytest.mark.parametrize("seed", range(8))
def test_no_order_is_shorter_than_what_a_cut_counts_for_it(seed: int) -> None:
    """The best order takes little longer: the search over cuts minimizes what the plan will show."""
    rng = random.Random(seed)
    works = [Work(*(rng.randrange(1, 40) for _ in range(3))) for _ in range(3)]
    link, count = Link(rng.randrange(5)), rng.randrange(6, 10)
    costs = tuple(
        StageCost(w.forward_ns, w.backward_input_ns, w.backward_weight_ns, w.total_ns - w.forward_ns, 0, 0)
        for w in works
    )
    edges = tuple(Edge(s, s + 1, 1, 1) for s in range(2))
    problem = Problem(Profile(costs, edges, link), Placement((0, 1, 2)), count)
    counted = least_span_ns(works, [link.transfer_ns(1)] * 2, count)
    assert counted <= plan(problem, time_limit_s=1.0).certificate.value_ns <= 1.1 * counted


def _legal(model: nn.Module, args: tuple[Tensor, ...]) -> tuple[CallOrder, list[str]]:
    captured = capture(model, args)
    groups = StorageGroups(captured.module.graph)
    auxiliary = auxiliary_nodes(captured, groups)
    main = [n for n in captured.module.graph.nodes if n.op == "call_function" and n not in auxiliary]
    return call_order(main, groups, lambda _: Work(1, 1, 1)), [str(node.target) for node in main]


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
