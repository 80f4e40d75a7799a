"""What training scripts do around a step, written once for the plain loop, one process and four ranks."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import zbcompile
from tests.support.life_workers import MSE, NUM_MICROBATCHES, Chain, compiled, plain_backward, rows
from zbcompile.errors import PipelineError, UsageError

NUM_STEPS = 4
State = dict[str, Tensor]


class Plain:
    """The script without a pipeline; ``half``: under autocast, with a bias that is frozen from the start."""

    def __init__(self, half: bool = False) -> None:
        self.model, self.half = Chain(), half
        self.model.middle.bias.requires_grad_(not half)

    def mode(self) -> torch.autocast:
        """Return what every step and evaluation runs in: autocast to bfloat16, or nothing."""
        return torch.autocast("cpu", torch.bfloat16, enabled=self.half)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self.model.named_parameters()

    def parameters(self) -> list[nn.Parameter]:
        return [p for _, p in self.named_parameters()]

    def step(self) -> Tensor:
        """Run forward and backward; return the mean loss."""
        x, y = rows()
        before = [(p, p.grad) for p in self.parameters()]
        self.model.zero_grad()
        with self.mode():
            losses = [MSE(self.model(a), b).detach() for a, b in self._pieces(x, y)]
            plain_backward(self.model)
        for parameter, grad in before:
            if grad is not None:
                parameter.grad = grad if parameter.grad is None else grad + parameter.grad
        return torch.stack(losses).mean()

    def clip(self, max_norm: float) -> Tensor:
        return nn.utils.clip_grad_norm_(self.parameters(), max_norm)

    def evaluate(self) -> Tensor | None:
        """Return what the model makes of the batch."""
        x, y = rows()
        with torch.no_grad(), self.mode():
            return torch.cat([self.model(a) for a, _ in self._pieces(x, y)])

    def state(self) -> State:
        return {name: tensor.clone() for name, tensor in self.model.state_dict().items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        self.model.load_state_dict(state)

    @staticmethod
    def _pieces(x: Tensor, y: Tensor) -> list[tuple[Tensor, Tensor]]:
        return list(zip(x.chunk(NUM_MICROBATCHES), y.chunk(NUM_MICROBATCHES), strict=True))


class Piped(Plain):
    """The same script on a pipeline."""

    def __init__(self, half: bool = False) -> None:
        super().__init__(half)
        with self.mode():
            self.pipeline: zbcompile.Pipeline = compiled(self.model, 4)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self.pipeline.named_parameters()

    def step(self) -> Tensor:
        x, y = rows()
        losses: list[Tensor] = []
        with self.mode():
            self.pipeline.step(x, target=y, losses=losses, share_losses=True)
        return torch.stack(losses).mean()

    def clip(self, max_norm: float) -> Tensor:
        return self.pipeline.clip_grad_norm_(max_norm)

    def evaluate(self) -> Tensor | None:
        with self.mode():
            result: Tensor | None = self.pipeline.eval(rows()[0])
        return result

    def state(self) -> State:
        return {name: tensor.clone() for name, tensor in self.pipeline.state_dict().items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        self.pipeline.load_state_dict(state)


def _loop(train: Plain, optimizer: Any, after: Callable[[Tensor], object] = lambda loss: None) -> State:
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        loss = train.step()
        optimizer.step()
        after(loss)
    return train.state()


def parameter_groups(train: Plain) -> State:
    """Weight decay for matrices alone, and a rate of its own for the last layer."""
    named = list(train.named_parameters())
    matrices = [p for name, p in named if p.ndim > 1 and not name.startswith("last")]
    vectors = [p for name, p in named if p.ndim < 2 and not name.startswith("last")]
    last = [p for name, p in named if name.startswith("last")]
    groups = [{"params": matrices, "weight_decay": 0.5}, {"params": vectors}, {"params": last, "lr": 0.01}]
    return _loop(train, torch.optim.AdamW(groups, lr=0.1, weight_decay=0.0))


def learning_rate_schedule(train: Plain) -> State:
    """Warm-up and cosine, then a plateau of the shared loss."""
    optimizer = torch.optim.AdamW(train.parameters(), lr=0.1)
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
    rate = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, cosine], [2])
    _loop(train, optimizer, lambda loss: rate.step())
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)
    state = _loop(train, optimizer, plateau.step)
    return {**state, "(rate)": torch.tensor(optimizer.param_groups[0]["lr"])}


def clipping(train: Plain) -> State:
    """By the norm of all gradients, then each entry by value."""
    optimizer = torch.optim.SGD(train.parameters(), lr=0.5)
    norms = []
    for _ in range(NUM_STEPS):
        train.step()
        norms.append(train.clip(0.05))
        nn.utils.clip_grad_value_(train.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
    return {**train.state(), "(norms)": torch.stack(norms)}


def accumulation(train: Plain) -> State:
    """Two batches for one update."""
    optimizer = torch.optim.AdamW(train.parameters(), lr=0.1)
    for step in range(NUM_STEPS):
        train.step()
        if step % 2:
            for parameter in train.parameters():
                assert parameter.grad is not None
                parameter.grad.div_(2)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    return train.state()


def optimizers(train: Plain) -> State:
    """One after the other, fused and for each where there is a choice."""
    parameters = train.parameters()
    matrices = [p for p in parameters if p.ndim == 2]
    adam, sgd = torch.optim.AdamW, torch.optim.SGD
    made = [
        adam(parameters, lr=0.1, fused=True),
        adam(parameters, lr=0.1, foreach=True),
        sgd(parameters, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
        sgd(parameters, lr=0.1, momentum=0.9, fused=True),
        torch.optim.Adafactor(parameters, lr=0.1),
        torch.optim.Muon(matrices, lr=0.1),
    ]
    for optimizer in made:
        _loop(train, optimizer)
    return train.state()


def averaged_weights(train: Plain) -> State:
    """An exponential average of the weights, used for an evaluation between two steps."""
    own = nn.ParameterList(train.parameters())
    average = AveragedModel(own, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    optimizer = torch.optim.SGD(train.parameters(), lr=0.5)
    _loop(train, optimizer, lambda loss: average.update_parameters(own))
    kept, names = train.state(), [name for name, _ in train.named_parameters()]
    train.load({**kept, **dict(zip(names, average.module.parameters(), strict=True))})
    found = train.evaluate()
    averages = {f"(average) {name}": tensor for name, tensor in train.state().items()}
    train.load(kept)
    return {**_loop(train, optimizer), **averages, **({} if found is None else {"(found)": found})}


def rate_finder(train: Plain) -> State:
    """Raise the learning rate until the loss grows, then go back to the weights of before."""
    kept = train.state()
    optimizer = torch.optim.SGD(train.parameters(), lr=1e-3)
    best = math.inf
    for _ in range(12):
        optimizer.zero_grad()
        loss = float(train.step())
        if loss > 2 * best:
            break
        best = min(best, loss)
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= 3
    train.load(kept)
    rate = optimizer.param_groups[0]["lr"]
    state = _loop(train, torch.optim.AdamW(train.parameters(), lr=rate / 1000))
    return {**state, "(rate)": torch.tensor(rate), "(best)": torch.tensor(best)}


def evaluation_between_steps(train: Plain) -> State:
    """Evaluations change nothing."""
    optimizer = torch.optim.AdamW(train.parameters(), lr=0.1)
    seen = []
    state = _loop(train, optimizer, lambda loss: seen.append(train.evaluate()))
    found = [value for value in seen if value is not None]
    return {**state, **{f"(evaluated) {k}": value for k, value in enumerate(found)}}


def freezing(train: Plain) -> State:
    """A layer that is frozen for some steps, long after compiling."""
    optimizer = torch.optim.SGD(train.parameters(), lr=0.5)
    for frozen in (True, False):
        train.model.table.requires_grad_(not frozen)
        _loop(train, optimizer)
    return train.state()


def changed_model(train: Plain) -> State:
    """A mode that is changed after compiling is refused by name, and nothing of that step is left."""
    if isinstance(train, Piped):
        train.model.middle.eval()
        with pytest.raises((UsageError, PipelineError), match=r"in training mode \(middle\)"):
            train.step()
        train.model.middle.train()
    return _loop(train, torch.optim.SGD(train.parameters(), lr=0.3))


PRACTICES: dict[str, Callable[[Any], State]] = {
    practice.__name__: practice
    for practice in (
        parameter_groups,
        learning_rate_schedule,
        clipping,
        accumulation,
        optimizers,
        averaged_weights,
        rate_finder,
        evaluation_between_steps,
        freezing,
        changed_model,
    )
}


def practised(train: Plain, names: Iterable[str] = PRACTICES) -> dict[str, State]:
    """Run practices one after the other, each from the same weights."""
    first, found = train.state(), {}
    for name in names:
        train.load(first)
        for parameter in train.parameters():
            parameter.grad = None
        found[name] = copy.deepcopy(PRACTICES[name](train))
    return found


HALF = ("clipping", "evaluation_between_steps")
"""Those that also run under autocast."""


def run(rank: int) -> dict[bool, dict[str, State]]:
    """Run all of them on a rank."""
    found = {}
    for half, names in ((False, tuple(PRACTICES)), (True, HALF)):
        train = Piped(half)
        found[half] = practised(train, names)
        train.pipeline.close()
    return found
