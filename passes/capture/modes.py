"""Give modes of torch that a tracer would ignore their meaning in the traced forward, or refuse them.

``inference_mode`` becomes ``no_grad``: the tracer does not see it, and gradients would flow. TorchScript
functions are interpreted call by call: their own autodiff hides from the tracer. Hooks that pack what
autograd saves are refused: no stage would run them. Calls inside ``torch.utils.checkpoint`` are marked, so
that a change of a buffer there can be refused: eager changes it again when it recomputes. The argument
checks of ``torch.distributions`` are off: they look at values. A cast of a module that changes nothing is
left out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from zbcompile.passes import torch_patches
from zbcompile.passes.capture.draws import compared_draws

__all__ = ["traced_modes"]


@contextlib.contextmanager
def traced_modes(answers: torch_patches.Answers) -> Iterator[None]:
    """Put the modes' traced meaning in place while the model's forward is traced.

    Parameters
    ----------
    answers
        What the tracer answers to code that asks for the truth of a value.
    """
    with (
        torch_patches.patched("forward", answers=answers),
        torch.jit.optimized_execution(False),  # type: ignore[attr-defined]
        compared_draws(),
    ):
        yield
