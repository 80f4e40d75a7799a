"""``ctc_loss`` as calls of a fixed shape: torch's own keeps a table whose size depends on the targets.

``F.ctc_loss(log_probs, targets, ...)  -->  zbcompile::ctc_loss(...)`` and the reduction as calls of its own.
The backward makes the table again with the same kernel, which gives the same bits on the CPU, and holds
nothing of it in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast

import torch
from torch import Tensor

from zbcompile.passes import torch_private

__all__ = ["ctc_loss"]

_LIBRARY = torch.library.Library("zbcompile", "FRAGMENT")  # type: ignore[no-untyped-call]
_ARGUMENTS = (
    "Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths, int blank, "
    "bool zero_infinity"
)
_LIBRARY.define(f"ctc_loss({_ARGUMENTS}) -> Tensor")  # type: ignore[no-untyped-call]
_LIBRARY.define(f"ctc_loss_backward(Tensor grad, {_ARGUMENTS}) -> Tensor")  # type: ignore[no-untyped-call]


class _Context(Protocol):
    """What autograd keeps of a call."""

    saved_tensors: Sequence[Tensor]
    rest: tuple[int, bool]

    def save_for_backward(self, *tensors: Tensor) -> None: ...


@torch.library.impl(_LIBRARY, "ctc_loss", "CompositeExplicitAutograd")
def _losses(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    zero_infinity: bool,
) -> Tensor:
    lengths = input_lengths, target_lengths
    return torch_private.ctc_losses(log_probs, targets, *lengths, blank, zero_infinity)[0]


@torch.library.impl(_LIBRARY, "ctc_loss_backward", "CompositeExplicitAutograd")
def _gradient(
    grad: Tensor,
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    zero_infinity: bool,
) -> Tensor:
    lengths = input_lengths, target_lengths
    made = torch_private.ctc_losses(log_probs, targets, *lengths, blank, zero_infinity)
    return torch_private.ctc_gradient(grad, log_probs, targets, *lengths, *made, blank, zero_infinity)


@torch.library.register_fake("zbcompile::ctc_loss", lib=_LIBRARY)  # type: ignore[untyped-decorator]
def _losses_shape(log_probs: Tensor, *_: object) -> Tensor:
    return log_probs.new_empty(log_probs.shape[1:-1])


@torch.library.register_fake("zbcompile::ctc_loss_backward", lib=_LIBRARY)  # type: ignore[untyped-decorator]
def _gradient_shape(grad: Tensor, log_probs: Tensor, *_: object) -> Tensor:
    return torch.empty_like(log_probs, memory_format=torch.contiguous_format)


def _keep(ctx: _Context, inputs: tuple[object, ...], output: Tensor) -> None:
    ctx.save_for_backward(*cast("tuple[Tensor, ...]", inputs[:4]))
    ctx.rest = cast("tuple[int, bool]", inputs[4:])


def _backward(ctx: _Context, grad: Tensor) -> tuple[Tensor | None, ...]:
    made = torch.ops.zbcompile.ctc_loss_backward(grad, *ctx.saved_tensors, *ctx.rest)
    return made, None, None, None, None, None


torch.library.register_autograd("zbcompile::ctc_loss", _backward, setup_context=_keep, lib=_LIBRARY)


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor | Sequence[int],
    target_lengths: Tensor | Sequence[int],
    blank: int = 0,
    reduction: str | int = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """Return what ``ctc_loss`` of torch and of its functional module returns, of calls that can be traced."""
    if torch.is_autocast_enabled(log_probs.device.type):
        log_probs = log_probs.float()
    lengths = torch.as_tensor(input_lengths).reshape(-1), torch.as_tensor(target_lengths).reshape(-1)
    places = targets.to(log_probs.device, torch.long)
    batched = log_probs if log_probs.dim() == 3 else log_probs.unsqueeze(1)
    losses: Tensor = torch.ops.zbcompile.ctc_loss(batched, places, *lengths, blank, zero_infinity)
    if batched is not log_probs:
        losses = losses.squeeze(0)
    if zero_infinity:
        losses = torch.where(losses == float("inf"), torch.zeros_like(losses), losses)
    if reduction in ("mean", 1):
        return (losses / lengths[1].to(losses).clamp_min(1)).mean()
    return losses.sum() if reduction in ("sum", 2) else losses
