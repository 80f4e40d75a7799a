"""The buffers that a step changes, such as running statistics: as before the step, if it fails."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType

import torch
from torch import Tensor

from zbcompile.runtime import torch_private

__all__ = ["KeptBuffers"]


class KeptBuffers:
    """Copies of the buffers that the stages of this process change, made before each step.

    As a context manager it surrounds the step, and puts the values back if that fails before `release`.

    Parameters
    ----------
    names
        Names of the buffers.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._copies: list[Tensor] = []
        self._changed: list[Tensor] = []

    def watch(self, names: Iterable[str]) -> None:
        """Keep more buffers, from the next step on."""
        self._names = tuple(dict.fromkeys((*self._names, *names)))

    def keep(self, state: Mapping[str, Tensor]) -> KeptBuffers:
        """Copy the present values; return self."""
        present = [state[name] for name in self._names]
        if not present:
            return self
        if [_form(t) for t in present] != [_form(t) for t in self._copies]:
            self._copies = [t.detach().clone() for t in present]
        else:
            torch_private.copy_all(self._copies, present)
        self._changed = present
        return self

    def release(self) -> None:
        """Let the changes stand."""
        self._changed = []

    def __enter__(self) -> KeptBuffers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._changed and error is not None:
            torch_private.copy_all(self._changed, self._copies)
        self.release()


def _form(tensor: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device
