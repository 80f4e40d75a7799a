"""Gradients of a step: summed in microbatch order, whatever the order of the W actions was.

A gradient whose predecessors have not come yet is held until they have; orders with W in microbatch order
hold nothing. So the sums have the bits of a loop over the microbatches that calls ``backward()`` for each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

__all__ = ["GradientSums", "hand_over", "parameters_of", "tied_holders"]


class GradientSums:
    """Sums of one step on one rank; not yet in ``param.grad``.

    Attributes
    ----------
    totals
        Stage -> parameter name -> sum of the gradients so far.
    """

    def __init__(self) -> None:
        self.totals: dict[int, dict[str, Tensor]] = {}
        self._next: dict[int, int] = {}
        self._early: dict[int, dict[int, dict[str, Tensor]]] = {}

    def add(self, stage: int, microbatch: int, grads: dict[str, Tensor]) -> None:
        """Take over the gradients of one (stage, microbatch); each must have storage of its own."""
        expected = self._next.get(stage, 0)
        if microbatch != expected:
            self._early.setdefault(stage, {})[microbatch] = grads
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
                totals[name] = grad
            else:
                total.add_(grad)


def tied_holders(trainable: Sequence[Sequence[str]]) -> dict[str, tuple[int, ...]]:
    """Return the parameters that several stages hold: name -> stages in order.

    Parameters
    ----------
    trainable
        Per stage, the names of its trainable parameters.
    """
    holders: dict[str, list[int]] = {}
    for stage, names in enumerate(trainable):
        for name in names:
            holders.setdefault(name, []).append(stage)
    return {name: tuple(stages) for name, stages in sorted(holders.items()) if len(stages) > 1}


def hand_over(
    sums: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter], divisor: int | None
) -> None:
    """Divide the sums of a step and set or add to ``param.grad``.

    Called once, when everything of the step has arrived. A parameter that was frozen after the pipeline was
    compiled gets no gradient.

    Parameters
    ----------
    sums
        Sums by parameter name; divided in place.
    parameters
        Parameters by name.
    divisor
        What to divide by; None: sums stay as they are.
    """
    for name, total in sums.items():
        if not parameters[name].requires_grad:
            continue
        if divisor is not None and divisor != 1:
            total.div_(divisor)
        parameter = parameters[name]
        if parameter.grad is None:
            parameter.grad = total
        else:
            parameter.grad.add_(total)


def parameters_of(state: Mapping[str, Tensor]) -> dict[str, nn.Parameter]:
    """Return the parameters among a state."""
    return {name: value for name, value in state.items() if isinstance(value, nn.Parameter)}
