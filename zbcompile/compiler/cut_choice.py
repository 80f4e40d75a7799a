"""Cuts chosen with the order: small pieces of the model are split and counted, and quick plans join them.

``Captured --> cuts``. Counted costs on a fixed device and counted tries decide, so that all ranks cut alike.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from zbcompile.compiler.observe import Observer
from zbcompile.errors import InfeasibleError, UsageError
from zbcompile.options import CompileOptions
from zbcompile.passes.capture.captured import Captured
from zbcompile.passes.op_costs import nominal_device
from zbcompile.passes.partition.cut_points import CutPoint
from zbcompile.passes.partition.cuts import piece_cuts
from zbcompile.passes.partition.partition import legal_cuts, partition
from zbcompile.passes.profile.counted import counted_profile
from zbcompile.passes.profile.measure import snapshot_bytes
from zbcompile.passes.split.recompute import AUTO
from zbcompile.passes.split.split_backward import Recompute, split_backward
from zbcompile.schedule.costs import Link, Profile
from zbcompile.schedule.cuts import CutProblem
from zbcompile.schedule.devices import Device
from zbcompile.schedule.ir import Placement

__all__ = ["CutChoice", "cut_choice"]

PIECES_PER_STAGE = 6
MOST_PIECES = 96
TRIES = 24
"""Quick plans for the cuts of one model."""


@dataclass(frozen=True)
class CutChoice:
    """Chooses the cuts of a captured model.

    Attributes
    ----------
    placement
        Of the stages.
    num_microbatches, memory_limit, objective, transport, accumulate, kept_gradients, seed
        Of the pipeline.
    speeds
        Of its ranks in millionths; empty: all alike.
    device
        That costs are counted for; None: the nominal one, and messages take no time.
    post_validation
        Whether a copy of the weights and the optimizer's state is held, too.
    levels
        What stages recompute, as for `split_backward`: the first at which a cut fits counts.
    skip
        As for `split_backward`.
    observer
        Called with the `Cuts`, by the name ``cuts``.
    """

    placement: Placement
    num_microbatches: int
    memory_limit: int | tuple[int | None, ...] | None
    objective: str
    transport: str
    accumulate: str
    kept_gradients: bool
    seed: int
    speeds: tuple[int, ...]
    device: Device | None
    post_validation: bool
    levels: tuple[Recompute, ...]
    skip: Collection[str]
    observer: Observer

    def __call__(self, captured: Captured) -> Sequence[CutPoint] | None:
        """Return the cuts of the model; None where no cut fits, or there are fewer than stages need.

        Cuts that balance the work are then looked for, and that, or planning, says what is missing.
        """
        tried = (self._at(captured, level) for level in self.levels)
        return next((cuts for cuts in tried if cuts is not None), None)

    def _at(self, captured: Captured, level: Recompute) -> Sequence[CutPoint] | None:
        """Return the cuts for stages at a level of recompute; None as the call."""
        stages = self.placement.num_stages
        most = min(MOST_PIECES, PIECES_PER_STAGE * stages)
        cuts, pieces = self._pieces(captured, most, level)
        if pieces.num_stages < stages:
            return None
        task = CutProblem.of(
            pieces,
            self.placement,
            self.num_microbatches,
            self.memory_limit,
            self.objective,
            self.transport,
            self.speeds,
            accumulate=self.accumulate,
            kept_gradients=self.kept_gradients,
        )
        from zbcompile.planner.cuts import quick_cuts

        try:
            sizes = quick_cuts(task, seed=self.seed, tries=TRIES)
        except InfeasibleError:
            return None
        self.observer("cuts", task.cuts(sizes))
        return [cuts[end - 1] for end in accumulate(sizes[:-1])]

    def _pieces(
        self, captured: Captured, most: int, level: Recompute
    ) -> tuple[tuple[CutPoint, ...], Profile]:
        """Return the cuts between pieces, and what the pieces cost, counted; the model stays as it is."""
        device, stages = self.device, self.placement.num_stages
        cuts = piece_cuts(legal_cuts(captured, device), most, stages)
        sources = partition(captured, len(cuts) + 1, split_points=lambda legal, count: cuts, device=device)
        graphs = split_backward(captured, sources, recompute=level, device=device, skip=self.skip)
        if device is not None:
            pieces = counted_profile(graphs, device)
        else:
            pieces = counted_profile(graphs, nominal_device(captured.device), Link())
        if self.post_validation:
            costs = (
                replace(cost, static_bytes=cost.static_bytes + snapshot_bytes(cost.gradient_bytes))
                for cost in pieces.stages
            )
            pieces = replace(pieces, stages=tuple(costs))
        return cuts, pieces


def cut_choice(
    options: CompileOptions, num_ranks: int, num_microbatches: int, observer: Observer
) -> CutChoice | None:
    """Return what chooses the cuts of a pipeline; None where they are given or balanced.

    Raises
    ------
    UsageError
        Cuts are to be planned and given as well, or there is not one speed per rank.
    """
    if options.rank_speeds and len(options.rank_speeds) != num_ranks:
        given = len(options.rank_speeds)
        raise UsageError("one speed per rank", where="rank_speeds", needed=num_ranks, given=given)
    if not options.plans_cuts:
        return None
    return CutChoice(
        _placement(options, num_ranks),
        num_microbatches,
        options.memory_limit,
        options.objective,
        options.transport,
        options.accumulate,
        options.kept_gradients,
        options.seed,
        options.rank_speeds,
        options.profile if isinstance(options.profile, Device) else None,
        options.post_validation,
        ("none", "full") if options.recompute == AUTO else (options.recompute,),
        options.skip,
        observer,
    )


def _placement(options: CompileOptions, num_ranks: int) -> Placement:
    """Return the placement to cut for: ``auto`` with several stages per rank counts as a V."""
    stages, chosen = options.num_stages, options.placement
    if options.schedule is not None:
        return options.schedule.placement
    if isinstance(chosen, Placement):
        return chosen
    if stages == num_ranks:
        return Placement.linear(num_ranks)
    if num_ranks > stages or stages % num_ranks:
        raise UsageError(
            "cuts are planned for the same number of stages on every rank",
            needed=f"a multiple of {num_ranks} stages",
            given=stages,
            fix='give split_points, a Placement, or compile(cuts="balance")',
        )
    return Placement.named("v" if chosen == "auto" else chosen, num_ranks, stages // num_ranks)
