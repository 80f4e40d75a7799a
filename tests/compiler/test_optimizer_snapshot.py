"""A step of an optimizer is undone and done again to the bit; what cannot be undone is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tests.support.life_workers import Chain, compiled, rows
from zbcompile.compiler.compiled import CompiledPipeline
from zbcompile.compiler.optimizer_snapshot import REVERSIBLE, Options, Snapshot, check_reversible
from zbcompile.errors import PipelineError, UsageError
from zbcompile.options import CompileOptions

optim = torch.optim
FORMS: list[tuple[type[Optimizer], dict[str, Any]]] = [
    (optim.SGD, {}),
    (optim.SGD, {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1}),
    (optim.SGD, {"momentum": 0.9, "nesterov": True}),
    (optim.SGD, {"momentum": 0.9, "nesterov": True, "maximize": True}),
    (optim.Adam, {"weight_decay": 0.1}),
    (optim.Adam, {"amsgrad": True, "maximize": True}),
    (optim.AdamW, {}),
    (optim.AdamW, {"amsgrad": True}),
    (optim.NAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    (optim.RAdam, {"weight_decay": 0.1}),
    (optim.Adamax, {"weight_decay": 0.1}),
    (optim.Adadelta, {"weight_decay": 0.1}),
    (optim.Adagrad, {"lr_decay": 0.1}),
    (optim.ASGD, {"t0": 1}),
    (optim.RMSprop, {"centered": True, "momentum": 0.9}),
    (optim.Rprop, {}),
    (optim.Rprop, {"maximize": True}),
    (optim.Adafactor, {"weight_decay": 0.1}),
    (optim.Muon, {}),
]
WAYS: list[dict[str, Any]] = [{}, {"foreach": True}, {"foreach": False}, {"fused": True}]


def numbers(optimizer: Optimizer) -> list[tuple[int, str, Tensor]]:
    """Return copies of all that an optimizer holds."""
    return [
        (place, name, torch.as_tensor(value).clone())
        for place, state in optimizer.state_dict()["state"].items()
        for name, value in state.items()
    ]


def same(one: list[tuple[int, str, Tensor]], other: list[tuple[int, str, Tensor]]) -> bool:
    return [n[:2] for n in one] == [n[:2] for n in other] and all(
        torch.equal(a[2], b[2]) for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize(("kind", "options"), FORMS)
def test_a_step_is_undone_and_done_again_to_the_bit(kind: type[Optimizer], options: dict[str, Any]) -> None:
    """From the first step on, which makes the state; the gradients are then as they were."""
    tried = 0
    for way in WAYS:
        torch.manual_seed(0)
        shapes = [(4, 6), (6, 4)] if kind is optim.Muon else [(4, 6), (6, 4), (5,)]
        parameters = [nn.Parameter(torch.randn(shape)) for shape in shapes]
        try:
            optimizer = kind(parameters, lr=0.1, **options, **way)  # type: ignore[call-arg]
        except TypeError:
            continue  # it has no such form
        check_reversible([optimizer])
        tried += 1
        for _ in range(4):
            gradients = [torch.randn_like(p) for p in parameters]
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient.clone()
            weights, state = [p.detach().clone() for p in parameters], numbers(optimizer)
            random, groups = torch.get_rng_state(), repr(optimizer.param_groups[0]["lr"])
            snapshot = Snapshot([optimizer])
            optimizer.step()
            then, state_then = [p.detach().clone() for p in parameters], numbers(optimizer)
            snapshot.roll_back()
            assert all(map(torch.equal, parameters, weights))
            assert same(numbers(optimizer), state)
            assert all(torch.equal(p.grad, g) for p, g in zip(parameters, gradients, strict=True))  # type: ignore[arg-type]
            optimizer.step()
            assert all(map(torch.equal, parameters, then))
            assert same(numbers(optimizer), state_then)
            assert torch.equal(torch.get_rng_state(), random)
            assert repr(optimizer.param_groups[0]["lr"]) == groups
    assert tried


def test_all_optimizers_that_are_taken_are_tried_above() -> None:
    assert {kind for kind, _ in FORMS} == set(REVERSIBLE)
    assert len(REVERSIBLE) >= 12


def test_a_snapshot_of_adamw_takes_twelve_bytes_a_parameter() -> None:
    parameter = nn.Parameter(torch.randn(100, 10))
    other = nn.Parameter(torch.randn(50))  # without a gradient, so a step leaves it alone
    optimizer = optim.AdamW([parameter, other])
    parameter.grad = torch.randn(100, 10)
    assert Snapshot([optimizer]).num_bytes == 4 * 1000
    optimizer.step()
    assert Snapshot([optimizer]).num_bytes == 12 * 1000 + 4


def test_a_step_is_done_again_with_the_options_of_its_time() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = optim.SGD([parameter], lr=torch.tensor(0.5))
    rate = optimizer.param_groups[0]["lr"]
    then = Options([optimizer])
    rate.fill_(0.25)
    with then.applied():
        assert float(optimizer.param_groups[0]["lr"]) == 0.5
    assert optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == 0.25


class MyAdamW(optim.AdamW):
    """An optimizer of somebody else."""


def test_what_cannot_be_undone_is_refused_by_name() -> None:
    parameter = nn.Parameter(torch.ones(2, 2))
    for kind in (optim.LBFGS, optim.SparseAdam, MyAdamW):
        with pytest.raises(UsageError, match=rf"{kind.__name__} is not known to be undone"):
            check_reversible([kind([parameter])])  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="a differentiable step of Adam cannot be undone"):
        check_reversible([optim.Adam([parameter], differentiable=True)])
    hooked = optim.SGD([parameter])
    handle = hooked.register_step_post_hook(lambda *told: None)
    with pytest.raises(UsageError, match="SGD has hooks of its step"):
        check_reversible([hooked])
    handle.remove()
    check_reversible([hooked])
    handle = register_optimizer_step_pre_hook(lambda *told: None)
    try:
        with pytest.raises(UsageError, match="SGD has hooks of its step"):
            check_reversible([hooked])
    finally:
        handle.remove()


def test_an_optimizer_that_needs_a_closure_is_refused_before_anything_changes() -> None:
    x, y = rows()
    pipeline = compiled(Chain())
    pipeline.step(x, target=y)
    with pytest.raises(UsageError, match="LBFGS calls for a closure"):
        pipeline.optimizer_step(optim.LBFGS(pipeline.parameters()))
    assert all(p.grad is not None for p in pipeline.parameters())


def test_in_one_process_the_norm_is_known_at_once_and_the_same_is_refused() -> None:
    x, y = rows()
    pipeline = compiled(Chain(), post_validation=True)
    pipeline.step(x, target=y)
    with pytest.raises(UsageError, match="LBFGS is not known to be undone"):
        pipeline.optimizer_step(optim.LBFGS(pipeline.parameters()))
    with pytest.raises(UsageError, match="a parameter that is not the model's"):
        pipeline.optimizer_step(optim.SGD([nn.Parameter(torch.ones(2))]))
    with pytest.raises(UsageError, match="max_norm must be None or a number from 0 on"):
        pipeline.optimizer_step(None, -1.0)
    with pytest.raises(UsageError, match="compile without post_validation, or train in bfloat16"):
        pipeline.scaler()
    assert all(p.grad is not None for p in pipeline.parameters())
    update = pipeline.optimizer_step(optim.SGD(pipeline.parameters()), 1e-3)
    assert update.known
    assert update.clipped
    assert not update.skipped
    assert float(update.wait().norm) > 1e-3
    assert all(p.grad is None for p in pipeline.parameters())
    pipeline.loss_scale = 2.0
    with pytest.raises(UsageError, match=r"loss_scale=2(.|\n)*unscale_"):
        pipeline.optimizer_step(None)


def test_a_norm_that_is_not_finite_changes_no_weight() -> None:
    x, y = rows()
    pipeline = compiled(Chain())
    state = {name: tensor.clone() for name, tensor in pipeline.state_dict().items()}
    for error_if_nonfinite in (False, True):
        pipeline.step(x, target=y * float("inf"))
        optimizer = optim.SGD(pipeline.parameters())
        if error_if_nonfinite:
            with pytest.raises(PipelineError, match="norm of order 2 of all gradients is nan"):
                pipeline.optimizer_step(optimizer, 1.0, error_if_nonfinite=True)
        else:
            assert pipeline.optimizer_step(optimizer, 1.0).skipped
        assert all(torch.equal(tensor, state[name]) for name, tensor in pipeline.state_dict().items())
        assert all(p.grad is None for p in pipeline.parameters())


def test_gradients_that_are_not_summed_over_replicas_are_not_stepped_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pipeline = compiled(Chain())
    monkeypatch.setattr(CompiledPipeline, "unreduced_steps", 2)
    with pytest.raises(UsageError, match="gradients of 2 steps wait for their sum"):
        pipeline.optimizer_step(None)


def test_the_plan_counts_the_snapshot_once() -> None:
    """Also where the plan of such a pipeline is taken again."""
    model = Chain()
    plain, counted = compiled(Chain()), compiled(model, post_validation=True)
    trained = [sum(p.nbytes for p in stage.parameters()) for stage in counted]
    before = [stage.static_bytes for stage in plain.profile.stages]
    assert [s.static_bytes for s in counted.profile.stages] == [
        b + 3 * t for b, t in zip(before, trained, strict=True)
    ]
    again = compiled(Chain(), profile=counted.profile, post_validation=True)
    assert [s.static_bytes for s in again.profile.stages] == [s.static_bytes for s in counted.profile.stages]
    with pytest.raises(UsageError, match="post_validation must be True or False"):
        compiled(Chain(), post_validation=1)


def test_pipelines_that_share_only_a_plan_are_refused() -> None:
    with pytest.raises(UsageError, match=r"post_validation is for one pipeline or one mesh.*\(plan_group\)"):
        CompileOptions(model=Chain(), num_stages=2, post_validation=True, plan_group=object())  # type: ignore[arg-type]


def test_the_snapshot_of_wider_gradients_is_counted() -> None:
    """SGD with Nesterov's momentum: a copy of the parameters, of its momentum and of its gradients."""
    options: dict[str, Any] = {"gradient_dtype": torch.float32, "dtype": torch.bfloat16}
    pipeline, counted = (
        compiled(Chain().to(torch.bfloat16), post_validation=later, **options) for later in (False, True)
    )
    charged = sum(s.static_bytes for s in counted.profile.stages)
    charged -= sum(s.static_bytes for s in pipeline.profile.stages)
    optimizer = optim.SGD(pipeline.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    for parameter in pipeline.parameters():
        parameter.grad_dtype = torch.float32
        parameter.grad = torch.ones(parameter.shape)
        optimizer.state[parameter]["momentum_buffer"] = torch.ones(parameter.shape)
    assert Snapshot([optimizer]).num_bytes == charged
