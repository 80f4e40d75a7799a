"""Patch torch while a model is traced: every context that changes how torch behaves, and puts it back.

Capture uses `as_in_eager`, `compiled_code_as_eager`, `distributions_unchecked`,
`grouped_products_of_any_dtype`, `idle_casts_skipped`, `indices_as_calls`, `quiet`, `strides_of_kernels`,
`truth_asked_first` and `without_tensor_hooks`; the joint trace uses `joint_trace_patched`.
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import NoReturn

import torch
from torch import Tensor, nn

from zbcompile.errors import CaptureError
from zbcompile.passes.kernel_strides import strides_of

__all__ = [
    "as_in_eager",
    "attribute_replaced",
    "compiled_code_as_eager",
    "distributions_unchecked",
    "grouped_products_of_any_dtype",
    "idle_casts_skipped",
    "indices_as_calls",
    "joint_trace_patched",
    "quiet",
    "strides_of_kernels",
    "truth_asked_first",
    "without_tensor_hooks",
]

_RESAMPLING = (
    *(f"{kind}{n}d" for kind in ("upsample_nearest", "_upsample_nearest_exact") for n in (1, 2, 3)),
    "upsample_linear1d",
    "upsample_bilinear2d",
    "upsample_trilinear3d",
    "upsample_bicubic2d",
    "_upsample_bilinear2d_aa",
    "_upsample_bicubic2d_aa",
)


@contextlib.contextmanager
def attribute_replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """Give an attribute of a module or class another value while active."""
    given = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, given)


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
def as_in_eager() -> Iterator[None]:
    """Tell a model that asks whether it is compiled or exported that it is not, as in eager.

    Hugging Face models then leave the causal mask to the kernel.
    """
    with (
        attribute_replaced(torch.compiler, "_is_exporting_flag", False),
        attribute_replaced(torch.compiler, "_is_compiling_flag", False),
    ):
        yield


@contextlib.contextmanager
def compiled_code_as_eager() -> Iterator[list[str]]:
    """Run what ``torch.compile`` made as the code that it was made from.

    Yields
    ------
    list
        Names of the modules and functions that ran so, as they are called.
    """
    from torch._dynamo import eval_frame

    names: list[str] = []
    given: Callable[..., object] = vars(eval_frame)["set_eval_frame"]

    def note(callback: object) -> object:
        frame = sys._getframe(1)
        if frame.f_code.co_name == "compile_wrapper":
            function = frame.f_locals.get("fn")
            while (inner := getattr(function, "__wrapped__", None)) is not None:
                function = inner
            owner = getattr(function, "__self__", function)
            name = getattr(function, "__qualname__", "") if owner is function else ""
            name = name or type(owner).__name__
            own = str(getattr(function, "__module__", "")).startswith("torch._higher_order_ops")
            if not own and name not in names:
                names.append(name)
        return given(callback)

    with (
        torch.compiler.set_stance("force_eager"),
        attribute_replaced(eval_frame, "set_eval_frame", note),
    ):
        yield names


@contextlib.contextmanager
def without_tensor_hooks() -> Iterator[None]:
    """Refuse a gradient hook on a tensor, with its source line: no stage would call it."""

    def refuse(tensor: Tensor, hook: object) -> NoReturn:
        frame = sys._getframe(1)
        raise CaptureError(
            "cannot capture a gradient hook on a tensor: it would not run",
            where=f"{frame.f_code.co_filename}:{frame.f_lineno}",
            fix="do its work in a torch.autograd.Function, or on param.grad after the step",
        )

    with attribute_replaced(Tensor, "register_hook", refuse):
        yield


@contextlib.contextmanager
def truth_asked_first(
    truth: Callable[[Tensor | torch.SymBool, FrameType], bool | None],
    demand: Callable[[Tensor | torch.SymBool, FrameType], bool],
) -> Iterator[None]:
    """Let callers answer what code asks about values that a trace does not know, before torch looks.

    Parameters
    ----------
    truth
        (value, frame that asks) -> whether it is true; None: torch looks.
    demand
        (value, frame that demands it) -> whether it is settled that all of it is true. Torch looks at a
        tensor that is not settled, and takes any number as a hint about sizes.
    """
    look = Tensor.__bool__
    look_at_number: Callable[[torch.SymBool], bool] = vars(torch.SymBool)["__bool__"]
    check: Callable[..., None] = vars(torch)["_check_with"]
    check_all: Callable[..., None] = vars(torch)["_check_tensor_all_with"]

    def asked(tensor: Tensor) -> bool:
        found = truth(tensor, sys._getframe(1))
        return look(tensor) if found is None else found

    def number_asked(number: torch.SymBool) -> bool:
        found = truth(number, sys._getframe(1))
        return look_at_number(number) if found is None else found

    def demanded(error: type[Exception], cond: object, message: object = None) -> None:
        if isinstance(cond, torch.SymBool):
            demand(cond, sys._getframe(1))
        check(error, cond, message)

    def all_demanded(error: type[Exception], cond: Tensor, message: object = None) -> None:
        if not demand(cond, sys._getframe(1)):
            check_all(error, cond, message)

    asked.__qualname__ = "Tensor.__bool__"
    setattr(Tensor, "__bool__", asked)  # noqa: B010
    try:
        with (
            attribute_replaced(torch.SymBool, "__bool__", number_asked),
            attribute_replaced(torch, "_check_with", demanded),
            attribute_replaced(torch, "_check_tensor_all_with", all_demanded),
        ):
            yield
    finally:
        delattr(Tensor, "__bool__")


@contextlib.contextmanager
def idle_casts_skipped() -> Iterator[None]:
    """Let ``module.to(...)`` inside a forward do nothing where every tensor is so already, as in eager."""
    cast: Callable[..., nn.Module] = nn.Module.to
    parse: Callable[..., tuple[object, ...]] = torch._C._nn._parse_to

    def is_so(tensor: Tensor, device: object, dtype: object) -> bool:
        is_cast = tensor.is_floating_point() or tensor.is_complex()
        return device in (None, tensor.device) and (dtype in (None, tensor.dtype) or not is_cast)

    def to(module: nn.Module, *args: object, **kwargs: object) -> nn.Module:
        device, dtype, _, memory_format = parse(*args, **kwargs)
        tensors = (*module.parameters(), *module.buffers())
        idle = memory_format is None and all(is_so(tensor, device, dtype) for tensor in tensors)
        return module if idle else cast(module, *args, **kwargs)

    with attribute_replaced(nn.Module, "to", to):
        yield


@contextlib.contextmanager
def indices_as_calls() -> Iterator[None]:
    """Trace the indexing of masks under vmap (`TransformGetItemToIndex`) as the one call that it makes.

    Torch would put a function into the graph, for the sake of a gradient that a mask has not.
    """
    from torch._dynamo import _trace_wrapped_higher_order_op as indexing

    given: Callable[[Tensor, list[Tensor]], Tensor] = vars(indexing)["mod_index"]

    def index(x: Tensor, indices: list[Tensor]) -> Tensor:
        made: Tensor = given(x, indices) if x.requires_grad else torch.ops.aten.index(x, indices)
        return made

    with attribute_replaced(indexing, "mod_index", index):
        yield


@contextlib.contextmanager
def distributions_unchecked() -> Iterator[None]:
    """Keep ``torch.distributions`` from looking at the values of its arguments."""
    kind = torch.distributions.Distribution
    given = kind._validate_args
    kind.set_default_validate_args(False)
    try:
        yield
    finally:
        kind.set_default_validate_args(given)


@contextlib.contextmanager
def grouped_products_of_any_dtype() -> Iterator[None]:
    """Let fake tensors take ``grouped_mm`` of every dtype that the kernels take; torch's insist on bf16."""
    module = torch._meta_registrations
    given: Callable[..., object] = module._meta_grouped_mm_common
    create: Callable[..., object] = module._create_grouped_mm_output_tensor

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

    with attribute_replaced(module, "_meta_grouped_mm_common", common):
        yield


@contextlib.contextmanager
def strides_of_kernels() -> Iterator[None]:
    """Give fake tensors on the CPU the strides that results of real tensors have (`kernel_strides`)."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    given: Callable[..., object] = vars(FakeTensorMode)["dispatch"]

    def dispatch(
        mode: FakeTensorMode,
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

    with attribute_replaced(FakeTensorMode, "dispatch", dispatch):
        yield


@functools.cache
def _operands(func: torch._ops.OpOverload) -> int | None:
    """Return how many tensors an operator must be given; None where it changes one."""
    schema = getattr(func, "_schema", None)
    if schema is None or schema.is_mutable:
        return None
    return sum(str(argument.type) == "Tensor" for argument in schema.arguments)


@contextlib.contextmanager
def joint_trace_patched() -> Iterator[None]:
    """Trace forward and backward with the calls that eager makes, and without a word on the terminal."""
    with (
        quiet(),
        _resampling_kept_whole(),
        _dropout_as_in_eager(),
        grouped_products_of_any_dtype(),
        strides_of_kernels(),
        _checks_without_tokens(),
        _functorch_levels_kept(),
    ):
        yield


@contextlib.contextmanager
def _resampling_kept_whole() -> Iterator[None]:
    """Take torch's Python versions of upsampling away, which index and blend: eager runs one kernel."""
    taken: list[tuple[torch._ops.OpOverload, torch._C.DispatchKey, Callable[..., object]]] = []
    for name in _RESAMPLING:
        packet = getattr(torch.ops.aten, name, None)
        for overload in () if packet is None else packet.overloads():
            operator = getattr(packet, overload)
            for key in (torch._C.DispatchKey.Autograd, torch._C.DispatchKey.CompositeImplicitAutograd):
                if key in operator.py_kernels:
                    taken.append((operator, key, operator.py_kernels.pop(key)))
                    operator._dispatch_cache.clear()
    try:
        yield
    finally:
        for operator, key, kernel in taken:
            operator.py_kernels[key] = kernel
            operator._dispatch_cache.clear()


@contextlib.contextmanager
def _dropout_as_in_eager() -> Iterator[None]:
    """Trace dropout of narrow numbers on the CPU as eager runs it: the mask is scaled first, and rounds so.

    The fused call, which scales last, gives the same bits in float32 and keeps a mask of bytes.
    """
    operator = torch.ops.aten.dropout.default
    given = dict(operator.py_kernels)
    fused = given[torch._C.DispatchKey.Autograd]

    def dropout(x: Tensor, rate: float, train: bool) -> object:
        if train and rate == 1 and x.device.type == "cpu":  # draws nothing
            return x * torch.zeros((), dtype=x.dtype)
        if not train or rate == 0 or x.device.type != "cpu" or x.element_size() >= 4:
            return fused(x, rate, train)
        return x * torch.empty_like(x).bernoulli_(1 - rate).div_(1 - rate)

    operator.py_kernels.update(dict.fromkeys(given, dropout))
    operator._dispatch_cache.clear()
    try:
        yield
    finally:
        operator.py_kernels.update(given)
        operator._dispatch_cache.clear()


@contextlib.contextmanager
def _checks_without_tokens() -> Iterator[None]:
    """Trace the check for singular matrices as a plain call; torch would thread tokens through the graph."""
    holder = torch._library.simple_registry.singleton.find("aten::_linalg_check_errors").effect
    given, holder._effect = holder._effect, None
    try:
        yield
    finally:
        holder._effect = given


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
