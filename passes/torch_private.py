"""Every private torch name that the front end uses, and nothing else. Checked on torch 2.13 and 2.14.

When torch moves one of them, this file is the only one to change.
"""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from zbcompile.errors import CaptureError, SplitError

try:
    import torch._functorch.config
    import torch._meta_registrations
    from torch._functorch._aot_autograd import descriptors
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
    from torch._ops import OpOverload
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.fx import traceback as fx_traceback
    from torch.utils._pytree import tree_leaves, tree_map
except ImportError as error:  # pragma: no cover
    raise SplitError(
        f"torch {torch.__version__} lacks a name that the split needs: {error}",
        fix="use torch 2.13 or 2.14",
    ) from error

__all__ = [
    "LINALG_CHECK",
    "ChangeCarriesGradient",
    "FakeTensor",
    "JointGraph",
    "OpOverload",
    "ambient_autocast",
    "as_fake",
    "as_in_eager",
    "assigned_buffers",
    "backward_hooks",
    "distributions_unchecked",
    "evaluate_fake",
    "fake_mode",
    "functorch_nesting",
    "grouped_products_of_any_dtype",
    "has_hooks",
    "inductor_compile",
    "is_higher_order",
    "is_wrapped",
    "joint_graph",
    "math_attention",
    "missing_compiler",
    "node_meta",
    "parameter_kind",
    "preserve_node_meta",
    "quiet",
    "random_state",
    "region_of_call",
    "schema",
    "set_buffer",
    "storage_bytes",
    "storage_key",
    "tensor_tables",
    "transform_depth",
    "tree_leaves",
    "tree_map",
    "without_tensor_hooks",
    "wrapper_kind",
]


LINALG_CHECK = torch.fx.node.has_side_effect(torch.ops.aten._linalg_check_errors.default)
"""Raises for a singular matrix; has no result, and is kept by dead code elimination all the same."""

_RESAMPLING = (
    *(f"{kind}{n}d" for kind in ("upsample_nearest", "_upsample_nearest_exact") for n in (1, 2, 3)),
    "upsample_linear1d",
    "upsample_bilinear2d",
    "upsample_trilinear3d",
    "upsample_bicubic2d",
    "_upsample_bilinear2d_aa",
    "_upsample_bicubic2d_aa",
)


@dataclass(frozen=True)
class JointGraph:
    """Forward and backward of one module in one graph, with the role of each value.

    ``arguments`` : placeholder per argument of the module (None where dropped).
    ``tangents`` : placeholder per output (None where it takes no gradient).
    ``outputs``, ``mutations``, ``gradients`` : output index, argument index, argument index -> value.
    """

    module: GraphModule
    arguments: dict[int, Node]
    tangents: dict[int, Node]
    outputs: dict[int, Any]
    mutations: dict[int, Any]
    gradients: dict[int, Any]


class ChangeCarriesGradient(Exception):
    """The new value of a changed argument depends on parameters; ``args[0]`` is its position."""


def fake_mode() -> FakeTensorMode:
    """A fake mode that accepts real constants and data-dependent sizes."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())


def as_fake(
    mode: FakeTensorMode, value: Tensor, requires_grad: bool, device: torch.device | None = None
) -> Tensor:
    """A fake leaf with the shape, strides and dtype of ``value``, on its device or the one given."""
    device = device or value.device
    if value.layout != torch.strided:
        return mode.from_tensor(value)
    with mode:
        fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    if isinstance(value, torch.nn.Parameter):
        return nn.Parameter(fake, requires_grad=requires_grad)
    return fake.requires_grad_(requires_grad)


def joint_graph(module: nn.Module, arguments: list[Tensor]) -> JointGraph:
    """Trace forward and backward of ``module`` (no parameters of its own) on fake ``arguments``.

    No decompositions: only what autograd itself takes apart is taken apart.
    """
    modes = (
        _resampling_kept_whole(),
        _dropout_as_in_eager(),
        grouped_products_of_any_dtype(),
        _checks_without_tokens(),
        _functorch_levels_kept(),
    )
    with contextlib.ExitStack() as stack, quiet(), torch.enable_grad():
        for mode in modes:
            stack.enter_context(mode)
        joint = aot_export_joint_with_descriptors(stack, module, tuple(arguments), decompositions={})
        graph_module = joint.graph_module
    return _with_roles(graph_module)


def evaluate_fake(node: Node, args: Any) -> Any:
    """What ``node`` would give for these fake arguments; None where torch refuses them."""
    modes = [value.fake_mode for value in tree_leaves(args) if isinstance(value, FakeTensor)]
    target: Any = node.target
    try:
        with modes[0], torch.no_grad():
            return target(*args, **torch.fx.map_arg(node.kwargs, lambda n: n.meta["val"]))
    except (RuntimeError, ValueError):
        return None


@contextlib.contextmanager
def _resampling_kept_whole() -> Iterator[None]:
    """Without torch's Python versions of upsampling, which index and blend: eager runs one kernel."""
    taken: list[tuple[Any, Any, Any]] = []
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
def grouped_products_of_any_dtype() -> Iterator[None]:
    """Fake tensors take ``grouped_mm`` of every dtype that the kernels take; torch's fake insists on bf16."""
    module: Any = torch._meta_registrations
    given = module._meta_grouped_mm_common

    def common(a: Tensor, b: Tensor, scale_a: Any, scale_b: Any, **rest: Any) -> Any:
        narrow = a.dtype == b.dtype == torch.bfloat16
        if scale_a is not None or narrow or a.dtype != b.dtype:
            return given(a, b, scale_a, scale_b, **rest)
        return module._create_grouped_mm_output_tensor(a, b, rest["offs"], rest["out_dtype"])

    module._meta_grouped_mm_common = common
    try:
        yield
    finally:
        module._meta_grouped_mm_common = given


@contextlib.contextmanager
def _dropout_as_in_eager() -> Iterator[None]:
    """Dropout of narrow numbers on the CPU scales the mask first, as eager does, and rounds like it.

    (The fused call, which scales last, gives the same bits in float32 and keeps a mask of bytes.)
    """
    operator = torch.ops.aten.dropout.default
    given = dict(operator.py_kernels)
    fused: Any = given[torch._C.DispatchKey.Autograd]

    def dropout(x: Tensor, rate: float, train: bool) -> Any:
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
    """The check for singular matrices as a plain call: torch would thread tokens through the joint graph."""
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


@contextlib.contextmanager
def distributions_unchecked() -> Iterator[None]:
    """While active, ``torch.distributions`` does not look at the values of its arguments."""
    kind = torch.distributions.Distribution
    given = kind._validate_args
    kind.set_default_validate_args(False)
    try:
        yield
    finally:
        kind.set_default_validate_args(given)


def math_attention(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **given: Any) -> Tensor:
    """``scaled_dot_product_attention`` as the math backend computes it."""
    names = ("attn_mask", "dropout_p", "is_causal")
    given = dict(zip(names, rest, strict=False)) | given
    mask, rate, causal = given.get("attn_mask"), given.get("dropout_p", 0.0), given.get("is_causal", False)
    kernel: Any = torch.ops.aten._scaled_dot_product_attention_math.default
    options = {"scale": given.get("scale"), "enable_gqa": given.get("enable_gqa", False)}
    return kernel(query, key, value, mask, rate, causal, **options)[0]  # type: ignore[no-any-return]


def is_higher_order(node: Node) -> bool:
    """Whether a call takes functions as arguments (``torch.cond`` and its kind)."""
    return isinstance(node.target, torch._ops.HigherOrderOperator)


def transform_depth() -> int:
    """How many torch.func transforms (vmap, grad, jvp, functionalize) are being applied."""
    return int(torch._C._functorch.get_dynamic_layer_stack_depth())


def is_wrapped(value: Tensor) -> bool:
    """Whether a torch.func transform put this tensor around another."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(value))


def functorch_nesting(node: Node) -> int:
    """+1 where a call of the exported graph opens a torch.func transform, -1 where it closes one, else 0."""
    if getattr(node.target, "__module__", "") != "torch._functorch.predispatch":
        return 0
    name = getattr(node.target, "__name__", "")
    return int("_increment_nesting" in name) - int("_decrement_nesting" in name)


def random_state() -> bytes:
    """The real state of the CPU's random numbers, also while fake tensors are traced."""
    with torch._C._DisableTorchDispatch():
        return bytes(torch.default_generator.get_state().numpy())


def _with_roles(module: GraphModule) -> JointGraph:
    roles = JointGraph(module, {}, {}, {}, {}, {})
    for node in module.graph.find_nodes(op="placeholder"):
        role = node.meta["desc"]
        if isinstance(role, descriptors.PlainAOTInput):
            roles.arguments[role.idx] = node
        elif isinstance(role, descriptors.TangentAOTInput) and isinstance(
            role.output, descriptors.PlainAOTOutput
        ):
            roles.tangents[role.output.idx] = node
        elif isinstance(role, descriptors.TangentAOTInput) and isinstance(
            role.output, descriptors.InputMutationAOTOutput
        ):
            raise ChangeCarriesGradient(_argument(role.output.mutated_input))
        else:
            raise SplitError(f"the joint graph has an argument of unknown role: {role}")
    output = module.graph.output_node()
    for value, role in zip(output.args[0], output.meta["desc"], strict=True):  # type: ignore[arg-type]
        if value is None:
            continue
        if isinstance(role, descriptors.PlainAOTOutput):
            roles.outputs[role.idx] = value
        elif isinstance(role, descriptors.InputMutationAOTOutput):
            roles.mutations[_argument(role.mutated_input)] = value
        elif isinstance(role, descriptors.GradAOTOutput):
            roles.gradients[_argument(role.grad_of)] = value
        else:
            raise SplitError(f"the joint graph has a result of unknown role: {role}")
    return roles


def _argument(role: Any) -> int:
    if not isinstance(role, descriptors.PlainAOTInput):
        raise SplitError(f"the joint graph speaks of an argument of unknown role: {role}")
    return int(role.idx)


def preserve_node_meta() -> contextlib.AbstractContextManager[None]:
    """While active, traced nodes inherit the meta set by `node_meta`."""
    return fx_traceback.preserve_node_meta()


def node_meta(node: Node) -> contextlib.AbstractContextManager[None]:
    """Nodes traced inside carry the module path and source line of ``node``."""
    return fx_traceback.set_current_meta(node)


def region_of_call(node: Node) -> tuple[str, tuple[Any, ...], Node, tuple[Any, ...]] | None:
    """(kind, settings, submodule, arguments) of a region node that export made, else None.

    kind "grad" has settings (enabled,), kind "autocast" (device type, dtype, enabled, cache enabled).
    """
    name = getattr(node.target, "__name__", "")
    if name == "wrap_with_set_grad_enabled":
        return "grad", tuple(node.args[:1]), node.args[1], tuple(node.args[2:])  # type: ignore[return-value]
    if name == "wrap_with_autocast":
        return "autocast", tuple(node.args[:4]), node.args[4], tuple(node.args[5:])  # type: ignore[return-value]
    return None


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep torch's own traces of a failed trace off the terminal: the error says what is needed."""
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
    """A model that asks whether it is compiled or exported hears no, and does what it does in eager
    (Hugging Face models then leave the causal mask to the kernel)."""
    previous = torch.compiler._is_exporting_flag, torch.compiler._is_compiling_flag
    torch.compiler._is_exporting_flag = torch.compiler._is_compiling_flag = False
    try:
        yield
    finally:
        torch.compiler._is_exporting_flag, torch.compiler._is_compiling_flag = previous


def ambient_autocast() -> list[tuple[str, torch.dtype]]:
    """(device type, dtype) of the autocast regions that the caller is in."""
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    return [(kind, torch.get_autocast_dtype(kind)) for kind in kinds]


@contextlib.contextmanager
def without_tensor_hooks() -> Iterator[None]:
    """While active, a gradient hook on a tensor is refused with its source line: no stage would call it."""
    given = Tensor.register_hook

    def refuse(tensor: Tensor, hook: Any) -> Any:
        frame = sys._getframe(1)
        raise CaptureError(
            "cannot capture a gradient hook on a tensor: it would not run",
            where=f"{frame.f_code.co_filename}:{frame.f_lineno}",
            fix="do its work in a torch.autograd.Function, or on param.grad after the step",
        )

    Tensor.register_hook = refuse  # type: ignore[method-assign]
    try:
        yield
    finally:
        Tensor.register_hook = given  # type: ignore[method-assign]


def wrapper_kind(module: nn.Module) -> str:
    """Name of the parallel wrapper or script that ``module`` is, or an empty string."""
    if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
        return type(module).__name__
    if isinstance(module, torch.jit.ScriptModule):
        return "torch.jit"
    names = {base.__name__ for base in type(module).__mro__ if base.__module__.startswith("torch.")}
    return "FullyShardedDataParallel" if names & {"FullyShardedDataParallel", "FSDPModule"} else ""


def parameter_kind(parameter: Tensor) -> str:
    """Name of a tensor subclass that cannot be captured, or an empty string."""
    if isinstance(parameter, nn.parameter.UninitializedParameter | nn.parameter.UninitializedBuffer):
        return "lazy parameter"
    data = parameter.data
    return "" if type(data) is Tensor or isinstance(data, FakeTensor) else type(data).__name__


def schema(target: Any) -> Any:
    """The operator's schema: arguments with alias annotations, whether it changes any."""
    return target._schema


def storage_key(value: Tensor) -> int:
    """Equal for two tensors, fake ones too, iff they share storage."""
    return int(value.untyped_storage()._cdata)


def tensor_tables(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """The module's own parameters and buffers, to be replaced in place."""
    return module._parameters, module._buffers


def storage_bytes(value: Tensor) -> int:
    """Bytes of a fake tensor's storage; the upper bound where the size depends on data."""
    size: Any = value.untyped_storage().nbytes()
    if isinstance(size, int):
        return size
    bound = size.node.shape_env.bound_sympy(size.node.expr).upper
    try:
        return min(int(bound), 1 << 60)
    except (ArithmeticError, AttributeError, TypeError, ValueError):  # no bound is known
        return 1 << 60


def has_hooks(parameter: Tensor) -> bool:
    """Whether the user asked for code to run on this parameter's gradient."""
    hooks = (parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None))
    return any(hooks)


def backward_hooks(module: nn.Module) -> bool:
    """Whether the user asked for code to run in this module's backward."""
    return bool(module._backward_hooks) or bool(module._backward_pre_hooks)


def assigned_buffers(model: nn.Module) -> dict[tuple[nn.Module, str], Tensor]:
    """(module, name) -> buffer, to see after a call which ones were replaced."""
    return {
        (module, name): buffer
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    }


def set_buffer(module: nn.Module, name: str, buffer: Tensor) -> None:
    """Put ``buffer`` back under its name."""
    module._buffers[name] = buffer


def inductor_compile(module: GraphModule) -> Callable[[list[Any]], Sequence[Any]]:
    """A graph that takes one list and empties it --> the same, compiled by inductor.

    Decomposed with inductor's own table; random calls stay eager's, so that they draw the same bits;
    results keep the strides of the graph. Raises what inductor raises.
    """
    import torch._inductor.config
    from torch._inductor.compile_fx import compile_fx_inner, record_original_output_strides
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.virtualized import V
    from torch.fx.experimental.proxy_tensor import make_fx

    holes = module.graph.find_nodes(op="placeholder")
    values = [node.meta["val"] for node in holes]
    examples = [value.detach() if isinstance(value, Tensor) else value for value in values]
    modes = [value.fake_mode for value in examples if isinstance(value, FakeTensor)]
    with torch._inductor.config.patch(fallback_random=True), torch.no_grad(), quiet():
        traced = make_fx(
            lambda *given: module.forward(list(given)), decomposition_table=select_decomp_table()
        )(*examples)
        output = traced.graph.output_node()
        results: Any = output.args[0]
        output.meta["user_visible_output_idxs"] = list(range(len(results)))
        record_original_output_strides(traced)
        with V.set_fake_mode(modes[0] if modes else fake_mode()):
            return compile_fx_inner(traced, examples, is_inference=True)


def missing_compiler() -> str:
    """Why inductor cannot build code for the CPU here; an empty string when it can."""
    from torch._inductor import cpp_builder, exc

    try:
        cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler as error:
        return str(error).splitlines()[0]
    return ""
