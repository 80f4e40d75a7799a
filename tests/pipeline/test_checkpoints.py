"""Checkpoints: whatever saved them goes on anywhere else, and a save that is cut short leaves the old one."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_model
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import zbcompile
from tests.support.checkpoint_workers import (
    EXTRA,
    adamw,
    narrow,
    replicas,
    saved_and_continued,
    saved_and_killed,
    steps,
)
from tests.support.clean_process import in_clean_process
from tests.support.gloo_workers import MODELS, NUM_RANKS, even_profile
from zbcompile.errors import FormatError, PipelineError, ShapeError, UsageError
from zbcompile.formats.detect import load_schedule
from zbcompile.runtime.launch import spawn, spawn_outcomes
from zbcompile.schedule.costs import Profile

pytestmark = [pytest.mark.timeout(400), pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def test_what_four_ranks_saved_goes_on_in_one_process_two_stages_and_the_plain_model(tmp_path: Path) -> None:
    in_clean_process(saved_there_and_continued_here, tmp_path)


def compiled(num_stages: int) -> tuple[zbcompile.Pipeline, dict[str, Any]]:
    model, call, loss_fn = MODELS["gpt2"]()
    profile = Profile(even_profile().stages[:num_stages])
    pipeline = zbcompile.compile(
        model, num_stages, loss_fn=loss_fn, num_microbatches=4, time_limit=0.5, profile=profile, seed=7
    )
    return pipeline.build(call.get("args", ()), call.get("kwargs", {}), call.get("target")), call


def saved_there_and_continued_here(folder: Path) -> None:
    pipeline, call = compiled(4)
    first = copy.deepcopy(pipeline.state_dict())
    records = spawn(
        saved_and_continued, NUM_RANKS, (pipeline, call, str(folder)), timeout_s=200, inherit=True
    )
    there = {name: tensor for record in records for name, tensor in record.items()}
    assert there.keys() == first.keys()

    # In one process, from both forms; the optimizer has made no step.
    for form, extra in (("whole", EXTRA), ("flat", None)):
        pipeline.load_state_dict(first)
        pipeline.step_number = 2
        optimizer = adamw(pipeline.parameters(), lr=0.5)
        assert pipeline.load(folder / form, optimizer) == extra
        assert pipeline.step_number == 2
        assert [g["weight_decay"] for g in optimizer.param_groups] == [0.1, 0.0]
        steps(pipeline, optimizer, call, 1)
        for name, tensor in pipeline.state_dict().items():
            assert torch.equal(there[name], tensor), (form, name)

    # In two stages; another seed would draw other masks.
    halves, _ = compiled(2)
    optimizer = adamw(halves.parameters(), lr=0.5)
    assert halves.load(folder / "whole", optimizer) == EXTRA
    assert halves.step_number == 2
    expected = halves.optimizer_state_dict(optimizer)
    record = folder / "whole/training.json"
    record.write_text(record.read_text().replace('"seed": 7', '"seed": 8'))
    with pytest.raises(UsageError, match=r"(?s)another seed.*seed=8.*seed=7"):
        halves.load(folder / "whole")

    # In the plain model by torch's own means, and back.
    model, _, _ = MODELS["gpt2"]()
    plain = adamw(model.parameters(), lr=0.5)
    state = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, plain, options=FLAT)}
    dcp.load(state, checkpoint_id=folder / "whole", no_dist=True)
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, plain, state["optim"], options=FLAT)
    assert all(torch.equal(tensor, model.state_dict()[n]) for n, tensor in halves.state_dict().items())
    same_entries(get_optimizer_state_dict(model, plain, options=FLAT), expected)
    state = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, plain, options=FLAT)}
    dcp.save(state, checkpoint_id=folder / "plain", no_dist=True)
    halves.load_state_dict(first)
    again = adamw(halves.parameters(), lr=0.5)
    assert halves.load(folder / "plain", again) is None
    assert all(torch.equal(tensor, model.state_dict()[n]) for n, tensor in halves.state_dict().items())
    same_entries(halves.optimizer_state_dict(again), expected)

    # Merged: the tied table stands there once.
    other, _, _ = MODELS["gpt2"]()
    load_model(other, folder / "merged.safetensors")
    assert all(torch.equal(tensor, other.state_dict()[n]) for n, tensor in model.state_dict().items())
    assert other.lm_head.weight is other.transformer.wte.weight


def same_entries(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for key, value in one.items():
        assert torch.equal(value, other[key]) if isinstance(value, Tensor) else value == other[key], key


def test_a_save_that_is_cut_short_leaves_the_old_one_and_refusals_leave_all_as_it_was(tmp_path: Path) -> None:
    """Rank 0, which puts the folder into its place, is killed while all ranks write."""
    outcomes = spawn_outcomes(saved_and_killed, NUM_RANKS, (str(tmp_path), 0), timeout_s=100)
    assert [o.exit_code for o in outcomes] == [-9, 0, 0, 0]
    records: dict[int, Any] = {o.rank: o.value for o in outcomes[1:]}
    assert records[2]["parameters"] == 0
    for rank, record in records.items():
        differ, foreign, folded, nothing, saved, full, killed = record["said"]
        assert "PipelineError: the ranks differ in what they save: rank 1 from rank 0" in differ
        assert ("FormatError" if rank == 1 else "PipelineError: rank 1 refused save()") in foreign
        assert "expected text (extra)" in foreign
        assert "something else than a checkpoint" in folded
        assert "no checkpoint there" in nothing
        assert saved == "done"
        assert "PipelineError: cannot save: rank 1: No space left on device" in full
        assert "PipelineError: rank 0 is gone" in killed
    assert sorted(os.listdir(tmp_path)) == [".saved.zbcompile-partial", "saved"]
    pipeline, call = narrow()
    optimizer = adamw(pipeline.parameters())
    assert pipeline.load(tmp_path / "saved", optimizer) == {"step": 1}
    assert pipeline.step_number == 1
    for record in records.values():
        for name, tensor in record["kept"].items():
            assert torch.equal(pipeline.state_dict()[name], tensor)
    steps(pipeline, optimizer, call, 1)
    pipeline.save(tmp_path / "saved", optimizer)
    assert os.listdir(tmp_path) == ["saved"]


def test_the_same_state_gives_the_same_bytes_and_the_plan_stands_beside_it(tmp_path: Path) -> None:
    pipeline, call = narrow()
    optimizer = adamw(pipeline.parameters())
    steps(pipeline, optimizer, call, 1)
    for name in ("one", "other"):
        pipeline.save(tmp_path / name, optimizer, EXTRA)
    names = sorted(os.listdir(tmp_path / "one"))
    assert names == [".metadata", "__0_0.distcp", "plan.json", "training.json"]
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "other" / name).read_bytes(), name
    file, _ = load_schedule((tmp_path / "one/plan.json").read_text(), "plan.json")
    assert file.solution() == pipeline.solution


def test_a_checkpoint_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    pipeline, call = narrow()
    optimizer = adamw(pipeline.parameters())
    steps(pipeline, optimizer, call, 1)
    pipeline.save(tmp_path / "alone", extra=1)
    pipeline.save(tmp_path / "whole", optimizer)
    state = {"model": pipeline.state_dict(), "optim": pipeline.optimizer_state_dict(optimizer)}
    wrong = {**state["model"], "last.bias": torch.zeros(9)}
    dcp.save({**state, "model": wrong}, checkpoint_id=tmp_path / "wrong", no_dist=True)
    del state["model"]["last.bias"]
    dcp.save(state, checkpoint_id=tmp_path / "less", no_dist=True)
    grouped = {"model": pipeline.state_dict(), "optim": {"param_groups": [{"lr": 0.1, "params": ["a"]}]}}
    dcp.save(grouped, checkpoint_id=tmp_path / "grouped", no_dist=True)

    before = {name: tensor.clone() for name, tensor in pipeline.state_dict().items()}
    fresh = adamw(pipeline.parameters())
    for name, kind, match in (
        ("alone", UsageError, "no optimizer"),
        ("wrong", ShapeError, r"another shape.*\(last\.bias\)"),
        ("less", UsageError, r"lacks a tensor.*\(last\.bias\)"),
        ("grouped", UsageError, "no options of a parameter"),
        ("nothing", FormatError, "no checkpoint there"),
    ):
        with pytest.raises(kind, match=match):
            pipeline.load(tmp_path / name, fresh)
    assert all(torch.equal(tensor, before[name]) for name, tensor in pipeline.state_dict().items())
    assert not fresh.state
    assert pipeline.load(tmp_path / "alone") == 1
    with pytest.raises(PipelineError, match=r"(?s)only safetensors files.*whole"):
        pipeline.save_merged(tmp_path / "whole")
    with pytest.raises(UsageError, match="something else than a checkpoint"):
        pipeline.save(tmp_path)
    (tmp_path / "whole/notes.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"something else.*notes\.txt"):
        pipeline.save(tmp_path / "whole", optimizer)
    pipeline.load(tmp_path / "whole", fresh)
    assert len(fresh.state) == len(before)


def test_replicas_and_restarts_run_the_plan_that_was_made_once(tmp_path: Path) -> None:
    records = spawn(replicas, 4, (str(tmp_path),), timeout_s=200)
    for rank, record in enumerate(records):
        failed = (
            "UsageError: mine" if rank == 3 else "PipelineError: rank 3 failed in compile(): UsageError: mine"
        )
        assert failed in record["failed"]
        assert (
            "PipelineError: the ranks differ in their stage graphs: rank 3 from rank 0" in record["different"]
        )
        assert record["plan"] == records[0]["plan"] == record["again"] == record["cached"]
        assert not {"measure", "verify"} & set(record["seen"])
        assert record["equal"]
    assert "source='measured" in records[0]["plan"]
