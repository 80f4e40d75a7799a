"""`zbcompile.compile` as a user calls it, in one process: results, gradients, refusals, what can be
looked at."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zbcompile
from zbcompile.autograd_oracle import autograd_step, count_draws
from zbcompile.errors import CheckError, InfeasibleError, PipelineError, ShapeError, UsageError
from zbcompile.formats import measured_json, schedule_json
from zbcompile.schedule.costs import Profile, StageCost
from zbcompile.schedule.ir import Kind, Placement, Schedule

MSE = nn.functional.mse_loss


def mlp(width: int = 8, layers: int = 4, dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [nn.Linear(width, width), nn.Tanh()]
        parts += [nn.Dropout(dropout)] if dropout else []
    return nn.Sequential(*parts)


def data(rows: int = 8, width: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape = (rows, width)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def compiled(model: nn.Module, stages: int = 2, count: int = 4, **more: Any) -> zbcompile.Pipeline:
    return zbcompile.compile(model, stages, loss_fn=MSE, num_microbatches=count, time_limit=1.0, **more)


def loop(model: nn.Module, x: Tensor, y: Tensor, count: int, scale: bool = True) -> list[Tensor]:
    """The reference: backward for each microbatch."""
    size, losses = len(x) // count, []
    for k in range(count):
        rows = slice(k * size, (k + 1) * size)
        loss = MSE(model(x[rows]), y[rows])
        loss.backward()
        losses.append(loss.detach())
    for parameter in model.parameters():
        if parameter.grad is not None and scale:
            parameter.grad.div_(count)
    return losses


def assert_same_gradients(model: nn.Module, other: nn.Module) -> None:
    for (name, mine), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        assert theirs.grad is not None
        assert mine.grad is not None, name
        assert torch.equal(mine.grad, theirs.grad), name


@pytest.mark.parametrize(("stages", "count"), [(1, 1), (2, 1), (2, 4), (4, 8), (3, 2)])
def test_gradients_losses_and_outputs_are_those_of_a_loop(stages: int, count: int) -> None:
    model, x_y = mlp(), data()
    other = copy.deepcopy(model)
    pipeline = compiled(model, stages, count)
    losses: list[Tensor] = []
    output = pipeline.step(x_y[0], target=x_y[1], losses=losses, return_outputs=True)
    assert [float(v) for v in losses] == [float(v) for v in loop(other, *x_y, count)]
    assert_same_gradients(model, other)
    size = len(output) // count
    expected = torch.cat([other(x_y[0][k * size : (k + 1) * size]) for k in range(count)])
    assert torch.equal(output, expected)


def test_two_steps_without_zero_grad_add_up_and_unscaled_gradients_are_sums() -> None:
    model, (x, y) = mlp(), data()
    other = copy.deepcopy(model)
    pipeline = compiled(model, scale_grads=False)
    pipeline.step(x, target=y)
    pipeline.step(2 * x, target=y)
    first = copy.deepcopy(other)
    loop(first, x, y, 4, scale=False)
    loop(other, 2 * x, y, 4, scale=False)
    for mine, one, two in zip(model.parameters(), first.parameters(), other.parameters(), strict=True):
        assert one.grad is not None
        assert two.grad is not None
        assert torch.equal(mine.grad, one.grad + two.grad)  # type: ignore[arg-type]


def test_a_pipeline_draws_itself_in_a_notebook_once_it_is_captured() -> None:
    model, (x, y) = mlp(), data()
    pipeline = compiled(model)
    assert pipeline._repr_html_() is None
    pipeline.step(x, target=y)
    shown = pipeline._repr_html_()
    assert shown is not None
    assert shown == pipeline.solution._repr_html_()
    assert "1F1B" in shown


@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
def test_clipping_has_the_bits_of_torch(norm_type: float) -> None:
    model, (x, y) = mlp(), data()
    pipeline = compiled(model)
    with pytest.raises(UsageError, match="not captured yet"):
        pipeline.clip_grad_norm_(0.1)
    pipeline.step(x, target=y)
    other = copy.deepcopy(model)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        theirs.grad = mine.grad.clone()  # type: ignore[union-attr]
    norms = pipeline.grad_norms(norm_type)
    assert list(norms) == [name for name, _ in model.named_parameters()]
    for max_norm in (1e9, 0.01):
        expected = nn.utils.clip_grad_norm_(other.parameters(), max_norm, norm_type)
        assert torch.equal(pipeline.grad_norm(norm_type), expected)
        assert torch.equal(pipeline.clip_grad_norm_(max_norm, norm_type), expected)
        assert_same_gradients(model, other)
    next(model.parameters()).grad.fill_(math.inf)  # type: ignore[union-attr]
    with pytest.raises(PipelineError, match="cannot be clipped"):
        pipeline.clip_grad_norm_(0.1, norm_type, error_if_nonfinite=True)
    for wrong in (-1.0, math.nan):
        with pytest.raises(UsageError, match="max_norm must be a number from 0 on"):
            pipeline.clip_grad_norm_(wrong)
    pipeline.zero_grad()
    assert pipeline.clip_grad_norm_(0.1) == 0


def test_an_optimizer_over_the_stages_trains_the_model_itself() -> None:
    model, (x, y) = mlp(), data()
    other = copy.deepcopy(model)
    pipeline = compiled(model)
    pipeline.build((x,), {}, y)
    assert [n for n, _ in pipeline.named_parameters()] == [n for n, _ in model.named_parameters()]
    mine, theirs = (torch.optim.AdamW(m.parameters(), lr=0.01) for m in (pipeline, other))
    for _ in range(3):
        mine.zero_grad()
        theirs.zero_grad()
        pipeline.step(x, target=y)
        loop(other, x, y, 4)
        mine.step()
        theirs.step()
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def test_capture_waits_for_the_first_step_and_touches_nothing() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 8))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    random = torch.get_rng_state()
    x, y = data()
    lazy = compiled(model)
    with pytest.raises(UsageError, match="not captured yet"):
        _ = lazy.schedule
    assert "not captured" in repr(lazy)
    lazy.build((x,), {}, y)
    assert torch.equal(random, torch.get_rng_state())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    lazy.step(x, target=y)
    assert int(model[1].num_batches_tracked) == 4


def test_dropout_repeats_with_seed_and_step_and_equals_the_same_streams_in_plain_autograd() -> None:
    model, (x, y) = mlp(dropout=0.3), data()
    other = copy.deepcopy(model)
    pipeline = compiled(model, 2, 4, seed=5)
    pipeline.step(x, target=y)
    first = [p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]
    pipeline.zero_grad()
    pipeline.step(x, target=y)
    assert not all(torch.equal(a, p.grad) for a, p in zip(first, model.parameters(), strict=True))  # type: ignore[arg-type]
    pipeline.zero_grad()
    pipeline.step_number = 0
    pipeline.step(x, target=y)
    assert all(torch.equal(a, p.grad) for a, p in zip(first, model.parameters(), strict=True))  # type: ignore[arg-type]
    parts = [{"input": x[2 * k : 2 * k + 2]} for k in range(4)]
    targets = iter([y[2 * k : 2 * k + 2] for k in range(4)])
    draws = [count_draws(stage) for stage in pipeline]
    autograd_step(other, parts, lambda out: MSE(out, next(targets)), draws, seed=5, step=0)
    assert_same_gradients(model, other)


class Checkpointed(nn.Module):
    """Dropout inside checkpoints; with two blocks in one of them, a stage can end inside."""

    def __init__(self, at_once: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3)) for _ in range(4))
        self.at_once = at_once

    def forward(self, input: Tensor) -> Tensor:
        for k in range(0, 4, self.at_once):
            input = checkpoint(nn.Sequential(*self.layers[k : k + self.at_once]), input, use_reentrant=False)
        return input


@pytest.mark.parametrize("at_once", [1, 2, 4])
def test_the_oracle_draws_in_a_recomputed_block_what_its_forward_drew(at_once: int) -> None:
    model, x = Checkpointed(at_once), torch.randn(6, 4)
    other = copy.deepcopy(model)
    schedule = Schedule.parse(
        "placement 0 1\nmicrobatches 2\nrank 0: 0F0 0F1 0BW0 0BW1\nrank 1: 1F0 1BW0 1F1 1BW1"
    )
    with zbcompile.compile(
        model, 2, example_args=(x,), example_target=x, loss_fn=MSE, num_microbatches=2, schedule=schedule
    ) as pipeline:
        pipeline.step(x, target=x)
        draws = [count_draws(stage) for stage in pipeline]
    assert all(draws)
    targets = iter(x.chunk(2))
    parts = [{"input": part} for part in x.chunk(2)]
    autograd_step(other, parts, lambda out: MSE(out, next(targets)), draws, seed=0, step=0)
    assert_same_gradients(model, other)


def test_eval_uses_evaluation_mode_for_any_batch_and_leaves_the_mode() -> None:
    model = nn.Sequential(
        nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)
    )
    x, y = data()
    pipeline = compiled(model, 3)
    pipeline.step(x, target=y)
    losses: list[Tensor] = []
    found = pipeline.eval(x, target=y, losses=losses)
    shorter = pipeline.eval(x[:3])
    assert model.training
    assert all(m.training for m in model.modules())
    model.eval()
    with torch.no_grad():
        assert torch.equal(found, torch.cat([model(x[k : k + 2]) for k in range(0, 8, 2)]))
        assert torch.equal(shorter, torch.cat([model(x[k : k + 1]) for k in range(3)]))
        assert float(losses[0]) == float(MSE(model(x[:2]), y[:2]))


def test_placements_and_several_stages_per_rank() -> None:
    x, y = data()
    other = mlp(layers=6)
    loop(other, x, y, 4)
    for more in (
        {"placement": "v", "num_ranks": 2},
        {"placement": "looped", "num_ranks": 2},
        {"placement": [1, 0, 1, 0, 0, 1]},
        {"num_ranks": 3},
        {"num_ranks": 4},
    ):
        model = mlp(layers=6)
        stages = 6
        if "placement" in more and not isinstance(more["placement"], str):
            more = {**more, "num_ranks": 2}
        pipeline = compiled(model, stages, **more)
        pipeline.step(x, target=y)
        assert pipeline.schedule.num_ranks == more["num_ranks"]
        assert_same_gradients(model, other)


def test_what_a_pipeline_shows(tmp_path: Path) -> None:
    model, (x, y) = mlp(), data()
    pipeline = compiled(model, example_args=(x,), example_target=y)
    pipeline.step(x, target=y)
    assert len(pipeline) == 2
    assert [s.index for s in pipeline] == [0, 1]
    names = {name for stage in pipeline for name, _ in stage.named_parameters()}
    assert names == {name for name, _ in model.named_parameters()}
    (hidden,) = pipeline[0](x[:2])
    last = pipeline[1].compiled
    results = pipeline[1](*(y[:2] if p.source[0] == "batch" else hidden for p in last.inputs))
    loss = next(t for t, p in zip(results, last.outputs, strict=True) if p.is_loss)
    assert torch.equal(loss, MSE(model(x[:2]), y[:2]))
    assert "def program(rank):" in pipeline.source(0)
    assert pipeline.certificate.value_ns >= pipeline.certificate.bound_ns
    measured = pipeline.timeline()
    seen = [str(a) for row in measured.ranks for a, _, _ in row if a.kind.is_compute]
    assert sorted(seen) == sorted(str(a) for _, _, a in pipeline.schedule.actions() if a.kind.is_compute)
    assert all(end >= start for row in measured.ranks for _, start, end in row)
    assert measured_json.loads(measured_json.dumps(measured)) == measured
    path = tmp_path / "order.json"
    path.write_text(schedule_json.dumps(pipeline.solution))
    again = mlp()
    second = zbcompile.compile(again, 2, loss_fn=MSE, schedule=path, profile=pipeline.profile)
    second.step(x, target=y)
    assert_same_gradients(again, model)
    assert second.schedule == pipeline.schedule


def test_every_pass_is_written_where_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZBCOMPILE_DUMP", str(tmp_path / "dump"))
    x, y = data()
    compiled(mlp(), example_args=(x,), example_target=y)
    names = [path.name for path in sorted((tmp_path / "dump").iterdir())]
    assert [n.split("-", 1)[1].removesuffix(".txt") for n in names] == [
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
    assert "def program(rank)" in (tmp_path / "dump" / names[-1]).read_text()
    assert "def forward" in (tmp_path / "dump" / names[3] / "stage-0" / "forward.txt").read_text()


def one_by_one(placement: Placement, count: int) -> Schedule:
    """One microbatch after the other, fused."""
    text = [f"placement {' '.join(map(str, placement.rank_of))}", f"microbatches {count}"]
    for rank in range(placement.num_ranks):
        row = []
        for i in range(count):
            mine = placement.stages_of(rank)
            row += [f"{s}F{i}" for s in mine] + [f"{s}BW{i}" for s in reversed(mine)]
        text.append(f"rank {rank}: {' '.join(row)}")
    return Schedule.parse("\n".join(text))


def test_an_order_of_ones_own_runs_and_a_wrong_one_is_refused() -> None:
    x, y = data()
    model, other = mlp(), mlp()
    order = one_by_one(Placement.linear(2), 4)
    pipeline = zbcompile.compile(model, 2, loss_fn=MSE, schedule=order)
    pipeline.step(x, target=y)
    loop(other, x, y, 4)
    assert_same_gradients(model, other)
    kinds = {a.kind for _, _, a in pipeline.schedule.actions() if a.kind.is_compute}
    assert kinds == {Kind.FORWARD, Kind.FULL_BACKWARD}
    rows = [row[::-1] for row in order.order]
    with pytest.raises(CheckError, match="stands before its"):
        zbcompile.compile(
            model,
            2,
            loss_fn=MSE,
            schedule=Schedule.of(order.placement, 4, rows),
            example_args=(x,),
            example_target=y,
        )


def refusal(call: Callable[[], Any], kind: type[Exception], *words: str) -> None:
    with pytest.raises(kind) as caught:
        call()
    for word in words:
        assert word in str(caught.value), (word, str(caught.value))


def test_bad_arguments_are_refused_with_both_sides() -> None:
    x, y = data()
    refusal(lambda: compiled(mlp(), 0), UsageError, "positive")
    refusal(lambda: compiled(mlp(), 2, 3).step(x, target=y), UsageError, "batch of 8", "3 equal", "args[0]")
    refusal(
        lambda: compiled(mlp(), memory_limit=10).step(x, target=y),
        InfeasibleError,
        "rank 1",
        "given: 10",
        "raise memory_limit to",
    )
    refusal(lambda: compiled(mlp(), placement=[0, 0]).step(x, target=y), UsageError, "placement")
    refusal(lambda: compiled(mlp(), num_ranks=3).step(x, target=y), UsageError, "3 ranks", "2 stages")
    refusal(
        lambda: zbcompile.compile(mlp(), 2, num_microbatches=4, time_limit=1.0).step(x),
        UsageError,
        "no loss",
        "loss_fn",
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": torch.relu}, "the model must be an nn.Module"),
        ({"example_args": torch.ones(4, 4)}, "example_args must be a tuple"),
        ({"example_kwargs": [1]}, "example_kwargs must map"),
        ({"memory_limit": 4e9}, "memory_limit must be whole bytes"),
        ({"memory_limit": "4GiB"}, "memory_limit must be whole bytes"),
        ({"seed": 1 << 31}, "(?s)seed is out of range.*0 to 2147483647; given: 2147483648"),
    ],
)
def test_arguments_of_the_wrong_type_are_refused_by_name(change: dict[str, Any], words: str) -> None:
    given: dict[str, Any] = {"model": nn.Linear(4, 4), "num_stages": 1, **change}
    with pytest.raises(UsageError, match=words):
        zbcompile.compile(**given)


def test_another_shape_dtype_or_form_of_call_is_refused_before_anything_runs() -> None:
    model, (x, y) = mlp(), data()
    pipeline = compiled(model, other_shapes="refuse")
    pipeline.step(x, target=y)
    grads = [p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]
    refusal(lambda: pipeline.step(x[:, :4], target=y), ShapeError, "args[0]", "[8, 8]", "[8, 4]")
    refusal(lambda: pipeline.step(x.double(), target=y), ShapeError, "torch.float64")
    refusal(lambda: pipeline.step(x[:7], target=y[:7]), ShapeError, "[8, 8]", "[7, 8]")
    refusal(lambda: pipeline.step(x, x, target=y), UsageError, "differs")
    refusal(lambda: pipeline.step(x), UsageError, "target")
    assert all(torch.equal(a, p.grad) for a, p in zip(grads, model.parameters(), strict=True))  # type: ignore[arg-type]
    pipeline.step(x, target=y)


def test_a_failing_step_hands_over_no_gradient() -> None:
    model, (x, y) = mlp(), data()
    pipeline = compiled(model)
    pipeline.build((x,), {}, y)
    stage = pipeline[1].compiled

    class Broken:
        def __getattr__(self, name: str) -> Any:
            return getattr(stage, name)

        def run_full_backward(self, *args: Any) -> Any:
            raise RuntimeError("out of luck")

        run_backward_input = run_full_backward

    spec = pipeline._ready().spec
    object.__setattr__(spec, "stages", (spec.stages[0], Broken()))
    refusal(lambda: pipeline.step(x, target=y), PipelineError, "out of luck", "rank 1", "stage 1")
    assert all(p.grad is None for p in model.parameters())


def test_tensors_with_another_first_dimension_or_named_whole_go_to_every_microbatch() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor, *, bias: Tensor, scale: float) -> Tensor:
            return self.two(torch.tanh(self.one(x)) + bias) * scale

    x, y = data()
    for bias, whole in ((torch.randn(1, 8), ()), (torch.randn(8), ("bias",))):
        torch.manual_seed(2)
        model = Masked()
        other = copy.deepcopy(model)
        pipeline = compiled(model, whole=whole)
        pipeline.step(x, bias=bias, scale=0.5, target=y)
        for k in range(0, 8, 2):
            MSE(other(x[k : k + 2], bias=bias, scale=0.5), y[k : k + 2]).backward()
        for p in other.parameters():
            p.grad.div_(4)  # type: ignore[union-attr]
        assert_same_gradients(model, other)
        step = functools.partial(pipeline.step, x, bias=bias, scale=0.7, target=y)
        refusal(step, UsageError, "scale")


def test_a_profile_decides_the_plan_and_a_loss_scale_scales() -> None:
    model, (x, y) = mlp(), data()
    stage = StageCost.simple(1000, 1000, 1000, 10, 5)
    pipeline = compiled(model, profile=Profile((stage, stage)))
    pipeline.loss_scale = 1024.0
    pipeline.step(x, target=y)
    assert pipeline.certificate.is_optimal
    other = mlp()
    for k in range(0, 8, 2):
        (1024.0 * MSE(other(x[k : k + 2]), y[k : k + 2])).backward()
    for p in other.parameters():
        p.grad.div_(4)  # type: ignore[union-attr]
    assert_same_gradients(model, other)


def test_one_communicator_gives_the_same_gradients() -> None:
    model, (x, y) = mlp(), data()
    pipeline = compiled(model, 4, one_communicator=True)
    pipeline.step(x, target=y)
    other = mlp()
    loop(other, x, y, 4)
    assert_same_gradients(model, other)
    assert "SEND_SLOTS = None" in pipeline.source(0)


class Skipping(nn.Module):
    """A value of the first stage is used in the last."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        first = self.layers[0](x)
        return self.layers[2](self.layers[1](first).relu()) + first  # type: ignore[no-any-return]


def test_a_profile_without_an_edge_that_the_model_has_is_refused() -> None:
    stage = StageCost.simple(10, 10, 10)
    with pytest.raises(UsageError, match="from stage 0 to stage 2, the profile has no such edge"):
        zbcompile.compile(
            Skipping(),
            3,
            example_args=(torch.randn(4, 8),),
            loss_fn=lambda y, _: y.square().mean(),
            split_points=["layers.1", "layers.2"],
            profile=Profile((stage,) * 3),
        )
