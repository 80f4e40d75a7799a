"""Deriving the bound over all cuts again: no way to cut the pieces leaves every rank below it.

Rank d with the pieces a..e-1 is put into a chain of three stages: one with the least times of all that comes
before, its own, and one with the least times of all that follows. What `zbcompile.planner.certify.facts` says
of that chain's middle holds for every cut with this stage. Nothing here calls the code that found the bound.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from zbcompile.errors import UsageError
from zbcompile.planner.certify.derive import window_fillings
from zbcompile.planner.certify.facts import Derivation, Facts, Witness, refuse
from zbcompile.schedule.costs import Edge, Profile, StageCost
from zbcompile.schedule.cuts import Cuts
from zbcompile.schedule.ir import Placement
from zbcompile.schedule.problem import Problem

__all__ = ["check_cuts", "cuts_bound"]

_AS_PROFILED = 1_000_000


def check_cuts(problem: Problem, cuts: Cuts) -> None:
    """Test that the stages of a problem are cut out of the pieces as stated."""
    if len(cuts.sizes) != problem.num_stages:
        raise refuse("the cuts make another number of stages", problem.num_stages, len(cuts.sizes))
    try:
        made = cuts.profile(problem.placement)
    except UsageError as error:
        raise refuse(f"the cuts do not fit the problem: {error.what}") from None
    if made != problem.profile:
        raise refuse("the problem's profile is not what its cuts make of the pieces")


def cuts_bound(problem: Problem, cuts: Cuts, witness: Witness, target: int, out: Derivation) -> int:
    """Show that no cut has a value below ``target``, and return it.

    Raises
    ------
    CheckError
        Some cut is not excluded, or the witness is not what follows.
    """
    ranks = _Ranks(problem, cuts)
    if problem.placement.rank_of != tuple(range(problem.num_ranks)):
        return ranks.shared(witness, out)
    below = ranks.way_below(target)
    if below is not None:
        raise refuse(f"nothing excludes an order below {target} ns for the cut {below}")
    sizes = witness.get("sizes")
    if isinstance(sizes, (list, tuple)) and len(sizes) == problem.num_ranks and _adds_up(sizes, ranks.count):
        costs, first = [], 0
        for rank, size in enumerate(sizes):
            cost = ranks.cost(rank, first, first + size)
            if cost is None:
                raise refuse("a stage of the witness's cut does not fit its rank", given=list(sizes))
            costs.append(cost[0])
            out.note(f"rank {rank} with pieces {first} to {first + size - 1}: {cost[1]}")
            first += size
        Derivation(numbers={"sizes": sizes, "stage_bounds_ns": costs}).compare(witness)
    else:
        Derivation().compare(witness)
    out.note(f"in every other cut some rank needs as much; {len(ranks.known)} stages were looked at")
    out.add("the least that every cut costs some rank", target)
    return target


def _adds_up(sizes: list[object] | tuple[object, ...], count: int) -> bool:
    whole = [size for size in sizes if type(size) is int and size > 0]
    return len(whole) == len(sizes) and sum(whole) == count


class _Ranks:
    """What a rank needs at least for some pieces.

    Attributes
    ----------
    count
        Number of pieces.
    known
        What was derived: (rank, first piece, end) -> the cost and its sum in words, None where not one
        microbatch fits.
    """

    def __init__(self, problem: Problem, cuts: Cuts) -> None:
        self.problem, self.pieces = problem, cuts.pieces.stages
        self.profile, self.count = cuts.pieces, len(cuts.pieces.stages)
        self.speeds = cuts.speeds or (_AS_PROFILED,) * problem.num_ranks
        self.known: dict[tuple[int, int, int], tuple[int, str] | None] = {}
        chain = {e.source: e for e in cuts.pieces.edges if e.target == e.source + 1 and e.has_gradient}
        self.joined = len(chain) == self.count - 1
        self.least_there = min((e.forward_bytes for e in chain.values()), default=0)
        self.least_back = min((e.backward_bytes for e in chain.values()), default=0)

    def work(self, first: int, end: int) -> int:
        """Return the least time of F, B and W of some pieces for one microbatch, at the profile's speed."""
        return sum(
            p.forward_ns + min(p.backward_input_ns + p.backward_weight_ns, p.full_backward_ns)
            for p in self.pieces[first:end]
        )

    def shared(self, witness: Witness, out: Derivation) -> int:
        """Add what some rank has to work, or what one microbatch takes, for any placement."""
        m, pieces = self.problem.num_microbatches, self.pieces
        total = m * self.work(0, self.count) + sum(p.update_ns for p in pieces)
        mean, way = total * _AS_PROFILED // sum(self.speeds), 0
        if self.joined:
            rank_of = self.problem.placement.rank_of
            once = sum(p.forward_ns + min(p.backward_input_ns, p.full_backward_ns) for p in pieces)
            way = once * _AS_PROFILED // max(self.speeds) + 2 * len(rank_of) * self.profile.overhead_ns
            for here, there in pairwise(rank_of):
                if here != there:
                    way += self._hop(here, there, self.least_there) + self._hop(there, here, self.least_back)
        terms = {
            "the ranks' mean share of all work and updates, by their speeds": mean,
            "one microbatch through all pieces and back, as the rank of stage 0 sees it": way,
            "bytes times time of all pieces, over the headroom of all ranks": self._area(),
        }
        numbers: dict[str, object] = dict(
            zip(("mean_work_ns", "path_ns", "mean_area_ns"), terms.values(), strict=True)
        )
        words = max(terms, key=lambda words: terms[words])
        out.add(words, terms[words])
        beside = min(p.unshard_ns for p in pieces) + min(p.reduce_ns for p in pieces)
        if beside:
            out.add("the least gather and the least reduction of any piece", beside)
            numbers["once_a_step_ns"] = beside
        Derivation(numbers=numbers).compare(witness)
        return terms[words] + beside

    def _area(self) -> int:
        """Return bytes times time, from F to B of every piece's stage, over all headroom; 0 without caps."""
        kept = self.problem.kept_gradients
        room = -sum(p.static_bytes + (p.gradient_bytes if kept else 0) for p in self.pieces)
        for cap in self.problem.caps:
            if cap is None:
                return 0
            room += cap
        if room <= 0:
            return 0
        held = behind = 0
        for piece in reversed(self.pieces):
            own = piece.forward_ns + min(piece.backward_input_ns, piece.full_backward_ns)
            behind = own + (behind if self.joined else 0)
            held += piece.saved_bytes * behind
        return -(-self.problem.num_microbatches * held * _AS_PROFILED // (max(self.speeds) * room))

    def way_below(self, target: int) -> list[int] | None:
        """Return a cut that leaves every rank below a value, or None."""
        m, last = self.problem.num_microbatches, self.problem.num_ranks - 1
        ways: dict[int, list[int]] = {0: []}
        for rank in range(last + 1):
            further: dict[int, list[int]] = {}
            for first, sizes in ways.items():
                for end in range(first + 1, self.count - (last - rank) + 1):
                    if m * self.work(first, end) * _AS_PROFILED // self.speeds[rank] >= target:
                        break
                    rest = m * self.work(end, self.count) * _AS_PROFILED
                    if end in further or rest > target * sum(self.speeds[rank + 1 :]):
                        continue
                    cost = self.cost(rank, first, end)
                    if cost is not None and cost[0] < target:
                        further[end] = [*sizes, end - first]
            ways = further
        return ways.get(self.count)

    def cost(self, rank: int, first: int, end: int) -> tuple[int, str] | None:
        """Return what the rank needs at least, with its sum; None where not one microbatch fits."""
        place = rank, first, end
        if place not in self.known:
            self.known[place] = self._cost(*place)
        return self.known[place]

    def _cost(self, rank: int, first: int, end: int) -> tuple[int, str] | None:
        facts, own = self._facts(rank, first, end)
        m, room = facts.count, facts.headroom[own]
        if facts.saved[own] > room:
            return None
        trip = facts.way(("F", own), ("B", own))
        assert trip is not None
        work, idle = facts.work(own), self._idle(facts, own, trip)
        gather, after = self._once(facts, own)
        lead, last = self._once(facts, 0) if own else (gather, after)
        found = {f"{gather} before + work {work} + idle {idle} + {after} after": gather + work + idle + after}
        if self.joined and rank:
            head, left, tail = facts.head(own), facts.trailing(own), facts.b[0] + facts.w[0]
            words = f"way there {head} + work {work} + idle {idle} - W's left {left} + way back {tail}"
            found[f"{lead} before + {words} + {last} after"] = lead + head + work + idle - left + tail + last
            if self.problem.objective == "makespan":
                start = max(gather, lead + head)
                words = f"head {start} + work {work} + idle {idle} + {after} after"
                found[words] = start + work + idle + after
        if room > 0:
            held = (trip + facts.b[own]) * facts.saved[own] + facts.w[own] * facts.pending[own]
            beside = gather + after
            found[f"{m} x {held} byte ns / {room} bytes + {beside} once"] = -(-m * held // room) + beside
        most = max(found, key=lambda words: found[words])
        return found[most], most

    def _once(self, facts: Facts, stage: int) -> tuple[int, int]:
        """Return a stage's gather, and its reduction and update together."""
        cost = facts.problem.profile.stages[stage]
        return cost.unshard_ns, cost.reduce_ns + cost.update_ns

    def _facts(self, rank: int, first: int, end: int) -> tuple[Facts, int]:
        """Return the chain of what comes before, the rank's stage, and what follows; and its place there."""
        problem, last = self.problem, self.problem.num_ranks - 1
        stages: list[StageCost] = []
        caps: list[int | None] = []
        if rank and self.joined:
            forward, backward = self._others(range(rank), self.pieces[:first])
            piece = self.pieces[0]
            spare = max(0, piece.full_backward_ns - piece.backward_input_ns)
            weight = min(piece.backward_weight_ns, spare) * _AS_PROFILED // self.speeds[0]
            there = sum(self._hop(r, r + 1, self.least_there) for r in range(rank))
            back = sum(self._hop(r + 1, r, self.least_back) for r in range(rank))
            stages.append(
                replace(
                    StageCost.simple(forward + there, backward + back, weight, 0, 0),
                    unshard_ns=piece.unshard_ns,
                    reduce_ns=piece.reduce_ns,
                    update_ns=piece.update_ns * _AS_PROFILED // self.speeds[0],
                )
            )
            caps.append(None)
        own = len(stages)
        stages.append(self._own(rank, first, end))
        caps.append(problem.caps[rank])
        if rank < last and self.joined:
            forward, backward = self._others(range(rank + 1, last + 1), self.pieces[end:])
            there = sum(self._hop(r, r + 1, self.least_there) for r in range(rank, last))
            back = sum(self._hop(r + 1, r, self.least_back) for r in range(rank, last))
            stages.append(StageCost.simple(forward + there, backward + back, 0, 0, 0))
            caps.append(None)
        edges = tuple(Edge(s, s + 1) for s in range(len(stages) - 1))
        profile = Profile(tuple(stages), edges)
        placement = Placement(tuple(range(len(stages))))
        chain = Problem(
            profile,
            placement,
            problem.num_microbatches,
            tuple(caps),
            problem.objective,
            kept_gradients=problem.kept_gradients,
        )
        return Facts(chain), own

    def _hop(self, source: int, target: int, num_bytes: int) -> int:
        return self.profile.link_between(source, target).transfer_ns(num_bytes)

    def _others(self, ranks: range, pieces: tuple[StageCost, ...]) -> tuple[int, int]:
        """Return the least times of F's and of B's of pieces that other ranks run, a stage on each."""
        fastest = max(self.speeds[r] for r in ranks)
        host = len(ranks) * self.profile.overhead_ns
        forward = sum(p.forward_ns for p in pieces) * _AS_PROFILED // fastest
        backward = sum(min(p.backward_input_ns, p.full_backward_ns) for p in pieces) * _AS_PROFILED // fastest
        return forward + host, backward + host

    def _own(self, rank: int, first: int, end: int) -> StageCost:
        """Return the rank's stage: sums over its pieces, at its speed, with the host overhead."""
        own, speed = self.pieces[first:end], self.speeds[rank]

        def slowed(times: list[int]) -> int:
            return -(-sum(times) * _AS_PROFILED // speed) + self.profile.overhead_ns

        return StageCost(
            slowed([p.forward_ns for p in own]),
            slowed([p.backward_input_ns for p in own]),
            slowed([p.backward_weight_ns for p in own]),
            slowed([p.full_backward_ns for p in own]),
            sum(p.saved_bytes for p in own),
            sum(p.saved_for_weight_bytes for p in own),
            sum(p.static_bytes for p in own),
            gradient_bytes=sum(p.gradient_bytes for p in own),
            unshard_ns=sum(p.unshard_ns for p in own),
            reduce_ns=sum(p.reduce_ns for p in own),
            update_ns=-(-sum(p.update_ns for p in own) * _AS_PROFILED // speed),
        )

    def _idle(self, facts: Facts, own: int, trip: int) -> int:
        """Return the most idle time of memory windows that do not overlap."""
        m, saved = facts.count, facts.saved[own]
        fits = m if saved == 0 else min(m, facts.headroom[own] // saved)
        best = [0] * (m + fits + 2)
        for i in range(m, 0, -1):
            most = max(time for _, _, time in window_fillings(facts, own, own, i, fits))
            idle = max(0, trip - min(fits, m - i + 1) * facts.f[own] - most)
            best[i] = max(best[i + 1], idle + best[i + fits])
        return best[1]
