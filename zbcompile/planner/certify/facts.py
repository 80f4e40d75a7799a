"""What a derivation starts from: a problem's own numbers, longest paths, knapsacks, and a sum in the making.

Nothing here calls the code that found the bound: paths and knapsacks are computed anew and plainly, so that a
fault there does not vouch for itself. All is for costs that no choice of fusing undercuts (as in
`Instance.relaxed`), as every bound is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from zbcompile.errors import CheckError
from zbcompile.schedule.problem import Problem

__all__ = [
    "OUTERMOST",
    "Derivation",
    "Facts",
    "Inner",
    "Witness",
    "add_work",
    "alike",
    "number",
    "rank_of",
    "refuse",
]

Witness = Mapping[str, object]
Node = tuple[str, int]

Inner = Callable[[Problem, str, Witness], int]
"""Derives a bound inside another one, from its problem, its method and its witness."""

OUTERMOST = ("variants", "cuts", "cp_sat", "crossing")
"""Methods that prove no part of another bound."""


def refuse(what: str, needed: object = None, given: object = None) -> CheckError:
    """Return the error of a certificate that does not hold."""
    return CheckError(what, where="certificate", needed=needed, given=given, fix="plan again")


@dataclass
class Derivation:
    """A sum in the making.

    Attributes
    ----------
    lines
        Text, a term a line.
    total
        The sum so far in ns.
    numbers
        What was derived, by the names that a witness gives it.
    """

    lines: list[str] = field(default_factory=list)
    total: int = 0
    numbers: dict[str, object] = field(default_factory=dict)

    def add(self, text: str, term: int) -> None:
        """Add a term with its text."""
        self.lines.append(f"{term:+,} ns  {text}")
        self.total += term

    def note(self, text: str) -> None:
        """Add a line without a term."""
        self.lines.append(text)

    def compare(self, witness: Witness) -> None:
        """Refuse a witness that says anything else than what was derived, or more. It may say less."""
        for name, given in witness.items():
            if name not in self.numbers:
                raise refuse(f"the witness says {name[:40]!r}, which is no part of its bound", given=given)
            for place, needed, found in _differences(name, self.numbers[name], given):
                raise refuse(f"{place} of the witness is not what follows", needed, found)


def _differences(place: str, needed: object, given: object) -> Iterator[tuple[str, object, object]]:
    """Yield where two JSON values differ: (place, value needed, value given)."""
    if isinstance(needed, (list, tuple)) and isinstance(given, (list, tuple)):
        if len(needed) != len(given):
            yield place, f"{len(needed)} entries", len(given)
            return
        for k, (one, other) in enumerate(zip(needed, given, strict=True)):
            yield from _differences(f"{place}[{k}]", one, other)
    elif not alike(needed, given):
        yield place, needed, given


def alike(one: object, other: object) -> bool:
    """Return whether two JSON values are the same; 1, 1.0 and true are three values, a tuple is a list."""
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(alike, one, other))
    return type(one) is type(other) and one == other


class Facts:
    """A problem's times and bytes, relaxed over fusing.

    Attributes
    ----------
    problem, count
        The problem and its number of microbatches.
    f, b, w
        Times of F, B and W per stage in ns, host overhead included.
    saved, pending
        M_B and M_W per stage in bytes.
    stages_of, headroom
        Stages and bytes for activations per rank.
    """

    def __init__(self, problem: Problem) -> None:
        if problem.microbatch_costs:
            raise refuse("this bound proves nothing where microbatches differ in cost")
        self.problem, self.count = problem, problem.num_microbatches
        stages, extra = problem.profile.stages, problem.profile.overhead_ns
        self.f = [s.forward_ns + extra for s in stages]
        self.b = [min(s.backward_input_ns, s.full_backward_ns) + extra for s in stages]
        self.w = [
            min(s.backward_weight_ns + extra, s.full_backward_ns + extra - b)
            for s, b in zip(stages, self.b, strict=True)
        ]
        self.saved = [s.saved_bytes for s in stages]
        self.pending = [min(s.saved_bytes, s.saved_for_weight_bytes) for s in stages]
        self.stages_of = [problem.placement.stages_of(r) for r in range(problem.num_ranks)]
        self.headroom = [self._headroom(r) for r in range(problem.num_ranks)]
        self._far: dict[Node, dict[Node, int]] = {}

    def _headroom(self, rank: int) -> int:
        """Return the cap minus static bytes, or all that the rank could hold at once if that is less."""
        own = [self.problem.profile.stages[s] for s in self.stages_of[rank]]
        most = sum(stage.saved_bytes + stage.saved_for_weight_bytes for stage in own)
        if self.problem.accumulate == "order":
            most += sum(stage.gradient_bytes for stage in own)
        given = self.problem.headroom(rank)
        return most * self.count if given is None else min(given, most * self.count)

    def work(self, rank: int) -> int:
        """Return the time of all F, B, W of a rank in one step."""
        return self.count * sum(self.f[s] + self.b[s] + self.w[s] for s in self.stages_of[rank])

    def _next(self, node: Node) -> list[tuple[Node, int]]:
        """Return what waits for a node directly: (node, least time from start to start)."""
        kind, s = node
        edges = self.problem.profile.edges
        if kind == "F":
            onward = [(("F", e.target), self.f[s] + self.problem.lag_ns(e)) for e in edges if e.source == s]
            return [*onward, (("B", s), self.f[s])]
        return [
            (("B", e.source), self.b[s] + self.problem.lag_ns(e, backward=True))
            for e in edges
            if e.target == s and e.has_gradient
        ]

    def far(self, node: Node) -> dict[Node, int]:
        """Return the longest start-to-start path from an F or B of a microbatch to all that wait for it."""
        if not self._far:
            count = len(self.f)
            for here in [*(("B", s) for s in range(count)), *(("F", s) for s in reversed(range(count)))]:
                found = {here: 0}
                for there, length in self._next(here):
                    for end, rest in self._far[there].items():
                        found[end] = max(found.get(end, 0), length + rest)
                self._far[here] = found
        return self._far[node]

    def way(self, a: Node, b: Node) -> int | None:
        """Return the longest path from the start of a to that of b; ``None`` if b does not wait for a."""
        return self.far(a).get(b)

    def head(self, stage: int) -> int:
        """Return the least time before F of a stage can start."""
        ways = [self.way(("F", s), ("F", stage)) for s in range(len(self.f))]
        return max(w for w in ways if w is not None)

    def after(self, stage: int) -> int:
        """Return the least time from the end of B of a stage to the end of the step, its own W included."""
        far = self.far(("B", stage))
        return max(length + self.b[s] + self.w[s] for (_, s), length in far.items()) - self.b[stage]

    def first(self, rank: int) -> int | None:
        """Return the stage that every F of the rank waits for, if there is one."""
        row = self.stages_of[rank]
        return next((x for x in row if all(self.way(("F", x), ("F", s)) is not None for s in row)), None)

    def last(self, rank: int) -> int | None:
        """Return the stage whose B waits for every B of the rank, if there is one."""
        row = self.stages_of[rank]
        return next((x for x in row if all(self.way(("B", s), ("B", x)) is not None for s in row)), None)

    def most_time(self, items: Sequence[tuple[int, int, int]], headroom: int) -> int:
        """Return the most time of (time, bytes, count) items in some bytes; whole items if all are alike."""
        if headroom < 0:
            return 0
        sized = sorted((i for i in items if i[1]), key=lambda i: (Fraction(-i[0], i[1]), i[1]))
        total = Fraction(sum(t * n for t, size, n in items if size == 0))
        whole = len({i[:2] for i in sized}) == 1
        for time, size, n in sized:
            taken = min(Fraction(headroom, size), Fraction(n))
            taken = Fraction(int(taken)) if whole else taken
            total += time * taken
            headroom -= int(taken * size) if whole else min(headroom, n * size)
        return int(total)

    def waiting_time(self, rank: int, headroom: int, own: int | None = None) -> int:
        """Return the most time of W's that some bytes hold back, one W of stage ``own`` left out."""
        items = [(self.w[s], self.pending[s], self.count - (s == own)) for s in self.stages_of[rank]]
        return self.most_time(items, headroom)

    def trailing(self, rank: int) -> int:
        """Return the most time of W's left when the rank's last B ends."""
        last = self.last(rank)
        if last is None:
            raise refuse(f"no B is bound to be the last on rank {rank}")
        return self.w[last] + self.waiting_time(rank, self.headroom[rank] - self.saved[last], last)


def number(witness: Witness, name: str, high: int) -> int:
    """Return a whole number of the witness, from 0 to ``high``."""
    value = witness.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= high:
        raise refuse(f"the witness has no usable {name!r}", f"0 to {high}", value)
    return value


def rank_of(facts: Facts, witness: Witness, name: str = "rank") -> int:
    """Return a rank that the witness names."""
    return number(witness, name, len(facts.stages_of) - 1)


def add_work(facts: Facts, rank: int, out: Derivation) -> None:
    """Add all work of a rank."""
    parts = " + ".join(f"{facts.f[s]} + {facts.b[s]} + {facts.w[s]}" for s in facts.stages_of[rank])
    out.numbers["work_ns"] = facts.work(rank)
    out.add(f"work of rank {rank}: {facts.count} x ({parts})", facts.work(rank))
