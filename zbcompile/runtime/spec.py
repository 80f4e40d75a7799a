"""What all ranks of a pipeline share, and what one step takes and returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from zbcompile.runtime.gradients import GradientSums, tied_holders
from zbcompile.runtime.wire_format import WireFormat
from zbcompile.runtime.wiring import RunnableStage, Wiring
from zbcompile.schedule.ir import Placement
from zbcompile.schedule.problem import Accumulate

__all__ = ["PipelineSpec", "Step", "Trial"]


@dataclass(frozen=True)
class PipelineSpec:
    """What all ranks of a pipeline share: stages, their placement, their wiring. Equal on all ranks.

    Attributes
    ----------
    stages
        All stages; a rank runs only its own and reads no more than the ports of the others.
    placement
        Which rank runs which stage.
    num_microbatches
        Microbatches per step.
    seed
        Seed of the random streams.
    random_stages
        The stages whose forward draws random numbers.
    one_communicator
        Whether the programs keep one global order of messages, for channels with a single queue.
    gradient_dtype
        What gradients of narrower parameters are summed in; None: their own dtype.
    accumulate
        Whether gradients are summed in microbatch ``order``, or as they come, in the least ``memory``.
    microbatch_order
        The microbatches in the order in which gradients are summed; empty: 0, 1, 2, ...
    wiring
        Which tensor of which stage goes where.
    wire_formats
        Per kind of message (backward, source stage, target stage) the wire formats of its tensors.
    tied
        Parameters that several stages hold: name -> stages in order.
    """

    stages: tuple[RunnableStage, ...]
    placement: Placement
    num_microbatches: int
    seed: int = 0
    random_stages: frozenset[int] = frozenset()
    one_communicator: bool = False
    gradient_dtype: torch.dtype | None = None
    accumulate: Accumulate = "order"
    microbatch_order: tuple[int, ...] = ()
    wiring: Wiring = field(init=False)
    wire_formats: Mapping[tuple[bool, int, int], tuple[WireFormat, ...]] = field(init=False)
    tied: Mapping[str, tuple[int, ...]] = field(init=False)

    def __post_init__(self) -> None:
        wiring = Wiring.of(self.stages)
        wire_formats = {
            (backward, source, target): tuple(WireFormat.of(port, gradient=backward) for port in ports)
            for (backward, source, target), ports in wiring.ports.items()
        }
        object.__setattr__(self, "wiring", wiring)
        object.__setattr__(self, "wire_formats", wire_formats)
        object.__setattr__(self, "tied", tied_holders([stage.trainable for stage in self.stages]))

    @property
    def has_gradients(self) -> bool:
        """Whether a step computes gradients of parameters."""
        return any(stage.trainable for stage in self.stages)


class Trial(Protocol):
    """Decides whether a step that has begun counts: it was begun before all ranks had agreed on its weights.

    All ranks learn the same, each at its own time. A void step computes nothing more, but every message of it
    is still sent and received, so that the next step finds the channels empty.
    """

    def void(self, wait: bool) -> bool:
        """Return whether the step is known not to count; with ``wait``, wait until it is known.

        A rank waits before its first backward. By then all ranks have begun the step, at least those whose
        loss it needs; its gradients, and what backing out of the weights needs, are never held together.
        """


@dataclass
class Step:
    """One training or evaluation step: its inputs, and what comes out on one rank.

    Attributes
    ----------
    batch
        Per microbatch, the flat list of tensor inputs; None for one that no stage of this process takes.
    number
        Number of the step; it chooses the random streams.
    loss_scale
        The gradient of each microbatch's loss.
    keep_results
        Whether outputs are wanted.
    kept
        Outputs (stage, position) that are wanted in any case.
    first
        Number of the first microbatch in the whole step of all replicas, for its random streams.
    sums
        Rank -> its sums of gradients; given on from a part of the step to the next.
    ends_sums
        Whether the sums are complete at its end: those of tied parameters and of replicas are then summed.
    trial
        Whether the step counts; None: it does.
    losses
        Microbatch -> loss; filled by the step.
    results
        (stage, output position) -> microbatch -> tensor; filled by the step.
    """

    batch: Sequence[Sequence[Tensor | None]]
    number: int = 0
    loss_scale: float = 1.0
    keep_results: bool = True
    kept: frozenset[tuple[int, int]] = frozenset()
    first: int = 0
    sums: dict[int, GradientSums] = field(default_factory=dict)
    ends_sums: bool = True
    trial: Trial | None = None
    losses: dict[int, Tensor] = field(default_factory=dict)
    results: dict[tuple[int, int], dict[int, Tensor]] = field(default_factory=dict)
