"""Stages as modules: the model's own parameters under their own names, and a stage's forward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from zbcompile.errors import ShapeError, UsageError
from zbcompile.runtime.by_hand import SavedForBackward, checked_gradients, checked_inputs, refuse_parts
from zbcompile.runtime.materialize import materialize
from zbcompile.runtime.torch_private import module_tables
from zbcompile.runtime.wiring import PortLike, RunnableStage

__all__ = ["Stage", "StateReader"]


class Stage(nn.Module):
    """One stage of a pipeline: a module that holds the model's own parameters and buffers, under their names.

    Calling it runs the stage's forward graph without autograd: inputs and outputs in the order of its ports.
    F, B, W and BW of one microbatch can be called by hand, with the bits of autograd::

        outputs, saved = stage.run_forward(*inputs)                     # F
        input_grads, saved = stage.run_backward_input(saved, *grads)    # B
        weight_grads = stage.run_backward_weight(saved)                 # W: name -> gradient

    None of them records autograd's graph or touches ``param.grad``. Random numbers come from torch's own
    generators (a step draws from a stream per stage and microbatch, docs/reference/runtime.md).

    Parameters
    ----------
    index
        Number of the stage.
    stage
        What runs.
    state
        The model's tensors by name.
    model
        The model that they belong to; `materialize` needs it.

    Attributes
    ----------
    index
        Number of the stage.
    compiled
        What runs.
    """

    def __init__(
        self,
        index: int,
        stage: RunnableStage,
        state: Mapping[str, Tensor],
        model: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.index, self.compiled = index, stage
        self._kind = type(self)
        self._model = (model,)  # in a tuple, so that it is not registered as a submodule
        self._held = tuple(dict.fromkeys([*getattr(stage, "parameters", ()), *getattr(stage, "buffers", ())]))
        self._tensors: dict[str, Tensor] = {}
        self._tables: dict[str, Mapping[str, Tensor | None]] = {}
        self.follow(state)

    @property
    def graphs(self) -> object:
        """Its F, B, W and BW graphs (``stage.graphs.forward.print_readable()``); None if it has none."""
        return getattr(self.compiled, "graphs", None)

    def follow(self, state: Mapping[str, Tensor]) -> None:
        """Hold the tensors of ``state`` from now on: a parameter of the model may have been replaced.

        Raises
        ------
        UsageError
            A parameter was replaced in this module (by ``fully_shard``, say) and not in the model; or the
            module has another class (by ``replicate``, say).
        """
        for name in self._held:
            if self._tensors.get(name) is not state[name]:
                self._tables[name] = _attach(self, name, state[name])
                self._tensors[name] = state[name]
            elif isinstance(state[name], nn.Parameter):
                found = self._tables[name].get(name.rpartition(".")[2])
                if found is not state[name]:
                    raise UsageError(
                        "a parameter of a stage was replaced, and is not the model's any more: no step would "
                        "train it",
                        where=f"{name} of stage {self.index}",
                        given=f"a {type(found).__name__}",
                        fix="change the model in place of the stage; to shard stages, give compile(mesh=) a "
                        "dimension dp_shard",
                    )
        if type(self) is not self._kind:
            raise UsageError(
                "a stage was made another class: what that does to its calls is no part of a step",
                where=f"stage {self.index}",
                needed=self._kind.__name__,
                given=type(self).__name__,
                fix="leave the stage as it is; for replicas of stages give compile(mesh=) a dimension dp",
            )

    def materialize(
        self,
        *,
        state: Mapping[str, Tensor] | str | Path | None = None,
        init_weights: Callable[[nn.Module], object] | None = None,
        build: Callable[[], nn.Module] | None = None,
        device: torch.device | str = "cpu",
        seed: int = 0,
    ) -> dict[str, Tensor]:
        """Give this stage's parameters and buffers memory and values, if the model is on the meta device.

        Parameters
        ----------
        state
            A state dict, a safetensors file, or a directory of them with their index.
        init_weights
            Called with every module that owns one of the stage's parameters, if there is no ``state``;
            default ``module.reset_parameters()``.
        build
            Makes the model a second time, for buffers that are not in ``state``.
        device
            Where the tensors go.
        seed
            Seed of the random streams that the initialisation draws from.

        Returns
        -------
        dict
            Name -> tensor, for what became real.

        Raises
        ------
        UsageError, ShapeError
            As `zbcompile.runtime.materialize.materialize`; also if the stage belongs to no model.
        """
        model = self._model[0]
        if model is None:
            raise UsageError("this stage belongs to no model", where=f"stage {self.index}")
        made = materialize(
            model,
            self._held,
            state=state,
            init_weights=init_weights,
            build=build,
            device=device,
            seed=seed,
        )
        self.follow(StateReader(model, self._held).read())
        return made

    @property
    def inputs(self) -> tuple[PortLike, ...]:
        """What enters the stage, in order: name, shape, dtype, and whether B returns a gradient for it."""
        return tuple(self.compiled.inputs)

    @property
    def outputs(self) -> tuple[PortLike, ...]:
        """What leaves the stage, in order: name, shape, dtype, and whether B takes a gradient of it."""
        return tuple(self.compiled.outputs)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the outputs of the stage for one microbatch, in port order; nothing is kept."""
        return self.run_forward(*inputs)[0]

    def run_forward(self, *inputs: Tensor) -> tuple[tuple[Tensor, ...], SavedForBackward]:
        """Run F on one microbatch.

        Parameters
        ----------
        inputs
            One tensor per port of `inputs`, of its shape and dtype.

        Returns
        -------
        tuple
            The outputs, one tensor per port of `outputs`; and what `run_backward_input` or
            `run_full_backward` takes. Buffers that the model changes are changed.

        Raises
        ------
        UsageError, ShapeError
            Another number of tensors, or a tensor of another shape or dtype; or the stage's weights are
            sharded.
        """
        given = checked_inputs(self.index, self.inputs, inputs)
        state = dict(self.named_parameters()) | dict(self.named_buffers())
        refuse_parts(self.index, state)
        with torch.no_grad():
            outputs, saved = self.compiled.run_forward(state, given)
        return tuple(outputs), SavedForBackward(self.index, "F", saved)

    def run_backward_input(
        self, saved: SavedForBackward, *output_grads: Tensor | None
    ) -> tuple[tuple[Tensor | None, ...], SavedForBackward]:
        """Run B: the gradients of the stage's inputs.

        Parameters
        ----------
        saved
            What `run_forward` returned; it can be used once.
        output_grads
            One gradient per port of `outputs`, of its shape and dtype: the sum over all stages that use the
            output. None stands for zeros, and for 1 where the output is the loss. All may be left out where
            only the loss has a gradient.

        Returns
        -------
        tuple
            The gradients, one per port of `inputs`, None where the port has none; and what
            `run_backward_weight` takes.

        Raises
        ------
        UsageError, ShapeError
            ``saved`` is another stage's or was used, or the gradients do not fit the outputs.
        """
        grads = checked_gradients(self.index, self.outputs, output_grads)
        values = saved.take(self.index, "F", "run_backward_input")
        with torch.no_grad():
            input_grads, kept = self.compiled.run_backward_input(values, grads)
        return tuple(input_grads), SavedForBackward(self.index, "B", kept)

    def run_backward_weight(self, saved: SavedForBackward) -> dict[str, Tensor]:
        """Run W: return the gradients of this microbatch, parameter name -> tensor of the parameter's shape.

        Parameters
        ----------
        saved
            What `run_backward_input` returned; it can be used once.

        Raises
        ------
        UsageError
            ``saved`` is another stage's or was used.
        """
        values = saved.take(self.index, "B", "run_backward_weight")
        with torch.no_grad():
            return self.compiled.run_backward_weight(values)

    def run_full_backward(
        self, saved: SavedForBackward, *output_grads: Tensor | None
    ) -> tuple[tuple[Tensor | None, ...], dict[str, Tensor]]:
        """Run BW, B and W in one: return what `run_backward_input` and `run_backward_weight` would return.

        Parameters and errors are those of `run_backward_input`.
        """
        grads = checked_gradients(self.index, self.outputs, output_grads)
        values = saved.take(self.index, "F", "run_full_backward")
        with torch.no_grad():
            input_grads, weights = self.compiled.run_full_backward(values, grads)
        return tuple(input_grads), weights

    def extra_repr(self) -> str:
        """Return what goes in and out, for ``repr``."""
        ins = ", ".join(p.name for p in self.compiled.inputs)
        outs = ", ".join(p.name for p in self.compiled.outputs)
        return f"stage {self.index}: ({ins}) -> ({outs})"


def _attach(root: nn.Module, name: str, value: Tensor) -> Mapping[str, Tensor | None]:
    """Register a tensor under a dotted name, through empty modules that spell out the path.

    Return the table that it is in.
    """
    *path, leaf = name.split(".")
    holder = root
    for part in path:
        child = module_tables(holder)[0].get(part)
        if child is None:
            child = nn.Module()
            holder.add_module(part, child)
        holder = child
    _, parameters, buffers = module_tables(holder)
    if isinstance(value, nn.Parameter):
        holder.register_parameter(leaf, value)
        return parameters
    holder.register_buffer(leaf, value)
    return buffers


class StateReader:
    """Reads the model's present tensors by name, anew at each step, so that ``.to`` and swaps are seen.

    The constructor notes what the stages were compiled for, and `check` compares it at each step: shapes and
    dtypes, which parameters are trained, which names are one tensor.

    Parameters
    ----------
    model
        The model that owns the tensors.
    names
        Canonical names of what the stages use.
    """

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        modules = dict(model.named_modules(remove_duplicate=False))

        def place(name: str) -> tuple[nn.Module, str]:
            path, _, leaf = name.rpartition(".")
            return modules[path], leaf

        self._places = {name: place(name) for name in names}
        named = [
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ]
        canonical = {id(getattr(*self._places[name])): name for name in names}
        self._tied = [
            (name, place(name), canonical[id(tensor)])
            for name, tensor in named
            if canonical.get(id(tensor), name) != name
        ]
        self._forms = {name: _form(getattr(*self._places[name])) for name in names}

    def read(self) -> dict[str, Tensor]:
        """Return name -> tensor."""
        return {name: getattr(*place) for name, place in self._places.items()}

    def check(self, state: Mapping[str, Tensor]) -> None:
        """Compare the model, now with ``state``, with what was compiled.

        Raises
        ------
        ShapeError
            A tensor has another shape or dtype.
        UsageError
            A frozen parameter is trained, or tied names are no longer one tensor.
        """
        for name, tensor in state.items():
            shape, dtype, trained = self._forms[name]
            if tensor.shape != shape or tensor.dtype != dtype:
                raise ShapeError(
                    "a tensor of the model differs from the one compiled for",
                    where=name,
                    needed=f"{list(shape)} {dtype}",
                    given=f"{list(tensor.shape)} {tensor.dtype}",
                    fix="compile another pipeline for the changed model",
                )
            if tensor.requires_grad and not trained:
                raise _changed(f"{name} was frozen when the model was compiled and is not now", name)
        for name, place, first in self._tied:
            if getattr(*place) is not state[first]:
                raise _changed(f"{name} and {first} were one tensor when the model was compiled", name)


def _form(tensor: Tensor) -> tuple[torch.Size, torch.dtype, bool]:
    """Return what a tensor must keep: its shape, its dtype, and whether it is trained."""
    return tensor.shape, tensor.dtype, tensor.requires_grad


def _changed(what: str, where: str) -> UsageError:
    return UsageError(
        what, where=where, fix="undo the change, or compile another pipeline for the changed model"
    )
