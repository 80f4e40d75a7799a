"""Run an order of your own: write it by hand, have it judged, and train with it.

    python examples/own_schedule.py

An action is stage, letter, microbatch: F is a forward, B the gradient of a stage's inputs, W that of its
weights, BW both at once. Sends and receives are put in by the compiler, and the whole is proved free of
deadlock before anything runs.
"""

from __future__ import annotations

import copy

import torch
from torch import nn

import zbcompile
from zbcompile.errors import CheckError

# Two stages, three microbatches. The second rank leaves its W's for the end, where the first one works alone.
ORDER = """\
placement 0 1
microbatches 3
rank 0: 0F0 0F1 0B0 0W0 0F2 0BW1 0BW2
rank 1: 1F0 1B0 1F1 1B1 1W0 1F2 1B2 1W1 1W2
"""

# The same with a mistake: the first rank wants the gradient of microbatch 2 before it has run its forward.
WRONG = ORDER.replace("0F2 0BW1 0BW2", "0BW2 0BW1 0F2")


def main() -> int:
    """Judge both orders and train a step with the right one; return how many gradients differ."""
    profile = zbcompile.Profile((zbcompile.StageCost.simple(1000, 1000, 1000),) * 2)
    problem = zbcompile.Problem.of(profile, num_microbatches=3)
    try:
        zbcompile.check(zbcompile.Schedule.parse(WRONG), problem)
    except CheckError as error:
        print(f"refused: {error}")
    schedule = zbcompile.Schedule.parse(ORDER)
    zbcompile.check(schedule, problem)
    print("the other one is complete, in order and free of deadlock")

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    inputs, targets = torch.randn(6, 8), torch.randn(6, 8)
    reference = copy.deepcopy(model)
    pipeline = zbcompile.compile(
        model,
        num_stages=2,
        example_args=(inputs,),
        example_target=targets,
        loss_fn=nn.functional.mse_loss,
        schedule=schedule,
    )
    print(pipeline.source(1))
    pipeline.step(inputs, target=targets)
    for x, y in zip(inputs.chunk(3), targets.chunk(3), strict=True):
        nn.functional.mse_loss(reference(x), y).backward()
    different = 0
    for name, parameter in reference.named_parameters():
        found = dict(pipeline.named_parameters())[name].grad
        different += found is None or parameter.grad is None or not torch.equal(found, parameter.grad / 3)
    print(f"{different} gradients differ from autograd's")
    pipeline.close()
    return different


if __name__ == "__main__":
    raise SystemExit(main())
