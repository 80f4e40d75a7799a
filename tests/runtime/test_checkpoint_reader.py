"""Checkpoints from someone else: read as data, or refused by the name of what is wrong."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from zbcompile.errors import FormatError
from zbcompile.runtime.checkpoint_reader import INDEX_FILE, CheckpointReader

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
STATE = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor(True), "lr": 0.1, "betas": (0.9, 0.99)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    dcp.save(STATE, checkpoint_id=tmp_path / "saved", no_dist=True)
    return tmp_path / "saved"


def test_tensors_and_plain_values_come_back(folder: Path) -> None:
    reader = CheckpointReader(str(folder))
    assert {"a", "b", "lr"} <= set(reader.names)
    found = reader.read(["a", "b", "lr"])
    assert torch.equal(found["a"], STATE["a"])
    assert torch.equal(found["b"], STATE["b"])
    assert found["lr"] == 0.1


class Harmful:
    """A pickle of it makes a folder when it is loaded."""

    def __init__(self, place: Path) -> None:
        self.place = str(place)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.place,)


def test_an_index_that_asks_for_code_is_refused_by_name_and_runs_none(folder: Path, tmp_path: Path) -> None:
    (folder / INDEX_FILE).write_bytes(pickle.dumps(Harmful(tmp_path / "harm")))
    with pytest.raises(FormatError, match=r"asks for posix\.mkdir, which belongs to no checkpoint"):
        CheckpointReader(str(folder))
    assert not (tmp_path / "harm").exists()


def test_a_value_that_asks_for_code_is_refused_and_runs_none(tmp_path: Path) -> None:
    dcp.save({"lr": Harmful(tmp_path / "harm")}, checkpoint_id=tmp_path / "saved", no_dist=True)
    with pytest.raises(FormatError, match=r"cannot be read as plain data.*\(lr\)"):
        CheckpointReader(str(tmp_path / "saved")).read(["lr"])
    assert not (tmp_path / "harm").exists()


def place_of(metadata: Metadata) -> _StorageInfo:
    return metadata.storage_data[MetadataIndex("a", (0, 0))]


def entry_of(metadata: Metadata) -> TensorStorageMetadata:
    entry = metadata.state_dict_metadata["a"]
    assert isinstance(entry, TensorStorageMetadata)
    return entry


EDITS: dict[str, tuple[Callable[[Metadata], object], str]] = {
    "file elsewhere": (lambda m: setattr(place_of(m), "relative_path", "../x.distcp"), "not beside it"),
    "other file": (lambda m: setattr(place_of(m), "relative_path", INDEX_FILE), "not beside it"),
    "no file": (lambda m: setattr(place_of(m), "relative_path", "x.distcp"), "cannot be read: No such file"),
    "beyond the end": (lambda m: setattr(place_of(m), "length", 1 << 40), "more than the file holds"),
    "before the start": (lambda m: setattr(place_of(m), "offset", -1), "more than the file holds"),
    "transformed": (
        lambda m: setattr(place_of(m), "transform_descriptors", ["zip"]),
        "a form that is not read",
    ),
    "no chunks": (lambda m: setattr(entry_of(m), "chunks", []), r"parts are missing.*\(a\)"),
    "huge": (
        lambda m: (
            setattr(entry_of(m), "size", torch.Size([1 << 40])),
            setattr(entry_of(m).chunks[0], "sizes", torch.Size([1 << 40])),
        ),
        r"larger than what is saved.*\(a\)",
    ),
    "no tensor": (lambda m: m.state_dict_metadata.update(a="text"), "no tensor and no value"),
    "no entries": (lambda m: setattr(m, "state_dict_metadata", 3), "lists no entries"),
    "no places": (lambda m: m.storage_data.update({"a": 3}), "damaged"),
}


@pytest.mark.parametrize("case", EDITS)
def test_an_index_that_does_not_fit_its_files_is_refused(folder: Path, case: str) -> None:
    edit, match = EDITS[case]
    metadata = pickle.loads((folder / INDEX_FILE).read_bytes())  # noqa: S301
    edit(metadata)
    (folder / INDEX_FILE).write_bytes(pickle.dumps(metadata))
    with pytest.raises(FormatError, match=match):
        CheckpointReader(str(folder))


def test_damaged_bytes_are_refused(folder: Path) -> None:
    index, data = folder / INDEX_FILE, folder / "__0_0.distcp"
    whole, values = index.read_bytes(), data.read_bytes()
    for text in (b"", whole[:-40], b"\x80\x04}."):
        index.write_bytes(text)
        with pytest.raises(FormatError, match="damaged|no record"):
            CheckpointReader(str(folder))
    index.write_bytes(whole)
    data.write_bytes(bytes(len(values)))
    with pytest.raises(FormatError, match="cannot read"):
        CheckpointReader(str(folder)).read(["a"])
    stream = io.BytesIO()
    torch.save(torch.zeros(5), stream)
    with pytest.raises(FormatError, match="no checkpoint there"):
        CheckpointReader(str(folder / "nothing"))
