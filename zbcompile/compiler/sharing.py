"""What ranks tell each other of a step: the form of its batch and hashes of it, its losses and metrics.

Rank 0 says at the beginning of a step which forms its batch has, and does not wait for the others. They may
therefore come without inputs that none of their stages takes, and a batch that differs from rank 0's is
refused before the first message.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zbcompile.compiler.call import pieces_of
from zbcompile.compiler.runs import Counted, Run, Shapes
from zbcompile.compiler.sampled import bytes_of, sampled_bytes
from zbcompile.compiler.signature import Signature, Value, described
from zbcompile.errors import UsageError
from zbcompile.passes.capture.nested_values import Microbatches
from zbcompile.runtime.group import PipelineGroup

__all__ = ["examples", "regrouped", "share_values", "tell", "tell_evaluation", "whole_shapes"]


def tell(
    group: PipelineGroup,
    signature: Signature,
    values: Sequence[Value],
    forms: Sequence[str | None],
    agreed: Mapping[str, object],
) -> tuple[str | None, ...]:
    """Return which forms rank 0's batch has, None for one that it does not know; compare this rank with it.

    Rank 0 is that of this rank's pipeline. Each pipeline of a job has a batch of its own, in the same forms.

    Parameters
    ----------
    group
        The ranks, which all come here.
    signature, values
        This rank's part of the batch.
    forms
        On rank 0 of a pipeline what it says.
    agreed
        What must be the same on all ranks, by name.

    Raises
    ------
    UsageError
        A tensor of this rank differs from rank 0's, or something else that must be the same.
    """
    hashes = [None if value is None else _hash(value) for value in values]
    said = {"the microbatches, in number or shape": list(forms), **agreed}
    _tell_pipelines(group, json.dumps(said), "the step of the first pipeline")
    mine = json.dumps([list(forms), hashes, agreed]) if group.pipeline_rank == 0 else None
    told, theirs, others = json.loads(group.announce_in(group.pipeline, mine, "the step"))
    for name, value in agreed.items():
        if value != others[name]:
            raise UsageError(
                f"the ranks differ in {name}", needed=f"{others[name]}, as on rank 0", given=value
            )
    _compare(signature.names, hashes, theirs)
    return tuple(told)


def tell_evaluation(group: PipelineGroup, form: str, names: Sequence[str], values: Sequence[Value]) -> None:
    """Compare the batch of an evaluation, which every rank has, with rank 0's.

    Parameters
    ----------
    group
        The ranks, which all come here.
    form
        A hash of everything but the values of the tensors.
    names, values
        The tensors.

    Raises
    ------
    UsageError
        It differs.
    """
    hashes = [None if value is None else _hash(value) for value in values]
    shapes = {name: described(value) for name, value in zip(names, values, strict=True)}
    said = {"the batch to evaluate": shapes, "the arguments that are no tensors, or autocast": form}
    _tell_pipelines(group, json.dumps(said), "the evaluation of the first pipeline")
    mine = json.dumps([form, hashes]) if group.pipeline_rank == 0 else None
    wanted, theirs = json.loads(group.announce_in(group.pipeline, mine, "the evaluation"))
    if len(theirs) == len(hashes):
        _compare(names, hashes, theirs)
    if wanted != form:
        raise UsageError(
            "the batch to evaluate has another form than that of rank 0",
            fix="give all ranks the same arguments, under the same autocast",
        )


def _tell_pipelines(group: PipelineGroup, mine: str, what: str) -> None:
    """Refuse, on the first rank of a pipeline, another form of a call than the first pipeline has.

    That pipeline waits for nobody. ``mine`` is a JSON object: what may differ, by its words.
    """
    if len(group.pipeline) == group.size:
        return
    told = group.announce(mine if group.rank == 0 else None, what)
    if group.pipeline_rank == 0 and told != mine:
        own, first = json.loads(mine), json.loads(told)
        name = next(name for name in own if own[name] != first.get(name))
        raise UsageError(
            f"the replicas differ in {name}",
            where=f"rank {group.rank}",
            needed=f"{first.get(name)}, as on rank 0",
            given=own[name],
            fix="give every pipeline as many microbatches of the same shapes, and make the same calls",
        )


def _compare(names: Sequence[str], hashes: Sequence[str | None], theirs: Sequence[str | None]) -> None:
    """Refuse a tensor that differs from rank 0's, where both have it."""
    for name, own, other in zip(names, hashes, theirs, strict=True):
        if own is not None and other is not None and own != other:
            raise UsageError(
                "the batch differs from that of rank 0",
                where=name,
                needed=f"the same on every rank that gives it: {other}",
                given=own,
                fix="give all ranks the same batch, or each rank only what its stages take",
            )


def _hash(value: Tensor | Microbatches) -> str:
    """Return shapes and a hash of the values of a tensor, of a sample of them where it is large."""
    digest = hashlib.blake2b(digest_size=8)
    pieces = pieces_of(value)
    for piece in pieces:
        digest.update(sampled_bytes(piece))
    shapes = ", ".join(str(list(piece.shape)) for piece in pieces)
    return f"{shapes} {value.dtype}, hash {digest.hexdigest()}"


def whole_shapes(
    group: PipelineGroup, signature: Signature, values: Sequence[Value], runs: Sequence[Run]
) -> list[Counted]:
    """Return the shapes of a new batch from the parts of all ranks.

    Raises
    ------
    UsageError
        The ranks differ in it, or none was given a tensor.
    """
    mine = [[len(run.pieces), run.rows, run.shapes] for run in runs]
    whole = [
        list(v.shape) if isinstance(v, Tensor) and not signature.cut[k] else None
        for k, v in enumerate(values)
    ]
    parts = [json.loads(text) for text in group.gather(json.dumps([mine, whole]), "the new shape")]
    spread = [
        [(rows, shapes) for count, rows, shapes in part for _ in range(count)] for part, _ in parts if part
    ]
    merged: list[tuple[int, list[Any]]] = [(rows, list(shapes)) for rows, shapes in spread[0]]
    for _, shapes in parts:
        for k, shape in enumerate(shapes):
            for _, into in merged:
                into[k] = into[k] or shape
    for part in spread:
        if [rows for rows, _ in part] != [rows for rows, _ in merged]:
            raise UsageError(
                "the ranks cut the batch into different microbatches",
                needed=f"microbatches of {[rows for rows, _ in merged]} rows, as on the ranks before",
                given=[rows for rows, _ in part],
                fix="cut it alike on all ranks",
            )
        for (_, into), (_, shapes) in zip(merged, part, strict=True):
            for k, shape in enumerate(shapes):
                if into[k] is not None and shape is not None and into[k] != shape:
                    raise _other_shape(signature.names[k], into[k], shape)
                into[k] = into[k] if shape is None else shape
    counted: list[Counted] = []
    for rows, shapes in merged:
        if None in shapes:
            raise UsageError(
                "no rank was given a tensor of the batch", where=signature.names[shapes.index(None)]
            )
        key: Shapes = tuple(tuple(shape) for shape in shapes)
        if counted and counted[-1][1:] == (rows, key):
            counted[-1] = (counted[-1][0] + 1, rows, key)
        else:
            counted.append((1, rows, key))
    return counted


def regrouped(
    signature: Signature, values: Sequence[Value], runs: Sequence[Run], wanted: Sequence[Counted]
) -> list[Run]:
    """Return this rank's microbatches as runs of the forms that rank 0 has told.

    Parameters
    ----------
    signature, values, runs
        This rank's part; no runs if it has no tensor that is cut.
    wanted
        Per form the number of microbatches, rows of each, and shapes.

    Raises
    ------
    UsageError
        This rank's tensors have other shapes.
    """
    pieces: list[Sequence[Tensor | None]] = [piece for run in runs for piece in run.pieces]
    if not pieces:
        kept = [value if isinstance(value, Tensor) else None for value in values]
        pieces = [kept] * sum(count for count, _, _ in wanted)
    if len(pieces) != sum(count for count, _, _ in wanted):
        raise UsageError(
            "the ranks cut the batch into different microbatches",
            needed=f"{sum(count for count, _, _ in wanted)}, as on rank 0",
            given=len(pieces),
        )
    result, start = [], 0
    for count, rows, shapes in wanted:
        run = Run(rows, pieces[start : start + count])
        for piece in run.pieces:
            for k, (tensor, shape) in enumerate(zip(piece, shapes, strict=True)):
                if tensor is not None and tuple(tensor.shape) != shape:
                    raise _other_shape(signature.names[k], shape, tuple(tensor.shape))
        result.append(run)
        start += count
    return result


def _other_shape(name: str, needed: object, given: object) -> UsageError:
    return UsageError(
        "the batch has another shape than on rank 0",
        where=name,
        needed=f"{needed} per microbatch",
        given=given,
        fix="give all ranks the same batch, or rank 0 the whole of it",
    )


def examples(run: Run, shapes: Shapes, known: Sequence[Tensor]) -> Run:
    """Return a run with every tensor: those that this rank lacks are repeated from a known microbatch."""
    tiles = [
        _tiled(tensor, shape or ()) if any(piece[k] is None for piece in run.pieces) else None
        for k, (tensor, shape) in enumerate(zip(known, shapes, strict=True))
    ]
    return Run(
        run.rows,
        [[b if a is None else a for a, b in zip(piece, tiles, strict=True)] for piece in run.pieces],
    )


def _tiled(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    for dim, size in enumerate(shape):
        places = torch.arange(size, device=tensor.device) % tensor.shape[dim]
        tensor = tensor.index_select(dim, places)
    return tensor


def share_values(
    group: PipelineGroup, pipeline: Sequence[int], source: int, values: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the small tensors of a pipeline's rank on every rank that names this pipeline.

    Parameters
    ----------
    group
        The ranks, which all come here.
    pipeline, source
        The ranks of the pipeline, and which of them has the values.
    values
        By name; those of other ranks than the source are not looked at.
    """
    text = None
    if group.rank == pipeline[source]:
        rows = [
            [name, list(v.shape), str(v.dtype).removeprefix("torch."), base64.b64encode(bytes_of(v)).decode()]
            for name, v in values.items()
        ]
        text = json.dumps(rows)
    told = json.loads(group.announce_in(pipeline, text, "the losses of the step", source))
    if text is not None:
        return dict(values)
    return {
        name: torch.frombuffer(bytearray(base64.b64decode(data)), dtype=getattr(torch, dtype)).reshape(shape)
        if data
        else torch.empty(shape, dtype=getattr(torch, dtype))
        for name, shape, dtype, data in told
    }
