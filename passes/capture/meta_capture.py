"""Stand-ins: a model without weights is captured on fake tensors of the device it is planned for.

On the meta device torch picks the attention that holds every score, and a plan made there asks for eight
times the memory. So while a model whose parameters are on the meta device is captured, every parameter,
buffer and example is replaced by a fake tensor on a real device, and a call that asks for the meta device
gets that device instead. The model is put back afterwards; no memory is allocated.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from zbcompile.errors import CaptureError, UsageError
from zbcompile.passes import torch_private

__all__ = ["PlannedDevice", "planned_device", "on_planned_device"]

_META = torch.device("meta")


def planned_device(
    model: nn.Module, examples: Sequence[Tensor], device: torch.device | str | None = None
) -> torch.device | None:
    """The device to plan for if ``model`` has tensors on the meta device, else None.

    ``device``, if given; else the device of the examples that are not on meta; else the CPU.

    Raises
    ------
    CaptureError : a module holds a meta tensor that is neither parameter nor buffer: its values are lost.
    UsageError : the device has no backend in this torch, or is the meta device.
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
    return torch.accelerator.is_available() and torch.accelerator.current_accelerator().type == device.type  # type: ignore[union-attr]


@contextlib.contextmanager
def on_planned_device(
    model: nn.Module, examples: Sequence[Tensor], device: torch.device | str | None = None
) -> Iterator[tuple[list[Tensor], contextlib.AbstractContextManager[object]]]:
    """Examples to capture with and the mode to run the forward under.

    Nothing changes for a model without meta tensors. Otherwise, while active, all tensors of ``model``
    are fakes on the `planned_device`; a tensor that is registered twice stays one tensor.
    """
    chosen = planned_device(model, examples, device)
    if chosen is None:
        yield list(examples), contextlib.nullcontext()
        return
    fakes = _Fakes(chosen)
    places: list[tuple[Any, str, Tensor]] = [
        (table, name, value)
        for module in model.modules()
        for table in torch_private.tensor_tables(module)
        for name, value in table.items()
        if value is not None
    ]
    default = chosen if torch.get_default_device() == _META else contextlib.nullcontext()
    try:
        for table, name, value in places:
            table[name] = fakes.of(value)
        with default:
            yield [fakes.of(value) for value in examples], PlannedDevice(chosen)
    finally:
        for table, name, value in places:
            table[name] = value


class _Fakes:
    """One fake per tensor."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.mode = device, torch_private.fake_mode()
        self.made: dict[int, Tensor] = {}

    def of(self, value: Tensor) -> Tensor:
        if id(value) not in self.made:
            self.made[id(value)] = torch_private.as_fake(self.mode, value, value.requires_grad, self.device)
        return self.made[id(value)]


class PlannedDevice(TorchFunctionMode):
    """Calls that ask for the meta device get ``device``."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = {name: self._real(value) for name, value in (kwargs or {}).items()}
        return func(*(self._real(value) for value in args), **given)

    def _real(self, value: Any) -> Any:
        if isinstance(value, torch.device) and value == _META:
            return self.device
        return str(self.device) if type(value) is str and value == "meta" else value
