"""Hold the private torch names that the passes use. Checked on torch 2.13 and 2.14.

When torch moves one of them, only this file, `torch_patches` (what is replaced while a model is traced) and
`runtime.torch_private` change. That one is apart because the runtime lies below the passes and must not load
what traces.
"""

from __future__ import annotations

import contextlib
import operator
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.fx.node import Argument

from zbcompile.errors import SplitError
from zbcompile.passes.torch_patches import CHECKPOINT, checkpoint_marked, joint_trace_patched, quiet
from zbcompile.runtime.torch_private import module_tables, post_accumulate_hooks, tensor_tables
from zbcompile.signals import deferred_signals

try:
    from torch._dispatch.python import enable_python_dispatcher
    from torch._functorch._aot_autograd import descriptors
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
    from torch._ops import OpOverload
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.fx import traceback as fx_traceback
    from torch.fx._lazy_graph_module import _LazyGraphModule as LazyGraphModule
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
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
    "LazyGraphModule",
    "OpOverload",
    "RegionCall",
    "TorchDispatchMode",
    "ambient_autocast",
    "as_fake",
    "as_plain_tensors",
    "as_subclass",
    "assert_later",
    "assigned_buffers",
    "backward_hooks",
    "backward_pre_hooks",
    "call_of",
    "checkpoint_marked",
    "ctc_gradient",
    "ctc_losses",
    "depends_on_data",
    "draws_seen",
    "enable_python_dispatcher",
    "evaluate_fake",
    "fake_mode",
    "forward_hooks",
    "forward_pre_hooks",
    "function_of_context",
    "functorch_nesting",
    "gradient_hooks",
    "group_members",
    "in_checkpoint",
    "inductor_compile",
    "is_higher_order",
    "is_wrapped",
    "joint_graph",
    "math_attention",
    "missing_compiler",
    "module_tables",
    "no_autocast",
    "node_meta",
    "outside_the_trace",
    "parameter_kind",
    "post_accumulate_hooks",
    "preserve_node_meta",
    "random_state",
    "schema",
    "set_buffer",
    "storage_bytes",
    "storage_key",
    "tensor_tables",
    "upper_bound",
    "transform_depth",
    "truth_of",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "version_of",
    "wrapper_kind",
]


ctc_losses: Callable[..., tuple[Tensor, Tensor]] = torch.ops.aten._ctc_loss.Tensor
"""The loss of every sample, and the table that the backward reads."""
ctc_gradient: Callable[..., Tensor] = torch.ops.aten._ctc_loss_backward.Tensor
"""The gradient of the first argument, from the losses and the table."""
assert_later: Callable[..., None] = torch._assert_async
"""Demands that a tensor is true, without waiting for it."""

LINALG_CHECK = torch.fx.node.has_side_effect(torch.ops.aten._linalg_check_errors.default)
"""Raises for a singular matrix; has no result, and dead code elimination keeps it."""


def call_of(module: GraphModule) -> Callable[..., Any]:
    """Return what runs a graph; the code of a lazy one is written now."""
    LazyGraphModule.force_recompile(module)
    return module.forward


_HooksOf = Callable[[Any], Mapping[int, object] | None]


@dataclass(frozen=True)
class JointGraph:
    """Forward and backward of one module in one graph, with the role of each value.

    Attributes
    ----------
    module
        The graph.
    arguments
        Position among the module's arguments -> placeholder; without those that were dropped.
    tangents
        Position among the module's outputs -> placeholder of its gradient; without those that take none.
    outputs
        Position among the module's outputs -> value.
    mutations
        Position of an argument that the module changes -> its new value.
    gradients
        Position of an argument -> its gradient.
    """

    module: GraphModule
    arguments: dict[int, Node]
    tangents: dict[int, Node]
    outputs: dict[int, Node]
    mutations: dict[int, Node]
    gradients: dict[int, Node]


class ChangeCarriesGradient(Exception):
    """The new value of a changed argument depends on parameters; ``args[0]`` is its position."""


def group_members(name: str) -> tuple[int, ...]:
    """Return the ranks in the default process group of the members of the group of this name."""
    from torch.distributed import distributed_c10d

    resolve = distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
    return tuple(distributed_c10d.get_process_group_ranks(resolve(name)))  # type: ignore[arg-type]


def fake_mode() -> FakeTensorMode:
    """Return a fake mode that accepts real constants and data-dependent sizes."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())


def as_fake(
    mode: FakeTensorMode, value: Tensor, requires_grad: bool, device: torch.device | None = None
) -> Tensor:
    """Return a fake leaf with the shape, strides and dtype of ``value``, on its device or the one given."""
    device = device or value.device
    if value.layout != torch.strided:
        return mode.from_tensor(value)
    with mode:
        fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    if isinstance(value, torch.nn.Parameter):
        return nn.Parameter(fake, requires_grad=requires_grad)
    return fake.requires_grad_(requires_grad)


def as_subclass(data: Tensor, kind: type[Tensor], requires_grad: bool) -> Tensor:
    """Return a tensor of another class on the memory of ``data``, made without a call that the class sees."""
    return Tensor._make_subclass(kind, data, requires_grad)


def as_plain_tensors() -> contextlib.AbstractContextManager[object]:
    """Return a context in which a class of tensors does not see what is called with them."""
    return torch._C.DisableTorchFunctionSubclass()


def joint_graph(module: nn.Module, arguments: list[Tensor]) -> JointGraph:
    """Trace forward and backward of a module on fake arguments.

    Parameters
    ----------
    module
        Has no parameters of its own.
    arguments
        Fake tensors; those that require a gradient get one.

    Returns
    -------
    JointGraph
        Without decompositions: only what autograd itself takes apart is taken apart.

    Raises
    ------
    ChangeCarriesGradient
        The module changes an argument to a value that depends on parameters.
    """
    # torch aborts the process where an interrupt comes in the middle of some of its calls.
    interrupts = deferred_signals(signal.SIGINT)
    with interrupts, joint_trace_patched(), torch.enable_grad(), contextlib.ExitStack() as stack:
        joint = aot_export_joint_with_descriptors(stack, module, tuple(arguments), decompositions={})
        graph_module = joint.graph_module
    return _with_roles(graph_module)


def evaluate_fake(node: Node, args: Sequence[object]) -> Tensor | None:
    """Return the tensor that a call would give for these fake arguments; None where torch refuses them."""
    modes = [value.fake_mode for value in tree_leaves(args) if isinstance(value, FakeTensor)]
    target = cast("Callable[..., Tensor]", node.target)
    try:
        with modes[0], torch.no_grad():
            return target(*args, **torch.fx.map_arg(node.kwargs, lambda n: n.meta["val"]))
    except (RuntimeError, ValueError):
        return None


def math_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return ``scaled_dot_product_attention`` as the math backend computes it."""
    kernel = torch.ops.aten._scaled_dot_product_attention_math.default
    results = kernel(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    return cast("tuple[Tensor, Tensor]", results)[0]


def is_higher_order(node: Node) -> bool:
    """Return whether a call takes functions as arguments (``torch.cond`` and its kind)."""
    return isinstance(node.target, torch._ops.HigherOrderOperator)


def transform_depth() -> int:
    """Return how many torch.func transforms (vmap, grad, jvp, functionalize) are being applied."""
    return int(torch._C._functorch.get_dynamic_layer_stack_depth())


def is_wrapped(value: Tensor) -> bool:
    """Return whether a torch.func transform put this tensor around another."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(value))


def functorch_nesting(node: Node) -> int:
    """Return +1 for a call that opens a torch.func transform, -1 for the one that closes it."""
    if getattr(node.target, "__module__", "") != "torch._functorch.predispatch":
        return 0
    name = getattr(node.target, "__name__", "")
    return int("_increment_nesting" in name) - int("_decrement_nesting" in name)


def random_state() -> bytes:
    """Return the real state of the CPU's random numbers, also while fake tensors are traced."""
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
    values = cast("tuple[Node | None, ...]", output.args[0])
    for value, role in zip(values, output.meta["desc"], strict=True):
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


def _argument(role: descriptors.AOTInput) -> int:
    if not isinstance(role, descriptors.PlainAOTInput):
        raise SplitError(f"the joint graph speaks of an argument of unknown role: {role}")
    return int(role.idx)


def preserve_node_meta() -> contextlib.AbstractContextManager[None]:
    """Return a context in which traced nodes inherit the meta set by `node_meta`."""
    return fx_traceback.preserve_node_meta()


def node_meta(node: Node) -> contextlib.AbstractContextManager[None]:
    """Return a context in which traced nodes get the module path and source line of ``node``."""
    return fx_traceback.set_current_meta(node)


def in_checkpoint(node: Node) -> bool:
    """Return whether a traced node was made under `checkpoint_marked`."""
    return CHECKPOINT in (node.meta.get("custom") or ())


@dataclass(frozen=True)
class RegionCall:
    """A call that runs a submodule under a mode, as export makes it of a ``with`` block.

    Attributes
    ----------
    kind, settings
        ``"grad"`` with (enabled,), or ``"autocast"`` with (device type, dtype, enabled, cache enabled).
    body
        Name of the submodule.
    arguments
        What the submodule is called with.
    """

    kind: Literal["grad", "autocast"]
    settings: tuple[object, ...]
    body: str
    arguments: tuple[Argument, ...]

    @staticmethod
    def of(node: Node) -> RegionCall | None:
        """Return what a node of an exported graph runs under a mode; None for any other node."""
        name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
        args = node.args
        if name == "wrap_with_set_grad_enabled":
            return RegionCall("grad", args[:1], str(cast("Node", args[1]).target), args[2:])
        if name == "wrap_with_autocast":
            return RegionCall("autocast", args[:4], str(cast("Node", args[4]).target), args[5:])
        return None


@contextlib.contextmanager
def outside_the_trace() -> Iterator[None]:
    """Compute with real tensors in the midst of a trace, and leave nothing of it in the graph."""
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


def depends_on_data(number: torch.SymBool) -> bool:
    """Return whether the truth of a number depends on the values of tensors, and is not known for all."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols, statically_known_true

    if not free_unbacked_symbols(number):
        return False
    opposite: torch.SymBool = torch.sym_not(number)  # type: ignore[no-untyped-call]
    return not statically_known_true(number) and not statically_known_true(opposite)


def truth_of(value: Tensor) -> bool:
    """Return whether a real tensor is true, in the midst of a trace."""
    with outside_the_trace():
        return bool(value != 0)


@contextlib.contextmanager
def draws_seen() -> Iterator[Callable[[], bool]]:
    """Yield a function that says whether the block drew random numbers; the state is put back."""
    with outside_the_trace():
        state = torch.get_rng_state()
    before = after = random_state()
    try:
        yield lambda: after != before
    finally:
        after = random_state()
        with outside_the_trace():
            torch.set_rng_state(state)


def ambient_autocast() -> list[tuple[str, torch.dtype]]:
    """Return (device type, dtype) of the autocast regions that the caller is in."""
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    return [(kind, torch.get_autocast_dtype(kind)) for kind in kinds]


@contextlib.contextmanager
def no_autocast() -> Iterator[None]:
    """Leave the autocast regions that the caller is in, for a graph whose casts are calls of its own."""
    with contextlib.ExitStack() as stack:
        for kind, _ in ambient_autocast():
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def wrapper_kind(module: nn.Module) -> str:
    """Return the name of the parallel wrapper or script that a module is, or an empty string."""
    if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
        return type(module).__name__
    if isinstance(module, torch.jit.ScriptModule):
        return "torch.jit"
    names = {base.__name__ for base in type(module).__mro__ if base.__module__.startswith("torch.")}
    if "DDP" in names:
        return "replicate"
    return "FullyShardedDataParallel" if names & {"FullyShardedDataParallel", "FSDPModule"} else ""


def parameter_kind(parameter: Tensor) -> str:
    """Return the name of a tensor subclass that cannot be captured, or an empty string."""
    if isinstance(parameter, nn.parameter.UninitializedParameter | nn.parameter.UninitializedBuffer):
        return "lazy parameter"
    with as_plain_tensors():
        data = parameter.data
    return "" if type(data) is Tensor or isinstance(data, FakeTensor) else type(data).__name__


def schema(target: OpOverload) -> torch.FunctionSchema:
    """Return an operator's schema: arguments with alias annotations, whether it changes any."""
    return target._schema


def storage_key(value: Tensor) -> int:
    """Return a number that two tensors, fake ones too, have in common iff they share storage."""
    return int(value.untyped_storage()._cdata)


def version_of(tensor: Tensor) -> int:
    """Return a number that grows with every change of a tensor in place."""
    return tensor._version


def function_of_context(context: object, default: type) -> type:
    """Return the class of the autograd.Function that a context belongs to, or the default."""
    found: type = getattr(type(context), "_forward_cls", default)
    return found


def storage_bytes(value: Tensor) -> int:
    """Return the bytes of a fake tensor's storage; the upper bound where the size depends on data."""
    size = cast("int | torch.SymInt", value.untyped_storage().nbytes())
    bound = upper_bound(size)
    return 1 << 60 if bound is None else min(bound, 1 << 60)


def upper_bound(size: int | torch.SymInt) -> int | None:
    """Return the largest value of a size that depends on data; None where no bound is known."""
    if isinstance(size, int):
        return size
    bound = size.node.shape_env.bound_sympy(size.node.expr).upper
    try:
        return int(bound)
    except (ArithmeticError, AttributeError, TypeError, ValueError):
        return None


forward_pre_hooks: _HooksOf = operator.attrgetter("_forward_pre_hooks")
forward_hooks: _HooksOf = operator.attrgetter("_forward_hooks")
backward_pre_hooks: _HooksOf = operator.attrgetter("_backward_pre_hooks")
backward_hooks: _HooksOf = operator.attrgetter("_backward_hooks")
"""Hooks of a module, by kind: its own table."""
gradient_hooks: _HooksOf = operator.attrgetter("_backward_hooks")
"""What was registered with ``register_hook`` on a parameter."""


def assigned_buffers(model: nn.Module) -> dict[tuple[nn.Module, str], Tensor]:
    """Return (module, name) -> buffer, to see after a call which ones were replaced."""
    return {
        (module, name): buffer
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    }


def set_buffer(module: nn.Module, name: str, buffer: Tensor) -> None:
    """Put ``buffer`` back under its name."""
    module._buffers[name] = buffer


def inductor_compile(module: GraphModule) -> Callable[[list[object]], Sequence[object]]:
    """Compile a graph that takes one list and empties it with inductor; the result is called in the same way.

    The graph is decomposed with inductor's own table. Random calls stay eager's, so that they draw the same
    bits. Results keep the strides of the graph. Raises what inductor raises.
    """
    import torch._inductor.config
    from torch._inductor.compile_fx import compile_fx_inner, record_original_output_strides
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.virtualized import V
    from torch.fx.experimental.proxy_tensor import make_fx

    placeholders = module.graph.find_nodes(op="placeholder")
    values = [node.meta["val"] for node in placeholders]
    examples = [value.detach() if isinstance(value, Tensor) else value for value in values]
    modes = [value.fake_mode for value in examples if isinstance(value, FakeTensor)]
    with torch._inductor.config.patch(fallback_random=True), torch.no_grad(), quiet():
        traced = make_fx(
            lambda *given: module.forward(list(given)), decomposition_table=select_decomp_table()
        )(*examples)
        output = traced.graph.output_node()
        results = cast("Sequence[Argument]", output.args[0])
        output.meta["user_visible_output_idxs"] = list(range(len(results)))
        record_original_output_strides(traced)
        with V.set_fake_mode(modes[0] if modes else fake_mode()):
            return compile_fx_inner(traced, examples, is_inference=True)


def missing_compiler() -> str:
    """Return why inductor cannot build code for the CPU here; an empty string when it can."""
    from torch._inductor import cpp_builder, exc

    try:
        cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler as error:
        return str(error).splitlines()[0]
    return ""
