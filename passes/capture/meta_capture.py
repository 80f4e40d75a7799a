"""Capture a model without weights as if it were on the device that it is planned for.

``model on the meta device --> fake tensors of a real device``. On the meta device torch picks the attention
that holds every score, and a plan made there asks for eight times the memory. So while such a model is
captured, every parameter, buffer and example is replaced by a fake tensor on a real device, and a call that
asks for the meta device gets that device. The model is put back afterwards; no memory is allocated.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from zbcompile.errors import CaptureError, UsageError
from zbcompile.passes import torch_private

__all__ = ["meta_as_fake", "planned_device"]

_META = torch.device("meta")


def planned_device(
    model: nn.Module, examples: Sequence[Tensor], device: torch.device | str | None = None
) -> torch.device | None:
    """Return the device to plan a model for if it or its examples are on the meta device, else None.

    Parameters
    ----------
    model, examples
        What is captured.
    device
        The answer, if given. By default the device of the examples that are not on meta, else the CPU.

    Raises
    ------
    CaptureError
        A module holds a meta tensor that is neither parameter nor buffer: its values are lost.
    UsageError
        The device has no backend in this torch, or is the meta device.
    """
    if not any(t.device.type == "meta" for t in (*model.parameters(), *model.buffers(), *examples)):
        return None
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and value.device.type == "meta":
                raise CaptureError(
                    f"{name} is a plain tensor on the meta device, so its values are lost",
                    where=f"{path}.{name}".lstrip("."),
                    fix=f"register_buffer({name!r}, ...) it, or build it on the CPU",
                )
    real = [t.device for t in examples if t.device.type != "meta"]
    chosen = torch.device(device) if device is not None else (real[0] if real else torch.device("cpu"))
    if chosen.type == "meta" or not _has_backend(chosen):
        raise UsageError(
            f"no stages can be traced for the device {chosen}",
            needed="the CPU, or an accelerator of this machine",
            fix='plan with device="cpu" and count costs with the target\'s entry in the device table',
        )
    return chosen


def _has_backend(device: torch.device) -> bool:
    if device.type == "cpu":
        return True
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return accelerator is not None and accelerator.type == device.type


@contextlib.contextmanager
def meta_as_fake(
    model: nn.Module, examples: Sequence[Tensor], device: torch.device | str | None = None
) -> Iterator[tuple[list[Tensor], contextlib.AbstractContextManager[object]]]:
    """Replace the tensors of a model on the meta device by fake ones on its `planned_device` while active.

    Nothing changes for a model without meta tensors. A tensor that is registered twice stays one tensor.

    Parameters
    ----------
    model, examples, device
        See `planned_device`.

    Yields
    ------
    list of Tensor, context manager
        The examples to capture with, and the mode to run the forward under.
    """
    chosen = planned_device(model, examples, device)
    if chosen is None:
        yield list(examples), contextlib.nullcontext()
        return
    fakes = _Fakes(chosen)
    held = [
        (table, name, value)
        for module in model.modules()
        for table in torch_private.tensor_tables(module)
        for name, value in table.items()
        if value is not None
    ]
    default = chosen if torch.get_default_device() == _META else contextlib.nullcontext()
    try:
        for table, name, value in held:
            table[name] = fakes.of(value)
        with default:
            yield [fakes.of(value) for value in examples], _MetaRedirected(chosen)
    finally:
        for table, name, value in held:
            table[name] = value


class _Fakes:
    """One fake per tensor."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.mode = device, torch_private.fake_mode()
        self.made: dict[int, Tensor] = {}

    def of(self, value: Tensor) -> Tensor:
        """Return the fake of a tensor."""
        if id(value) not in self.made:
            self.made[id(value)] = torch_private.as_fake(self.mode, value, value.requires_grad, self.device)
        return self.made[id(value)]


class _MetaRedirected(TorchFunctionMode):
    """Calls that ask for the meta device get ``device``."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        given = {name: self._redirected(value) for name, value in (kwargs or {}).items()}
        return func(*(self._redirected(value) for value in args), **given)

    def _redirected(self, value: object) -> object:
        if isinstance(value, torch.device) and value == _META:
            return self.device
        return str(self.device) if type(value) is str and value == "meta" else value
