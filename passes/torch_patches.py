"""Patch torch while a model is traced: one table of what is replaced, when and why, and what puts it back.

`PATCHES` is the table, `patched` the only code that applies it. Afterwards, also after an error or an
interrupt, every attribute is the object that it was before.
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import signal
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal, NoReturn, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import checkpoint

from zbcompile.errors import CaptureError
from zbcompile.passes.kernel_strides import strides_of
from zbcompile.passes.provenance import caller_source
from zbcompile.signals import deferred_signals

__all__ = [
    "CHECKPOINT",
    "PATCHES",
    "Answers",
    "Patch",
    "When",
    "applied",
    "checkpoint_marked",
    "compiled_code_as_eager",
    "joint_trace_patched",
    "patched",
    "quiet",
]

When = Literal["eager path", "compiled code", "forward", "fake tensors", "joint trace"]
"""While capture takes the path of eager; while the model's own forward runs; while it is captured; while fake
tensors are traced at all; while forward and backward of a stage are."""


@dataclass(frozen=True, slots=True)
class Answers:
    """What the tracer answers when patched code asks.

    Attributes
    ----------
    truth
        (value, frame that asks) -> whether it is true; None: torch looks.
    demand
        (value, frame that demands it) -> whether it is settled that all of it is true. Torch looks at a
        tensor that is not settled, and takes any number as a hint about sizes.
    ran
        Called with the name of a module or function that ``torch.compile`` made, as it runs.
    """

    truth: Callable[[Tensor | torch.SymBool, FrameType], bool | None] = lambda value, frame: None
    demand: Callable[[Tensor | torch.SymBool, FrameType], bool] = lambda value, frame: False
    ran: Callable[[str], None] = lambda name: None


@dataclass(frozen=True, slots=True)
class Patch:
    """One attribute that is another object for a while.

    Attributes
    ----------
    when
        For what it is replaced.
    where
        Returns the module, class or operator that has the attribute; None: there is nothing to patch. Private
        modules are imported when it is called.
    name
        The attribute.
    replacement
        (what is there, answers) -> what is there for a while; the same object: nothing is replaced.
    why
        What torch does wrong for a trace.
    after
        Called with the owner when the attribute has changed, there and back.
    """

    when: When
    where: Callable[[], object]
    name: str
    replacement: Callable[[Any, Answers], object]
    why: str
    after: Callable[[Any], None] = lambda owner: None


_ABSENT = object()


@contextlib.contextmanager
def applied(patches: Iterable[Patch], answers: Answers | None = None) -> Iterator[None]:
    """Apply patches, and put everything back as it was, in reverse order.

    An interrupt waits until all are applied, and until all are put back.
    """
    given: list[tuple[Patch, object, object]] = []
    try:
        with deferred_signals(signal.SIGINT):
            for patch in patches:
                owner = patch.where()
                if owner is None:
                    continue
                own = vars(owner).get(patch.name, _ABSENT)
                present = getattr(owner, patch.name)
                value = patch.replacement(present, answers or Answers())
                if value is not present:
                    given.append((patch, owner, own))
                    setattr(owner, patch.name, value)
                    patch.after(owner)
        yield
    finally:
        with deferred_signals(signal.SIGINT):
            for patch, owner, own in reversed(given):
                if own is _ABSENT:
                    delattr(owner, patch.name)
                else:
                    setattr(owner, patch.name, own)
                patch.after(owner)


def patched(*when: When, answers: Answers | None = None) -> contextlib.AbstractContextManager[None]:
    """Return a context in which the patches of the table for ``when`` are applied."""
    return applied([patch for patch in PATCHES if patch.when in when], answers)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep torch's reports of a failed trace off the terminal: the error says what is needed."""
    logger = logging.getLogger("torch")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    silent = io.StringIO()
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(silent),
        contextlib.redirect_stderr(silent),
    ):
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logger.setLevel(level)


@contextlib.contextmanager
def compiled_code_as_eager() -> Iterator[list[str]]:
    """Run what ``torch.compile`` made as the code that it was made from.

    Yields
    ------
    list
        Names of the modules and functions that ran so, as they are called.
    """
    names: list[str] = []

    def ran(name: str) -> None:
        if name not in names:
            names.append(name)

    with torch.compiler.set_stance("force_eager"), patched("compiled code", answers=Answers(ran=ran)):
        yield names


@contextlib.contextmanager
def joint_trace_patched() -> Iterator[None]:
    """Trace forward and backward with the calls that eager makes, and without a word on the terminal."""
    with quiet(), patched("fake tensors", "joint trace"), _functorch_levels_kept():
        yield


@contextlib.contextmanager
def _functorch_levels_kept() -> Iterator[None]:
    """Leave the transforms that a failed trace left open."""
    functorch = torch._C._functorch
    depth = functorch.get_dynamic_layer_stack_depth()
    try:
        yield
    finally:
        if functorch.get_dynamic_layer_stack_depth() > depth:
            functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)


CHECKPOINT = "zbcompile_checkpoint"
"""What nodes that are traced under `checkpoint_marked` have in their meta data."""


@contextlib.contextmanager
def checkpoint_marked() -> Iterator[None]:
    """Make the nodes that are traced inside known to `torch_private.in_checkpoint`."""
    from torch.fx import traceback as fx_traceback

    with fx_traceback.preserve_node_meta(), fx_traceback.annotate({CHECKPOINT: True}):
        yield


# The replacements, in the order of the table.


def _noting(given: Callable[..., object], answers: Answers) -> Callable[..., object]:
    """``eval_frame.set_eval_frame`` that tells which compiled code calls it."""

    def note(callback: object) -> object:
        frame = sys._getframe(1)
        if frame.f_code.co_name == "compile_wrapper":
            function = frame.f_locals.get("fn")
            while (inner := getattr(function, "__wrapped__", None)) is not None:
                function = inner
            owner = getattr(function, "__self__", function)
            name = getattr(function, "__qualname__", "") if owner is function else ""
            if not str(getattr(function, "__module__", "")).startswith("torch._higher_order_ops"):
                answers.ran(name or type(owner).__name__)
        return given(callback)

    return note


def _refusing_hooks(given: object, answers: Answers) -> Callable[..., NoReturn]:
    """``Tensor.register_hook`` that refuses, with the line that calls it."""

    def refuse(tensor: Tensor, hook: object) -> NoReturn:
        frame = sys._getframe(1)
        raise CaptureError(
            "cannot capture a gradient hook on a tensor: it would not run",
            where=f"{frame.f_code.co_filename}:{frame.f_lineno}",
            fix="do its work in a torch.autograd.Function, or on param.grad after the step",
        )

    return refuse


def _asked(given: Callable[[Any], bool], answers: Answers) -> Callable[..., bool]:
    """``__bool__`` of tensors and numbers that asks the tracer first."""

    def asked(value: Tensor | torch.SymBool) -> bool:
        found = answers.truth(value, sys._getframe(1))
        return given(value) if found is None else found

    return asked


def _asked_tensor(given: Callable[[Any], bool], answers: Answers) -> Callable[..., bool]:
    asked = _asked(given, answers)
    asked.__qualname__ = "Tensor.__bool__"
    return asked


def _demanded(given: Callable[..., None], answers: Answers) -> Callable[..., None]:
    """``torch._check_with`` that tells the tracer of numbers."""

    def demanded(error: type[Exception], cond: object, message: object = None) -> None:
        if isinstance(cond, torch.SymBool):
            answers.demand(cond, sys._getframe(1))
        given(error, cond, message)

    return demanded


def _all_demanded(given: Callable[..., None], answers: Answers) -> Callable[..., None]:
    """``torch._check_tensor_all_with`` that looks only at what the tracer has not settled."""

    def all_demanded(error: type[Exception], cond: Tensor, message: object = None) -> None:
        if not answers.demand(cond, sys._getframe(1)):
            given(error, cond, message)

    return all_demanded


def _idle_cast_skipped(given: Callable[..., nn.Module], answers: Answers) -> Callable[..., nn.Module]:
    """``module.to(...)`` that does nothing where every tensor is so already."""
    parse: Callable[..., tuple[object, ...]] = torch._C._nn._parse_to

    def is_so(tensor: Tensor, device: object, dtype: object) -> bool:
        is_cast = tensor.is_floating_point() or tensor.is_complex()
        return device in (None, tensor.device) and (dtype in (None, tensor.dtype) or not is_cast)

    def to(module: nn.Module, *args: object, **kwargs: object) -> nn.Module:
        device, dtype, _, memory_format = parse(*args, **kwargs)
        tensors = (*module.parameters(), *module.buffers())
        idle = memory_format is None and all(is_so(tensor, device, dtype) for tensor in tensors)
        return module if idle else given(module, *args, **kwargs)

    return to


def _index_as_call(given: Callable[..., Tensor], answers: Answers) -> Callable[..., Tensor]:
    def index(x: Tensor, indices: list[Tensor]) -> Tensor:
        made: Tensor = given(x, indices) if x.requires_grad else torch.ops.aten.index(x, indices)
        return made

    return index


class _InferenceMode(Protocol):
    """A ``torch.inference_mode`` whose methods are replaced."""

    mode: bool
    grad_before: bool


def _enter_no_grad(mode: _InferenceMode) -> None:
    mode.grad_before = torch.is_grad_enabled()
    if mode.mode:
        torch.set_grad_enabled(False)


def _leave_no_grad(mode: _InferenceMode, *_: object) -> None:
    torch.set_grad_enabled(mode.grad_before)


def _marked_block(given: Callable[..., Iterator[None]], answers: Answers) -> Callable[..., Iterator[None]]:
    def block(*args: object, **kwargs: object) -> Iterator[None]:
        with checkpoint_marked() if torch.is_grad_enabled() else contextlib.nullcontext():
            yield from given(*args, **kwargs)

    return block


def _refusing_saved_hooks(given: Callable[..., None], answers: Answers) -> Callable[..., None]:
    """``saved_tensors_hooks.__enter__`` that refuses hooks which are not torch's own."""

    def enter(hooks: saved_tensors_hooks) -> None:
        if type(hooks) is saved_tensors_hooks or not type(hooks).__module__.startswith("torch."):
            raise CaptureError(
                "cannot capture hooks on the tensors that autograd saves: no stage would run them",
                where=caller_source(),
                fix="leave them out, and choose what to hold with compile(..., recompute=...)",
            )
        return given(hooks)

    return enter


def _grouped_products(given: Callable[..., object], answers: Answers) -> Callable[..., object]:
    create: Callable[..., object] = torch._meta_registrations._create_grouped_mm_output_tensor

    def common(
        a: Tensor,
        b: Tensor,
        scale_a: Tensor | None,
        scale_b: Tensor | None,
        offs: Tensor | None = None,
        bias: Tensor | None = None,
        scale_result: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        **rest: bool,
    ) -> object:
        narrow = a.dtype == b.dtype == torch.bfloat16
        if scale_a is not None or narrow or a.dtype != b.dtype:
            return given(a, b, scale_a, scale_b, offs, bias, scale_result, out_dtype, **rest)
        return create(a, b, offs, out_dtype)

    return common


def _dispatch_with_strides(given: Callable[..., object], answers: Answers) -> Callable[..., object]:
    """``FakeTensorMode.dispatch`` whose results on the CPU have the strides of real ones."""

    def dispatch(
        mode: object,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        made = given(mode, func, types, args, kwargs or {})
        first = made[0] if isinstance(made, tuple | list) and made else made
        if not isinstance(first, Tensor):
            return made
        strides = strides_of(func, _operands(func), [a for a in args if isinstance(a, Tensor)], first)
        if strides is None:
            return made
        form = {"dtype": first.dtype, "device": first.device}
        empty = torch.ops.aten.empty_strided.default
        again = given(mode, empty, (), (list(first.shape), list(strides)), form)
        return (again, *made[1:]) if isinstance(made, tuple | list) else again

    return dispatch


@functools.cache
def _operands(func: torch._ops.OpOverload) -> int | None:
    """Return how many tensors an operator must be given; None where it changes one."""
    schema = getattr(func, "_schema", None)
    if schema is None or schema.is_mutable:
        return None
    return sum(str(argument.type) == "Tensor" for argument in schema.arguments)


_Kernels = dict[Any, Callable[..., object]]
"""Dispatch key -> a Python version of an operator."""


def _without_python_versions(given: _Kernels, answers: Answers) -> _Kernels:
    keys = torch._C.DispatchKey.Autograd, torch._C.DispatchKey.CompositeImplicitAutograd
    return {key: kernel for key, kernel in given.items() if key not in keys} if given.keys() & keys else given


def _dropout_as_in_eager(given: _Kernels, answers: Answers) -> _Kernels:
    """Dropout as eager runs it; the fused call, which scales last, gives the same bits in float32."""
    fused = given[torch._C.DispatchKey.Autograd]

    def dropout(x: Tensor, rate: float, train: bool) -> object:
        if train and rate == 1 and x.device.type == "cpu":  # draws nothing
            return x * torch.zeros((), dtype=x.dtype)
        if not train or rate == 0 or x.device.type != "cpu" or x.element_size() >= 4:
            return fused(x, rate, train)
        return x * torch.empty_like(x).bernoulli_(1 - rate).div_(1 - rate)

    return dict.fromkeys(given, dropout)


def _forget_dispatch(operator: torch._ops.OpOverload) -> None:
    operator._dispatch_cache.clear()


def _eval_frame() -> object:
    from torch._dynamo import eval_frame

    return eval_frame


def _indexing() -> object:
    from torch._dynamo import _trace_wrapped_higher_order_op

    return _trace_wrapped_higher_order_op


def _fake_mode() -> object:
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode


_RESAMPLING = (
    *(f"{kind}{n}d" for kind in ("upsample_nearest", "_upsample_nearest_exact") for n in (1, 2, 3)),
    "upsample_linear1d",
    "upsample_bilinear2d",
    "upsample_trilinear3d",
    "upsample_bicubic2d",
    "_upsample_bilinear2d_aa",
    "_upsample_bicubic2d_aa",
)


def _resampling() -> tuple[Patch, ...]:
    """Return one patch per form of every operator of `_RESAMPLING`."""
    aten = torch.ops.aten
    packets = [getattr(aten, name) for name in _RESAMPLING if hasattr(aten, name)]
    operators = [getattr(packet, form) for packet in packets for form in packet.overloads()]
    why = "torch's Python versions of upsampling index and blend; eager runs one kernel"
    return tuple(
        Patch(
            "joint trace",
            functools.partial(lambda operator: operator, operator),
            "py_kernels",
            _without_python_versions,
            why,
            _forget_dispatch,
        )
        for operator in operators
    )


PATCHES: tuple[Patch, ...] = (
    Patch(
        "eager path",
        lambda: torch.compiler,
        "_is_exporting_flag",
        lambda given, answers: False,
        "a model that asks takes another path; Hugging Face's leave the mask to the kernel only in eager",
    ),
    Patch(
        "eager path",
        lambda: torch.compiler,
        "_is_compiling_flag",
        lambda given, answers: False,
        "as for _is_exporting_flag",
    ),
    Patch(
        "compiled code",
        _eval_frame,
        "set_eval_frame",
        _noting,
        "nothing else tells which compiled modules and functions ran as plain code",
    ),
    Patch("forward", lambda: Tensor, "register_hook", _refusing_hooks, "no stage would call the hook"),
    Patch(
        "forward",
        lambda: Tensor,
        "__bool__",
        _asked_tensor,
        "torch looks at a value that a trace does not know, and fails",
    ),
    Patch("forward", lambda: torch.SymBool, "__bool__", _asked, "as for tensors"),
    Patch(
        "forward",
        lambda: torch,
        "_check_with",
        _demanded,
        "torch takes a demand as a hint about sizes; in eager it is checked in every step",
    ),
    Patch("forward", lambda: torch, "_check_tensor_all_with", _all_demanded, "as for _check_with"),
    Patch(
        "forward",
        lambda: nn.Module,
        "to",
        _idle_cast_skipped,
        "a cast that changes nothing is traced as a change of the module",
    ),
    Patch(
        "forward",
        _indexing,
        "mod_index",
        _index_as_call,
        "indexing of masks under vmap (TransformGetItemToIndex) puts a function into the graph, for the "
        "sake of a gradient that a mask has not",
    ),
    Patch(
        "forward",
        lambda: torch.distributions.Distribution,
        "_validate_args",
        lambda given, answers: False,
        "distributions look at the values of their arguments",
    ),
    Patch(
        "forward",
        lambda: torch.inference_mode,
        "__enter__",
        lambda given, answers: _enter_no_grad,
        "the tracer does not see inference_mode, and gradients would flow",
    ),
    Patch(
        "forward",
        lambda: torch.inference_mode,
        "__exit__",
        lambda given, answers: _leave_no_grad,
        "as for __enter__",
    ),
    Patch(
        "forward",
        lambda: checkpoint,
        "_checkpoint_without_reentrant_generator",
        _marked_block,
        "the graph does not say which calls are recomputed (reentrant blocks: capture/custom_functions)",
    ),
    Patch(
        "forward",
        lambda: saved_tensors_hooks,
        "__enter__",
        _refusing_saved_hooks,
        "no stage would run hooks on saved tensors",
    ),
    Patch(
        "fake tensors",
        lambda: torch._meta_registrations,
        "_meta_grouped_mm_common",
        _grouped_products,
        "fake tensors take grouped_mm of bf16 only; kernels take every dtype",
    ),
    Patch(
        "fake tensors",
        _fake_mode,
        "dispatch",
        _dispatch_with_strides,
        "some results of fake tensors have other strides than those of real ones (kernel_strides)",
    ),
    Patch(
        "joint trace",
        lambda: torch.ops.aten.dropout.default,
        "py_kernels",
        _dropout_as_in_eager,
        "for narrow numbers on the CPU eager scales the mask first, and rounds so",
        _forget_dispatch,
    ),
    Patch(
        "joint trace",
        lambda: torch._library.simple_registry.singleton.find("aten::_linalg_check_errors").effect,
        "_effect",
        lambda given, answers: None,
        "torch threads tokens through a graph with a check for singular matrices",
    ),
    *_resampling(),
)
"""Every attribute that is replaced while a model is traced, with the reason."""
