"""Gradients of a step: summed in microbatch order, or in one that was planned, or as they come.

In microbatch order a gradient whose predecessors have not come yet is held until they have; orders with W in
microbatch order hold nothing. So the sums have the bits of a loop over the microbatches that calls
``backward()`` for each. As they come, no gradient is held beside the sum, and the order that runs decides the
bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from zbcompile.errors import ShapeError
from zbcompile.runtime.torch_private import accumulate_hooks
from zbcompile.schedule.problem import Accumulate

__all__ = ["GradientSums", "divided", "hand_over", "parameters_of", "run_hooks", "sum_dtype", "tied_holders"]


class GradientSums:
    """Sums of one step on one rank; not yet in ``param.grad``.

    Parameters
    ----------
    dtype
        What gradients of narrower parameters are summed in; None: their own dtype.
    accumulate
        ``order``: in microbatch order; ``memory``: as they come.

    Attributes
    ----------
    totals
        Stage -> parameter name -> sum of the gradients so far.
    """

    def __init__(self, dtype: torch.dtype | None = None, accumulate: Accumulate = "order") -> None:
        self._dtype, self._in_order = dtype, accumulate == "order"
        self._turn: dict[int, int] = {}
        self.totals: dict[int, dict[str, Tensor]] = {}
        self._next: dict[int, int] = {}
        self._early: dict[int, dict[int, dict[str, Tensor]]] = {}

    def restart(self, order: Sequence[int] = ()) -> None:
        """Begin with the first microbatch again: what comes is added to the sums so far.

        Parameters
        ----------
        order
            The microbatches in the order of the sums; empty: 0, 1, 2, ...
        """
        self._next.clear()
        self._turn = {microbatch: turn for turn, microbatch in enumerate(order)}

    def add(self, stage: int, microbatch: int, grads: dict[str, Tensor]) -> None:
        """Take over the gradients of one (stage, microbatch); each must have storage of its own."""
        if not self._in_order:
            self._add_now(stage, grads)
            return
        expected, turn = self._next.get(stage, 0), self._turn.get(microbatch, microbatch)
        if turn != expected:
            self._early.setdefault(stage, {})[turn] = grads
            return
        early = self._early.get(stage, {})
        while True:
            self._add_now(stage, grads)
            expected += 1
            if expected not in early:
                break
            grads = early.pop(expected)
        self._next[stage] = expected

    def _add_now(self, stage: int, grads: dict[str, Tensor]) -> None:
        totals = self.totals.setdefault(stage, {})
        for name, grad in grads.items():
            total = totals.get(name)
            if total is None:
                totals[name] = grad.to(sum_dtype(grad, self._dtype))
            else:
                total.add_(grad)


def sum_dtype(tensor: Tensor, asked: torch.dtype | None) -> torch.dtype:
    """Return what gradients like a tensor are summed in: ``asked`` if that is wider."""
    narrower = asked is not None and tensor.is_floating_point() and tensor.dtype.itemsize < asked.itemsize
    return asked if narrower and asked is not None else tensor.dtype


def tied_holders(parameters: Sequence[Sequence[str]]) -> dict[str, tuple[int, ...]]:
    """Return the parameters that several stages hold: name -> stages in order.

    Parameters
    ----------
    parameters
        Per stage, names of parameters.
    """
    holders: dict[str, list[int]] = {}
    for stage, names in enumerate(parameters):
        for name in names:
            holders.setdefault(name, []).append(stage)
    return {name: tuple(stages) for name, stages in sorted(holders.items()) if len(stages) > 1}


def divided(
    sums: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter], divisor: int | None
) -> list[tuple[nn.Parameter, Tensor]]:
    """Return the gradients of a step, ready for `hand_over`. Nothing of a parameter is changed yet.

    A parameter that was frozen after the pipeline was compiled gets no gradient.

    Parameters
    ----------
    sums
        Sums by parameter name; divided in place.
    parameters
        Parameters by name.
    divisor
        What to divide by; None: sums stay as they are.

    Raises
    ------
    ShapeError
        A parameter already has a gradient to which this one cannot be added.
    """
    ready = []
    for name, total in sums.items():
        parameter = parameters[name]
        if not parameter.requires_grad:
            continue
        held = parameter.grad
        if held is not None and _form(held) != _form(total):
            raise ShapeError(
                "param.grad holds something that the gradient of the step cannot be added to",
                where=name,
                needed=_words(total),
                given=_words(held),
                fix="set it to None before the step",
            )
        if divisor is not None and divisor != 1:
            total.div_(divisor)
        ready.append((parameter, total))
    return ready


def _form(tensor: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device


def _words(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {tensor.dtype} on {tensor.device}"


def hand_over(gradients: Sequence[tuple[nn.Parameter, Tensor]]) -> None:
    """Set or add to ``param.grad``. Called once, when everything of the step has arrived."""
    for parameter, gradient in gradients:
        if parameter.grad is None:
            if gradient.dtype != parameter.dtype:
                parameter.grad_dtype = gradient.dtype  # else torch refuses it
            parameter.grad = gradient
        else:
            parameter.grad.add_(gradient)


def run_hooks(parameters: Iterable[nn.Parameter]) -> None:
    """Call the hooks that want to know of a gradient that was handed over, as autograd does: no gradients on.

    Autograd calls them after every backward, that is per microbatch; a step calls them once.
    """
    with torch.no_grad():
        for parameter in parameters:
            for hook in accumulate_hooks(parameter):
                hook(parameter)


def parameters_of(state: Mapping[str, Tensor]) -> dict[str, nn.Parameter]:
    """Return the parameters among a state."""
    return {name: value for name, value in state.items() if isinstance(value, nn.Parameter)}
