"""Weights for a part of a model that was built on the meta device: only the named tensors become real.

A rank that runs one stage of a model too big for it gives memory to that stage's tensors alone.
Parameters come from a state dict, from safetensors files (no pickle), or from each module's own
initialisation, which draws from a random stream per module, so that a weight is the same whichever rank makes
it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from zbcompile.errors import ShapeError, UsageError
from zbcompile.runtime.real_buffers import real_buffers
from zbcompile.runtime.tensor_files import TensorFiles
from zbcompile.runtime.torch_private import tensor_tables

__all__ = ["materialize"]


def materialize(
    model: nn.Module,
    names: Iterable[str],
    *,
    state: Mapping[str, Tensor] | str | Path | None = None,
    init_weights: Callable[[nn.Module], object] | None = None,
    build: Callable[[], nn.Module] | None = None,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> dict[str, Tensor]:
    """Give memory and values on ``device`` to the parameters and buffers ``names`` of ``model``, in place.

    Parameters
    ----------
    model
        The model; tensors that are real already are left alone.
    names
        Canonical names (the first of a tied parameter).
    state
        A state dict, a safetensors file, or a directory of them with their index; read name by name.
        A value is cast to the dtype of the model, as ``load_state_dict`` does.
    init_weights
        Called with every module that owns one of ``names``; default ``module.reset_parameters()``.
        Used for parameters if there is no ``state``.
    build
        Makes the model a second time; buffers that are not in ``state`` are taken from it. It is run with
        parameters on the meta device, so it needs no memory for them.
    device
        Where the tensors go.
    seed
        Seed of the random streams that the initialisation draws from.

    Returns
    -------
    dict
        Name -> tensor, for what became real. Every place that held the old tensor holds the new one.

    Raises
    ------
    UsageError
        The model lacks a name, no source has a value, a module has no initialisation, or buffers depend on
        parameters or on random numbers.
    ShapeError
        A value has another shape.
    """
    places = _places(model)
    wanted = [name for name in dict.fromkeys(names) if _known(name, places).is_meta]
    files = TensorFiles(state) if isinstance(state, str | Path) else state
    parameters = [name for name in wanted if isinstance(places[name][0][2], nn.Parameter)]
    buffers = [name for name in wanted if not isinstance(places[name][0][2], nn.Parameter)]
    values: dict[str, Tensor] = {}
    if files is not None:
        values = {name: files[name] for name in wanted if name in files}
        missing = [name for name in parameters if name not in values]
        if missing:
            raise UsageError(
                f"no value for {len(missing)} parameters in the state given", where=", ".join(missing[:5])
            )
    elif parameters:
        values = _initialised(model, parameters, places, init_weights, seed)
    unknown = [name for name in buffers if name not in values]
    if unknown:
        values.update(_from_build(unknown, build))
    return {name: _put(places[name], name, values[name], torch.device(device)) for name in wanted}


_Place = tuple[nn.Module, str, Tensor]
"""Where a tensor is held: (module, attribute, tensor)."""


def _places(model: nn.Module) -> dict[str, list[_Place]]:
    """Return canonical name -> every place that holds the tensor."""
    first: dict[int, str] = {}
    found: dict[str, list[_Place]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for table in tensor_tables(module):
            for leaf, value in table.items():
                if value is not None:
                    name = first.setdefault(id(value), f"{path}.{leaf}" if path else leaf)
                    found.setdefault(name, []).append((module, leaf, value))
    return found


def _known(name: str, places: Mapping[str, list[_Place]]) -> Tensor:
    if name not in places:
        raise UsageError(f"the model has no parameter or buffer {name!r}", fix="use the stage's own names")
    return places[name][0][2]


def _initialised(
    model: nn.Module,
    names: list[str],
    places: Mapping[str, list[_Place]],
    init_weights: Callable[[nn.Module], object] | None,
    seed: int,
) -> dict[str, Tensor]:
    """Return values of ``names`` by the initialisation of the modules that own them, one module at a time."""
    owners: dict[int, list[str]] = {}
    for name in names:
        owners.setdefault(id(places[name][0][0]), []).append(name)
    paths = {id(module): path for path, module in model.named_modules()}
    values: dict[str, Tensor] = {}
    for key, own in owners.items():
        module = places[own[0]][0][0]
        made = _initialise(module, paths[key], init_weights, seed)
        values.update({name: made[places[name][0][1]] for name in own})
    return values


def _initialise(
    module: nn.Module, path: str, init_weights: Callable[[nn.Module], object] | None, seed: int
) -> dict[str, Tensor]:
    """Return all parameters of one module, initialised on the CPU; the module itself stays as it is."""
    reset = getattr(module, "reset_parameters", None)
    if init_weights is None and reset is None:
        raise UsageError(
            f"{type(module).__name__} has no reset_parameters()",
            where=path,
            fix="give init_weights=, a function of a module, or state=",
        )
    table, _ = tensor_tables(module)
    kept = dict(table)
    stream = int.from_bytes(hashlib.sha256(f"{seed}:{path}".encode()).digest()[:8], "big") >> 1
    try:
        for name, value in kept.items():
            if value is not None:
                fresh = torch.full_like(value, float("nan") if value.is_floating_point() else 0, device="cpu")
                table[name] = nn.Parameter(fresh, requires_grad=value.requires_grad)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(stream)
            init_weights(module) if init_weights is not None else reset()  # type: ignore[misc]
        made = {name: value.detach() for name, value in table.items() if value is not None}
    finally:
        table.update(kept)
    untouched = [name for name, value in made.items() if value.is_floating_point() and value.isnan().any()]
    if untouched:
        raise UsageError(
            f"the initialisation left {', '.join(untouched)} without a value",
            where=f"{path} ({type(module).__name__})",
            fix="give init_weights=, a function of a module, or state=",
        )
    return made


def _from_build(names: list[str], build: Callable[[], nn.Module] | None) -> dict[str, Tensor]:
    if build is None:
        raise UsageError(
            f"no value for {len(names)} buffers",
            where=", ".join(names[:5]),
            fix="give build=, a function that makes the model, or a state that has them",
        )
    return real_buffers(build, names)


def _put(places: list[_Place], name: str, value: Tensor, device: torch.device) -> Tensor:
    """Replace the meta tensor everywhere by a real one with ``value``, which is returned."""
    old = places[0][2]
    if value.shape != old.shape:
        raise ShapeError(f"{name} has another shape", needed=tuple(old.shape), given=tuple(value.shape))
    with torch.no_grad():
        real = torch.empty_strided(old.shape, old.stride(), dtype=old.dtype, device=device)
        real.copy_(value)
    new: Tensor = (
        nn.Parameter(real, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else real
    )
    for module, leaf, _ in places:
        parameters, buffers = tensor_tables(module)
        (parameters if leaf in parameters else buffers)[leaf] = new
    return new
