"""Life after compile(), one process per rank over gloo: against one process, and against the plain loop."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support import life_workers
from tests.support.life_workers import (
    Chain,
    compiled,
    main_parameter_steps,
    optimizer_per_parameter,
    rows,
    scaled_steps,
)
from zbcompile.errors import UsageError
from zbcompile.runtime.launch import spawn, spawn_outcomes

pytestmark = pytest.mark.timeout(200)


def test_freed_models_train_in_hooks_like_one_process_and_refuse_what_is_gone(tmp_path: Path) -> None:
    there = spawn(life_workers.freed, 4, (str(tmp_path / "merged.safetensors"),), timeout_s=150)
    model, (x, y) = Chain(tied=True), rows()
    optimizer_per_parameter(model.parameters())
    pipeline = compiled(model, 4)
    before = pipeline.eval(x)
    for count in (8, 8, 7):
        pipeline.step(x[:count], target=y[:count])
    assert torch.equal(there[-1]["before"], before)
    assert torch.equal(there[-1]["after"], pipeline.eval(x[:4]))
    assert not any(part["told"] for part in there)
    state = model.state_dict()
    seen = {name for part in there for name in part["state"]}
    assert seen == state.keys()
    merged = load_file(tmp_path / "merged.safetensors")  # a tied tensor is there once
    assert all(torch.equal(tensor, state[name]) for name, tensor in merged.items())
    assert len(merged) == len(state) - 1
    for part in there:
        assert all(torch.equal(tensor, state[name]) for name, tensor in part["state"].items())


def test_one_process_frees_nothing() -> None:
    with pytest.raises(
        UsageError, match=r"(?s)free_model=True frees the tensors of other processes.*torchrun"
    ):
        compiled(Chain(), free_model=True)


def test_an_order_is_changed_on_all_ranks_between_two_steps_and_no_bit() -> None:
    there = spawn(life_workers.replanned, 4, (), timeout_s=150)
    model = Chain()
    life_workers.plain_steps(model, 4)
    state = model.state_dict()
    assert {name for part in there for name in part["state"]} == state.keys()
    for part in there:
        assert all(torch.equal(tensor, state[name]) for name, tensor in part["state"].items())
        assert part["taken"] == there[0]["taken"]
        assert part["links"] == there[0]["links"] != ()
    first, last = there[-1]["evaluated"]
    assert not torch.equal(first, last)


def test_narrow_parameters_and_one_scaler_have_the_bits_of_one_process() -> None:
    there = spawn(life_workers.mixed, 4, (), timeout_s=150)
    half: dict[str, torch.nn.Module] = {"half": Chain(), "tied": Chain(tied=True), "scaled": Chain()}
    x, y = (t.to(torch.bfloat16) for t in rows())
    for name in ("half", "tied"):
        half[name].to(torch.bfloat16)
        pipeline = compiled(half[name], 4, dtype=torch.bfloat16, gradient_dtype=torch.float32)
        if name == "half":
            main_parameter_steps(pipeline, 3)
        else:
            pipeline.step(x, target=y)
    with torch.autocast("cpu", torch.float16):
        scales = scaled_steps(compiled(half["scaled"], 4))
    assert all(part["scales"] == scales for part in there)
    for name, model in half.items():
        own = dict(model.named_parameters())
        assert {key for part in there for key in part[name]} == own.keys()
        for part in there:
            for key, tensor in part[name].items():
                assert torch.equal(tensor, own[key].grad if name == "tied" else own[key]), (name, key)
    assert {t.dtype for part in there for t in part["tied"].values()} == {torch.float32}


def test_a_group_is_left_at_once_by_ranks_that_are_faster_than_others() -> None:
    assert spawn(life_workers.groups_left_at_once, 4, (60,), timeout_s=150) == [60] * 4


@pytest.mark.parametrize("last", [1, 2])
def test_a_rank_that_ends_while_groups_are_made_is_said_to_be_gone(last: int) -> None:
    """The first group is that of all ranks, the next one is made in the middle of compile()."""
    *there, lost = spawn_outcomes(life_workers.lost_in_new_group, 4, (last,), timeout_s=60)
    assert lost.exit_code == 7
    for outcome in there:
        assert outcome.error is None
        assert "is gone: its connection" in str(outcome.value)
