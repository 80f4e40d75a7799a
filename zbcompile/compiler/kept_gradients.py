"""Gradients of earlier steps that are still in ``param.grad`` when a step begins, beside the plan."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

from torch import Tensor

from zbcompile.compiler.lower import LoweredPlan
from zbcompile.runtime.gradients import parameters_of
from zbcompile.runtime.spec import PipelineSpec

__all__ = ["KeptGradients"]


class KeptGradients:
    """Warns, once, where they exceed a memory limit that was planned without them.

    Nothing is refused: a plan counts two tensors per parameter for the optimizer, and many keep fewer.
    """

    def __init__(self) -> None:
        self._warned = False

    def check(
        self, plan: LoweredPlan, spec: PipelineSpec, rank: int | None, state: Mapping[str, Tensor]
    ) -> None:
        """Look at what the parameters of a rank, or of all ranks, hold before a step."""
        problem = plan.problem
        if self._warned or problem.kept_gradients:
            return
        parameters, over = parameters_of(state), []
        for here, cap in enumerate(problem.caps):
            if cap is None or rank not in (None, here):
                continue
            names = {n for s in spec.placement.stages_of(here) for n in spec.stages[s].trainable}
            grads = [parameters[name].grad for name in sorted(names)]
            kept = sum(grad.nbytes for grad in grads if grad is not None)
            peak = plan.timeline.peak_bytes[here]
            if kept and peak + kept > cap:
                over.append(f"rank {here} holds {kept} bytes beside {peak}, its limit is {cap}")
        if over:
            self._warned = True
            warnings.warn(
                "gradients of an earlier step are kept, which the plan does not count: "
                f"{'; '.join(over[:4])}; set them to None before the step (optimizer.zero_grad()), or "
                "compile with kept_gradients=True",
                stacklevel=2,
            )
