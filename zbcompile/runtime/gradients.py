"""Gradients of a step: summed in microbatch order, whatever the order of the W actions was.

A gradient whose predecessors are not there yet is held until they are; orders with W in microbatch order
hold nothing. So the sums have the bits of a loop over the microbatches in which each calls ``backward()``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

__all__ = ["GradientSums", "hand_over", "tied_holders"]


class GradientSums:
    """Sums of one step on one rank, per stage and parameter name; not yet in ``param.grad``."""

    def __init__(self, num_microbatches: int) -> None:
        self.num_microbatches = num_microbatches
        self.totals: dict[int, dict[str, Tensor]] = {}
        self._next: dict[int, int] = {}
        self._early: dict[int, dict[int, dict[str, Tensor]]] = {}

    def add(self, stage: int, microbatch: int, grads: dict[str, Tensor]) -> None:
        """Take over the gradients of one (stage, microbatch); each has storage of its own."""
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
    """Parameters that more than one stage holds: name -> stages in order. ``trainable`` is per stage."""
    holders: dict[str, list[int]] = {}
    for stage, names in enumerate(trainable):
        for name in names:
            holders.setdefault(name, []).append(stage)
    return {name: tuple(stages) for name, stages in sorted(holders.items()) if len(stages) > 1}


def hand_over(
    sums: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter], divisor: int | None
) -> None:
    """Divide and set or add to ``param.grad``. Called once, when everything of the step has arrived.

    A parameter that was frozen after it was compiled gets none.
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
