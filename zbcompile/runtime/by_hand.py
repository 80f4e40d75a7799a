"""A stage called by hand: what its phases hand on, and what may be given to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from zbcompile.errors import ShapeError, UsageError
from zbcompile.runtime.wiring import PortLike, Saved

__all__ = ["SavedForBackward", "checked_gradients", "checked_inputs", "refuse_parts"]


class SavedForBackward:
    """What one phase of a stage keeps for the next, for one microbatch. It can be used once.

    `Stage.run_forward` makes one for `Stage.run_backward_input` or `Stage.run_full_backward`, and
    `Stage.run_backward_input` makes one for `Stage.run_backward_weight`. Its memory is free again as soon as
    it is used, or dropped.

    Attributes
    ----------
    stage
        Number of the stage that made it.
    after
        The phase that made it: ``F`` or ``B``.
    """

    __slots__ = ("_values", "after", "stage")

    def __init__(self, stage: int, after: str, values: Saved | None) -> None:
        self.stage, self.after, self._values = stage, after, values

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors that are held, each storage once; 0 when it was used."""
        tensors = [value for value in self._values or () if isinstance(value, Tensor)]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        return sum(storages.values())

    def take(self, stage: int, after: str, phase: str) -> Saved:
        """Return the values for a phase of a stage, and hold them no longer.

        Raises
        ------
        UsageError
            They are another stage's or for another phase, or were used already.
        """
        if (self.stage, self.after) != (stage, after):
            raise UsageError(
                f"{phase} was given what another phase or another stage saved",
                where=f"stage {stage}",
                needed=f"what {after} of stage {stage} returned",
                given=f"what {self.after} of stage {self.stage} returned",
            )
        values, self._values = self._values, None
        if values is None:
            raise UsageError(
                f"what {after} saved was used already",
                where=f"stage {stage}, {phase}",
                fix=f"run {after} again: its values are freed at their only use",
            )
        return values

    def __repr__(self) -> str:
        held = "used" if self._values is None else f"{self.num_bytes} bytes"
        return f"<saved by {self.after} of stage {self.stage}: {held}>"


def refuse_parts(stage: int, state: Mapping[str, Tensor]) -> None:
    """Refuse a stage of whose weights this process has parts alone.

    Raises
    ------
    UsageError
        Names the first such parameter.
    """
    for name, tensor in state.items():
        if isinstance(tensor, DTensor):
            raise UsageError(
                f"stage {stage} cannot be called by hand: its weights are sharded over replicas",
                where=name,
                fix="call pipeline.step() or pipeline.eval(), or compile without dp_shard",
            )


def checked_inputs(stage: int, ports: Sequence[PortLike], given: Sequence[Tensor]) -> list[Tensor]:
    """Return the inputs of a stage as its graphs were traced with: each with the strides of its port.

    Raises
    ------
    UsageError, ShapeError
        Another number of tensors, or a tensor of another shape or dtype.
    """
    _same_number("inputs", stage, ports, given)
    inputs = []
    for position, (port, value) in enumerate(zip(ports, given, strict=True)):
        _same_form(f"input {position} ({port.name})", stage, port, value)
        inputs.append(_laid_out(value.detach(), port.shape, port.stride))
    return inputs


def checked_gradients(
    stage: int, ports: Sequence[PortLike], given: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Return one gradient per output: those given, 1 for a loss without one, None for zeros.

    Nothing at all may be given where the loss is the only output that has a gradient.

    Raises
    ------
    UsageError, ShapeError
        Another number of gradients, or one of another shape or dtype than its output.
    """
    if not given and all(port.is_loss or not port.has_gradient for port in ports):
        given = (None,) * len(ports)
    _same_number("gradients of outputs", stage, ports, given)
    grads: list[Tensor | None] = []
    for position, (port, grad) in enumerate(zip(ports, given, strict=True)):
        if grad is not None:
            _same_form(f"gradient of output {position} ({port.name})", stage, port, grad)
            grads.append(grad.detach())
        elif port.is_loss and port.has_gradient:
            grads.append(torch.ones(port.shape, dtype=port.dtype, device=port.device))
        else:
            grads.append(None)
    return grads


def _same_number(what: str, stage: int, ports: Sequence[PortLike], given: Sequence[object]) -> None:
    if len(ports) != len(given):
        raise UsageError(
            f"a stage was given another number of {what} than it has",
            where=f"stage {stage}",
            needed=f"{len(ports)}: {', '.join(port.name for port in ports) or 'none'}",
            given=len(given),
        )


def _same_form(what: str, stage: int, port: PortLike, value: Tensor) -> None:
    """Compare shape and dtype; a size that depends on data is not compared."""
    if not isinstance(value, Tensor):
        raise UsageError(f"{what} is no tensor", where=f"stage {stage}", given=type(value).__name__)
    known = [
        (mine, theirs) for mine, theirs in zip(value.shape, port.shape, strict=False) if type(theirs) is int
    ]
    if value.dim() == len(port.shape) and value.dtype == port.dtype and all(a == b for a, b in known):
        return
    raise ShapeError(
        f"{what} differs from what the stage was compiled for",
        where=f"stage {stage}",
        needed=f"{list(port.shape)} {port.dtype}",
        given=f"{list(value.shape)} {value.dtype}",
    )


def _laid_out(value: Tensor, shape: Sequence[int], stride: Sequence[int]) -> Tensor:
    """Return a tensor with these strides: itself where it has them, else a copy."""
    if not all(type(n) is int for n in (*shape, *stride)) or 0 in stride:
        return value
    sizes = zip(shape, value.stride(), stride, strict=True)
    if all(size <= 1 or mine == traced for size, mine, traced in sizes):
        return value
    return torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device).copy_(value)
