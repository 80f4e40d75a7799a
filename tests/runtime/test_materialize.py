"""Only one stage's tensors become real, and they are those of the whole model."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import zbcompile
from tests.passes.capture.test_meta_device import llama, on_meta, tokens
from tests.support.frontend_helpers import run_autograd, run_stages
from zbcompile.compiler.stages import build_stages
from zbcompile.errors import FormatError, ShapeError, UsageError
from zbcompile.runtime.materialize import materialize
from zbcompile.runtime.real_buffers import real_buffers
from zbcompile.runtime.tensor_files import TensorFiles
from zbcompile.schedule.devices import device_named


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters()) | dict(model.named_buffers())


def test_a_stage_alone_becomes_real_and_runs_to_the_bits_of_the_model() -> None:
    reference = llama()
    batch = ((), tokens(), None)
    built = build_stages(on_meta(), 2, (), batch[1], split_points=["model.layers.1"])
    state: dict[str, Tensor] = {}
    for stage in built.stages:  # each stage on a model of its own, as on a rank of its own
        own = on_meta()
        names = (*stage.parameters, *stage.buffers)
        state |= materialize(own, names, state=reference.state_dict(), build=llama)
        real = {name for name, value in tensors_of(own).items() if not value.is_meta}
        assert real == set(names)
    results, grads = run_stages(built, state, [batch])
    wanted, trained = run_autograd(reference, [batch])
    assert torch.equal(results[0]["loss"], wanted[0]["loss"])
    for name, parameter in trained.named_parameters():
        assert torch.equal(grads[name], parameter.grad), name


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.BatchNorm1d(4))
        self.head = nn.Linear(4, 9, bias=False)
        self.head.weight = self.table.weight
        self.body[0].bias.requires_grad_(False)
        self.register_buffer("ramp", torch.arange(6.0).cos(), persistent=False)


def test_initialisation_does_not_depend_on_which_rank_makes_it() -> None:
    whole, first, second = (on_meta(Parts) for _ in range(3))
    names = list(tensors_of(whole))
    before = torch.get_rng_state()
    together = materialize(whole, names, build=Parts, seed=5)
    one = materialize(first, ["body.0.bias", "table.weight"], seed=5)
    other = materialize(second, [n for n in names if n not in one], build=Parts, seed=5)
    assert torch.equal(before, torch.get_rng_state())
    assert set(one) | set(other) == set(names)
    for name, value in together.items():
        assert torch.equal(value, (one | other)[name]), name
    assert not torch.equal(
        together["body.0.weight"], materialize(on_meta(Parts), names, build=Parts)["body.0.weight"]
    )
    assert torch.equal(together["body.1.weight"], torch.ones(4))
    assert torch.equal(together["ramp"], torch.arange(6.0).cos())
    assert together["body.2.num_batches_tracked"].dtype == torch.int64


def test_ties_frozen_parameters_and_real_tensors_stay_what_they_are() -> None:
    model = on_meta(Parts)
    materialize(model, ["table.weight", "body.0.bias"])
    assert model.head.weight is model.table.weight
    assert isinstance(model.table.weight, nn.Parameter)
    assert model.table.weight.requires_grad
    assert not model.body[0].bias.requires_grad
    assert model.body[0].weight.is_meta
    kept = model.table.weight
    assert materialize(model, ["table.weight"]) == {}
    assert model.table.weight is kept


def test_own_initialisation_and_dtype_of_the_model() -> None:
    model = on_meta(Parts).to(torch.bfloat16)

    def constant(module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            parameter.fill_(3)

    made = materialize(model, ["body.0.weight"], init_weights=constant)
    assert torch.equal(made["body.0.weight"], torch.full((4, 4), 3.0, dtype=torch.bfloat16))


class NoReset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: materialize(on_meta(Parts), ["nothing"]), UsageError, "no parameter or buffer 'nothing'"),
        (lambda: materialize(on_meta(Parts), ["ramp"]), UsageError, "no value for 1 buffers"),
        (lambda: materialize(on_meta(NoReset), ["scale"]), UsageError, "NoReset has no reset_parameters"),
        (
            lambda: materialize(on_meta(NoReset), ["scale"], init_weights=lambda module: None),
            UsageError,
            "left scale without a value",
        ),
        (lambda: materialize(on_meta(Parts), ["table.weight"], state={}), UsageError, "no value for 1 param"),
        (
            lambda: materialize(on_meta(Parts), ["table.weight"], state={"table.weight": torch.ones(9, 5)}),
            ShapeError,
            "table.weight has another shape",
        ),
    ],
)
def test_what_is_missing_is_named(call, error, words) -> None:
    with pytest.raises(error, match=words):
        call()


class FromParameters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 3)
        self.register_buffer("norm", self.lin.weight.detach().norm())


class FromRandom(nn.Module):
    def __init__(self, draw=lambda: torch.randn(5)) -> None:
        super().__init__()
        self.register_buffer("noise", draw())


class FromItem(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 3)
        self.register_buffer("fixed", torch.full((2,), self.lin.weight.sum().item()))


@pytest.mark.parametrize(
    ("build", "name", "words"),
    [
        (FromParameters, "norm", "computed from parameters"),
        (FromRandom, "noise", "drawn from random numbers"),
        (lambda: FromRandom(lambda: torch.tensor(random.random())), "noise", "drawn from random numbers"),
        (FromItem, "fixed", "reads the values of parameters"),
        (NoReset, "absent", "has no buffer 'absent'"),
        (lambda: on_meta(Parts), "ramp", "meta device"),
    ],
)
def test_buffers_that_a_second_build_gets_wrong_are_refused(build, name, words) -> None:
    state, python = torch.get_rng_state(), random.getstate()
    with pytest.raises(UsageError, match=words):
        real_buffers(build, [name])
    assert torch.equal(state, torch.get_rng_state())
    assert python == random.getstate()


class Large(nn.Module):
    """A million times more parameters than this machine has memory for, and a table of cosines."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(1 << 22, 1 << 24)
        self.register_buffer("table", torch.arange(1 << 17).cos())


def test_buffers_of_a_model_too_big_to_build() -> None:
    made = real_buffers(Large, ["table"])
    assert torch.equal(made["table"], torch.arange(1 << 17).cos())


def test_safetensors_files_are_read_name_by_name(tmp_path: Path) -> None:
    source = Parts()
    values = {n: v.detach().clone() for n, v in source.state_dict().items() if n != "head.weight"}
    save_file(values, tmp_path / "model.safetensors")
    model = on_meta(Parts)
    made = materialize(model, list(tensors_of(model)), state=tmp_path / "model.safetensors", build=Parts)
    assert all(torch.equal(made[name], value) for name, value in values.items())

    half = sorted(values)[: len(values) // 2]
    sharded = tmp_path / "sharded"
    sharded.mkdir()
    save_file({n: values[n] for n in half}, sharded / "a.safetensors")
    save_file({n: v for n, v in values.items() if n not in half}, sharded / "b.safetensors")
    assert set(TensorFiles(sharded)) == set(values)
    where = {n: "a.safetensors" if n in half else "b.safetensors" for n in values}
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    again = materialize(on_meta(Parts), list(values), state=sharded)
    assert all(torch.equal(again[name], value) for name, value in values.items())


def test_hostile_files_are_refused(tmp_path: Path) -> None:
    pickled = tmp_path / "weights.pt"
    torch.save({"a": torch.ones(1)}, pickled)
    with pytest.raises(UsageError, match="only safetensors"):
        TensorFiles(pickled)
    damaged = tmp_path / "damaged.safetensors"
    damaged.write_bytes(b"\xff" * 64)
    with pytest.raises(FormatError, match="not a readable"):
        TensorFiles(damaged)
    with pytest.raises(UsageError, match="no safetensors files"):
        TensorFiles(tmp_path / "nowhere")
    index = tmp_path / "index"
    index.mkdir()
    for text in (
        "[]",
        "{",
        '{"weight_map": {"a": "../damaged.safetensors"}}',
        '{"weight_map": {"a": "b.pt"}}',
    ):
        (index / "model.safetensors.index.json").write_text(text)
        with pytest.raises(FormatError, match="index"):
            TensorFiles(index)


def test_compile_plans_without_weights_and_trains_once_they_are_there() -> None:
    reference, batch = llama(), tokens()
    model = on_meta()
    with pytest.raises(UsageError, match="cannot be measured"):
        zbcompile.compile(model, 2, example_kwargs=batch, num_microbatches=2)
    pipeline = zbcompile.compile(
        model, 2, example_kwargs=batch, num_microbatches=2, profile=device_named("H100"), time_limit=1.0
    )
    assert "H100" in pipeline.profile.source
    with pytest.raises(UsageError, match="stage 0 has no weights yet"):
        pipeline.step(**batch)
    for stage in pipeline.local_stages:
        made = stage.materialize(state=reference.state_dict(), build=llama)
        assert made.keys() <= tensors_of(stage).keys()
        assert not any(value.is_meta for value in tensors_of(stage).values())
    losses: list[Tensor] = []
    pipeline.step(**batch, losses=losses)
    halves = [((), {name: value[i : i + 1] for name, value in batch.items()}, None) for i in range(2)]
    wanted, trained = run_autograd(reference, halves)
    assert [v.item() for v in losses] == [w["loss"].item() for w in wanted]
    for name, parameter in trained.named_parameters():
        assert torch.equal(dict(pipeline.named_parameters())[name].grad, parameter.grad / 2), name
