"""Which tensors are parts: what ``shards=`` and attributes of parameters say, held against all processes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import Tensor, nn

from zbcompile.compiler.parts import Part, Parts
from zbcompile.compiler.sampled import sampled_bytes
from zbcompile.compiler.sharding import local
from zbcompile.errors import PipelineError, UsageError
from zbcompile.options import CompileOptions, Shard
from zbcompile.runtime.group import PipelineGroup

__all__ = ["check_copies", "check_shards", "parts_of"]

_FIX = 'name it in shards= of compile(), for instance shards={"*.up.weight": 0}'


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
