"""Buffers of a model too big to build: the constructor runs with parameters on the meta device.

Rotary tables, masks and running statistics are computed when the model is built. Building it again with its
parameters on the meta device gives them their values for the memory of the buffers alone. A buffer that
depends on a parameter's values or on random numbers cannot be made that way and is refused by name: the build
runs twice with different random states, and both results must agree to the bit.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from zbcompile.errors import UsageError

__all__ = ["real_buffers"]

_LARGE = 1 << 16
"""An uninitialised tensor of at least so many elements is taken to be a parameter's and gets no memory."""


def real_buffers(build: Callable[[], nn.Module], names: Sequence[str]) -> dict[str, Tensor]:
    """Return the values of the buffers ``names`` of the model that ``build`` makes.

    Raises
    ------
    UsageError
        The built model lacks a buffer, computes it from parameters, or makes another one in the second build.
    """
    first, second = _build(build, 1), _build(build, 2)
    values: dict[str, Tensor] = {}
    for name in names:
        value, again = first.get(name), second.get(name)
        if value is None or again is None:
            raise UsageError(f"the model that build= makes has no buffer {name!r}", where=name)
        if value.is_meta:
            raise UsageError(
                f"buffer {name!r} is computed from parameters, or build= makes it on the meta device",
                where=name,
                fix="give its value in state=, or build without torch.device('meta')",
            )
        if not _same(value, again):
            raise UsageError(
                f"buffer {name!r} is drawn from random numbers, so every rank would get another",
                where=name,
                fix="give its value in state=",
            )
        values[name] = value
    return values


def _build(build: Callable[[], nn.Module], seed: int) -> dict[str, Tensor]:
    """Return all buffers of one build."""
    with _random_states(seed), _meta_parameters(), _LazyEmpty(), torch.no_grad():
        try:
            model = build()
        except (NotImplementedError, RuntimeError) as error:
            raise UsageError(
                f"build= reads the values of parameters: {error}",
                fix="give the buffers' values in state=",
            ) from error
    return dict(model.named_buffers(remove_duplicate=False))


def _same(left: Tensor, right: Tensor) -> bool:
    if left.shape != right.shape or left.dtype != right.dtype or right.is_meta:
        return False
    return bool(torch.equal(_raw(left), _raw(right)))


def _raw(value: Tensor) -> Tensor:
    """Return the bytes of a tensor."""
    return value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


class _LazyEmpty(TorchFunctionMode):
    """Put large ``torch.empty`` tensors on the meta device: only parameters start that way."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Collection[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        given = dict(kwargs or {})
        if func is torch.empty:
            shape = given.get("size", args[0] if len(args) == 1 and not isinstance(args[0], int) else args)
            if torch.Size(shape).numel() >= _LARGE:
                given["device"] = "meta"
        return func(*args, **given)


@contextlib.contextmanager
def _meta_parameters() -> Iterator[None]:
    """Move every parameter to the meta device when it is registered."""

    def to_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:
            return None
        return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)

    handle = register_module_parameter_registration_hook(to_meta)  # type: ignore[arg-type]
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def _random_states(seed: int) -> Iterator[None]:
    """Seed all random generators; restore the caller's states afterwards."""
    numpy = sys.modules.get("numpy")
    python, array = random.getstate(), numpy.random.get_state() if numpy else None
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            random.seed(seed)
            if numpy:
                numpy.random.seed(seed)
            yield
    finally:
        random.setstate(python)
        if numpy:
            numpy.random.set_state(array)
