"""Initial orders: what the literature offers, and a fallback that always fits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from zbcompile.planner.core.instance import BW, B, Codes, F, Fusing, Instance, W, shaped
from zbcompile.planner.incumbent import Order
from zbcompile.planner.run import Run
from zbcompile.planner.starts import classic
from zbcompile.schedule.one_microbatch import OneMicrobatch

__all__ = ["Classic", "OneAtATime", "one_at_a_time"]

_LONG = 30_000


def one_at_a_time(instance: Instance, *, fusing: bool = True) -> Codes:
    """Return an order that runs one microbatch after the other: it fits wherever anything fits.

    All F's come first where that fits. A stage runs fused, if it may, where B and W hold more or take longer
    than BW.
    """
    one = OneMicrobatch.under(instance.memory, instance.rules, instance.rank_of, fusing=fusing)
    order = one.fit(instance.headroom).order or one.forwards_first()
    rows: Codes = [[] for _ in instance.stages_of]
    for backward, s in order:
        wide = fusing and (
            instance.memory.uses[s].split_holds_more
            or instance.fused[s] < instance.backward[s] + instance.weight[s]
        )
        split = [(B, s), (W, s)]
        rows[instance.rank_of[s]] += ([(BW, s)] if wide else split) if backward else [(F, s)]
    return [row * instance.num_microbatches for row in rows]


@dataclass(frozen=True, slots=True)
class Classic:
    """The orders of the literature; on very long problems the first that fits is enough.

    They are listed best first.
    """

    name: str = "classic"
    instant: bool = True

    def applies(self, run: Run) -> bool:
        """Return whether there is a published order for the placement."""
        return any(True for _ in classic.orders_for(run.problem))

    def propose(self, run: Run) -> Iterator[Order]:
        """Yield them until one is proved the best, or there is one and the time is over."""
        for name, codes in classic.orders_for(run.problem):
            yield from _also_all_split(run, codes, f"{self.name} {name}")
            if run.done or (run.actions > _LONG and run.value is not None):
                return


@dataclass(frozen=True, slots=True)
class OneAtATime:
    """The fallback that fits wherever anything does: one microbatch after the other."""

    name: str = "one_at_a_time"
    instant: bool = True

    def applies(self, run: Run) -> bool:
        """Return whether there is no order yet."""
        return run.value is None

    def propose(self, run: Run) -> Iterator[Order]:
        """Yield the order."""
        fusing = run.options.fusing is not Fusing.NEVER
        yield from _also_all_split(run, one_at_a_time(run.instance, fusing=fusing), self.name)


def _also_all_split(run: Run, codes: Codes, name: str) -> Iterator[Order]:
    """Yield an order, and where sends hold up their rank, so that splits decide much, all of it split."""
    yield Order(codes, (name,))
    if run.holds_rank and run.options.fusing is Fusing.AUTO:
        split = shaped(codes, Fusing.NEVER)
        if split != codes:
            yield Order(split, (f"{name}, all split",))
