"""Norms, clipping, scaler and checkpoints over the whole mesh: shards are parts, all else is a copy."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

import zbcompile
from tests.support.mesh_workers import profile
from tests.support.part_workers import MICROBATCHES, batch, cube, cut, mse, two_by_two, whole_model
from zbcompile.compiler.norms import norms_of_texts, norms_text, own_norms
from zbcompile.compiler.parts import Part, boxes_of
from zbcompile.runtime.launch import spawn

pytestmark = [pytest.mark.timeout(200)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shards")


@pytest.fixture(scope="module")
def found(folder: Path) -> list[dict[str, Any]]:
    return spawn(two_by_two, 4, (str(folder),), timeout_s=180)


def check_training(records: list[dict[str, Any]]) -> None:
    """The same norms on all ranks; they, gradients and weights are those of one process up to rounding.

    Not to the bit: a sum over two shards, and a norm of norms of parts, round in another order.
    """
    for record in records:
        assert record["norms"] == records[0]["norms"]
        assert record["norms"] == pytest.approx(record["wanted"], rel=1e-6)
        assert record["names"] == pytest.approx(record["wanted names"], rel=1e-6)
        assert list(record["names"]) == list(record["wanted names"])
        late = {key: value for key, value in record["far"].items() if value > 1e-6}
        assert not late


def test_two_by_two_clips_and_trains_as_one_process(found: list[dict[str, Any]]) -> None:
    check_training(found)


def joined(records: list[dict[str, Any]], key: str) -> dict[str, Tensor]:
    """Return the whole tensors of what four processes hold: 0 and 1 have one stage, 2 and 3 the other."""
    whole = {}
    for first in (0, 2):
        for name, tensor in records[first][key].items():
            other = records[first + 1][key][name]
            if ".up." in name:
                (a, b), (c, d) = tensor.chunk(2), other.chunk(2)
                whole[name] = torch.cat([a, c, b, d])
            elif name.endswith("down.weight"):
                whole[name] = torch.cat([tensor, other], 1)
            else:
                assert torch.equal(tensor, other), name
                whole[name] = tensor
    return whole


@pytest.mark.parametrize("order", [0.0, 1.0, 2.0, math.inf, -1.0, -math.inf])
def test_the_norm_of_pieces_is_that_of_the_whole(order: float) -> None:
    """Three pieces of one gradient, the last one empty: the norm of each order, as of all entries at once."""
    whole = torch.tensor([3.0, 0.5, -2.0, 4.0, 0.25])
    texts = []
    for number, entries in enumerate(whole.split([2, 3, 0])):
        parameter = torch.nn.Parameter(torch.zeros_like(entries))
        parameter.grad = entries
        own = own_norms({"weight": parameter}, order)
        texts.append(norms_text(own, "asked", {"weight": f"{number}/0"}))
    found = norms_of_texts(texts, own, "asked", order)
    assert float(found["weight"]) == pytest.approx(float(torch.linalg.vector_norm(whole, order)))


def test_a_checkpoint_holds_the_whole_parameters_to_the_bit(
    found: list[dict[str, Any]], folder: Path
) -> None:
    """torch alone reads it into the plain model and optimizer; so does one process, and so do the shards."""
    state, momenta = joined(found, "state"), joined(found, "momenta")
    merged = load_file(folder / "merged.safetensors")
    assert merged.keys() == state.keys()
    assert all(torch.equal(merged[name], tensor) for name, tensor in state.items())

    plain = whole_model(8)
    optimizer = torch.optim.AdamW(plain.parameters())
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    entries = {
        "model": plain.state_dict(),
        "optim": get_optimizer_state_dict(plain, optimizer, options=options),
    }
    dcp.load(entries, checkpoint_id=folder / "saved")
    for name, tensor in state.items():
        assert torch.equal(entries["model"][name], tensor), name
        assert torch.equal(entries["optim"][f"state.{name}.exp_avg"], momenta[name]), name
        assert entries["optim"][f"param_groups.{name}.lr"] == 0.01

    x, y = batch()
    alone = zbcompile.compile(
        whole_model(8), 2, example_args=(x,), example_target=y, loss_fn=mse, num_microbatches=MICROBATCHES,
        profile=profile(), time_limit=0.3, verify=False,
    )  # fmt: skip
    later = torch.optim.AdamW(list(alone.parameters()))
    assert alone.load(folder / "saved", later) == {"at": 2}
    assert all(torch.equal(alone.state_dict()[name], tensor) for name, tensor in state.items())
    for record in found:
        assert record["extra"] == {"at": 2}
        assert record["differ"] == []
        assert record["by hand"] == []


def test_what_is_not_finite_or_frozen_on_one_shard_is_seen_by_all(found: list[dict[str, Any]]) -> None:
    for record in found:
        for name in ("down.weight", "norm.weight"):
            assert str(record["nan", name]) == "nan"
            assert "is nan" in record["raised", name]
        assert record["scale"] == 2.0
        assert record["skipped"]
        assert "norm.weight" in record["none"]
        assert "no gradient on rank 3" in record["none"]
        assert record["frozen"].startswith("PipelineError: ranks that train the same parameters")
        assert "1.down.weight" in record["frozen"]
        assert "needed: frozen, as on rank 2; given: trained on rank 3" in record["frozen"]
        assert 0 < record["after"] < math.inf


def test_what_is_said_wrongly_or_not_at_all_is_refused_by_name(found: list[dict[str, Any]]) -> None:
    words = {
        "pattern": ["shards['*.upp.weight']", "matches no parameter", "0.norm.weight"],
        "dim": ["0.down.weight", "cannot be cut along dimension 2", "0 to 1"],
        "along": ["one of tp", "'ep'"],
        "twice": ["cut in two ways", "by shards['*.up.weight']"],
        "blocks": ["down.weight", "a multiple of 4 along dimension 1", "6 on rank"],
        "type": ["maps patterns of names", "zbcompile.Shard(0, blocks=3)"],
        "no mesh": ["there is no mesh"],
        "said copy": ["down.weight", "copies of a tensor begin with different values: rank"],
        "unsaid": ["shards or copies of one", "2 processes along tp, and no shards="],
        "unsaved": ["save() cannot tell"],
        "forgotten": [
            "0.bias",
            "norm 0.995656 on rank 0",
            "ranks that hold copies of a parameter have different gradients",
        ],
        "marked": ["1.000000"],
        "factored": ["neither a part of the whole parameter's", "_var"],
    }
    for rank, record in enumerate(found):
        for name, parts in words.items():
            for part in parts:
                assert part in record["refused"][name], (rank, name, record["refused"][name])


def test_two_by_two_by_two_clips_trains_and_saves_as_one_process(folder: Path) -> None:
    """Replicas with all weights, and replicas that share them; each checkpoint is that of the whole model."""
    found = spawn(cube, 8, (str(folder),), timeout_s=180)
    for k, kind in enumerate(("dp", "dp_shard")):
        records = [record[k] for record in found]
        check_training(records)
        merged = load_file(folder / f"{kind}.safetensors")
        state = whole_model().state_dict()
        dcp.load({"model": state}, checkpoint_id=folder / kind)
        for name, tensor in state.items():
            assert torch.equal(tensor, merged[name]), name
        for record in records:
            assert record["differ"] == []
            assert record["moved"] == list(record["state"])
            for name, tensor in record["state"].items():
                assert torch.equal(tensor, cut(name, state[name], record["number"])), name


def test_parts_are_boxes_of_the_whole() -> None:
    """Three parts of different lengths, in two blocks: cut, put together again, and as boxes."""
    whole = torch.arange(2 * 18, dtype=torch.float32).reshape(2, 18)
    parts = [Part(1, 2, (4, 8, 6), number) for number in range(3)]
    back, covered = torch.zeros_like(whole), torch.zeros_like(whole)
    for part, size in zip(parts, (4, 8, 6), strict=True):
        mine = part.cut(whole)
        assert mine.shape == (2, size)
        assert part.whole_shape(mine.shape) == [2, 18]
        part.put(back, mine)
        for box in boxes_of(mine, part):
            rows, columns = (slice(at, at + n) for at, n in zip(box.offsets, box.tensor.shape, strict=True))
            assert torch.equal(whole[rows, columns], box.tensor)
            covered[rows, columns] += 1
    assert torch.equal(back, whole)
    assert bool((covered == 1).all())
