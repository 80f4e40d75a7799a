"""Reads folders of torch.distributed.checkpoint (DCP) as data from someone else.

DCP's index, ``.metadata``, is a pickle, and so is every value that is no tensor. Here the index is read by an
unpickler that makes DCP's own records and nothing else, is checked against the files that it speaks of, and
values are read with ``weights_only``.
"""

from __future__ import annotations

import hashlib
import io
import math
import os
import pickle
from collections.abc import Collection, Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from zbcompile.errors import FormatError
from zbcompile.formats.streams import reason

__all__ = ["INDEX_FILE", "CheckpointReader", "is_data_file"]

INDEX_FILE, _DATA_SUFFIX = ".metadata", ".distcp"
_MAX_INDEX_BYTES = 1 << 30
_RECORDS = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},
}


def is_data_file(name: str) -> bool:
    """Return whether DCP gives such a name to a file of values."""
    return name.endswith(_DATA_SUFFIX)


class CheckpointReader:
    """The entries of a folder that ``torch.distributed.checkpoint.save`` has written.

    Parameters
    ----------
    folder
        The checkpoint.

    Attributes
    ----------
    names
        The names of all entries.
    digest
        Of the index: equal for the same checkpoint.

    Raises
    ------
    FormatError
        The folder is no checkpoint, its index is damaged or asks for more than DCP's records, or speaks of
        more than the files hold.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        reader = _Reader(folder)
        self._metadata = reader.read_metadata()
        self.names, self.digest = self._metadata.state_dict_metadata.keys(), reader.digest

    def read(self, names: Collection[str]) -> dict[str, Any]:
        """Return some entries: tensors on the CPU, and plain values.

        Raises
        ------
        FormatError
            A file is damaged, or holds a value that would need code to be read.
        """
        reader = _Reader(self.folder)
        reader.set_up_storage_reader(self._metadata, True)
        planner = _Planner(flatten_state_dict=False, flatten_sharded_tensors=False)
        try:
            found = {name: _room(self._metadata.state_dict_metadata[name]) for name in names}
            planner.set_up_planner(found, self._metadata, True)
            reader.read_data(planner.create_local_plan(), planner).wait()
        except FormatError:
            raise
        except (OSError, RuntimeError, ValueError, AssertionError, EOFError, pickle.UnpicklingError) as error:
            raise FormatError(f"cannot read: {str(error)[:300]}", where=self.folder) from error
        return found


def _room(entry: TensorStorageMetadata | BytesStorageMetadata) -> Tensor | None:
    """Return the tensor that an entry is read into; None for a value."""
    if isinstance(entry, BytesStorageMetadata):
        return None
    return torch.empty(entry.size, dtype=entry.properties.dtype)


class _Planner(DefaultLoadPlanner):
    """Reads values that are no tensors without running code."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        try:
            self.state_dict[name] = torch.load(value, weights_only=True)
        except pickle.UnpicklingError as error:
            first = str(error).partition("\n")[0][:200]
            raise FormatError(f"a value cannot be read as plain data: {first}", where=name) from error


class _Reader(FileSystemReader):
    """DCP's reader with an index that is checked."""

    digest = ""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = os.path.join(self.path, INDEX_FILE)
        try:
            with open(path, "rb") as file:
                text = file.read(_MAX_INDEX_BYTES + 1)
        except OSError as error:
            raise FormatError(f"no checkpoint there: {reason(error)}", where=path) from None
        if len(text) > _MAX_INDEX_BYTES:
            raise FormatError(
                "the index is too large", where=path, needed=f"at most {_MAX_INDEX_BYTES} bytes"
            )
        self.digest = hashlib.sha256(text).hexdigest()
        try:
            metadata = _Records(io.BytesIO(text)).load()
            _check(metadata, str(self.path))
        except FormatError as error:
            raise FormatError(error.what, where=error.where or path, fix=error.fix) from None
        except Exception as error:  # a damaged pickle raises anything
            raise FormatError(f"the index is damaged: {type(error).__name__}", where=path) from error
        return cast(Metadata, metadata)


class _Records(pickle.Unpickler):
    """Makes the records of DCP's index, and refuses every other name."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)):
            return getattr(torch, name)
        if name in _RECORDS.get(module, ()):
            return super().find_class(module, name)
        raise FormatError(
            f"the index asks for {module}.{name}, which belongs to no checkpoint",
            fix="load it with torch.distributed.checkpoint itself, if you trust whoever wrote it",
        )


def _check(metadata: object, folder: str) -> None:
    """Refuse an index whose entries are no records, or larger than what the files hold."""
    if not isinstance(metadata, Metadata):
        raise FormatError("the index is no record of a checkpoint")
    entries, places = metadata.state_dict_metadata, metadata.storage_data
    if not isinstance(entries, Mapping) or not isinstance(places, Mapping):
        raise FormatError("the index lists no entries")
    sizes: dict[str, int] = {}
    held: dict[str, int] = {}
    for index, place in places.items():
        name = place.relative_path
        if os.path.basename(name) != name or not is_data_file(name):
            raise FormatError("the index names a file that is not beside it", where=ascii(name)[:200])
        if place.transform_descriptors:
            raise FormatError("the values are written in a form that is not read here", where=name)
        if name not in sizes:
            sizes[name] = _size(os.path.join(folder, name))
        if not 0 <= place.offset <= place.offset + place.length <= sizes[name]:
            raise FormatError(
                "the index speaks of more than the file holds", where=os.path.join(folder, name)
            )
        held[index.fqn] = held.get(index.fqn, 0) + place.length
    for name, entry in entries.items():
        if isinstance(entry, BytesStorageMetadata):
            continue
        if not isinstance(entry, TensorStorageMetadata) or not isinstance(entry.size, torch.Size):
            raise FormatError(
                "the index has an entry that is no tensor and no value", where=ascii(name)[:200]
            )
        if sum(math.prod(chunk.sizes) for chunk in entry.chunks) != math.prod(entry.size):
            raise FormatError("the index speaks of a tensor of which parts are missing", where=name)
        if math.prod(entry.size) * entry.properties.dtype.itemsize > held.get(name, 0):
            raise FormatError("the index speaks of a tensor larger than what is saved of it", where=name)


def _size(path: str) -> int:
    try:
        return os.path.getsize(path)
    except OSError as error:
        raise FormatError(f"a file of the checkpoint cannot be read: {reason(error)}", where=path) from None
