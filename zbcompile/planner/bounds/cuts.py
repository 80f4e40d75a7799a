"""The bound over all cuts: no order of any stages that can be cut out of the pieces is shorter.

Stage k alone on rank k. Say that rank d runs the pieces a..e-1. Whatever the other cuts are:

* its F's and B's come after the F's of the pieces before a (the head) and d messages at least, and are
  followed by the B's of these pieces and one W of the first (the tail) and d messages;
* from the start of its F to the start of its B, the F's of the pieces from a on and the B's of those from e
  on run one after the other, with a message each way for every rank after d (the round trip);
* so its memory windows (`zbcompile.planner.bounds.memory_window`) leave it idle for some time, with which

      work + idle,   head + work + idle - W's that can be left when the last B ends + tail,
      area: m ((round trip + B) M_B + W M_W) / headroom

  are at most the span, and head + work + idle is at most the makespan.

The greatest of these is the cost of (d, a, e). A cut is a way through such triples, and its value is at least
the greatest cost on the way. The bound is the least of that over all ways, by bisection. Times of pieces on
other ranks are taken at the speed of the fastest rank that may run them, and messages at the least size of
any cut. Where some piece does not feed the next one, or gets no gradient from it, a cut may break the path:
then heads, tails and round trips count nothing but the rank's own F.

What a step costs beside that adds up over the pieces of a stage (`zbcompile.planner.bounds.once_a_step`): the
rank's first F waits for its gather, its reduction and its update follow its last W. Work and area grow by the
three of them. What counts from the start of the step waits for the gather of stage 0, which has piece 0, or
for the rank's own; what counts until W of stage 0 is followed by the reduction and the update of piece 0.

Several stages on a rank: three bounds, and to each of them the least gather and reduction of any piece.

* Some rank runs its share of all work and updates, by speed.
* The rank of stage 0 is busy or waits from the start of an F to the end of its B, while one microbatch passes
  through all pieces and back.
* From the start of F to the end of B of the stage of piece k, the F's and B's of piece k and of all behind it
  run one after the other, and M_B of piece k is held. With a cap on every rank, the ranks' headrooms times
  their times are no less than the sum of that over the pieces and microbatches: the longest time is no less
  than the sum over all headroom together.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from zbcompile.planner.bounds.bound import Bound
from zbcompile.planner.bounds.memory_window import memory_window_bound
from zbcompile.planner.bounds.start_end_idle import pending_time
from zbcompile.planner.core.instance import Instance
from zbcompile.schedule.coarsen import joined_stage
from zbcompile.schedule.costs import Profile, StageCost
from zbcompile.schedule.cuts import CutProblem
from zbcompile.schedule.ir import Placement
from zbcompile.schedule.memory import uses_of
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.speeds import AS_PROFILED, stage_at

__all__ = ["BestCut", "best_cut", "least_overflow", "shared_bound"]

_MOST_COSTS = 4_000
"""Costs that are looked at in full: a second or two. Beyond, a triple counts with a part of its cost."""

Triple = tuple[int, int, int]
"""(rank d, first piece a, end e): rank d runs the pieces a..e-1."""


@dataclass(frozen=True, slots=True)
class BestCut:
    """The bound, and a cut none of whose stages costs more.

    Attributes
    ----------
    bound
        The bound.
    sizes
        Pieces of every stage of that cut.
    """

    bound: Bound
    sizes: tuple[int, ...]


class Segments:
    """What rank d needs at least if it runs pieces a..e-1, however the others are cut.

    Attributes
    ----------
    count, ranks
        Number of pieces and of ranks.
    """

    def __init__(self, task: CutProblem) -> None:
        self.task, self.frame = task, task.frame
        pieces, extra = task.pieces.stages, task.pieces.overhead_ns
        self.count, self.ranks, self._extra = len(pieces), task.frame.num_ranks, extra
        self.speeds = task.speeds or (AS_PROFILED,) * self.ranks
        backward = [min(p.backward_input_ns, p.full_backward_ns) for p in pieces]
        self._f = [0, *accumulate(p.forward_ns for p in pieces)]
        self._b = [0, *accumulate(backward)]
        full = [
            p.forward_ns + min(b + p.backward_weight_ns, p.full_backward_ns)
            for p, b in zip(pieces, backward, strict=True)
        ]
        self._work = [0, *accumulate(full)]
        self._saved = [0, *accumulate(p.saved_bytes for p in pieces)]
        self._pending = [0, *accumulate(p.saved_for_weight_bytes for p in pieces)]
        kept = task.frame.kept_gradients
        static = (p.static_bytes + (p.gradient_bytes if kept else 0) for p in pieces)
        self._static = [0, *accumulate(static)]
        self._hops = _least_hops(task)
        self._ways = [0, *accumulate(there + back for there, back in self._hops or ())]
        self._known: dict[Triple, int | None] = {}

    def ends(self, rank: int, first: int) -> range:
        """Return where the pieces of a rank that begin with ``first`` may end: each later rank needs one."""
        later = self.ranks - 1 - rank
        return range(first + 1 if later else self.count, self.count - later + 1)

    def ends_within(self, rank: int, first: int, most: int) -> range:
        """Return where they may end if the rank, by its work, and the later ones need at most ``most``."""
        ends, m, work = self.ends(rank, first), self.frame.num_microbatches, self._work
        head = self._head(rank, first) if self.frame.objective == "makespan" else 0
        own = (max(0, most - head) // m + 2) * self.speeds[rank] // AS_PROFILED + 1
        rest = (most + 1) * sum(self.speeds[rank + 1 :]) // (m * AS_PROFILED)
        low, high = bisect_left(work, work[-1] - rest), bisect_right(work, work[first] + own)
        return range(max(ends.start, low), min(ends.stop, high))

    def within(self, triple: Triple, most: int) -> bool:
        """Return whether a rank may do its pieces in a value of ``most``."""
        if self.rough(triple) > most:
            return False
        if triple not in self._known and len(self._known) >= _MOST_COSTS:
            return self.overflow(triple) <= 0
        cost = self.cost(triple)
        return cost is not None and cost <= most

    def rough(self, triple: Triple) -> int:
        """Return a part of the cost that takes no time to find: head and work, or the area."""
        rank, first, end = triple
        work = (self._work[end] - self._work[first]) * AS_PROFILED // self.speeds[rank]
        head = self._head(rank, first) if self.frame.objective == "makespan" else 0
        most, cap = head + self.frame.num_microbatches * work, self.frame.caps[rank]
        if cap is None or self._hops is None:
            return most
        saved = self._saved[end] - self._saved[first]
        room = cap - self._static[end] + self._static[first]
        if room < saved:
            return most
        both = self._f[end] - self._f[first] + self._b[end] - self._b[first]
        trip = both * AS_PROFILED // self.speeds[rank] + self._trip(rank, end)
        return max(most, self.frame.num_microbatches * trip * saved // room if room else 0)

    def mean_work(self) -> int:
        """Return the work of all pieces in a step, updates included, shared by the ranks by their speeds."""
        work = self.frame.num_microbatches * self._work[-1] + sum(
            p.update_ns for p in self.task.pieces.stages
        )
        return work * AS_PROFILED // sum(self.speeds)

    def mean_area(self) -> int:
        """Return bytes times time that all pieces hold, over all headroom; 0 without a cap on each rank."""
        caps = [cap for cap in self.frame.caps if cap is not None]
        room = sum(caps) - self._static[-1]
        if len(caps) < self.ranks or room <= 0:
            return 0
        held = 0
        for k, (saved, after) in enumerate(pairwise(self._saved)):
            end = self.count if self._hops is not None else k + 1
            held += (after - saved) * (self._f[end] - self._f[k] + self._b[end] - self._b[k])
        return -(-self.frame.num_microbatches * held * AS_PROFILED // (max(self.speeds) * room))

    def least_beside(self) -> int:
        """Return the least gather and the least reduction of any piece: every rank pays as much."""
        pieces = self.task.pieces.stages
        return min(p.unshard_ns for p in pieces) + min(p.reduce_ns for p in pieces)

    def one_microbatch(self) -> int:
        """Return the time of all F's, B's and messages of one microbatch; 0 where a cut may break the way."""
        if self._hops is None:
            return 0
        host = 2 * self.frame.num_stages * self._extra
        ways = sum(there + back for there, back in self._hops)
        return (self._f[-1] + self._b[-1]) * AS_PROFILED // max(self.speeds) + ways + host

    def cost(self, triple: Triple) -> int | None:
        """Return the cost of a triple in ns; None where not even one microbatch fits."""
        if triple not in self._known:
            self._known[triple] = self._cost(*triple)
        return self._known[triple]

    def overflow(self, triple: Triple) -> int:
        """Return the bytes by which one microbatch exceeds the rank's cap; 0 or less where it fits."""
        rank, first, end = triple
        cap = self.frame.caps[rank]
        if cap is None:
            return -1
        saved, pending, static = (
            sums[end] - sums[first] for sums in (self._saved, self._pending, self._static)
        )
        return uses_of(StageCost(0, 0, 0, 0, saved, pending)).alone(fusing=True) + static - cap

    def _head(self, rank: int, first: int) -> int:
        """Return the least time before the rank's first F can start."""
        if self._hops is None:
            return 0
        ways = sum(there for there, _ in self._hops[:rank])
        return self._before(self._f, rank, first) + ways

    def _before(self, sums: list[int], rank: int, first: int) -> int:
        """Return the least time of the F's (or B's) of the pieces before a rank's."""
        fastest = max(self.speeds[:rank], default=AS_PROFILED)
        return sums[first] * AS_PROFILED // fastest + rank * self._extra

    def _trip(self, rank: int, end: int) -> int:
        """Return the least time from the end of the rank's F to the start of its B."""
        if self._hops is None:
            return 0
        fastest = max(self.speeds[rank + 1 :], default=AS_PROFILED)
        host = 2 * (self.ranks - 1 - rank) * self._extra
        there, back = ((sums[-1] - sums[end]) * AS_PROFILED // fastest for sums in (self._f, self._b))
        return there + back + host + self._ways[-1] - self._ways[rank]

    def _cost(self, rank: int, first: int, end: int) -> int | None:
        if self.overflow((rank, first, end)) > 0:
            return None
        frame = self.frame
        stage = stage_at(joined_stage(self.task.pieces.stages[first:end]), self.speeds[rank])
        profile = Profile((stage,), overhead_ns=self._extra)
        alone = Problem.of(
            profile,
            Placement((0,)),
            frame.num_microbatches,
            (frame.caps[rank],),
            kept_gradients=frame.kept_gradients,
        )
        instance = Instance.of(alone).relaxed()
        work, known = instance.work(0), self._hops is not None
        trip = instance.forward[0]
        head = tail = 0
        if self._hops is not None:
            head = self._head(rank, first)
            trip += self._trip(rank, end)
            tail = self._tail(rank, first)
        idle = memory_window_bound(instance, trip, 0).idle_ns
        left = instance.weight[0] + pending_time(instance, 0, instance.headroom[0] - instance.saved[0], 0)
        own = stage.unshard_ns, stage.reduce_ns + stage.update_ns
        opening, closing = self._of_piece_0() if known and rank else own
        found = [sum(own) + work + idle]
        if known and rank:
            found.append(opening + head + work + idle - left + tail + closing)
        if instance.headroom[0] > 0:
            held = (trip + instance.backward[0]) * instance.saved[0] + instance.weight[0] * instance.pending[
                0
            ]
            found.append(sum(own) - (-frame.num_microbatches * held // instance.headroom[0]))
        if frame.objective == "makespan":
            found.append(max(own[0], opening + head) + work + idle + own[1])
        return max(found)

    def _of_piece_0(self) -> tuple[int, int]:
        """Return the least gather of stage 0, and its least reduction and update: those of piece 0."""
        piece = self.task.pieces.stages[0]
        return piece.unshard_ns, piece.reduce_ns + piece.update_ns * AS_PROFILED // self.speeds[0]

    def _tail(self, rank: int, first: int) -> int:
        """Return the least time from the end of the rank's last B to the end of rank 0's W behind it."""
        if self._hops is None or rank == 0:
            return 0
        ways = sum(back for _, back in self._hops[:rank])
        piece = self.task.pieces.stages[0]
        weight = min(piece.backward_weight_ns, max(0, piece.full_backward_ns - piece.backward_input_ns))
        return self._before(self._b, rank, first) + ways + weight * AS_PROFILED // self.speeds[0]


def _least_hops(task: CutProblem) -> list[tuple[int, int]] | None:
    """Return the least travel times from every stage to the next and back; None if a cut may break a path."""
    edges = {edge.source: edge for edge in task.pieces.edges if edge.target == edge.source + 1}
    if len(edges) < task.pieces.num_stages - 1 or not all(edge.has_gradient for edge in edges.values()):
        return None
    forward = min((edge.forward_bytes for edge in edges.values()), default=0)
    backward = min((edge.backward_bytes for edge in edges.values()), default=0)
    link, rank_of = task.pieces.link_between, task.frame.placement.rank_of
    return [
        (0, 0) if a == b else (link(a, b).transfer_ns(forward), link(b, a).transfer_ns(backward))
        for a, b in pairwise(rank_of)
    ]


def best_cut(task: CutProblem) -> BestCut | None:
    """Return the bound over all cuts, for stage k on rank k; None where no cut fits under the caps."""
    segments = Segments(task)
    if _way(segments, lambda triple: segments.overflow(triple) <= 0) is None:
        return None
    low = segments.mean_work() - 1
    step = max(1, low // 50)
    high, sizes = low + step, None
    while sizes is None:
        sizes = _within(segments, high)
        if sizes is None:
            low, step = high, 2 * step
            high += step
    while high - low > 1:
        middle = (low + high) // 2
        found = _within(segments, middle)
        if found is None:
            low = middle
        else:
            high, sizes = middle, found
    witness = {"sizes": list(sizes), "stage_bounds_ns": [segments.cost(triple) for triple in _triples(sizes)]}
    return BestCut(Bound(high, "cuts", task.frame.objective, witness), sizes)


def least_overflow(task: CutProblem) -> tuple[int, ...]:
    """Return the cut, for stage k on rank k, whose worst rank exceeds its cap by the fewest bytes."""
    segments = Segments(task)
    worst = [segments.overflow((rank, first, end)) for rank, first, end in _all_triples(segments)]
    amounts = sorted(set(worst))
    low, high = 0, len(amounts) - 1
    while low < high:
        middle = (low + high) // 2
        limit = amounts[middle]
        found = _way(segments, lambda triple, most=limit: segments.overflow(triple) <= most)  # type: ignore[misc]
        low, high = (low, middle) if found is not None else (middle + 1, high)
    sizes = _way(segments, lambda triple: segments.overflow(triple) <= amounts[low])
    assert sizes is not None
    return sizes


def shared_bound(task: CutProblem) -> Bound:
    """Return the bound over all cuts for any placement: mean work, way of one microbatch, or mean area."""
    segments = Segments(task)
    terms = {
        "mean_work_ns": segments.mean_work(),
        "path_ns": segments.one_microbatch(),
        "mean_area_ns": segments.mean_area(),
    }
    beside = segments.least_beside()
    witness = {**terms, "once_a_step_ns": beside} if beside else terms
    return Bound(max(terms.values()) + beside, "cuts", task.frame.objective, witness)


def _within(segments: Segments, most: int) -> tuple[int, ...] | None:
    """Return a cut none of whose stages costs more than ``most``, None if there is none."""
    return _way(
        segments,
        lambda triple: segments.within(triple, most),
        lambda rank, first: segments.ends_within(rank, first, most),
    )


def _way(
    segments: Segments,
    allowed: Callable[[Triple], bool],
    ends_of: Callable[[int, int], range] | None = None,
) -> tuple[int, ...] | None:
    """Return a cut all of whose triples are allowed and end where they may, None if there is none."""
    ends_of = ends_of or segments.ends
    befores: list[dict[int, int]] = [{0: 0}]
    for rank in range(segments.ranks):
        reached: dict[int, int] = {}
        for first in befores[-1]:
            for end in ends_of(rank, first):
                if end not in reached and allowed((rank, first, end)):
                    reached[end] = first
        befores.append(dict(sorted(reached.items())))
    if segments.count not in befores[-1]:
        return None
    ends = [segments.count]
    for reached in befores[:0:-1]:
        ends.append(reached[ends[-1]])
    ends.reverse()
    return tuple(b - a for a, b in pairwise(ends))


def _triples(sizes: Sequence[int]) -> Iterator[Triple]:
    """Yield the triples of a cut."""
    ends = [0, *accumulate(sizes)]
    yield from ((rank, *pair) for rank, pair in enumerate(pairwise(ends)))


def _all_triples(segments: Segments) -> Iterator[Triple]:
    for rank in range(segments.ranks):
        for first in range(rank, segments.count) if rank else (0,):
            yield from ((rank, first, end) for end in segments.ends(rank, first) if end > first)
