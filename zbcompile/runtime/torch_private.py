"""Every private torch name that the runtime uses, and nothing else. Checked on torch 2.13 and 2.14."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler, OptState
from torch.distributed.distributed_c10d import ProcessGroup, Store
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "TorchDispatchMode",
    "accumulate_hooks",
    "begin_sharded",
    "copy_all",
    "found_not_finite",
    "has_step_hooks",
    "is_unscaled",
    "mark_unscaled",
    "module_tables",
    "new_group",
    "own_store",
    "post_accumulate_hooks",
    "profiler_enabled",
    "reduce_sharded",
    "tensor_tables",
    "without_accumulate_hooks",
]


def new_group(name: str, ranks: list[int], timeout: timedelta, backend: str) -> ProcessGroup:
    """Call ``dist.new_group`` for some ranks, which alone call it, under a name of our own.

    torch would name it by its members and by how many groups the process has. Such a name comes back when a
    group was destroyed, and differs between ranks that belong to different numbers of groups; in both cases
    the ranks never meet.

    gloo's call returns on a rank as soon as this rank is connected. If it then left the group, or its process
    ended, a slower rank would find its connection closed. So the ranks of a gloo group wait for each other.

    Raises
    ------
    ConnectionError
        A rank was lost while the others waited for it.
    """
    module = dist.distributed_c10d
    given = module._process_group_name
    module._process_group_name = lambda ranks, use_hashed_name: module.GroupName(name)
    try:
        group = dist.new_group(ranks, timeout=timeout, backend=backend, use_local_synchronization=True)
    finally:
        module._process_group_name = given
    if backend == "gloo":
        try:
            dist.barrier(group)
        except RuntimeError as error:
            raise ConnectionError(f"a rank left the new group {name}") from error
    return cast(ProcessGroup, group)


def accumulate_hooks(parameter: Tensor) -> list[Callable[[Tensor], None]]:
    """Return what was registered with ``register_post_accumulate_grad_hook``, in order."""
    hooks = post_accumulate_hooks(parameter)
    return list(hooks.values()) if hooks else []


def post_accumulate_hooks(parameter: Tensor) -> Mapping[int, Callable[[Tensor], None]] | None:
    """Return the table that ``register_post_accumulate_grad_hook`` fills; None before the first."""
    return getattr(parameter, "_post_accumulate_grad_hooks", None)


@contextlib.contextmanager
def without_accumulate_hooks(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Keep torch from calling what was registered with ``register_post_accumulate_grad_hook``."""
    tables = [cast("dict[int, Any]", table) for p in parameters if (table := post_accumulate_hooks(p))]
    held = [dict(table) for table in tables]
    for table in tables:
        table.clear()
    try:
        yield
    finally:
        for table, hooks in zip(tables, held, strict=True):
            table.update(hooks)


def found_not_finite(scaler: GradScaler, optimizer: Optimizer | None) -> dict[torch.device, Tensor]:
    """Return a scaler's table of what it found in gradients: device -> not 0 if one is not finite."""
    found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    return cast("dict[torch.device, Tensor]", found)


def is_unscaled(scaler: GradScaler, optimizer: Optimizer | None) -> bool:
    """Return whether ``unscale_`` has been called for an optimizer since the last update."""
    return scaler._per_optimizer_states[id(optimizer)]["stage"] is not OptState.READY


def mark_unscaled(scaler: GradScaler) -> None:
    """Note that ``unscale_`` has been called for no optimizer since the last update."""
    scaler._per_optimizer_states[id(None)]["stage"] = OptState.UNSCALED


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Return whether anything was registered to run before or after the optimizer's step, or any's."""
    own = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    return any((*own, _global_optimizer_pre_hooks, _global_optimizer_post_hooks))


def module_tables(
    module: nn.Module,
) -> tuple[Mapping[str, nn.Module | None], Mapping[str, Tensor | None], Mapping[str, Tensor | None]]:
    """Return the module's own tables of children, parameters and buffers."""
    return module._modules, module._parameters, module._buffers


def tensor_tables(module: nn.Module) -> tuple[dict[str, Tensor | None], dict[str, Tensor | None]]:
    """Return the module's own tables of parameters and buffers: tensors are replaced there."""
    return cast("dict[str, Tensor | None]", module._parameters), module._buffers


def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy tensors into others, in one call that no signal handler interrupts."""
    with torch.no_grad():
        torch._foreach_copy_(targets, sources)


def begin_sharded(module: FSDPModule) -> None:
    """Make ready a module that ``fully_shard`` was applied to, which will never run a forward of its own."""
    module._get_fsdp_state()._lazy_init()


def reduce_sharded(module: FSDPModule) -> None:
    """Do what FSDP does after a module's backward: sum and scatter the gradients of its whole parameters.

    The module stays as it is, gathered.
    """
    module.set_is_last_backward(True)
    module.set_requires_gradient_sync(True)
    module.set_reshard_after_backward(False)
    state = module._get_fsdp_state()
    for group in state._fsdp_param_groups:
        group.post_backward()
    state._root_post_backward_final_callback()


def profiler_enabled() -> bool:
    """Whether a torch profiler is recording."""
    return bool(torch.autograd._profiler_enabled())  # type: ignore[attr-defined]


def own_store() -> Store:
    """Return the key-value store of the default process group, through a connection of its own if it has one.

    A thread may then use it while another thread waits in the store.
    """
    store = dist.distributed_c10d._get_default_store()
    try:
        return cast(Store, store.clone())  # type: ignore[attr-defined]
    except (AttributeError, RuntimeError, NotImplementedError):
        return store
