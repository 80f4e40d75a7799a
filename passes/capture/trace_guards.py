"""Guard the trace of a forward against calls that a graph cannot hold.

Every torch function that the forward calls passes through `TraceGuard`. It replaces a parameter that the code
holds outside of the modules (in a list, a closure) by the traced tensor, turns ``.data`` into ``.detach()``,
refuses with its source line what would lose a gradient without an error, and remembers the call that failed.
`state_guards` does the same for the state of the modules.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name

from zbcompile.errors import CaptureError
from zbcompile.passes import torch_private
from zbcompile.passes.capture.branches import FixedBranches
from zbcompile.passes.capture.ctc_loss import ctc_loss
from zbcompile.passes.capture.data_checks import Check, branch_at, check_at, demand_at, keep_check
from zbcompile.passes.capture.draws import Draws
from zbcompile.passes.capture.known_values import KnownValues
from zbcompile.passes.provenance import caller_source

__all__ = ["TraceGuard"]

_Function = Callable[..., object]

_GET_DATA, _SET_DATA = torch.Tensor.data.__get__, torch.Tensor.data.__set__  # type: ignore[attr-defined]
_ATTENTION = (F.scaled_dot_product_attention, F.multi_head_attention_forward)
_READS = (torch.Tensor.item, torch.Tensor.tolist)
_QUESTIONS: dict[_Function, Callable[..., Tensor]] = {
    torch.equal: lambda x, y: (x == y).all(),
    torch.allclose: lambda *args, **kwargs: torch.isclose(*args, **kwargs).all(),
    torch.is_nonzero: lambda x: x != 0,
}
"""Functions that answer with a Python bool -> the same answer as a tensor, for equal shapes."""
_KERNELS: tuple[Callable[[], bool], ...] = (
    torch.backends.cuda.flash_sdp_enabled,
    torch.backends.cuda.mem_efficient_sdp_enabled,
    torch.backends.cuda.math_sdp_enabled,
    torch.backends.cuda.cudnn_sdp_enabled,
)


class TraceGuard(TorchFunctionMode):
    """A mode that is active while the forward is traced.

    Parameters
    ----------
    traced
        Id of a parameter or buffer of the model -> the tensor that the trace has in its place.
    model
        The frame that calls the model.
    pinned
        Arguments that have the same value in every step.
    buffers
        Name of a buffer of whole numbers -> its tensor in the trace, and its value.
    branches
        What the example answers to questions that make a branch; None: such a question is refused.

    Attributes
    ----------
    failed
        Name of the torch function that raised first; empty until one does.
    read
        Name of the last torch function that gave Python a number.
    transform
        Source line where a torch.func transform was seen first.
    suspect
        Source line where a value was made to require a gradient first.
    """

    def __init__(
        self,
        traced: Mapping[int, Tensor],
        model: FrameType | None = None,
        pinned: Sequence[Tensor] = (),
        buffers: Mapping[str, tuple[Tensor, Tensor]] | None = None,
        branches: FixedBranches | None = None,
    ) -> None:
        super().__init__()
        self.branches = branches
        self.failed = self.read = self.transform = self.suspect = ""
        self._traced, self._model = traced, model
        self._draws, self._values = Draws(), KnownValues(pinned, buffers)
        self._depth = torch_private.transform_depth()
        self._kernels = _kernels()

    def __torch_function__(
        self,
        func: _Function,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        given = {name: self._checked(value) for name, value in (kwargs or {}).items()}
        taken = tuple(self._checked(value) for value in args)
        if not self.transform and torch_private.transform_depth() > self._depth:
            self.transform = caller_source()
        if func in _ATTENTION and _kernels() != self._kernels:
            return _chosen_attention(func, taken, given)
        if func == _GET_DATA:
            return cast("Tensor", taken[0]).detach()
        if func == _SET_DATA:
            raise CaptureError(
                "cannot capture an assignment to .data",
                where=caller_source(),
                fix="change a buffer with copy_(), or a parameter after the step",
            )
        if func in _READS:
            self.read = _name(func)
        if func is torch.Tensor.requires_grad_ and not self.suspect:
            self.suspect = caller_source()
        if func in (F.ctc_loss, torch.ctc_loss):
            return ctc_loss(*taken, **given)  # type: ignore[arg-type]
        if func is torch_private.assert_later and self.demand(cast("Tensor", taken[0]), sys._getframe(1)):
            return None
        if func in _QUESTIONS:
            frame = sys._getframe(1)
            side = None if self.branches is None else self.branches.next(frame)
            if (check := self._check(frame, side)) is not None:
                keep_check(check, _QUESTIONS[func](*taken, **given))
                return check.needed
        if func is torch.Tensor.item and cast("Tensor", taken[0]).dtype is torch.bool:
            found = self.truth(cast("Tensor", taken[0]), sys._getframe(1))
            if found is not None:
                return found
        try:
            result = self._values.call(func, taken, given, func)
        except Exception:
            self.failed = self.failed or _name(func)
            raise
        self._draws.note(func, taken, result)
        return result

    def truth(self, value: Tensor | torch.SymBool, frame: FrameType) -> bool | None:
        """Return whether a value is true where nobody need look: it is known, or kept as a check.

        Raises
        ------
        CaptureError
            It depends on a random draw.
        """
        side = None if self.branches is None else self.branches.next(frame)
        if isinstance(value, Tensor):
            if value.numel() != 1 or torch_private.is_wrapped(value):
                return None
            real = self._values.of(value)
            if real is not None:
                self._values.handed_out([value])
                return torch_private.truth_of(real)
            known = self._draws.truth(value)
            if known is not None:
                return known
        elif not torch_private.depends_on_data(value):
            return None
        check = self._check(frame, side)
        if check is None:
            return None
        keep_check(check, value)
        return check.needed

    @property
    def read_buffers(self) -> frozenset[str]:
        """Names of the buffers whose values Python code has read."""
        return frozenset(self._values.read)

    def demand(self, value: Tensor | torch.SymBool, frame: FrameType) -> bool:
        """Return whether the demand that all of a value is true is kept as a check."""
        if isinstance(value, torch.SymBool) and not torch_private.depends_on_data(value):
            return False
        check = None if self._model is None else demand_at(frame, self._model)
        if check is not None:
            keep_check(check, (value != 0).all() if isinstance(value, Tensor) else value)
        return check is not None

    def _check(self, frame: FrameType, side: bool | None = None) -> Check | None:
        """Return the check that code makes with a truth, or that it takes the side of the example."""
        if self._model is None:
            return None
        found = check_at(frame, self._model)
        return branch_at(frame, self._model, side) if found is None and side is not None else found

    def _checked(self, value: object) -> object:
        """Return an argument with traced tensors in the place of the model's own; refuse what is neither."""
        if isinstance(value, tuple | list):
            if not any(isinstance(item, Tensor | tuple | list) for item in value):
                return value
            items = [self._checked(item) for item in value]
            same = all(a is b for a, b in zip(items, value, strict=True))
            return value if same or type(value) not in (tuple, list) else type(value)(items)
        if type(value) is Tensor or type(value) is nn.Parameter:
            found = self._traced.get(id(value))
            if found is None and value.requires_grad and not torch_private.is_wrapped(value):
                raise CaptureError(
                    f"a tensor {list(value.shape)} that requires a gradient is no parameter of the model: "
                    "its gradient would be lost",
                    where=caller_source(),
                    fix="register it as nn.Parameter (lists of modules and parameters as nn.ModuleList and "
                    "nn.ParameterList), or pass a loss that is a module as loss_fn itself",
                )
            return value if found is None else found
        if isinstance(value, torch.Generator):
            raise CaptureError(
                "cannot capture a random draw from a torch.Generator",
                where=caller_source(),
                fix="draw without generator=: the pipeline gives every microbatch a random stream of its own",
            )
        return value


def _chosen_attention(func: _Function, args: tuple[object, ...], given: Mapping[str, object]) -> object:
    """Return attention inside a choice of kernels that the graph would not remember, or refuse it."""
    flash, _, math, _ = _kernels()
    query = args[0] if args else given.get("query")
    on_cpu = isinstance(query, Tensor) and query.device.type == "cpu"
    alone = func is F.scaled_dot_product_attention
    if alone and on_cpu and (flash or math):  # flash is the first choice there anyway
        kernel: _Function = func if flash else torch_private.math_attention
        return kernel(*args, **given)
    raise CaptureError(
        "cannot capture a choice of attention kernels inside the model (sdpa_kernel)",
        where=caller_source(),
        fix="put sdpa_kernel(...) around the calls of the pipeline instead",
    )


def _kernels() -> tuple[bool, ...]:
    """Return which attention kernels are allowed now: flash, memory-efficient, math, cuDNN."""
    return tuple(allowed() for allowed in _KERNELS)


def _name(func: _Function) -> str:
    name = resolve_name(func) or getattr(func, "__qualname__", "") or getattr(func, "__name__", "")
    return str(name).removesuffix(".__get__")
