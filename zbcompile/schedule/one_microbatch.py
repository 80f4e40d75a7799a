"""One microbatch through all stages: in which order its bytes fit on every rank.

Any order that fits, with all actions but those of one microbatch taken out, is an order of that microbatch
that fits. And such an order, run once per microbatch, fits for any number of them. So caps leave room for
some order exactly if they do so for one microbatch.

A step is the F of a stage or its backward, BW or B directly followed by W: both at once, or W at once, holds
least. What a step takes and gives back is the rule of `zbcompile.schedule.memory`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zbcompile.schedule.ir import Kind
from zbcompile.schedule.memory import Memory
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.rules import COMPUTE_KINDS, Rules

__all__ = ["MOST_STATES", "Fit", "OneMicrobatch", "Step"]

_FORWARD, _BACKWARD = map(COMPUTE_KINDS.index, (Kind.FORWARD, Kind.BACKWARD_INPUT))

Step = tuple[bool, int]
"""Whether it is a backward, and the stage."""

MOST_STATES = 20_000
"""States that a search visits before it gives up: about a second. A chain of stages has one per F."""


@dataclass(frozen=True, slots=True)
class Fit:
    """What a search found.

    Attributes
    ----------
    order
        Steps of all ranks in one sequence that fits, or None if none was found.
    searched_all
        Whether every sequence was looked at, so that none found means that there is none.
    next_bytes
        The fewest bytes above the headroom of the rank asked about that a step would have needed. With less
        than these the search would find nothing more. None: no step of that rank lacked bytes.
    states
        States visited.
    """

    order: list[Step] | None
    searched_all: bool
    next_bytes: int | None
    states: int


@dataclass(frozen=True, slots=True)
class OneMicrobatch:
    """Bytes and dependencies of one microbatch.

    Attributes
    ----------
    rank_of
        The rank of every stage.
    change, peak
        Per step, bytes held after it and most bytes held while it runs, less those held before it. The F of
        stage s is step s, its backward step S + s.
    before
        Per step, the steps that it waits for.
    """

    rank_of: tuple[int, ...]
    change: tuple[int, ...]
    peak: tuple[int, ...]
    before: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(problem: Problem, *, fusing: bool = True) -> OneMicrobatch:
        """Collect them from a problem; ``fusing``: whether backwards may be fused."""
        rank_of = problem.placement.rank_of
        return OneMicrobatch.under(Memory.of(problem), Rules.of(problem), rank_of, fusing=fusing)

    @staticmethod
    def under(memory: Memory, rules: Rules, rank_of: tuple[int, ...], *, fusing: bool) -> OneMicrobatch:
        """Take the steps' bytes from the rule for memory, and what they wait for from the rules."""
        count = len(rank_of)
        backward = [uses.backward(fusing=fusing) for uses in memory.uses]
        waits = (*rules.waits[_FORWARD], *rules.waits[_BACKWARD])
        return OneMicrobatch(
            rank_of,
            (*(uses.forward.change for uses in memory.uses), *(change for change, _ in backward)),
            (*(uses.forward.peak for uses in memory.uses), *(peak for _, peak in backward)),
            tuple(tuple(w.stage + count * (w.kind == _BACKWARD) for w in row) for row in waits),
        )

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.rank_of)

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return max(self.rank_of) + 1

    def forwards_first(self) -> list[Step]:
        """Return all F's from the first stage on, then all backwards from the last."""
        stages = range(len(self.rank_of))
        return [*((False, s) for s in stages), *((True, s) for s in reversed(stages))]

    def peaks(self, order: Sequence[Step]) -> list[int]:
        """Return the most bytes that every rank holds along an order."""
        held, peak = [0] * self.num_ranks, [0] * self.num_ranks
        for backward, s in order:
            rank, step = self.rank_of[s], s + self.num_stages * backward
            peak[rank] = max(peak[rank], held[rank] + self.peak[step])
            held[rank] += self.change[step]
        return peak

    def fit(
        self, headroom: Sequence[int | None], watched: int | None = None, states: int = MOST_STATES
    ) -> Fit:
        """Look for an order within some bytes per rank.

        Parameters
        ----------
        headroom
            Bytes per rank, None for no limit.
        watched
            The rank for which `Fit.next_bytes` is wanted.
        states
            States after which to give up.
        """
        simple = self.forwards_first()
        if all(h is None or peak <= h for peak, h in zip(self.peaks(simple), headroom, strict=True)):
            return Fit(simple, True, None, 0)
        return _Search(self, headroom, watched).run(states)

    def forced_bytes(self, rank: int) -> int:
        """Return bytes that a rank holds at once in every order.

        When a step starts, here or on any rank, what F leaves is held of each stage whose F comes before and
        whose backward comes no sooner in every order.
        """
        count = len(self.rank_of)
        before = [0] * (2 * count)
        for backward, s in self.forwards_first():
            step = s + count * backward
            for earlier in self.before[step]:
                before[step] |= before[earlier] | 1 << earlier
        own = [s for s in range(count) if self.rank_of[s] == rank]
        whole = sum(self.change[s] for s in own)
        most = max(self.alone(s) for s in own)
        for step in (*range(count - 1, -1, -1), *range(count, 2 * count)):
            started = before[step] | (1 << step if step < count else 0)
            held = sum(
                self.change[t]
                for t in own
                if started >> t & 1 and (count + t == step or before[count + t] >> step & 1)
            )
            most = max(most, held)
            if held == whole:
                break
        return most

    def alone(self, stage: int) -> int:
        """Return the bytes that a stage needs by itself."""
        backward = self.num_stages + stage
        return max(self.peak[stage], self.change[stage] + self.peak[backward])


Trail = tuple[int, "Trail"] | None
"""Steps done, last first."""


@dataclass(frozen=True, slots=True)
class _State:
    """Where an order stands.

    Attributes
    ----------
    done
        Bit set of the steps done: F of stage s is bit s, its backward bit S + s.
    held
        Bytes per rank.
    ready
        Steps not done whose predecessors are.
    trail
        The steps done.
    """

    done: int
    held: tuple[int, ...]
    ready: frozenset[int]
    trail: Trail


class _Search:
    """Depth-first over the order of the F's that lack bytes somewhere; all else runs as soon as it can.

    A backward that fits only frees bytes, and an F on a rank that can hold all of its stages at once costs
    nothing: so both run at once. Where every backward fits at all times, and an F with the backwards that it
    makes ready leaves no rank with more bytes than before, it runs at once too: whatever ran without it runs
    after it.
    """

    def __init__(self, one: OneMicrobatch, headroom: Sequence[int | None], watched: int | None) -> None:
        self.one, self.watched = one, watched
        self.next_bytes: int | None = None
        self.count = count = len(one.rank_of)
        whole = [0] * one.num_ranks
        for s, rank in enumerate(one.rank_of):
            whole[rank] += one.change[s]
        extra = max(*(one.peak[s] - one.change[s] for s in range(count)), *one.peak[count:])
        self.limit = [whole[r] + extra if h is None else h for r, h in enumerate(headroom)]
        self.roomy = [limit >= whole[r] + extra for r, limit in enumerate(self.limit)]
        self.only_frees = not any(one.peak[count:])
        self.waits = [0] * (2 * count)
        self.after: list[list[int]] = [[] for _ in range(2 * count)]
        for node, steps in enumerate(one.before):
            for before in steps:
                self.waits[node] |= 1 << before
                self.after[before].append(node)

    def _fits(self, node: int, held: Sequence[int]) -> bool:
        """Return whether a step fits, and note what it lacks on the watched rank."""
        rank, peak = self.one.rank_of[node % self.count], self.one.peak[node]
        if peak == 0 and node >= self.count:
            return True
        needed = held[rank] + peak
        if needed <= self.limit[rank]:
            return True
        if rank == self.watched and (self.next_bytes is None or needed < self.next_bytes):
            self.next_bytes = needed
        return False

    def _at_once(self, node: int, held: Sequence[int]) -> bool:
        """Return whether a ready step can only help."""
        if node < self.count:
            return self.roomy[self.one.rank_of[node]]
        return self._fits(node, held)

    def _after(self, state: _State, node: int | None) -> _State:
        """Return the state after a step and all that then runs at once."""
        one, count = self.one, self.count
        done, held, ready, trail = state.done, list(state.held), set(state.ready), state.trail
        queue = [] if node is None else [node]
        while True:
            if not queue:
                queue = sorted(n for n in ready if self._at_once(n, held))
                if not queue:
                    return _State(done, tuple(held), frozenset(ready), trail)
            n = queue.pop()
            done |= 1 << n
            ready.discard(n)
            trail = (n, trail)
            held[one.rank_of[n % count]] += one.change[n]
            for other in self.after[n]:
                if self.waits[other] & ~done == 0:
                    ready.add(other)

    def run(self, states: int) -> Fit:
        """Search until an order is found, nothing is left, or so many states were visited."""
        first = frozenset(n for n in range(self.count) if not self.waits[n])
        start = self._after(_State(0, (0,) * self.one.num_ranks, first, None), None)
        stack, seen = [start], {start.done}
        while stack:
            state = stack.pop()
            if state.done == (1 << 2 * self.count) - 1:
                return Fit(self._order(state.trail), True, self.next_bytes, len(seen))
            if len(seen) > states:
                return Fit(None, False, self.next_bytes, len(seen))
            stack.extend(self._choices(state, seen))
        return Fit(None, True, self.next_bytes, len(seen))

    def _choices(self, state: _State, seen: set[int]) -> list[_State]:
        """Return the states after each F that fits, the one with the fewest bytes held last."""
        found = []
        for node in sorted(state.ready):
            if node >= self.count or not self._fits(node, state.held):
                continue
            after = self._after(state, node)
            fresh = after.done not in seen
            seen.add(after.done)
            if self.only_frees and all(a <= b for a, b in zip(after.held, state.held, strict=True)):
                return [after] if fresh else []
            if fresh:
                found.append(after)
        return sorted(found, key=lambda after: (sum(after.held), after.done), reverse=True)

    def _order(self, trail: Trail) -> list[Step]:
        """Return the steps of a trail, first to last."""
        order = []
        while trail is not None:
            node, trail = trail
            order.append((node >= self.count, node % self.count))
        return order[::-1]
