"""Entries of a checkpoint that are parts: what ranks save of them stands in one tensor, the whole one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from zbcompile.compiler.parts import Box, Part, boxes_of

__all__ = ["PartPlanner", "SavedPart", "saved_parts"]


@dataclass(frozen=True)
class SavedPart:
    """What a rank saves of a tensor.

    Attributes
    ----------
    boxes
        The pieces, and where they stand.
    shape
        Of the whole tensor.
    """

    boxes: Sequence[Box]
    shape: Sequence[int]

    @property
    def nbytes(self) -> int:
        """Bytes of the pieces."""
        return sum(box.tensor.nbytes for box in self.boxes)

    def __create_write_items__(self, name: str, entry: object) -> list[WriteItem]:
        """Return what torch writes, as it asks entries of its own kinds."""
        return [self._item(name, box) for box in self.boxes if box.tensor.numel()]

    def _item(self, name: str, box: Box) -> WriteItem:
        offsets = torch.Size(box.offsets)
        data = TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=offsets, sizes=box.tensor.size()),
            properties=TensorProperties.create_from_tensor(box.tensor),
            size=torch.Size(self.shape),
        )
        return WriteItem(MetadataIndex(name, offsets), WriteItemType.SHARD, tensor_data=data)

    def at(self, offsets: Sequence[int]) -> Tensor:
        """Return the piece that begins at a place of the whole tensor."""
        return next(box.tensor for box in self.boxes if box.offsets == tuple(offsets))


class PartPlanner(DefaultSavePlanner):
    """torch's planner, for entries that may be a `SavedPart`."""

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return the tensor or value to write."""
        entry = self.state_dict[index.fqn]
        if isinstance(entry, SavedPart) and index.offset is not None:
            return entry.at(index.offset)
        return super().lookup_object(index)


def saved_parts(entries: Mapping[str, Any], parts: Mapping[str, Part]) -> dict[str, Any]:
    """Return entries of a checkpoint, those that are parts as `SavedPart`."""
    found = dict(entries)
    for name, part in parts.items():
        tensor = entries[name]
        found[name] = SavedPart(boxes_of(tensor, part), part.whole_shape(tensor.shape))
    return found
