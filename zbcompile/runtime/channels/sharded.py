"""Stages whose parameters are sharded over replicas by torch's ``fully_shard`` (FSDP2).

Each rank keeps a part of every parameter (a DTensor), and of its gradient and optimizer state. A stage is
gathered before its first F and let go after its last backward work; its gradients are summed and scattered.
These are points of the order (UNSHARD, REDUCE_GRAD, RESHARD) and not of modules: the graphs run as they are.

torch's calls wait for gloo, so on CPU they run on a thread of their own, one after the other, in the order of
the program. On a GPU they are queued on torch's own streams.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import ProcessGroup
from torch.distributed.fsdp import FSDPModule, fully_shard

from zbcompile.runtime import torch_private
from zbcompile.runtime.channels.channel import Key
from zbcompile.runtime.channels.gloo import BrokenChannelError
from zbcompile.runtime.connections import break_connections, leave_group
from zbcompile.runtime.doing import ANY_RANK
from zbcompile.runtime.group import PipelineGroup

__all__ = ["ShardCall", "ShardTicket", "ShardedStage", "ShardedStages", "StageCalls"]

ShardCall = Callable[[], Mapping[str, Tensor]]
"""Returns tensors by name."""


class StageCalls(Protocol):
    """What a rank does once a step for a whole stage."""

    @property
    def stages(self) -> Collection[int]:
        """The stages for which there is anything to do."""

    def unshard(self, stage: int) -> ShardTicket:
        """Begin to gather a stage; the ticket finds its whole parameters."""

    def reduce(self, stage: int, gradients: Mapping[str, Tensor]) -> ShardTicket:
        """Begin to sum a stage's gradients; the ticket finds this rank's part of them."""

    def reshard(self, stage: int) -> ShardTicket:
        """Let a stage go once what was begun before is done."""


class ShardedStage:
    """The parameters of one stage.

    Parameters
    ----------
    parameters
        By name; each is in no other stage.
    mesh
        The ranks that share them: along its last dimension; along a first one, if there are two, ranks have
        the same parts.

    Attributes
    ----------
    parts
        This rank's part of each, by name: DTensors that stay the same objects.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], mesh: DeviceMesh) -> None:
        container = nn.Module()
        self._keys = {name: f"p{k}" for k, name in enumerate(parameters)}
        for name, parameter in parameters.items():
            container.register_parameter(self._keys[name], parameter)
        sharded = fully_shard(container, mesh=mesh, reshard_after_forward=False)
        assert isinstance(sharded, FSDPModule)
        self._module: FSDPModule = sharded
        sharded.set_gradient_divide_factor(1.0)  # sums are divided once, when they are handed over
        sharded.set_force_sum_reduction_for_comms(True)
        torch_private.begin_sharded(sharded)
        self.parts = self._present()

    def _present(self) -> dict[str, nn.Parameter]:
        tables = torch_private.tensor_tables(self._module)  # type: ignore[arg-type]
        return {name: tables[0][key] for name, key in self._keys.items()}  # type: ignore[misc]

    def unshard(self) -> dict[str, nn.Parameter]:
        """Gather the parameters; return them whole, by name."""
        self._module.unshard()
        return self._present()

    def reshard(self) -> None:
        """Let the whole parameters go."""
        self._module.reshard()

    def reduce(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Sum gradients of the whole parameters over the ranks; return this rank's part of them, by name."""
        kept = {name: part.grad for name, part in self.parts.items()}
        for name, part in self._present().items():
            self.parts[name].grad = None
            part.grad = gradients.get(name)
        # The hooks run when gradients are handed over: here sums are not divided yet, on another thread.
        with torch_private.without_accumulate_hooks(self.parts.values()):
            torch_private.reduce_sharded(self._module)
        found = {}
        for name, part in self.parts.items():
            if name in gradients and part.grad is not None:
                found[name] = part.grad
            part.grad = kept[name]
        return found


class ShardTicket:
    """A call of a sharded stage.

    Parameters
    ----------
    key, peer
        What it is, in errors, and a rank that takes part.
    call
        What it does.
    thread
        Where it runs, after those before it; None: here and now.

    Attributes
    ----------
    begun_ns, ended_ns
        When it ran, in ns of the monotonic clock.
    """

    def __init__(self, key: Key, peer: int, call: ShardCall, thread: ThreadPoolExecutor | None) -> None:
        self.key: Key = key
        self.peer, self._call = peer, call
        self.begun_ns = self.ended_ns = time.perf_counter_ns()
        if thread is not None:
            self._future = thread.submit(self._run)
        else:
            self._future = Future()
            self._future.set_result(self._run())

    def _run(self) -> dict[str, Tensor]:
        self.begun_ns = time.perf_counter_ns()
        try:
            with torch.no_grad():
                return dict(self._call())
        finally:
            self.ended_ns = time.perf_counter_ns()

    def ready(self) -> bool:
        return self._future.done()

    def wait(self) -> None:
        try:
            self._future.result()
        except (RuntimeError, CancelledError) as error:
            raise BrokenChannelError(ANY_RANK, self.key, error) from error

    def found(self) -> dict[str, Tensor]:
        """Return what the call returned, once it has been waited for."""
        return self._future.result()

    def tensors(self) -> list[Tensor]:
        return []


class ShardedStages:
    """The sharded stages of a rank.

    Parameters
    ----------
    group
        All ranks, which come here at the same time.
    parameters
        Stage -> its parameters by name.
    device
        Where they are.
    """

    def __init__(
        self, group: PipelineGroup, parameters: Mapping[int, Mapping[str, nn.Parameter]], device: torch.device
    ) -> None:
        self._is_gloo = device.type != "cuda"
        mesh, self._groups = _sharing_mesh(group, device)
        self.stages = {s: ShardedStage(own, mesh) for s, own in parameters.items() if own}
        self._peer = group.shards[(group.shards.index(group.rank) + 1) % len(group.shards)]
        self._thread = ThreadPoolExecutor(1, "zbcompile shards") if self._is_gloo else None

    def unshard(self, stage: int) -> ShardTicket:
        """Begin to gather a stage; the ticket finds its whole parameters."""
        return self._begin((stage, "unshard"), self.stages[stage].unshard)

    def reduce(self, stage: int, gradients: Mapping[str, Tensor]) -> ShardTicket:
        """Begin to sum a stage's gradients; the ticket finds this rank's part of them."""
        return self._begin((stage, ""), lambda: self.stages[stage].reduce(gradients))

    def reshard(self, stage: int) -> ShardTicket:
        """Let a stage go once what was begun before is done."""

        def let_go() -> dict[str, Tensor]:
            self.stages[stage].reshard()
            return {}

        return self._begin((stage, "reshard"), let_go)

    def _begin(self, key: Key, call: ShardCall) -> ShardTicket:
        return ShardTicket(key, self._peer, call, self._thread)

    def abandon(self, fatal: bool) -> None:
        """Break all connections, from any thread."""
        for group in self._groups if fatal else ():
            if self._is_gloo:
                break_connections(group)
            else:
                group.abort()

    def close(self) -> None:
        """Leave the communicators. Parameters stay sharded."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
        groups, self._groups = self._groups, []
        for group in groups:
            leave_group(group)


def _sharing_mesh(group: PipelineGroup, device: torch.device) -> tuple[DeviceMesh, list[ProcessGroup]]:
    """Return the mesh of the replicas of this rank, and the communicators that were made for it.

    It has one dimension where every rank has a part of its own, and two where others have the same. Its
    dimensions have names that no other pipeline's have: torch takes equal meshes for one another, and would
    use the communicators of a pipeline that is closed.
    """
    backend = "gloo" if device.type != "cuda" else "nccl"
    shared = group.new_group(backend, group.shards)
    names = tuple(f"{name} of {shared.group_name}" for name in ("dp", "dp_shard"))
    if len(group.copies) == 1:
        return DeviceMesh.from_group(shared, device.type, mesh_dim_names=names[1:]), [shared]
    groups = [group.new_group(backend, group.copies), shared]
    ranks = torch.tensor([[group.members[rank] for rank in row] for row in group.grid])
    mesh = DeviceMesh.from_group(groups, device.type, ranks, mesh_dim_names=names)
    return mesh, groups
