"""The shortest training: a model in two stages, one process or two, with the gradients of a plain loop.

python examples/two_stages.py                                   both ranks take turns in one process
torchrun --nproc-per-node 2 examples/two_stages.py              one process per rank
"""

from __future__ import annotations

import copy

import torch
from torch import nn

import zbcompile

ROWS, WIDTH, MICROBATCHES = 16, 32, 4


def main() -> int:
    """Train one step; return the number of gradients that differ from those of the untouched model."""
    torch.manual_seed(0)  # the same weights and the same batch on every rank
    model = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, WIDTH))
    inputs, targets = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    reference = copy.deepcopy(model)

    pipeline = zbcompile.compile(
        model,
        num_stages=2,
        example_args=(inputs,),
        example_target=targets,
        loss_fn=nn.functional.mse_loss,
        num_microbatches=MICROBATCHES,
        time_limit=1.0,
    )
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
    pipeline.step(inputs, target=targets)

    # The same by hand: backward of each microbatch, then the mean.
    for x, y in zip(inputs.chunk(MICROBATCHES), targets.chunk(MICROBATCHES), strict=True):
        nn.functional.mse_loss(reference(x), y).backward()
    wanted = {name: p.grad / MICROBATCHES for name, p in reference.named_parameters() if p.grad is not None}
    different = 0
    for name, parameter in pipeline.named_parameters():
        equal = parameter.grad is not None and torch.equal(parameter.grad, wanted[name])
        different += not equal
        verdict = "equals" if equal else "differs from"
        print(f"rank {pipeline.rank or 0}: gradient of {name} {verdict} autograd's")
    optimizer.step()
    pipeline.close()
    return different


if __name__ == "__main__":
    raise SystemExit(main())
