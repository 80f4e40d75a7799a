"""Norms of gradients over all ranks, as torch computes them in one process.

torch's ``clip_grad_norm_`` takes the norm of each gradient, and then the norm of those norms. Ranks therefore
exchange one number per parameter. A gradient that is the same on several ranks (of a tied parameter, of a
copy) counts once; one of which ranks have different pieces (shards) has the norm of their norms, which for
order 0 is their sum.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import cast

import torch
from torch import Tensor, nn

from zbcompile.compiler.parts import Parts
from zbcompile.compiler.sharding import local
from zbcompile.errors import PipelineError, UsageError
from zbcompile.runtime.group import PipelineGroup

__all__ = [
    "clip",
    "clip_factor",
    "gradient_norms",
    "in_order",
    "norms_of_texts",
    "norms_text",
    "own_norms",
    "pieces_of",
    "total_norm",
]

_DTYPES = {str(d): d for d in (torch.float64, torch.float32, torch.bfloat16, torch.float16)}
"""Dtypes of norms."""


def gradient_norms(
    trained: nn.Module,
    own: Mapping[str, nn.Parameter],
    norm_type: float,
    group: PipelineGroup | None,
    parts: Parts,
    asked: str,
) -> dict[str, Tensor]:
    """Return the norm of every gradient: name -> scalar, in the order of the model's parameters.

    Parameters
    ----------
    trained
        What owns all parameters. Those without a gradient have no norm.
    own
        The parameters of this process.
    norm_type
        Order of the norm; may be infinite.
    group
        The ranks, which all come here; None: there is but this process.
    parts
        Which parameters are parts of larger ones.
    asked
        The call in words, with its arguments: the same on all ranks.

    Raises
    ------
    PipelineError
        A rank is lost.
    UsageError
        The ranks call with different arguments, or different calls; or copies of a parameter have different
        gradients.
    """
    parts.require(asked)
    found = own_norms(own, norm_type)
    if group is not None:
        text = norms_text(found, asked, pieces_of(own, parts))
        with group.calls.meeting(asked):
            texts = group.gather(text, "the norms of gradients")
        found = norms_of_texts(texts, found, asked, norm_type)
    return in_order(trained, found)


def pieces_of(own: Mapping[str, nn.Parameter], parts: Parts) -> dict[str, str]:
    """Return what this process has of each gradient, in words that are equal for equal gradients."""
    return {name: parts.piece(name, parameter) for name, parameter in own.items()}


def own_norms(own: Mapping[str, nn.Parameter], norm_type: float) -> dict[str, Tensor]:
    """Return the norms of this process's gradients, or of its parts of them, by name."""
    grads = {name: local(p.grad) for name, p in own.items() if p.grad is not None}
    # A rank may have nothing of a small parameter. Its part must not change the norm of all: with a negative
    # order the small entries count.
    nothing = 0.0 if norm_type >= 0 else math.inf
    grads = {name: grad if grad.numel() else grad.new_full((1,), nothing) for name, grad in grads.items()}
    return {name: torch.linalg.vector_norm(grad, norm_type) for name, grad in grads.items()}


def in_order(trained: nn.Module, norms: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return norms in the order of the model's parameters."""
    return {name: norms[name] for name, _ in trained.named_parameters() if name in norms}


def total_norm(norms: Sequence[Tensor], norm_type: float, error_if_nonfinite: bool = False) -> Tensor:
    """Return the norm of norms, a scalar; zero if there are none.

    Raises
    ------
    PipelineError
        It is not finite, and that was asked to be an error.
    """
    total = torch.linalg.vector_norm(torch.stack(list(norms)), norm_type) if norms else torch.tensor(0.0)
    if error_if_nonfinite and not bool(total.isfinite()):
        raise PipelineError(
            f"the norm of order {norm_type:g} of all gradients is {float(total):g}: they cannot be clipped",
            fix="skip this step, or leave error_if_nonfinite out",
        )
    return total


def clip(parameters: Iterable[nn.Parameter], max_norm: float, total: Tensor) -> None:
    """Clip gradients by the norm of all, as torch does; of a sharded one the part of this rank."""
    grads = [SimpleNamespace(grad=local(p.grad)) for p in parameters if p.grad is not None]
    nn.utils.clip_grads_with_norm_(cast("list[Tensor]", grads), max_norm, total)


def clip_factor(max_norm: float, total: Tensor) -> Tensor:
    """Return what `torch.nn.utils.clip_grads_with_norm_` multiplies every gradient by; 1: nothing is due."""
    return torch.clamp(max_norm / (total + 1e-6), max=1.0)


def norms_text(own: Mapping[str, Tensor], asked: str, pieces: Mapping[str, str]) -> str:
    """Return norms of this process's gradients, and the call ``asked`` in words, as text for the others.

    ``pieces`` says what this process has of each gradient (`Parts.piece`): equal words, equal gradients.
    """
    rows: dict[str, list[str]] = {name: [piece] for name, piece in pieces.items()}
    for name, norm in own.items():
        rows[name] += [float(norm).hex(), str(norm.dtype)]
    return json.dumps([asked, rows])


def norms_of_texts(
    texts: Sequence[str], own: Mapping[str, Tensor], asked: str, norm_type: float
) -> dict[str, Tensor]:
    """Return the norms in the texts of all ranks, by name, on the device of this process's.

    A gradient of which ranks have different pieces has the norm of the norms of its pieces.

    Raises
    ------
    UsageError
        A rank was asked for something else; or two ranks have different norms of the same piece.
    """
    parts = [json.loads(text) for text in texts]
    other = next((rank for rank, (words, _) in enumerate(parts) if words != asked), None)
    if other is not None:
        raise UsageError(
            "the ranks call for different norms",
            where=f"rank {other}",
            needed=asked,
            given=parts[other][0],
            fix="call it on every rank with the same arguments, and the scale that pipeline.scaler() keeps",
        )
    device = next(iter(own.values())).device if own else torch.device("cpu")
    told = [_Told.read(rank, name, row) for rank, (_, rows) in enumerate(parts) for name, row in rows.items()]
    largest = max((t.norm for t in told if t.norm is not None and math.isfinite(t.norm)), default=0.0)
    found: dict[str, dict[str, _Told]] = {}
    for one in told:
        there = found.setdefault(one.name, {}).setdefault(one.piece, one)
        found[one.name][one.piece] = _same(there, one, largest)
    norms = {name: [t for t in pieces.values() if t.norm is not None] for name, pieces in found.items()}
    return {name: _of_pieces(pieces, norm_type, device) for name, pieces in norms.items() if pieces}


@dataclass(frozen=True)
class _Told:
    """What a rank tells of its piece of a gradient: its norm, or None where it has none."""

    rank: int
    name: str
    piece: str
    norm: float | None = None
    dtype: torch.dtype = torch.float32

    @staticmethod
    def read(rank: int, name: str, row: Sequence[str]) -> _Told:
        """Return what stands in a rank's text."""
        if len(row) == 1:
            return _Told(rank, name, row[0])
        piece, norm, dtype = row
        return _Told(rank, name, piece, float.fromhex(norm), _DTYPES[dtype])

    def __str__(self) -> str:
        return f"{'no gradient' if self.norm is None else f'norm {self.norm:g}'} on rank {self.rank}"


def _same(one: _Told, other: _Told, largest: float) -> _Told:
    """Return the norm of a piece that two ranks have: the one that is not finite, where they differ so.

    Raises
    ------
    UsageError
        They differ by more than rounding: by the square root of the dtype's precision, or, of a gradient that
        is next to nothing beside the ``largest``, by the precision of that.
    """
    if one.norm is not None and other.norm is not None:
        if not (math.isfinite(one.norm) and math.isfinite(other.norm)):
            return other if math.isfinite(one.norm) else one
        eps = torch.finfo(one.dtype).eps
        if math.isclose(one.norm, other.norm, rel_tol=math.sqrt(eps), abs_tol=eps * largest):
            return one
    elif one.norm is None and other.norm is None:
        return one
    raise UsageError(
        "ranks that hold copies of a parameter have different gradients of it",
        where=one.name,
        needed=str(one),
        given=str(other),
        fix="sum it over the group in the backward (all_reduce), freeze it on all ranks or on none, or, if "
        "these are shards, name it in shards= of compile()",
    )


def _of_pieces(pieces: Sequence[_Told], norm_type: float, device: torch.device) -> Tensor:
    norms = [torch.tensor(told.norm, dtype=told.dtype, device=device) for told in pieces]
    if len(norms) == 1:
        return norms[0]
    # The norm of order 0 counts the entries that are not zero: that of norms would count the pieces.
    return (
        torch.stack(norms).sum()
        if norm_type == 0
        else torch.linalg.vector_norm(torch.stack(norms), norm_type)
    )
