"""The oracle: plain autograd on the untouched model, with the random numbers that a pipeline draws.

A pipeline draws the masks of each (stage, microbatch) from a stream of its own
(docs/reference/runtime.md). To compare, the model runs as it is, in one process; only the generator is set
to the next stage's stream when a stage has drawn its last. What a checkpoint computes again draws the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zbcompile.errors import CheckError
from zbcompile.runtime.randomness import generators_of, stream_seed
from zbcompile.runtime.torch_private import TorchDispatchMode

__all__ = ["autograd_step", "count_draws"]


def count_draws(stage: Any) -> int:
    """Return the number of calls in a stage's forward graph that draw from a seeded generator."""
    nodes = stage.graphs.forward.graph.nodes
    return sum(torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) for node in nodes)


class _Streams(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Set the generator to a stage's stream as soon as the stages before it have drawn.

    Not at the stage's own first draw: a checkpoint keeps the generator's state when its block begins, and
    computes the block again from there. While a backward runs, the change of streams is known by the state
    that the last draw of a stage leaves.
    """

    def __init__(
        self,
        draws: Sequence[int],
        seed_of: Callable[[int], int],
        generators: Sequence[torch.Generator],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generators = generators
        self.first = {sum(draws[:stage]): stage for stage, count in enumerate(draws) if count}
        self.total, self.seen, self.seed_of = sum(draws), 0, seed_of
        self.backward = False
        self.ends: dict[bytes, int] = {}

    def __enter__(self) -> _Streams:
        self._begin(self.first.get(0))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in op.tags:
            if not self.backward:
                self.seen += 1
                if self.seen in self.first:
                    self.ends[self._state()] = self.first[self.seen]
            self._begin(self.ends.get(self._state()))
        return result

    def _begin(self, stage: int | None) -> None:
        if stage is not None:
            for generator in self._generators:
                generator.manual_seed(self.seed_of(stage))

    def _state(self) -> bytes:
        return b"".join(bytes(generator.get_state().numpy()) for generator in self._generators)


@contextlib.contextmanager
def _streams(
    draws: Sequence[int], seed: int, step: int, microbatch: int, device: torch.device
) -> Iterator[_Streams]:
    generators = generators_of(device)
    states = [generator.get_state() for generator in generators]
    try:
        with _Streams(draws, lambda stage: stream_seed(seed, step, stage, microbatch), generators) as mode:
            yield mode
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def autograd_step(
    model: nn.Module,
    microbatches: Sequence[dict[str, Tensor]],
    loss_of: Callable[[Any], Tensor],
    draws: Sequence[int],
    *,
    seed: int,
    step: int,
    order: Sequence[int] = (),
) -> list[Tensor]:
    """Run forward and backward of every microbatch in order; gradients are divided by their number.

    Parameters
    ----------
    model
        The untouched model. Gradients land in ``param.grad``, which must be empty before.
    microbatches
        Keyword arguments of the model, per microbatch.
    loss_of
        Takes the loss out of the model's result.
    draws
        Per stage, the number of random operators of its forward (`count_draws`).
    seed, step
        Of the pipeline that is compared: they choose the random streams.
    order
        The order of the microbatches (`zbcompile.Pipeline.microbatch_order`); empty: 0, 1, 2, ...

    Returns
    -------
    list of Tensor
        The losses, by microbatch.

    Raises
    ------
    CheckError
        The model draws another number of random tensors than the stages do.
    """
    losses: dict[int, Tensor] = {}
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    for index in order or range(len(microbatches)):
        inputs = microbatches[index]
        with _streams(draws, seed, step, index, device) as streams:
            loss = loss_of(model(**inputs))
            if streams.seen != streams.total:
                raise CheckError(
                    "the model draws another number of random tensors than its stages",
                    needed=streams.total,
                    given=streams.seen,
                )
            streams.backward = True
            loss.backward()  # type: ignore[no-untyped-call]
        losses[index] = loss.detach()
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.div_(len(microbatches))
    return [losses[index] for index in range(len(microbatches))]
