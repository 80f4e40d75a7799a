"""What a process saves: the tensors of its own stages, and its optimizer's, under the model's own names.

The parts of all ranks together are what the unpipelined model would save, so a checkpoint can be loaded with
another number of ranks or stages, or into the plain model. Optimizer states have the flat form of
``torch.distributed.checkpoint.state_dict`` (``flatten_optimizer_state_dict``): ``state.NAME.exp_avg``,
``param_groups.NAME.lr``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zbcompile.compiler.parts import Parts
from zbcompile.compiler.sharding import split_like
from zbcompile.errors import ShapeError, UsageError
from zbcompile.passes.split.stage_graphs import StageGraphs

__all__ = [
    "check_model",
    "load_model",
    "load_optimizer",
    "model_state",
    "names_of",
    "optimizer_parts",
    "optimizer_state",
    "own_names",
    "own_tensors",
]


def own_tensors(
    trained: nn.Module, stages: Iterable[StageGraphs], local: Collection[int], first: bool
) -> dict[str, Tensor]:
    """Return name -> tensor of what this process saves, in the order of the model's state dict.

    Parameters
    ----------
    trained
        What owns all tensors.
    stages
        All of them.
    local
        Numbers of the stages of this process.
    first
        Whether this process also saves what belongs to no stage.

    Raises
    ------
    UsageError
        A module has extra state that is no tensor; or a tensor of this process is on the meta device, where
        saving and loading would do nothing.
    """
    whole = trained.state_dict(keep_vars=True)
    other = next((name for name, value in whole.items() if not isinstance(value, Tensor)), None)
    if other is not None:
        raise UsageError(
            "the model has state that is no tensor",
            where=other,
            fix="save it beside the checkpoint, and leave it out of the module's get_extra_state()",
        )
    own = {name: whole[name] for name in own_names(whole, stages, local, first)}
    empty = next((name for name, tensor in own.items() if tensor.is_meta), None)
    if empty is not None:
        raise UsageError(
            "a tensor is on the meta device and has no values yet",
            where=empty,
            fix="call stage.materialize(...) for every stage in pipeline.local_stages",
        )
    return own


def own_names(
    whole: Mapping[str, Any], stages: Iterable[StageGraphs], local: Collection[int], first: bool
) -> list[str]:
    """Return the names of what this process saves; ``whole`` is the state dict, the rest as `own_tensors`."""
    held: dict[int, set[int]] = {}
    for stage in stages:
        for name in (*stage.parameters, *stage.buffers):
            if name in whole:
                held.setdefault(id(whole[name]), set()).add(stage.index)
    return [
        name
        for name, tensor in whole.items()
        if (held[id(tensor)] & set(local) if id(tensor) in held else first)
    ]


def model_state(own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors to save: they share memory with the model's."""
    return {name: tensor.detach() for name, tensor in own.items()}


def check_model(own: Mapping[str, Tensor], state: Mapping[str, Tensor], parts: Parts | None = None) -> None:
    """Refuse saved values that this process's tensors cannot take.

    Parameters
    ----------
    own, state
        Tensors and saved values, by name.
    parts
        Where the saved values are whole tensors: which of this process's are parts.

    Raises
    ------
    ShapeError
        A saved tensor has another shape.
    UsageError
        A tensor is missing.
    """
    for name, tensor in own.items():
        saved = _saved(state, name)
        needed = list(tensor.shape) if parts is None else parts.whole_shape(name, tensor)
        if list(saved.shape) != needed:
            raise ShapeError(
                "a saved tensor has another shape than the model's",
                where=name,
                needed=needed,
                given=list(saved.shape),
                fix="load the checkpoint of this model",
            )


def load_model(own: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    """Copy saved values into this process's tensors: all of them, or none where `check_model` refuses one."""
    check_model(own, state)
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(split_like(state[name], tensor))


def optimizer_state(trained: nn.Module, own: Collection[str], optimizer: Optimizer) -> dict[str, Any]:
    """Return the optimizer's state and options of every parameter of this process.

    Parameters
    ----------
    trained
        What owns all parameters.
    own
        Names of the parameters that this process trains. An optimizer may hold those of other ranks, too.
    optimizer
        Any of torch's.

    Raises
    ------
    UsageError
        The optimizer holds a parameter that is none of the model's.
    """
    name_of = names_of(trained, optimizer)
    flat: dict[str, Any] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = name_of[parameter]
            if name not in own:
                continue
            for key, value in optimizer.state.get(parameter, {}).items():
                flat[f"state.{name}.{key}"] = value
            for key, value in group.items():
                if key not in ("params", "param_names"):
                    flat[f"param_groups.{name}.{key}"] = value
    return flat


def load_optimizer(
    trained: nn.Module, own: Collection[str], optimizer: Optimizer, state: Mapping[str, Any]
) -> None:
    """Give the optimizer what `optimizer_state` returned, here or on other ranks; arguments as there.

    It is unchanged where `optimizer_parts` raises.
    """
    optimizer.load_state_dict(optimizer_parts(trained, own, optimizer, state))


def optimizer_parts(
    trained: nn.Module, own: Collection[str], optimizer: Optimizer, state: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what ``optimizer.load_state_dict`` takes, from what `optimizer_state` returned.

    Raises
    ------
    UsageError
        Options of a parameter are missing, or differ within one of the optimizer's groups; or the optimizer
        holds a parameter that is none of the model's.
    """
    name_of = names_of(trained, optimizer)
    whole = optimizer.state_dict()
    groups: list[dict[str, Any]] = []
    states: dict[int, dict[str, Any]] = {}
    count = 0
    for group in optimizer.param_groups:
        found: dict[str, Any] = {}
        for parameter in group["params"]:
            name, position = name_of[parameter], count
            count += 1
            if name not in own:
                continue
            options = _below(state, f"param_groups.{name}.")
            if not options:
                raise UsageError(
                    "the saved optimizer has no options of a parameter",
                    where=name,
                    fix="load the state that optimizer_state_dict() saved, of all ranks",
                )
            if found and options != found:
                raise UsageError(
                    "parameters of one group were saved with different options",
                    where=name,
                    needed=found,
                    given=options,
                    fix="make the groups of the optimizer as they were when it was saved",
                )
            found = options
            if entries := _below(state, f"state.{name}."):
                states[position] = entries
        groups.append({**whole["param_groups"][len(groups)], **found})
    return {"state": states, "param_groups": groups}


def names_of(trained: nn.Module, optimizer: Optimizer) -> dict[nn.Parameter, str]:
    """Return the names of the model's parameters.

    Raises
    ------
    UsageError
        The optimizer holds one that is none of them.
    """
    names = {parameter: name for name, parameter in trained.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in names:
                raise UsageError(
                    "the optimizer holds a parameter that is not the model's",
                    given=f"shape {list(parameter.shape)}",
                    fix="make the optimizer from pipeline.parameters()",
                )
    return names


def _below(state: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}


def _saved(state: Mapping[str, Tensor], name: str) -> Tensor:
    if not isinstance(state.get(name), Tensor):
        raise UsageError(
            "the saved state lacks a tensor of this process's stages",
            where=name,
            fix="load the checkpoint of this model, of all ranks",
        )
    return state[name]
