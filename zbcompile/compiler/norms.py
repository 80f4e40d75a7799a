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

__all__ = ["clip", "gradient_norms", "total_norm"]

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
    found = {
        name: torch.linalg.vector_norm(local(p.grad), norm_type)
        for name, p in own.items()
        if p.grad is not None
    }
    if group is not None:
        refuse_shards(group, asked)
        found = _of_all_ranks(found, group, norm_type, asked)
    return {name: found[name] for name, _ in trained.named_parameters() if name in found}


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


def _of_all_ranks(
    own: Mapping[str, Tensor], group: PipelineGroup, norm_type: float, asked: str
) -> dict[str, Tensor]:
    numbers = {name: [float(norm).hex(), str(norm.dtype)] for name, norm in own.items()}
    text = json.dumps([asked, numbers])
    with group.calls.meeting(asked):
        parts = [json.loads(part) for part in group.gather(text, "the norms of gradients")]
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
    if len(group.shards) > 1:  # each rank has another part of a gradient
        return {name: torch.linalg.vector_norm(torch.stack(n), norm_type) for name, n in found.items()}
    return {name: norms[0] for name, norms in found.items()}
