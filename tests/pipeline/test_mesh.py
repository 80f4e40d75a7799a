"""Data parallelism around the stages: replicas of a pipeline on rows of their own, equal to one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import zbcompile
from tests.support.mesh_workers import (
    MICROBATCHES,
    REPLICAS,
    Tied,
    batch,
    cube,
    fully_sharded,
    gone_on,
    layers,
    lost,
    mse,
    profile,
    reference,
    trained,
    ways,
)
from zbcompile.compiler.reduction_speed import counted_speeds
from zbcompile.runtime.launch import spawn, spawn_outcomes
from zbcompile.schedule.costs import Link

pytestmark = [pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return spawn(ways, 4, timeout_s=250)


def test_two_by_two_trains_as_the_plain_loop_and_its_checkpoint_goes_on(tmp_path: Path) -> None:
    """Three AdamW steps with clipping: losses, norms and weights have the bits of the reference."""
    records = spawn(trained, 4, (str(tmp_path),), timeout_s=250)
    for rank, record in enumerate(records):
        assert record["differ"] == [], rank
        assert record["programs"] == records[0]["programs"]
        assert record["extra"] == {"at": 2}
        assert record["timeline"] == 2
    assert [record["eval"] for record in records] == [None, True, None, True]
    there = records[0]["state"] | records[1]["state"]

    # Only one replica writes, and one process goes on with what it wrote.
    files = [file for file in (tmp_path / "saved").iterdir() if file.suffix == ".distcp"]
    assert {file.name.split("_")[2] for file in files if file.stat().st_size} == {"0", "1"}
    (x, y), (pipeline, optimizer) = batch(2), gone_on(tmp_path, REPLICAS * MICROBATCHES)
    pipeline.step(x, target=y)
    pipeline.clip_grad_norm_(0.1)
    optimizer.step()
    for name, tensor in pipeline.state_dict().items():  # one process sums its microbatches in one row
        torch.testing.assert_close(tensor, there[name], rtol=1e-5, atol=1e-6)


def test_tied_weights_are_summed_over_stages_and_then_over_replicas(found: list[dict[str, Any]]) -> None:
    """All holders have the same bits; autograd adds both uses per microbatch, so within rounding of it."""
    wanted = reference(Tied())
    for record in found:
        assert torch.equal(record["tied"]["table.weight"], found[0]["tied"]["table.weight"])
        for name, grad in record["tied"].items():
            torch.testing.assert_close(grad, wanted[name], rtol=1e-6, atol=1e-8)


def test_dropout_masks_are_those_of_one_process_on_the_whole_batch(found: list[dict[str, Any]]) -> None:
    x, y = batch()
    alone = zbcompile.compile(
        layers(dropout=0.3), 2, example_args=(x,), example_target=y, loss_fn=mse, seed=5, verify=False,
        num_microbatches=REPLICAS * MICROBATCHES, profile=profile(), time_limit=0.3,
    )  # fmt: skip
    losses: list[torch.Tensor] = []
    alone.step(x, target=y, losses=losses)
    wanted = {name: p.grad for name, p in alone.named_parameters()}
    for record in found:
        assert torch.equal(record["losses"], torch.stack(losses))
        for name, grad in record["dropout"].items():
            torch.testing.assert_close(grad, wanted[name], rtol=1e-6, atol=1e-8)


def test_the_reduction_is_measured_planned_and_an_action_of_the_order(found: list[dict[str, Any]]) -> None:
    for record in found:
        assert record["verbs"] == [1, 1]
        assert record["reduced"] == ["0REDUCE_GRAD", "1REDUCE_GRAD"]
        assert record["reduce_ns"] == found[0]["reduce_ns"]
        assert min(record["reduce_ns"]) > 1


def test_a_counted_reduction_goes_around_the_ring() -> None:
    """Links of 1 us and 1 GB/s: 6 messages of a quarter of the bytes where four replicas have all weights.

    Where they share them, a gather is 3 such messages, and so is the sum that is scattered. Where two of two
    share them, it is one of a half each, and the sum of a part over two copies takes 2 messages of a quarter.
    """
    link, size = Link(1_000, 10**9), 4_000_000
    assert counted_speeds(link, 1, 4).reduce.ns(size) == 6 * (1_000 + 1_000_000)
    for timing in (counted_speeds(link, 4, 1).reduce, counted_speeds(link, 4, 1).gather):
        assert timing.ns(size) == 3 * (1_000 + 1_000_000)
    both = counted_speeds(link, 2, 2)
    assert both.gather.ns(size) == 1_000 + 2_000_000
    assert both.reduce.ns(size) == (1_000 + 2_000_000) + 2 * (1_000 + 1_000_000)


def test_several_steps_have_one_reduction(found: list[dict[str, Any]]) -> None:
    for record in found:
        assert record["early"] == {}
        assert record["two steps"] == []
        assert "gradients of 1 steps wait for their sum over the replicas" in record["unsaved"]
        assert "the same number of microbatches and loss_scale" in record["scaled"]


def test_what_replicas_cannot_share_is_refused_by_name(found: list[dict[str, Any]]) -> None:
    for rank, record in enumerate(found):
        assert "the replicas differ in the microbatches, in number or shape" in record["short"], rank
        assert "ranks that train the same parameters have frozen different ones" in record["frozen"]
        assert "given: frozen on rank 3" in record["frozen"]
        assert record["after"] == []
        assert "1.running_mean" in record["buffer"]
        assert "each replica would change it" in record["buffer"]
        assert "a dimension pp, dp or dp_shard" in record["names"]
        assert "along the mesh's dimension 'replicas'" in record["unused"]
        assert "leave group and data_group out" in record["both"]
        assert "mesh must be a torch DeviceMesh" in record["no mesh"]
        assert "replicas differ in the batch to evaluate" in record["other evaluation"]
        assert "[4, 8] torch.float32'}, as on rank 0" in record["other evaluation"]
        assert "whose group is not given" in record["alone"]
        assert "replicas begin with different values: rank 2 from rank 0" in record["unlike"]
        assert record["skipped"]


def test_a_short_batch_counts_by_its_rows(found: list[dict[str, Any]]) -> None:
    """6 of 8 rows on each replica: three microbatches of two rows."""
    x, y = (torch.cat([part[:6] for part in t.chunk(REPLICAS)]) for t in batch())
    plain = layers()
    mse(plain(x), y).backward()
    for record in found:
        for name, grad in record["rows"].items():
            torch.testing.assert_close(grad, plain.get_parameter(name).grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("killed", "rank 3 is gone"),
        ("stalled", "root: rank 3"),
        ("killed in a shard", "rank 3 is gone"),
    ],
)
def test_a_rank_that_is_lost_in_the_reduction_is_named_by_all(tmp_path: Path, fault: str, words: str) -> None:
    spawn_outcomes(lost, 4, (fault, str(tmp_path)), timeout_s=240)
    for rank in range(3):
        said = (tmp_path / f"said-{rank}").read_text()
        assert said.startswith("PipelineError"), said
        assert words in said, said


def test_two_by_two_by_two_trains_as_the_plain_loop_over_shards() -> None:
    """Replicas, ranks and shards: gradients and weights after AdamW have the bits of the reference."""
    records = spawn(cube, 8, timeout_s=250)
    for rank, record in enumerate(records):
        assert record["differ"] == [], rank
        assert len(record["names"]) == 6


def test_weights_that_replicas_share_train_as_the_plain_loop(tmp_path: Path) -> None:
    """FSDP2 on the stages, 2 x 2: weights after AdamW have the reference's bits, each rank holds half."""
    records = spawn(fully_sharded, 4, (str(tmp_path),), timeout_s=250)
    for rank, record in enumerate(records):
        assert record["differ"] == [], rank
        assert record["extra"] == {"at": 2}
        assert set(map(tuple, record["parts"].values())) == {(4, 8), (4,)}
        assert record["timeline"] == ["0UNSHARD", "0REDUCE_GRAD", "1UNSHARD", "1REDUCE_GRAD"]
        assert all(verb in record["program"] for verb in ("rank.unshard(0)", "rank.reshard(0)"))
        torch.testing.assert_close(*record["norms"], rtol=1e-6, atol=0)
        for pair in record["clipped"].values():
            torch.testing.assert_close(*pair, rtol=1e-6, atol=1e-8)
        assert "torch's Rprop has no step of weights that replicas share" in record["rprop"]
        assert "given: an optimizer on rank 2" in record["one optimizer"]
        assert "a stage was made another class" in record["replicated stage"]
        assert "untie it" in record["tied"]
        assert record["marks"] == {"kept"}
        assert record["hooks"] == (len(record["parts"]), True)
        assert "SGD was made before the weights were sharded" in record["early optimizer"]
        assert "is a single number" in record["scalar"]
        assert "0.scale" in record["scalar"]
        assert "its weights are sharded over replicas" in record["by hand"]
        assert "let compile(mesh=) shard it" in record["dtensor"]
        for case in ("wrapped before the first step", "wrapped after it", "wrapped stage"):
            assert "DistributedDataParallel holds the model" in record[case]
        assert "the module has another class" in record["outside"]
    assert [record["eval"] for record in records] == [None, True, None, True]

    # One process goes on with what four shards wrote.
    gone_on(tmp_path, MICROBATCHES)
