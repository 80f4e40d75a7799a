"""A gradient scaler for all ranks: torch's own, with one decision for all of them.

A rank sees the gradients of its own stages only. With a scaler of its own it would skip steps that the
others take, and its scale would drift from theirs. So ranks exchange whether one of them found a gradient
that is not finite; then every scaler sees what one scaler over all gradients would see.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from zbcompile.runtime import torch_private
from zbcompile.runtime.group import PipelineGroup

__all__ = ["PipelineScaler"]


class PipelineScaler(GradScaler):
    """`torch.amp.GradScaler` for a pipeline; every rank makes the same calls in the same order.

    Parameters
    ----------
    device
        Type of the device of the gradients.
    group
        The ranks; None: there is but this process.
    follow
        Gets the scale of the next step, now and whenever it may have changed.
    options
        Those of `torch.amp.GradScaler`.
    """

    def __init__(
        self, device: str, group: PipelineGroup | None, follow: Callable[[float], None], **options: Any
    ) -> None:
        super().__init__(device, **options)
        self._ranks, self._follow = group, follow
        if self.is_enabled():
            self.scale(torch.zeros((), device=device))  # it is made at the first use, which comes later
        self._follow(self.get_scale())

    def unscale_(self, optimizer: Optimizer | None) -> None:
        """Divide the optimizer's gradients by the scale; note whether one of any rank is not finite.

        A rank that trains nothing gives None, as often as the others give an optimizer.

        Raises
        ------
        PipelineError
            A rank is lost.
        """
        if optimizer is None:
            torch_private.mark_unscaled(self)
        else:
            super().unscale_(optimizer)
        if self._ranks is None or not self.is_enabled():
            return
        found = torch_private.found_not_finite(self, optimizer)
        own = any(bool(value) for value in found.values())
        with self._ranks.calls.meeting("unscale_()"):
            everyone = self._ranks.gather(str(int(own)), "unscale_()")
        found.clear()
        any_rank = torch.tensor(float("1" in everyone), device=self._device)
        found[any_rank.device] = any_rank

    def step(self, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> float | None:
        """Let the optimizer step, unless a gradient of any rank is not finite; None as in `unscale_`."""
        if self._ranks is not None and self.is_enabled() and not torch_private.is_unscaled(self, optimizer):
            self.unscale_(optimizer)  # a fused optimizer would do it alone
        if optimizer is None:
            return None
        return super().step(optimizer, *args, **kwargs)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Make the scale of the next step."""
        super().update(new_scale)
        self._follow(self.get_scale())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a saved scale, the same on all ranks."""
        super().load_state_dict(state_dict)
        self._follow(self.get_scale())
