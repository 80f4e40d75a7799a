"""Undoing an optimizer's step: what it changes is copied before it and put back, to the bit.

A step of these optimizers changes parameters that have a gradient, its own state of them, and, for some, the
gradients; no buffers, no options and no random state. (Inverse arithmetic would not give the same bits.)
Of weights that replicas share it is this process's part.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import Parameter, signature
from typing import Any

from torch import Tensor, nn
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adafactor,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    Muon,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)

from zbcompile.compiler.sharding import is_sharded, local
from zbcompile.errors import UsageError
from zbcompile.runtime import torch_private

__all__ = ["REVERSIBLE", "Options", "Snapshot", "check_reversible", "check_steps"]

REVERSIBLE: tuple[type[Optimizer], ...] = (
    ASGD, SGD, Adadelta, Adafactor, Adagrad, Adam, Adamax, AdamW, Muon, NAdam, RAdam, RMSprop, Rprop,
)  # fmt: skip
"""Optimizers whose step was undone and done again with the same bits, in all their forms
(`tests/compiler/test_optimizer_snapshot.py`)."""
_NOT_OF_PARTS = (Adafactor, Rprop)
"""Optimizers that have no step of DTensors in torch 2.13."""


def check_steps(optimizers: Sequence[Optimizer]) -> None:
    """Refuse optimizers that cannot step at all here, before anything is exchanged or changed.

    Raises
    ------
    UsageError
        The step needs a closure; or torch has none of it for weights that replicas share.
    """
    for optimizer in optimizers:
        kind = type(optimizer)
        closure = signature(kind.step).parameters.get("closure")
        if closure is not None and closure.default is Parameter.empty:
            raise UsageError(
                f"{kind.__name__} calls for a closure, which would run the model several times in one step",
                fix="use an optimizer that steps with the gradients at hand, such as AdamW",
            )
        shares = any(is_sharded(p) for group in optimizer.param_groups for p in group["params"])
        if shares and kind in _NOT_OF_PARTS:
            raise UsageError(
                f"torch's {kind.__name__} has no step of weights that replicas share",
                fix="use another optimizer, or dp in place of dp_shard",
            )


def check_reversible(optimizers: Sequence[Optimizer]) -> None:
    """Refuse optimizers whose step cannot be undone.

    Raises
    ------
    UsageError
        The optimizer is of another class, is differentiable, or has hooks of its step.
    """
    for optimizer in optimizers:
        kind = type(optimizer)
        if kind not in REVERSIBLE:
            raise UsageError(
                f"a step of {kind.__module__}.{kind.__qualname__} is not known to be undone to the bit",
                needed=f"one of torch.optim: {', '.join(sorted(known.__name__ for known in REVERSIBLE))}",
                fix="compile without post_validation",
            )
        if any(group.get("differentiable") for group in optimizer.param_groups):
            raise UsageError(
                f"a differentiable step of {kind.__name__} cannot be undone",
                fix="leave differentiable out, or compile without post_validation",
            )
        if torch_private.has_step_hooks(optimizer):
            raise UsageError(
                f"{kind.__name__} has hooks of its step, which would run again when it is done again",
                fix="remove the hooks, or compile without post_validation",
            )


def _with_gradient(optimizers: Sequence[Optimizer]) -> Iterator[nn.Parameter]:
    """Yield the parameters of optimizers that have a gradient, each once."""
    seen: set[int] = set()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield parameter


class Snapshot:
    """What the next step of optimizers may change, as it is before it.

    Parameters
    ----------
    optimizers
        Those that `check_reversible` takes.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = tuple(optimizers)
        parameters = list(_with_gradient(optimizers))
        self._values = [_with_copy(parameter) for parameter in parameters]
        self._states = [
            (optimizer, parameter, _copied(optimizer.state.get(parameter)))
            for optimizer in optimizers
            for parameter in _with_gradient([optimizer])
        ]
        self._gradients = [
            _with_copy(parameter.grad)
            for optimizer in optimizers
            if _changes_gradients(optimizer)
            for parameter in _with_gradient([optimizer])
            if parameter.grad is not None
        ]

    @property
    def num_bytes(self) -> int:
        """Bytes of all copies."""
        values = [kept for _, kept in (*self._values, *self._gradients)]
        states = [pair for _, _, state in self._states for _, pair in (state or {}).values()]
        return sum(kept.nbytes for kept in (*values, *(pair[1] for pair in states if pair is not None)))

    def roll_back(self) -> None:
        """Undo the step."""
        pairs: list[tuple[Tensor, Tensor]] = [*self._values, *self._gradients]
        for optimizer, parameter, before in self._states:
            if before is None:
                optimizer.state.pop(parameter, None)
                continue
            state = optimizer.state[parameter]
            state.clear()
            state.update({name: value for name, (value, _) in before.items()})
            pairs += [pair for _, pair in before.values() if pair is not None]
        if pairs:
            torch_private.copy_all([value for value, _ in pairs], [kept for _, kept in pairs])


class Options:
    """The options of optimizers, such as learning rates, as they are when this is made."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = tuple(optimizers)
        self._then = [[_copied_options(group) for group in o.param_groups] for o in optimizers]

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Give them to the optimizers; afterwards put back those that they have."""
        present = [[dict(group) for group in optimizer.param_groups] for optimizer in self._optimizers]
        try:
            self._set(self._then)
            yield
        finally:
            self._set(present)

    def _set(self, options: Sequence[Sequence[Mapping[str, Any]]]) -> None:
        for optimizer, groups in zip(self._optimizers, options, strict=True):
            # Groups that were added since stand behind those, and keep what they have.
            for group, values in zip(optimizer.param_groups[: len(groups)], groups, strict=True):
                group.update(values)


def _changes_gradients(optimizer: Optimizer) -> bool:
    """Return whether a step may write into gradients: SGD with Nesterov's momentum does (foreach)."""
    return isinstance(optimizer, SGD) and any(group["nesterov"] for group in optimizer.param_groups)


def _copied_options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}


def _copied(state: Mapping[str, Any] | None) -> dict[str, tuple[Any, tuple[Tensor, Tensor] | None]] | None:
    """Return the entries of a state; of a tensor also its values here, and a copy of them."""
    if state is None:
        return None
    return {
        name: (value, _with_copy(value) if isinstance(value, Tensor) else None)
        for name, value in state.items()
    }


def _with_copy(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return what this process has of a tensor, and a copy of it."""
    own = local(tensor.detach())
    return own, own.clone()
