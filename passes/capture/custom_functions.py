"""Capture a custom ``autograd.Function`` as one opaque call, and apply its class in the joint trace.

``F.apply(x, 2.0) --> zbcompile::function(key, [x])``. Export would look through a Function and differentiate
its forward, which is wrong whenever the backward says something else. So while a model is captured, every
Function's ``forward`` is replaced by one call of ``zbcompile::function`` that records class and arguments;
`FunctionCall` applies the class again when the stage is differentiated, with its own backward.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch.fx.node import Target
from torch.overrides import TorchFunctionMode

from zbcompile.errors import CaptureError
from zbcompile.passes import torch_private
from zbcompile.passes.capture.nested_values import Spec, flatten, unflatten
from zbcompile.passes.provenance import caller_source

__all__ = ["FunctionCall", "functions_guarded", "intercepted", "is_function_call"]

_Function = type[torch.autograd.Function]

_TRANSPARENT = ("torch._", "torch.autograd.", "torch.nn.attention.")
"""Modules of torch whose Functions export treats correctly or that never run inside a model."""

_ACTIVE: contextvars.ContextVar[dict[int, FunctionCall] | None] = contextvars.ContextVar(
    "functions", default=None
)

_STATE: contextvars.ContextVar[Mapping[int, str] | None] = contextvars.ContextVar("state", default=None)
"""Id of a parameter or buffer -> its name, while a stage is traced."""

_LIBRARY = torch.library.Library("zbcompile", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define("function(int key, Tensor[] tensors) -> Tensor[]")  # type: ignore[no-untyped-call]


@dataclass
class FunctionCall:
    """One recorded ``cls.apply(*args)``.

    Attributes
    ----------
    cls
        The Function.
    forward
        Its own forward, which is replaced while the model is captured.
    arguments
        How the tensors sit among the arguments.
    result
        How the results are nested; None until shapes are inferred.
    """

    cls: _Function
    forward: Callable[..., object]
    arguments: Spec
    result: Spec | None = field(default=None)

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Apply the class to ``tensors`` and the recorded other arguments; return the flat results."""
        apply: Callable[..., object] = self.cls.apply
        with _FunctionGuard(self.cls, _STATE.get() or {}):
            return flatten(apply(*unflatten(self.arguments, tensors)))[0]

    def infer(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return fresh tensors shaped like the results, from the class's own forward on fake tensors."""
        context = _ShapeContext(self.cls, len(tensors))
        given = unflatten(self.arguments, tensors)
        try:
            with torch.no_grad():
                value = self.forward(context, *given) if _takes_context(self.cls) else self.forward(*given)
        except RuntimeError as error:
            if "does not require grad" not in str(error):
                raise
            raise CaptureError(
                f"the autograd.Function {self.cls.__qualname__} computes a gradient in its forward",
                where=self.cls.__module__,
                fix="compute it with tensor operations there, or with autograd.grad in its backward",
            ) from error
        results, self.result = flatten(value)
        return [torch.empty_like(result) for result in results]


def _takes_context(cls: _Function) -> bool:
    """Return whether a forward gets ``ctx``: the class has no ``setup_context`` of its own."""
    return cls.setup_context is torch.autograd.Function.setup_context


class _FunctionGuard(TorchFunctionMode):
    """Refuses a parameter or buffer of the model that a Function reaches past its arguments."""

    def __init__(self, cls: _Function, state: Mapping[int, str]) -> None:
        super().__init__()
        self._cls, self._state = cls, state

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        given = dict(kwargs or {})
        for value in (*args, *given.values()):
            for item in value if isinstance(value, tuple | list) else (value,):
                if type(item) in (Tensor, nn.Parameter) and (id(item) in self._state or _is_trained(item)):
                    name = self._state.get(id(item), "a tensor that requires a gradient")
                    raise CaptureError(
                        f"the autograd.Function {self._cls.__qualname__} reaches {name} past its arguments: "
                        "its gradient would be lost, and a graph would keep its first value",
                        where=caller_source(),
                        fix="hand every parameter to apply(), and return its gradient from the backward",
                    )
        return func(*args, **given)


def _is_trained(value: object) -> bool:
    return isinstance(value, nn.Parameter) and value.requires_grad


@contextlib.contextmanager
def functions_guarded(calls: Mapping[int, FunctionCall], state: Mapping[str, Tensor]) -> Iterator[None]:
    """Refuse, in the forward and backward of recorded Functions, what they reach past their arguments.

    Parameters
    ----------
    calls
        What `intercepted` recorded.
    state
        Parameters and buffers of the model, by name.
    """
    names = {id(tensor): repr(name) for name, tensor in state.items()}
    token = _STATE.set(names)
    classes = list(dict.fromkeys(call.cls for call in calls.values()))
    guards = [staticmethod(_guarded(cls, cls.backward, names)) for cls in classes]
    replaced = [(cls, vars(cls).get("backward")) for cls in classes]
    try:
        for cls, guard in zip(classes, guards, strict=True):
            setattr(cls, "backward", guard)  # noqa: B010
        yield
    finally:
        for cls, own in replaced:
            if own is None:
                delattr(cls, "backward")
            else:
                setattr(cls, "backward", own)  # noqa: B010
        _STATE.reset(token)


def _guarded(
    cls: _Function, backward: Callable[..., object], state: Mapping[int, str]
) -> Callable[..., object]:
    def guarded(*args: object) -> object:
        with _FunctionGuard(cls, state):
            return backward(*args)

    return guarded


class _ShapeContext:
    """Takes what a forward does to ``ctx`` while only shapes are wanted."""

    def __init__(self, cls: _Function, count: int) -> None:
        self._cls = cls
        self.needs_input_grad = (True,) * count

    def save_for_backward(self, *tensors: object) -> None: ...

    def save_for_forward(self, *tensors: object) -> None: ...

    def mark_non_differentiable(self, *tensors: object) -> None: ...

    def set_materialize_grads(self, value: bool) -> None: ...

    def mark_dirty(self, *tensors: object) -> None:
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


def is_function_call(target: Target) -> bool:
    """Return whether a call's target is the opaque operator that stands for a custom Function."""
    return target is torch.ops.zbcompile.function.default


@contextlib.contextmanager
def intercepted() -> Iterator[dict[int, FunctionCall]]:
    """Record every call of a custom Function while active; the classes are restored afterwards.

    Classes that the forward itself defines are among them.

    Yields
    ------
    dict
        Key -> recorded call.
    """
    calls: dict[int, FunctionCall] = {}
    token = _ACTIVE.set(calls)
    replaced: list[tuple[_Function, object]] = []

    def record(cls: _Function) -> None:
        own = vars(cls).get("forward")
        if own is not None and not cls.__module__.startswith(_TRANSPARENT):
            replaced.append((cls, own))
            inline = cls.__module__ == "torch.utils.checkpoint"
            recorder = _run_inline if inline else _recorder(cls, cls.forward, calls)
            setattr(cls, "forward", staticmethod(recorder))  # noqa: B010

    try:
        for cls in _all_functions(torch.autograd.Function):
            record(cls)
        setattr(torch.autograd.Function, "__init_subclass__", classmethod(record))  # noqa: B010
        yield calls
    finally:
        delattr(torch.autograd.Function, "__init_subclass__")
        for cls, own in replaced:
            setattr(cls, "forward", own)  # noqa: B010
        _ACTIVE.reset(token)


def _all_functions(cls: _Function) -> list[_Function]:
    found: list[_Function] = []
    for child in cls.__subclasses__():
        found += [child, *_all_functions(child)]
    return list(dict.fromkeys(found))


class _Context(Protocol):
    """The ``ctx`` of a forward, as far as it is used here."""

    mark_non_differentiable: Callable[..., None]


def _run_inline(
    ctx: _Context, run_function: Callable[..., object], preserve_rng_state: object, *args: object
) -> object:
    """Run the block of a reentrant checkpoint itself; the save set decides what is recomputed."""
    ctx.mark_non_differentiable = lambda *_: None
    with torch_private.checkpoint_marked():
        return run_function(*args)


def _recorder(
    cls: _Function, forward: Callable[..., object], calls: dict[int, FunctionCall]
) -> Callable[..., object]:
    """Return a forward that makes one opaque call. A subclass that inherits it is recorded as itself."""
    takes_context = _takes_context(cls)

    def record(*args: object) -> object:
        if cls.__module__.startswith("torch.distributed.nn."):
            raise CaptureError(
                f"the forward calls a collective of torch.distributed.nn ({cls.__name__})",
                where=caller_source(),
                fix="sum after the step: the ranks of a pipeline do not run one forward together",
            )
        owner = cls
        if takes_context:
            context, args = args[0], args[1:]
            owner = torch_private.function_of_context(context, cls)
        tensors, spec = flatten(args)
        call = FunctionCall(owner, forward, spec)
        key = len(calls)
        calls[key] = call
        results = cast("list[Tensor]", torch.ops.zbcompile.function(key, tensors))
        if call.result is None:
            name = owner.__qualname__
            raise CaptureError(f"no shapes could be inferred for {name}", where=owner.__module__)
        return unflatten(call.result, results)

    return record
