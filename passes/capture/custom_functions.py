"""Custom ``autograd.Function``s: one opaque call in the captured graph, the class itself in the joint trace.

Export would look through a Function and differentiate its forward, which is wrong whenever the backward
says something else. So while capturing, every Function's ``forward`` is replaced by one call of
``zbcompile::function`` that remembers class and arguments; `FunctionCall` applies the class again when
the stage is differentiated, with its own backward.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zbcompile.errors import CaptureError
from zbcompile.passes.capture.nested_values import Spec, flatten, unflatten

__all__ = ["FunctionCall", "intercepted", "is_function_call"]

_TRANSPARENT = ("torch._", "torch.autograd.", "torch.nn.attention.")
"""Modules of torch whose Functions export treats correctly or that never run inside a model."""

_ACTIVE: contextvars.ContextVar[dict[int, FunctionCall] | None] = contextvars.ContextVar(
    "functions", default=None
)

_LIBRARY = torch.library.Library("zbcompile", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define("function(int key, Tensor[] tensors) -> Tensor[]")  # type: ignore[no-untyped-call]


@dataclass
class FunctionCall:
    """One recorded ``cls.apply(*args)``; calling it with the flat tensors applies the class again."""

    cls: type[torch.autograd.Function]
    forward: Any
    arguments: Spec
    result: Spec | None = field(default=None)

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The flat tensor results of ``cls.apply`` on ``tensors`` and the recorded other arguments."""
        apply: Any = self.cls.apply
        return flatten(apply(*unflatten(self.arguments, tensors)))[0]

    def infer(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Fresh tensors shaped like the results, from the class's own forward on fake ``tensors``."""
        context = _Context(self.cls, len(tensors))
        given = unflatten(self.arguments, tensors)
        own = self.cls.setup_context is not torch.autograd.Function.setup_context
        with torch.no_grad():
            value = self.forward(*given) if own else self.forward(context, *given)
        results, self.result = flatten(value)
        return [torch.empty_like(result) for result in results]


class _Context:
    """Takes what a forward does to ``ctx`` while only shapes are wanted."""

    def __init__(self, cls: type, count: int) -> None:
        self._cls = cls
        self.needs_input_grad = (True,) * count

    def save_for_backward(self, *tensors: Any) -> None: ...

    def save_for_forward(self, *tensors: Any) -> None: ...

    def mark_non_differentiable(self, *tensors: Any) -> None: ...

    def set_materialize_grads(self, value: bool) -> None: ...

    def mark_dirty(self, *tensors: Any) -> None:
        raise CaptureError(
            f"the autograd.Function {self._cls.__qualname__} changes its input in place",
            where=self._cls.__module__,
            fix="return a new tensor from its forward",
        )


@torch.library.register_fake("zbcompile::function", lib=_LIBRARY)  # type: ignore[untyped-decorator]
def _infer(key: int, tensors: list[Tensor]) -> list[Tensor]:
    active = _ACTIVE.get()
    if active is None:
        raise CaptureError("zbcompile::function was called outside a capture")
    return active[key].infer(tensors)


def is_function_call(target: Any) -> bool:
    """True for the opaque call that stands for a custom Function."""
    return target is torch.ops.zbcompile.function.default


@contextlib.contextmanager
def intercepted() -> Iterator[dict[int, FunctionCall]]:
    """While active, record every custom Function; yields key -> call. All classes are restored after."""
    calls: dict[int, FunctionCall] = {}
    token = _ACTIVE.set(calls)
    replaced: list[tuple[type, Any]] = []
    try:
        for cls in _all_functions(torch.autograd.Function):
            own = cls.__dict__.get("forward")
            if own is not None and not cls.__module__.startswith(_TRANSPARENT):
                replaced.append((cls, own))
                inline = cls.__module__ == "torch.utils.checkpoint"
                patched = _run_inline if inline else _recorder(cls, getattr(cls, "forward"), calls)  # noqa: B009
                cls.forward = staticmethod(patched)
        yield calls
    finally:
        for cls, own in replaced:
            cls.forward = own  # type: ignore[attr-defined]
        _ACTIVE.reset(token)


def _all_functions(cls: Any) -> list[Any]:
    found: list[Any] = []
    for child in cls.__subclasses__():
        found += [child, *_all_functions(child)]
    return list(dict.fromkeys(found))


def _run_inline(ctx: Any, run_function: Any, preserve_rng_state: Any, *args: Any) -> Any:
    """Reentrant checkpointing: the block itself. What to recompute is decided by the save set."""
    ctx.mark_non_differentiable = lambda *_: None
    return run_function(*args)


def _recorder(cls: Any, forward: Any, calls: dict[int, FunctionCall]) -> Any:
    """A forward that makes one opaque call. A subclass that inherits ``forward`` is recorded as itself."""
    takes_context = cls.setup_context is torch.autograd.Function.setup_context

    def record(*args: Any) -> Any:
        owner = cls
        if takes_context:
            context, args = args[0], args[1:]
            owner = getattr(type(context), "_forward_cls", cls)
        tensors, spec = flatten(args)
        call = FunctionCall(owner, forward, spec)
        key = len(calls)
        calls[key] = call
        results = torch.ops.zbcompile.function(key, tensors)
        if call.result is None:
            name = owner.__qualname__
            raise CaptureError(f"no shapes could be inferred for {name}", where=owner.__module__)
        return unflatten(call.result, results)

    return record
