"""Weights that replicas share (FSDP2): sharded when the pipeline is compiled, whole where they are used."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from zbcompile.errors import UsageError
from zbcompile.options import CompileOptions
from zbcompile.passes import torch_private
from zbcompile.passes.live_objects import live_instances
from zbcompile.passes.split.staged_model import StagedModel
from zbcompile.runtime.channels.sharded import ShardedStages
from zbcompile.runtime.gradients import tied_holders
from zbcompile.runtime.group import PipelineGroup
from zbcompile.runtime.torch_private import accumulate_hooks

__all__ = [
    "Shards",
    "is_sharded",
    "local",
    "refuse_dtensors",
    "refuse_unshardable",
    "split_like",
    "whole",
]


def refuse_unshardable(options: CompileOptions, staged: StagedModel, group: PipelineGroup | None) -> None:
    """Refuse what cannot be sharded, where a mesh has ``dp_shard``.

    Raises
    ------
    UsageError
        Names the option or the parameter.
    """
    if group is None or len(group.shards) == 1:
        return
    for name, value in (("free_model", options.free_model), ("gradient_dtype", options.gradient_dtype)):
        if value:
            raise UsageError(
                f"{name} cannot be had with weights that replicas share",
                where="mesh",
                fix=f"leave {name} out, or give replicas all weights (dp in place of dp_shard)",
            )
    for name, stages in tied_holders([stage.parameters for stage in staged.stages]).items():
        raise UsageError(
            "several stages hold a parameter that replicas would share, and gather it at different times",
            where=name,
            given=f"stages {', '.join(map(str, stages))}",
            fix="cut so that one stage holds it, untie it, or use dp in place of dp_shard",
        )
    for stage in staged.stages:
        _refuse_tensors({name: staged.captured.state[name] for name in stage.parameters}, stage.index)
    empty = next((name for name, tensor in staged.captured.state.items() if tensor.is_meta), None)
    if empty is not None:
        raise UsageError(
            "a model on the meta device cannot be sharded: its weights have no values yet",
            where=empty,
            fix="build it with values, or use dp in place of dp_shard",
        )


def _refuse_tensors(parameters: Mapping[str, Tensor], stage: int) -> None:
    """Refuse parameters of a stage that torch's FSDP2 does not take."""
    fix = "give replicas all weights: a dimension dp in place of dp_shard"
    for name, tensor in parameters.items():
        if tensor.dim() == 0 or not tensor.is_contiguous():
            what = "a single number" if tensor.dim() == 0 else "not contiguous"
            raise UsageError(f"a parameter that replicas would share is {what}", where=name, fix=fix)
    first = next(iter(parameters.items()), None)
    for name, tensor in parameters.items():
        if first is not None and tensor.dtype != first[1].dtype:
            raise UsageError(
                f"parameters of stage {stage} that replicas would share differ in dtype",
                where=name,
                needed=f"{first[1].dtype}, as {first[0]}",
                given=tensor.dtype,
                fix=fix,
            )


class Shards:
    """The sharded stages of this process, and what stands in the model for them.

    Parameters
    ----------
    trained
        The module that owns all tensors: its parameters are replaced by this rank's parts.
    group
        All ranks, which come here.
    own
        Stage of this rank -> its parameters by name.
    device
        Where they are.

    Attributes
    ----------
    stages
        What gathers, sums and scatters.
    """

    def __init__(
        self,
        trained: nn.Module,
        group: PipelineGroup,
        own: Mapping[int, Mapping[str, nn.Parameter]],
        device: torch.device,
    ) -> None:
        self._trained, self._group = trained, group
        self.stages = ShardedStages(group, own, device)
        group.watchdog.on_end.append(self.stages.abandon)
        self._parts = {n: p for stage in self.stages.stages.values() for n, p in stage.parts.items()}
        before = {name: parameter for stage in own.values() for name, parameter in stage.items()}
        _refuse_optimizers(before)
        for name, part in self._parts.items():
            _take_over(before[name], part)
        _replace(trained, [(before[name], part) for name, part in self._parts.items()])

    def check(self, state: Mapping[str, Tensor]) -> None:
        """Refuse parameters that somebody else has put in the place of the parts."""
        for name, part in self._parts.items():
            if state[name] is not part:
                raise UsageError(
                    "a sharded parameter was replaced after the model was compiled",
                    where=name,
                    fix="copy values into it (pipeline.load_state_dict), and leave the parameter itself",
                )

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """Have the whole parameters stand in the model. All ranks come here."""
        pairs: list[tuple[Tensor, Tensor]] = []
        for stage in self.stages.stages:
            found = self._group.alone(self.stages.unshard(stage).found, f"gathers stage {stage}")
            pairs += [(self._parts[name], parameter) for name, parameter in found.items()]
        _replace(self._trained, pairs)
        try:
            yield
        finally:
            _replace(self._trained, [(whole, part) for part, whole in pairs])
            for stage in self.stages.stages:
                self.stages.reshard(stage).found()

    def close(self) -> None:
        """Leave the communicator."""
        if self.stages.abandon in self._group.watchdog.on_end:
            self._group.watchdog.on_end.remove(self.stages.abandon)
        self.stages.close()


def _take_over(parameter: nn.Parameter, part: nn.Parameter) -> None:
    """Give a part the attributes that the user has set on its parameter, and the hooks."""
    vars(part).update({name: value for name, value in vars(parameter).items() if not name.endswith("_hooks")})
    for hook in accumulate_hooks(parameter):
        part.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]


def _refuse_optimizers(replaced: Mapping[str, nn.Parameter]) -> None:
    """Refuse optimizers of parameters that parts take the place of: they would step on what nobody uses."""
    names = {id(parameter): name for name, parameter in replaced.items()}
    for found in live_instances(torch.optim.Optimizer):
        held = [id(parameter) for group in found.param_groups for parameter in group["params"]]
        name = next((names[key] for key in held if key in names), None)
        if name is not None:
            raise UsageError(
                f"{type(found).__name__} was made before the weights were sharded, and would train nothing",
                where=name,
                fix="give compile() example_args, and make the optimizer of pipeline.parameters() after it",
            )


def refuse_dtensors(state: Mapping[str, Tensor]) -> None:
    """Refuse parameters that were sharded from outside."""
    for name, tensor in state.items():
        if isinstance(tensor, DTensor):
            raise UsageError(
                "a parameter was made a DTensor after the model was compiled: graphs take whole ones",
                where=name,
                fix="let compile(mesh=) shard it, with a dimension dp_shard",
            )


def _replace(trained: nn.Module, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Put other tensors into the model wherever it holds certain ones."""
    other = {id(old): new for old, new in pairs}
    for module in trained.modules():
        for table in torch_private.tensor_tables(module):
            for name, tensor in table.items():
                if id(tensor) in other:
                    table[name] = other[id(tensor)]


def is_sharded(tensor: Tensor) -> bool:
    """Return whether a tensor is this rank's part of a larger one."""
    return isinstance(tensor, DTensor)


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a sharded tensor; any other as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """Return all of a sharded tensor, whose ranks all come here; any other as it is."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        return tensor.full_tensor()


def split_like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Return a whole tensor sharded as a parameter is, where that has its shape; else as it is."""
    if not isinstance(parameter, DTensor) or tensor.shape != parameter.shape:
        return tensor
    here = tensor.to(parameter.device)
    return distribute_tensor(here, parameter.device_mesh, parameter.placements, src_data_rank=None)
