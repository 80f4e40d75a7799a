"""Norms of gradients over all ranks, as torch computes them in one process.

torch's ``clip_grad_norm_`` takes the norm of each gradient, and then the norm of those norms. Ranks therefore
exchange one number per parameter. A tied parameter, whose gradient is the same on all of its ranks, counts
once.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import cast

import torch
from torch import Tensor, nn

from zbcompile.compiler.peers import refuse_shards
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
    "total_norm",
]

_DTYPES = {str(d): d for d in (torch.float64, torch.float32, torch.bfloat16, torch.float16)}
"""Dtypes of norms."""


def gradient_norms(
    trained: nn.Module,
    own: Mapping[str, nn.Parameter],
    norm_type: float,
    group: PipelineGroup | None,
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
    asked
        The call in words, with its arguments: the same on all ranks.

    Raises
    ------
    PipelineError
        A rank is lost.
    UsageError
        The ranks call with different arguments, or different calls.
    """
    found = own_norms(own, norm_type)
    if group is not None:
        refuse_shards(group, asked)
        with group.calls.meeting(asked):
            # Copies of a part have its norm, too, which counts once.
            texts = group.gather(norms_text(found if group.writes else {}, asked), "the norms of gradients")
        found = norms_of_texts(texts, found, asked, norm_type if len(group.shards) > 1 else None)
    return in_order(trained, found)


def own_norms(own: Mapping[str, nn.Parameter], norm_type: float) -> dict[str, Tensor]:
    """Return the norms of this process's gradients, or of its parts of them, by name."""
    grads = {name: local(p.grad) for name, p in own.items() if p.grad is not None}
    # A rank may have nothing of a small parameter, and an empty part has no largest entry.
    grads = {name: grad if grad.numel() else grad.new_zeros(1) for name, grad in grads.items()}
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


def norms_text(own: Mapping[str, Tensor], asked: str) -> str:
    """Return norms of this process's gradients, and the call ``asked`` in words, as text for the others."""
    return json.dumps([asked, {name: [float(norm).hex(), str(norm.dtype)] for name, norm in own.items()}])


def norms_of_texts(
    texts: Sequence[str], own: Mapping[str, Tensor], asked: str, of_parts: float | None = None
) -> dict[str, Tensor]:
    """Return the norms in the texts of all ranks, by name, on the device of this process's.

    ``of_parts``: every rank has another part of a gradient, and this is the order of the norm.

    Raises
    ------
    UsageError
        A rank was asked for something else.
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
    found: dict[str, list[Tensor]] = {}
    for _, numbers in parts:
        for name, (number, dtype) in numbers.items():
            norm = torch.tensor(float.fromhex(number), dtype=_DTYPES[dtype], device=device)
            found.setdefault(name, []).append(norm)
    if of_parts is not None:
        return {name: torch.linalg.vector_norm(torch.stack(n), of_parts) for name, n in found.items()}
    return {name: norms[0] for name, norms in found.items()}
