"""Parts of parameters: what processes along a further dimension of the mesh (``tp``) hold of one parameter.

Along such a dimension every process has tensors of the same names. Some are parts of a larger one, cut as
``shards`` of `zbcompile.compile` says or as attributes of the parameters do (those of Megatron-Core); all
others are copies. Norms, checkpoints and checks ask a `Parts` which is which; `part_rules` makes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as Placed

from zbcompile.compiler.sharding import local
from zbcompile.errors import UsageError

__all__ = ["Box", "Part", "Parts", "boxes_of"]


@dataclass(frozen=True)
class Box:
    """A piece of a tensor, and where it stands in the whole one: dimension by dimension."""

    tensor: Tensor
    offsets: tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """What this process holds of one tensor.

    Attributes
    ----------
    dim, blocks
        As in `Shard`.
    sizes
        Length of the part of every process, in the order of the mesh's dimension.
    number
        Which of them is this process's.
    """

    dim: int
    blocks: int
    sizes: tuple[int, ...]
    number: int

    def whole_shape(self, shape: Sequence[int]) -> list[int]:
        """Return the shape of the tensor of which one of ``shape`` is this part."""
        return [sum(self.sizes) if d == self.dim else n for d, n in enumerate(shape)]

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """Yield where this part's rows stand along ``dim``: place in the part, in the whole, how many."""
        block, whole = self.sizes[self.number] // self.blocks, sum(self.sizes) // self.blocks
        before = sum(self.sizes[: self.number]) // self.blocks
        for k in range(self.blocks):
            yield k * block, k * whole + before, block

    def cut(self, whole: Tensor) -> Tensor:
        """Return this part of a whole tensor."""
        rows = [whole.narrow(self.dim, start, length) for _, start, length in self.runs()]
        return rows[0] if len(rows) == 1 else torch.cat(rows, self.dim)

    def put(self, whole: Tensor, part: Tensor) -> None:
        """Write this part into a whole tensor."""
        for here, there, length in self.runs():
            whole.narrow(self.dim, there, length).copy_(part.narrow(self.dim, here, length))


@dataclass(frozen=True)
class Parts:
    """Which tensors of this process are parts, and of what.

    Attributes
    ----------
    of
        Name -> part; a name that is not here is a copy.
    peers
        Per dimension of the mesh along which stages exchange data, the ranks along it.
    is_first
        Whether this process is the first of those that hold the same copies.
    unknown
        Why nobody can tell parts from copies; "" where that is known.
    """

    of: Mapping[str, Part] = field(default_factory=dict)
    peers: tuple[tuple[int, ...], ...] = ()
    is_first: bool = True
    unknown: str = ""

    def require(self, what: str) -> None:
        """Refuse a call that must know parts from copies. Raises `UsageError`."""
        if self.unknown:
            raise UsageError(
                f"{what} cannot tell whether parameters of the same name are shards or copies of one",
                where="mesh",
                given=self.unknown,
                fix='give compile() mesh= with pp and tp, and shards=, for instance shards={"*.up.weight": 0}'
                "; shards={} says that all are copies",
            )

    def whole_shape(self, name: str, tensor: Tensor) -> list[int]:
        """Return the shape that a tensor of this process has in the model of one process."""
        part = self.of.get(name)
        return list(tensor.shape) if part is None else part.whole_shape(tensor.shape)

    def cut(self, name: str, whole: Tensor) -> Tensor:
        """Return what this process holds of a whole tensor."""
        part = self.of.get(name)
        return whole if part is None else part.cut(whole)

    def cut_where_whole(self, own: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a state in which tensors that have the shape of the whole ones are cut."""
        found = dict(state)
        for name in self.of.keys() & own.keys() & state.keys():
            value = state[name]
            if isinstance(value, Tensor) and list(value.shape) == self.whole_shape(name, own[name]):
                found[name] = self.cut(name, value)
        return found

    def piece(self, name: str, tensor: Tensor) -> str:
        """Return a word for what this process holds of a tensor: equal where others hold the same."""
        part = self.of.get(name)
        return f"{0 if part is None else part.number}/{_offset(tensor)[1]}"


def boxes_of(tensor: Tensor, part: Part | None) -> list[Box]:
    """Return what this process holds of a whole tensor, as boxes of it.

    Parameters
    ----------
    tensor
        A part as ``part`` says, and of that perhaps only what replicas leave to this process (a DTensor).
    part
        None: the whole tensor but for such replicas.
    """
    dim, offset = _offset(tensor)
    own = local(tensor.detach())
    start = [0] * own.ndim
    if own.ndim:
        start[dim] = offset
    if part is None:
        return [Box(own, tuple(start))]
    found = []
    for here, there, length in part.runs():
        first = start[part.dim]
        low, high = max(here, first), min(here + length, first + own.shape[part.dim])
        if low < high:
            at = list(start)
            at[part.dim] = there + low - here
            found.append(Box(own.narrow(part.dim, low - first, high - low), tuple(at)))
    return found


def _offset(tensor: Tensor) -> tuple[int, int]:
    """Return along which dimension replicas share a tensor, and where this process's rows begin."""
    if not isinstance(tensor, DTensor):
        return 0, 0
    dim, first, rows = 0, 0, None
    for along, placement in enumerate(tensor.placements):
        if isinstance(placement, Replicate):
            continue
        assert isinstance(placement, Placed)
        assert rows is None, "shared along one dimension of a mesh"
        dim, rows = placement.dim, tensor.shape[placement.dim]
        each = -(-rows // tensor.device_mesh.size(along))
        first = min(rows, each * tensor.device_mesh.get_local_rank(along))
    return dim, first
