"""What one configuration is: how to build its model and a batch, and how its loss is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

BATCH = 4
"""Samples of a whole batch: two microbatches of two."""
LENGTH = 12
"""Tokens of a text."""
TEXT_IDS = (3, 60)
"""Token ids of text; those from 64 on stand for images, videos and sounds."""
VOCABULARY = 96

__all__ = ["BATCH", "LENGTH", "VOCABULARY", "Inputs", "ModelCase", "mean_square", "text", "text_with_labels"]


@dataclass(frozen=True)
class Inputs:
    """A whole batch: what `Pipeline.step` gets.

    Attributes
    ----------
    args, kwargs, target
        Of the call. Every tensor's dimension 0 is the batch, or the tensor is one of ``whole``.
    whole
        Positions of args and names of kwargs that every microbatch gets whole.
    constant
        Names of kwargs whose values the model's code reads, equal in all microbatches.
    """

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    target: Any = None
    whole: tuple[str | int, ...] = ()
    constant: tuple[str, ...] = ()

    def microbatches(self, count: int) -> list[Inputs]:
        """Cut every tensor but the whole ones into ``count`` pieces along dimension 0."""

        def piece(i: int, value: Any) -> Any:
            return pytree.tree_map_only(
                Tensor,
                lambda t: t.chunk(count)[i] if t.dim() and t.shape[0] and t.shape[0] % BATCH == 0 else t,
                value,
            )

        return [
            Inputs(
                tuple(a if k in self.whole else piece(i, a) for k, a in enumerate(self.args)),
                {k: a if k in self.whole else piece(i, a) for k, a in self.kwargs.items()},
                piece(i, self.target),
            )
            for i in range(count)
        ]


@dataclass(frozen=True)
class ModelCase:
    """One configuration.

    Attributes
    ----------
    name, family
        The name is unique.
    build
        Returns the model with random weights; nothing is downloaded.
    batch
        Returns the whole batch for a model.
    loss
        ``loss(output, target)``; None where the model returns its own.
    package
        Python package beside torch that the model comes from, or "".
    stages
        How many stages the model is cut into.
    options
        Options of `zbcompile.compile` that the configuration needs.
    ran_once
        Whether the model runs once before it is compiled.
    joined
        Whether the results of the microbatches can be joined to those of a batch.
    """

    name: str
    family: str
    build: Callable[[], nn.Module]
    batch: Callable[[Any], Inputs]
    loss: Callable[..., Tensor] | None = None
    package: str = ""
    stages: int = 2
    options: Mapping[str, Any] = field(default_factory=dict)
    ran_once: bool = False
    joined: bool = True

    def needs(self, batch: Inputs) -> str:
        """Return what a user must say beside the model and the batch; empty where nothing."""
        options = {**({"constant": batch.constant} if batch.constant else {}), **self.options}
        words = [f"{name}={list(v) if isinstance(v, tuple) else v}" for name, v in options.items()]
        words += ["run once before"] if self.ran_once else []
        return ", ".join(words + ([] if self.joined else ["return_outputs=False"]))


def text(length: int = LENGTH) -> Tensor:
    """Token ids of a batch of texts."""
    return torch.randint(*TEXT_IDS, (BATCH, length))


def text_with_labels(model: Any) -> Inputs:
    """Texts that are their own labels: the model returns its loss."""
    ids = text()
    return Inputs(kwargs={"input_ids": ids, "labels": ids.clone()})


def mean_square(output: Any, target: Any = None) -> Tensor:
    """A loss for any output: the mean squares of its floating-point tensors, summed."""
    values = [t for t in pytree.tree_leaves(output) if isinstance(t, Tensor) and t.is_floating_point()]
    return sum((v.float().pow(2).mean() for v in values if v.requires_grad), torch.zeros(()))
