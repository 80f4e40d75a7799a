"""Parts of parameters: what processes along a further dimension of the mesh (``tp``) hold of one parameter.

Along such a dimension every process has tensors of the same names. Some are parts of a larger one, cut as
``shards`` of `zbcompile.compile` says or as attributes of the parameters do (those of Megatron-Core); all
others are copies. Norms, checkpoints and checks ask here which is which.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as Placed

from zbcompile.compiler.sampled import sampled_bytes
from zbcompile.compiler.sharding import local
from zbcompile.errors import PipelineError, UsageError
from zbcompile.options import CompileOptions, Shard
from zbcompile.runtime.group import PipelineGroup

__all__ = ["Box", "Part", "Parts", "boxes_of", "check_copies", "check_shards", "parts_of"]

_FIX = 'name it in shards= of compile(), for instance shards={"*.up.weight": 0}'


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


def check_shards(options: CompileOptions, trained: nn.Module, group: PipelineGroup | None) -> None:
    """Refuse ``shards`` that cannot be meant, before anything is captured. Raises `UsageError`."""
    _said(options, _tensors(trained), [name for name, _ in _dimensions(options, group)])


def _tensors(trained: nn.Module) -> dict[str, Tensor]:
    """Return all tensors of a model's state, by name; tied ones are the same object."""
    return {n: t for n, t in trained.state_dict(keep_vars=True).items() if isinstance(t, Tensor)}


def parts_of(
    options: CompileOptions,
    trained: nn.Module,
    own: Collection[str],
    group: PipelineGroup | None,
    outside: str,
) -> Parts:
    """Return what is a part and what a copy; all ranks come here.

    Parameters
    ----------
    options
        With ``mesh`` and ``shards``.
    trained
        What owns all tensors.
    own
        Names of those that this process saves.
    group
        The ranks.
    outside
        Which processes stages exchange data with beside the ranks, in words; "" where there are none.

    Raises
    ------
    UsageError
        ``shards`` names nothing, a dimension that is not there, or one thing twice.
    PipelineError
        Processes along a dimension of the mesh do not fit together; raised by all.
    """
    others = _dimensions(options, group)
    state = _tensors(trained)
    said = _said(options, state, [name for name, _ in others])
    wide = {name: ranks for name, ranks in others if len(ranks) > 1}
    if group is None or not wide:
        return Parts(unknown=outside)
    if said is None:
        sizes = ", ".join(f"{len(ranks)} processes along {name}" for name, ranks in wide.items())
        return Parts(unknown=f"{sizes}, and no shards=")
    rows = _told(group, wide, {n: state[n] for n in own if n in state}, said)
    here = rows[group.rank]
    part_of = {}
    for name, shard in said.items():
        if shard.along in wide and name in here.shapes:
            ranks = here.along[shard.along]
            lengths = tuple(rows[rank].shapes[name][shard.dim] for rank in ranks)
            part_of[name] = Part(shard.dim, shard.blocks, lengths, ranks.index(group.rank))
    peers = tuple(tuple(ranks) for ranks in here.along.values())
    return Parts(part_of, peers, all(ranks[0] == group.rank for ranks in peers))


def _dimensions(
    options: CompileOptions, group: PipelineGroup | None
) -> Sequence[tuple[str, tuple[int, ...]]]:
    """Return the mesh's dimensions beside pipelines and replicas, with this process's peers along them."""
    if group is not None:
        return group.others
    names = () if options.mesh is None else options.mesh.mesh_dim_names or ()
    return [(name, (0,)) for name in names if name not in ("pp", "dp", "dp_shard")]


def _said(
    options: CompileOptions, state: Mapping[str, Tensor], dims: Sequence[str]
) -> dict[str, Shard] | None:
    """Return which tensors are cut, and how: name -> shard with all of its fields; None: nobody says it."""
    found: dict[int, tuple[str, Shard]] = {}
    marked = False

    def note(name: str, shard: Shard, source: str) -> None:
        full = _full(name, state[name], shard, dims, source)
        words, before = found.setdefault(id(state[name]), (source, full))
        if before != full:
            raise UsageError(
                "a parameter is said to be cut in two ways",
                where=name,
                given=f"{before} by {words}, {full} by {source}",
                fix="let one of the two say it",
            )

    for pattern, shard in options.shards or ():
        names = [name for name in state if fnmatchcase(name, pattern)]
        if not names:
            raise UsageError(
                "a pattern of shards matches no parameter and no buffer",
                where=f"shards[{pattern!r}]",
                given=f"{len(state)} names, such as {', '.join(list(state)[:3])}",
                fix="write names as the model's state_dict() has them, with * for any characters",
            )
        for name in names:
            note(name, shard, f"shards[{pattern!r}]")
    for name, tensor in state.items() if dims else ():
        attributes = vars(tensor) if hasattr(tensor, "__dict__") else {}
        marked = marked or "tensor_model_parallel" in attributes
        if attributes.get("tensor_model_parallel"):
            note(
                name, Shard(attributes["partition_dim"], attributes.get("partition_stride", 1)), "attributes"
            )
    if options.shards is None and not marked:
        return None
    return {name: found[id(tensor)][1] for name, tensor in state.items() if id(tensor) in found}


def _full(name: str, tensor: Tensor, shard: Shard, dims: Sequence[str], source: str) -> Shard:
    """Return a shard with its dimensions as they are, checked."""
    along = shard.along or ("tp" if "tp" in dims else dims[0] if len(dims) == 1 else None)
    if along not in dims:
        raise UsageError(
            "shards are cut along a dimension of the mesh that stages exchange data in",
            where=source,
            needed=f"one of {', '.join(dims)}" if dims else "a mesh with such a dimension, tp for instance",
            given=repr(shard.along),
            fix='write for instance Shard(0, along="tp"), and give compile() a mesh with that dimension',
        )
    if not -tensor.ndim <= shard.dim < tensor.ndim:
        raise UsageError(
            f"a tensor of {tensor.ndim} dimensions cannot be cut along dimension {shard.dim}",
            where=f"{name}, by {source}",
            needed=f"0 to {tensor.ndim - 1}" if tensor.ndim else "a tensor with dimensions",
            given=shard.dim,
        )
    return Shard(shard.dim % tensor.ndim, shard.blocks, along)


@dataclass(frozen=True)
class _Row:
    """What a process tells of itself: ranks along each dimension, shapes and cuts by name."""

    along: Mapping[str, list[int]]
    shapes: Mapping[str, list[int]]
    cuts: Mapping[str, Shard]

    @staticmethod
    def read(text: str) -> _Row:
        """Return what a process has told."""
        along, shapes, cuts = json.loads(text)
        return _Row(along, shapes, {name: Shard(*row) for name, row in cuts.items()})


def _told(
    group: PipelineGroup,
    wide: Mapping[str, Sequence[int]],
    own: Mapping[str, Tensor],
    said: Mapping[str, Shard],
) -> list[_Row]:
    """Exchange shapes and cuts; refuse those that do not fit together. All ranks see the same."""
    mine = [
        {name: [group.members.index(rank) for rank in ranks] for name, ranks in wide.items()},
        {name: list(tensor.shape) for name, tensor in own.items()},
        {n: [said[n].dim, said[n].blocks, said[n].along] for n in own if n in said},
    ]
    rows = [_Row.read(text) for text in group.gather(json.dumps(mine), "shards and copies")]
    for rank, row in enumerate(rows):
        for along, ranks in row.along.items():
            _compare(group, along, rank, row, ranks[0], rows[ranks[0]])
    return rows


def _compare(group: PipelineGroup, along: str, rank: int, row: _Row, first: int, other: _Row) -> None:
    """Refuse a process whose tensors do not fit those of the first one along a dimension."""

    def refuse(what: str, name: str, needed: object, given: object, fix: str) -> None:
        raise group.calls.common(
            PipelineError(
                what, where=name, needed=f"{needed}, as on rank {first}", given=f"{given} on rank {rank}",
                fix=fix,
            )
        )  # fmt: skip

    for name in sorted(row.shapes.keys() ^ other.shapes.keys()):
        here = name in row.shapes
        refuse(f"a tensor is not in every process along {along}", name, not here, here, "build one model")
    for name, shape in row.shapes.items():
        cut, cut_there = row.cuts.get(name), other.cuts.get(name)
        if cut != cut_there:
            refuse("processes differ in how a parameter is cut", name, cut_there, cut, "say it alike")
        dim = cut.dim if cut is not None and cut.along == along else None
        if [n for d, n in enumerate(shape) if d != dim] != [
            n for d, n in enumerate(other.shapes[name]) if d != dim
        ]:
            what = "copies of a parameter" if dim is None else "shards of a parameter"
            refuse(f"{what} have other shapes along {along}", name, other.shapes[name], shape, _FIX)
        if dim is not None and cut is not None and shape[dim] % cut.blocks:
            raise group.calls.common(
                PipelineError(
                    "a shard cannot be cut into its blocks",
                    where=name,
                    needed=f"a multiple of {cut.blocks} along dimension {dim}",
                    given=f"{shape[dim]} on rank {rank}",
                )
            )


def check_copies(group: PipelineGroup, parts: Parts, tensors: Mapping[str, Tensor]) -> None:
    """Compare the copies that a rank holds with those of the processes beside it, by hashes; all come here.

    Raises
    ------
    PipelineError
        Names the first one that differs, and two ranks; raised by all.
    """
    if not parts.peers:
        return
    own = {
        name: hashlib.sha256(sampled_bytes(local(tensor))).hexdigest()[:16]
        for name, tensor in tensors.items()
        if name not in parts.of
    }
    told = [json.loads(t) for t in group.gather(json.dumps([parts.peers, own]), "the copies of weights")]
    for rank, (peers, hashes) in enumerate(told):
        for ranks in peers:
            first = told[ranks[0]][1]
            name = next((name for name, digest in hashes.items() if first.get(name) != digest), None)
            if name is not None:
                raise group.calls.common(
                    PipelineError(
                        f"copies of a tensor begin with different values: rank {rank} from rank {ranks[0]}",
                        where=name,
                        fix=f"give both the same values, or, if these are shards, {_FIX}",
                    )
                )
