"""The facts of one rank of an order: its time, its memory, and what its backwards are split for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from zbcompile.schedule.ir import Action, Kind
from zbcompile.schedule.stage_actions import update_ns
from zbcompile.schedule.waits import Waits

__all__ = ["Peak", "RankFacts", "Splits", "facts_of"]


@dataclass(frozen=True, slots=True)
class Peak:
    """The most memory that a rank holds.

    Attributes
    ----------
    held_bytes
        The bytes, static bytes included.
    at_ns
        When they are first held.
    flying
        The (stage, microbatch) pairs between F and backward then.
    waiting
        Those between B and W then.
    """

    held_bytes: int
    at_ns: int
    flying: tuple[tuple[int, int], ...]
    waiting: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Splits:
    """How the backwards of a rank run, and what that is good for.

    Attributes
    ----------
    split, fused
        Counts per stage of the rank.
    weight_ns
        Time of all W's.
    filled_ns
        W time during which the rank would have waited for a message.
    last_ns
        W time behind the rank's last other action.
    rooms
        Runs of W's without which the F behind them would not fit under the cap.
    saved_ns
        What the fused backwards take less than B and W would.
    """

    split: tuple[int, ...]
    fused: tuple[int, ...]
    weight_ns: int
    filled_ns: int
    last_ns: int
    rooms: int
    saved_ns: int


@dataclass(frozen=True, slots=True)
class RankFacts:
    """One rank of an order.

    Attributes
    ----------
    work_ns, held_ns, span_ns
        Its computing, the time for which sends hold it, and its span.
    exposed_ns, update_ns
        After its last W: how long it waits for its reductions, and its update.
    last_reduced
        The stage whose reduction ends last, where the rank waits for it; else None.
    """

    rank: int
    work_ns: int
    held_ns: int
    span_ns: int
    peak: Peak
    splits: Splits
    exposed_ns: int = 0
    update_ns: int = 0
    last_reduced: int | None = None

    @property
    def idle_ns(self) -> int:
        """The rest of its span."""
        busy = self.work_ns + self.held_ns + self.exposed_ns + self.update_ns
        return max(0, self.span_ns - busy)


def facts_of(waits: Waits, rank: int) -> RankFacts:
    """Collect the facts of a rank."""
    timeline = waits.timeline
    span = timeline.rank_span[rank] if waits.problem.objective == "span" else timeline.makespan_ns
    held = sum(pause.held_ns for pause in waits.pauses(rank)) if waits.hold else 0
    work = timeline.busy_ns(rank)
    exposed = timeline.exposed_ns(rank)
    reduced = [a.stage for a in timeline.schedule.order[rank] if a.kind is Kind.REDUCE_GRAD]
    return RankFacts(
        rank,
        work,
        min(held, span - work),
        span,
        _peak(waits, rank),
        _splits(waits, rank),
        exposed,
        update_ns(waits.problem, rank),
        reduced[-1] if exposed and reduced else None,
    )


def _peak(waits: Waits, rank: int) -> Peak:
    """Find when a rank first holds most, and for which microbatches.

    F takes its bytes when it starts, every other action when it ends.
    """
    row, during = waits.schedule.order[rank], waits.during(rank)
    static = waits.problem.static_bytes(rank)
    held = max(during, default=static)
    flying, waiting = dict[tuple[int, int], None](), dict[tuple[int, int], None]()
    for k, action in enumerate(row) if held > static else ():
        if not action.kind.is_compute:
            continue
        pair = (action.stage, action.microbatch)
        if action.kind is Kind.FORWARD:
            flying[pair] = None
        elif action.kind is Kind.BACKWARD_WEIGHT:
            waiting.pop(pair, None)
        else:
            flying.pop(pair, None)
        if action.kind is Kind.BACKWARD_INPUT:
            waiting[pair] = None
        if during[k] == held:
            times = waits.timeline.start if action.kind is Kind.FORWARD else waits.timeline.end
            return Peak(held, times[rank][k], tuple(flying), tuple(waiting))
    return Peak(held, 0, (), ())


def _splits(waits: Waits, rank: int) -> Splits:
    """Count a rank's split and fused backwards, and what the W's do where they stand."""
    first, order = waits.graph.node_of[rank].start, waits.schedule.order[rank]
    row = [(node, order[node - first]) for node in waits.computes[rank]]
    stages, costs = waits.problem.placement.stages_of(rank), waits.problem.profile.stages
    extra = waits.problem.profile.overhead_ns
    split = Counter(a.stage for _, a in row if a.kind is Kind.BACKWARD_WEIGHT)
    fused = Counter(a.stage for _, a in row if a.kind is Kind.FULL_BACKWARD)
    weight = sum(waits.graph.duration[n] for n, a in row if a.kind is Kind.BACKWARD_WEIGHT)
    saved = 0
    for stage, count in fused.items():
        cost = costs[stage]
        saved += count * (cost.backward_input_ns + cost.backward_weight_ns + extra - cost.full_backward_ns)
    filled, last, rooms = _use_of_weights(waits, rank, row)
    return Splits(
        tuple(split[s] for s in stages),
        tuple(fused[s] for s in stages),
        weight,
        filled,
        last,
        rooms,
        saved,
    )


def _use_of_weights(waits: Waits, rank: int, row: Sequence[tuple[int, Action]]) -> tuple[int, int, int]:
    """Return (ns of waits filled, ns after all else, runs that make room) of a rank's W's."""
    filled = last = rooms = place = 0
    cap = waits.problem.caps[rank]
    for is_weight, entries in groupby(row, lambda entry: entry[1].kind is Kind.BACKWARD_WEIGHT):
        run = [node for node, _ in entries]
        place += len(run)
        if not is_weight:
            continue
        if place == len(row):
            last += sum(waits.graph.duration[node] for node in run)
            continue
        after = row[place][0]
        ready = waits.ready[after]
        filled += sum(max(0, min(waits.end(node), ready) - waits.start[node]) for node in run)
        if cap is not None and row[place][1].kind is Kind.FORWARD:
            rooms += waits.blocker(after, cap, waits.start[run[0]]) is not None
    return filled, last, rooms
