"""Call F, B and W of single stages by hand, and compare with autograd.

    python examples/run_stage.py

For those who write a schedule loop of their own: the stages are plain calls, one microbatch each. F returns
the outputs and what B needs, B the gradients of the stage's inputs and what W needs, W the gradients of the
stage's parameters by name. Between B and W any other work may be done: that is what fills the bubble.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

import zbcompile

STAGES, ROWS, WIDTH = 3, 4, 16


def main() -> int:
    """Print the largest difference from autograd of every stage; return the number of those that differ."""
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(STAGES) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())])
    inputs, targets = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    reference = copy.deepcopy(model)
    stages = zbcompile.compile(
        model,
        num_stages=STAGES,
        example_args=(inputs,),
        example_target=targets,
        loss_fn=nn.functional.mse_loss,
        num_microbatches=1,
        time_limit=1.0,
    )

    # F, from the first stage to the last. A port says what goes in: the batch, or another stage's output.
    batch = (inputs, targets)
    values: dict[str, Tensor] = {}
    saved = []
    for stage in stages:
        given = [batch[p.source[1]] if p.source[0] == "batch" else values[p.name] for p in stage.inputs]
        outputs, kept = stage.run_forward(*given)
        values.update(zip((p.name for p in stage.outputs), outputs, strict=True))
        saved.append(kept)
        print(f"F of {stage.extra_repr()} keeps {kept.num_bytes} bytes for B")

    # B, from the last stage to the first. The loss needs no gradient: it is 1.
    gradients: dict[str, Tensor | None] = {}
    waiting = []
    for stage in reversed(stages):
        wanted = [gradients.get(p.name) for p in stage.outputs]
        found, kept = stage.run_backward_input(saved[stage.index], *wanted)
        gradients.update(zip((p.name for p in stage.inputs), found, strict=True))
        waiting.append((stage, kept))
        print(f"B of stage {stage.index} keeps {kept.num_bytes} bytes for W")

    # W, in any order.
    nn.functional.mse_loss(reference(inputs), targets).backward()
    expected = {name: parameter.grad for name, parameter in reference.named_parameters()}
    different = 0
    for stage, kept in waiting:
        for name, gradient in stage.run_backward_weight(kept).items():
            equal = torch.equal(gradient, expected[name])
            different += not equal
            print(f"W of stage {stage.index}: {name} {'equals' if equal else 'differs from'} autograd")
    stages.close()
    return different


if __name__ == "__main__":
    raise SystemExit(main())
