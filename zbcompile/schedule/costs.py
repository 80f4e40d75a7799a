"""What stages and links cost: integers throughout, in nanoseconds and bytes.

With integers the integer program is exact, JSON is exact, and tests compare with ``==``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from operator import itemgetter
from typing import Any

from zbcompile.errors import UsageError
from zbcompile.schedule.spread import Spread

__all__ = ["Edge", "Link", "Profile", "StageCost"]


def _check_amounts(owner: object, names: Sequence[str]) -> None:
    for name in names:
        value = getattr(owner, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise UsageError(
                f"{type(owner).__name__}.{name} must be a non-negative integer",
                given=value,
                fix="give nanoseconds or bytes as whole numbers",
            )


@dataclass(frozen=True, slots=True)
class StageCost:
    """What one microbatch costs on one stage, and what the stage costs once a step.

    Attributes
    ----------
    forward_ns, backward_input_ns, backward_weight_ns
        Times of F, B and W in ns.
    full_backward_ns
        Time of a fused BW in ns. It is less than B + W where fusing saves a collective.
    saved_bytes
        M_B in bytes: held from the start of F until B (or BW) ends.
    saved_for_weight_bytes
        M_W in bytes: held from the end of B until W ends. It may exceed M_B (recompute).
    static_bytes
        Parameters, gradients and optimizer state in bytes: held all the time, counted in the cap.
    name
        A name for people.
    variants
        Other ways to run this stage (for instance with recompute), to choose from when memory binds. A
        variant has no variants of its own; `Profile.choose` gives it the ``static_bytes``,
        ``gradient_bytes``, ``unshard_ns``, ``reduce_ns`` and ``update_ns`` of the stage.
    gradient_bytes
        One gradient for each of the stage's trainable parameters, in bytes: what each microbatch whose
        gradients wait for their turn in the sum holds beside the sum (`zbcompile.schedule.held_gradients`).
        The sum itself is part of ``static_bytes``. 0: not known, or none.
    unshard_ns, reduce_ns
        Once a step, on the rank's channel for collectives of whole stages: time to gather the stage's
        parameters, and to reduce its gradients over its replicas, in ns
        (`zbcompile.schedule.stage_actions`). 0: there is no such action.
    update_ns
        Once a step: time of the optimizer's step for the stage, in ns, during which the rank does nothing
        else.

    Raises
    ------
    UsageError
        An amount is not a non-negative integer, or a variant has variants.
    """

    forward_ns: int
    backward_input_ns: int
    backward_weight_ns: int
    full_backward_ns: int
    saved_bytes: int
    saved_for_weight_bytes: int
    static_bytes: int = 0
    name: str = ""
    variants: tuple[StageCost, ...] = ()
    gradient_bytes: int = 0
    unshard_ns: int = 0
    reduce_ns: int = 0
    update_ns: int = 0

    def __post_init__(self) -> None:
        _check_amounts(self, _AMOUNTS)
        for variant in self.variants:
            if variant.variants:
                raise UsageError("a variant of a stage cannot have variants", where=variant.name or self.name)

    @staticmethod
    def simple(
        forward_ns: int,
        backward_input_ns: int,
        backward_weight_ns: int,
        saved_bytes: int = 2,
        saved_for_weight_bytes: int = 1,
    ) -> StageCost:
        """Build a stage whose fused backward saves nothing: BW = B + W. Times in ns."""
        return StageCost(
            forward_ns,
            backward_input_ns,
            backward_weight_ns,
            backward_input_ns + backward_weight_ns,
            saved_bytes,
            saved_for_weight_bytes,
        )

    @staticmethod
    def combined(costs: Iterable[StageCost], how: Callable[[list[int]], int]) -> StageCost:
        """Return a stage each of whose times and bytes is the ``sum`` or ``min`` of those of some stages.

        Name and variants are left out.
        """
        stages = tuple(costs)
        costs_of: dict[str, Any] = {name: how([getattr(s, name) for s in stages]) for name in _AMOUNTS}
        return StageCost(**costs_of)

    def of_stage(self, stage: StageCost) -> StageCost:
        """Return this way to run a stage with what every way of it holds, and without variants."""
        return replace(
            self,
            variants=(),
            static_bytes=stage.static_bytes,
            gradient_bytes=stage.gradient_bytes,
            unshard_ns=stage.unshard_ns,
            reduce_ns=stage.reduce_ns,
            update_ns=stage.update_ns,
        )

    @property
    def has_step_costs(self) -> bool:
        """Whether the stage costs anything once a step: a gather, a reduction or an update."""
        return bool(self.unshard_ns or self.reduce_ns or self.update_ns)

    @property
    def work_ns(self) -> int:
        """F + B + W of one microbatch, in ns."""
        return self.forward_ns + self.backward_input_ns + self.backward_weight_ns


_AMOUNTS = tuple(cost.name for cost in fields(StageCost) if cost.type == "int")


@dataclass(frozen=True, slots=True)
class Edge:
    """A flow of tensors from one stage to a later one, per microbatch.

    Attributes
    ----------
    source, target
        The stages; ``source`` is the earlier one.
    forward_bytes
        Size of the activation message in bytes.
    backward_bytes
        Size of its gradient in bytes.
    has_gradient
        False when nothing flows back (integers, masks, frozen producers).

    Raises
    ------
    UsageError
        A number is not a non-negative integer, or the edge does not go to a later stage.
    """

    source: int
    target: int
    forward_bytes: int = 0
    backward_bytes: int = 0
    has_gradient: bool = True

    def __post_init__(self) -> None:
        _check_amounts(self, ("source", "target", "forward_bytes", "backward_bytes"))
        if self.source >= self.target:
            raise UsageError("an edge goes from a stage to a later one", given=(self.source, self.target))


@dataclass(frozen=True, slots=True)
class Link:
    """A directed connection between two ranks.

    Attributes
    ----------
    latency_ns
        Time that every message takes, in ns.
    bytes_per_second
        Bandwidth; 0 means that size costs nothing.
    """

    latency_ns: int = 0
    bytes_per_second: int = 0

    def __post_init__(self) -> None:
        _check_amounts(self, ("latency_ns", "bytes_per_second"))

    def transfer_ns(self, num_bytes: int) -> int:
        """Return latency plus size over bandwidth, rounded up to a whole nanosecond."""
        if self.bytes_per_second == 0 or num_bytes == 0:
            return self.latency_ns
        return self.latency_ns + -(-num_bytes * 1_000_000_000 // self.bytes_per_second)


@dataclass(frozen=True, slots=True)
class Profile:
    """Costs of all stages, the edges between them, and the links between ranks.

    Attributes
    ----------
    stages
        Costs of every stage.
    edges
        Flows between stages, sorted by source and target. Empty means the chain 0 -> 1 -> ... with messages
        of size zero.
    link
        The link of every pair of different ranks that ``links`` does not name. From a rank to itself
        messages are free.
    links
        Exceptions, sorted, as ((source rank, target rank), link).
    overhead_ns
        Host time in ns that every compute action adds on its rank (`rehearse` calibrates it).
    source
        Where the numbers come from, for people ("measured on cpu", "arXiv 2401.10241").
    unsteady
        Measured times whose repeats differ widely, so that their medians may be wrong. Empty: none do, or
        the numbers were not measured.

    Raises
    ------
    UsageError
        There is no stage, an edge names a stage that does not exist, or two edges join the same stages.
    """

    stages: tuple[StageCost, ...]
    edges: tuple[Edge, ...] = ()
    link: Link = field(default_factory=Link)
    links: tuple[tuple[tuple[int, int], Link], ...] = ()
    overhead_ns: int = 0
    source: str = ""
    unsteady: tuple[Spread, ...] = ()

    def __post_init__(self) -> None:
        if not self.stages:
            raise UsageError("a profile needs at least one stage")
        _check_amounts(self, ("overhead_ns",))
        if not self.edges:
            object.__setattr__(self, "edges", tuple(Edge(s, s + 1) for s in range(len(self.stages) - 1)))
        last = len(self.stages) - 1
        for edge in self.edges:
            if edge.target > last:
                raise UsageError(
                    "an edge names a stage that does not exist", given=edge.target, needed=f"<= {last}"
                )
        ordered = tuple(sorted(self.edges, key=lambda e: (e.source, e.target)))
        pairs = [(e.source, e.target) for e in ordered]
        if len(set(pairs)) != len(pairs):
            raise UsageError("two edges join the same pair of stages", fix="add their bytes into one edge")
        object.__setattr__(self, "edges", ordered)
        object.__setattr__(self, "links", tuple(sorted(self.links, key=lambda item: item[0])))

    @staticmethod
    def uniform(stage: StageCost, num_stages: int, latency_ns: int = 0, source: str = "") -> Profile:
        """Build a profile with one cost for all stages, the chain of edges, and one latency for all links."""
        return Profile((stage,) * num_stages, link=Link(latency_ns), source=source)

    @staticmethod
    def combined(profiles: Sequence[Profile], how: Callable[[list[int]], int]) -> Profile:
        """Return a profile each of whose times and sizes is the ``min`` or ``max`` of those of some profiles.

        They have the same stages, edges and links. Names of stages and variants are left out.
        """
        first = profiles[0]
        stages = zip(*(profile.stages for profile in profiles), strict=True)
        edges = zip(*(profile.edges for profile in profiles), strict=True)
        return replace(
            first,
            stages=tuple(StageCost.combined(row, how) for row in stages),
            edges=tuple(
                replace(
                    row[0],
                    forward_bytes=how([edge.forward_bytes for edge in row]),
                    backward_bytes=how([edge.backward_bytes for edge in row]),
                )
                for row in edges
            ),
        )

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.stages)

    @property
    def offers_variants(self) -> bool:
        """Whether any stage has more than one way to run."""
        return any(stage.variants for stage in self.stages)

    def link_between(self, source_rank: int, target_rank: int) -> Link:
        """Return the link between two ranks; within one rank it is free."""
        if source_rank == target_rank:
            return _FREE
        pair = (source_rank, target_rank)
        k = bisect_left(self.links, pair, key=itemgetter(0))
        return self.links[k][1] if k < len(self.links) and self.links[k][0] == pair else self.link

    def choose(self, variants: Sequence[int]) -> Profile:
        """Return the profile with one variant fixed per stage.

        Parameters
        ----------
        variants
            One number per stage: 0 is the stage itself, k its k-th variant.

        Raises
        ------
        UsageError
            The count is wrong, or a stage has no such variant.
        """
        if len(variants) != len(self.stages):
            raise UsageError("one variant per stage", needed=len(self.stages), given=len(variants))
        chosen = []
        for index, (stage, k) in enumerate(zip(self.stages, variants, strict=True)):
            if not 0 <= k <= len(stage.variants):
                raise UsageError(
                    f"stage {index} has no variant {k}", needed=f"0 to {len(stage.variants)}", given=k
                )
            picked = stage if k == 0 else stage.variants[k - 1]
            chosen.append(picked.of_stage(stage))
        return replace(self, stages=tuple(chosen))


_FREE = Link()
