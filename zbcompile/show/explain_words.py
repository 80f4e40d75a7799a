"""What `zbcompile explain` prints: the reasons of an order in sentences and a small table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.console import Group, RenderableType
from rich.table import Table

from zbcompile.schedule.spread import spread_words
from zbcompile.schedule.wait_roots import Stretch
from zbcompile.show.bubbles import Bubble, Moment
from zbcompile.show.explain import Explanation
from zbcompile.show.prose import Prose
from zbcompile.show.rank_facts import RankFacts
from zbcompile.show.units import format_bytes, percent
from zbcompile.show.wait_words import WaitWords, listed

__all__ = ["explanation_text"]

_MOST_SUM_LINES = 12
_MOST_NAMED = 6
_MOST_RANKS = 16


def explanation_text(found: Explanation, rank: int | None = None) -> Group:
    """Return the explanation of an order for a terminal; of one rank alone if ``rank`` is given."""
    words = _Words(found)
    if found.moments:
        return words.moments()
    if rank is not None:
        return words.one_rank(rank)
    return words.whole()


class _Words(WaitWords):
    """Writes one explanation."""

    def __init__(self, found: Explanation) -> None:
        super().__init__(found.problem, found.unit, abstract=not found.has_costs)
        self.found, self.problem = found, found.problem

    def whole(self) -> Group:
        """Say all."""
        parts = [*self._certificate(), Prose(""), *self._deciding(), Prose(""), *self._ranks()]
        if self.found.measured is not None:
            parts += [Prose(""), *self._measured()]
        if unsteady := spread_words(self.problem.profile.unsteady):
            parts += [Prose(""), Prose(unsteady, style="bold")]
        return Group(*parts, *self._bubbles("the longest waits"))

    def one_rank(self, rank: int) -> Group:
        """Say what concerns one rank."""
        facts = self.found.ranks[rank]
        title = Prose(f"rank {rank}: {self._shares(facts)}", style="bold")
        text = Prose(f"{self._memory(facts)}\n{self._split(facts)}")
        return Group(title, text, *self._bubbles(f"the longest waits of rank {rank}"))

    def moments(self) -> Group:
        """Say what ranks do at a time."""
        parts: list[RenderableType] = []
        for moment in self.found.moments:
            if moment.bubble is None or len(self.found.moments) > 1:
                parts.append(Prose(self._at(moment)))
            else:
                parts += self._bubble(moment.bubble)
        return Group(*parts)

    def _certificate(self) -> Iterator[RenderableType]:
        """Say what is proved, and why nothing is shorter."""
        proof = self.found.proof
        if proof is None:
            yield Prose("no certificate: nothing is proved about this order", style="bold")
            return
        yield Prose(proof.claim, style="bold")
        if proof.fault is None:
            yield Prose(f"why: {proof.reason}")
        lines = proof.sum_lines
        if len(lines) > _MOST_SUM_LINES:
            more = (
                f"... {len(lines) - _MOST_SUM_LINES + 1} more terms; `zbcompile check --certificate` has all"
            )
            lines = (*lines[: _MOST_SUM_LINES - 2], more, lines[-1])
        if lines:
            yield Prose("\n".join(lines), 4, style="dim")

    def _deciding(self) -> Iterator[RenderableType]:
        """Say which ranks decide the step, and along which path."""
        ranks, objective = self.found.deciding, self.problem.objective
        who = f"rank {ranks[0]} decides" if len(ranks) == 1 else f"ranks {listed(ranks)} decide"
        yield Prose(f"{who} the step", style="bold")
        yield Prose(f"{objective} of rank {ranks[0]}: {self._shares(self.found.ranks[ranks[0]])}")
        yield from self._tails()
        parts = [self._stretch(list(row)) for _, row in groupby(self.found.path, lambda s: s.rank)]
        if len(parts) > 2 * _MOST_NAMED:
            more = f"{len(parts) - 2 * _MOST_NAMED} more"
            parts = [*parts[:_MOST_NAMED], more, *parts[-_MOST_NAMED:]]
        yield Prose(f"critical path: {', '.join(parts)}")

    def _tails(self) -> Iterator[RenderableType]:
        """Name the ranks that end with a reduction."""
        late = [facts for facts in self.found.ranks if facts.exposed_ns]
        if not late:
            return
        worst = max(late, key=lambda facts: facts.exposed_ns)
        who = listed([facts.rank for facts in late])
        ends = f"rank {who} ends" if len(late) == 1 else f"ranks {who} end"
        stage, waits = worst.last_reduced, self.long(worst.exposed_ns)
        most = f"rank {worst.rank} waits {waits} for that of stage {stage} after its last W"
        yield Prose(f"{ends} with the reduction of a stage's gradients; {most}")

    def _stretch(self, row: Sequence[Stretch]) -> str:
        """Write a part of the critical path on one rank, with the messages that it waits for in between."""
        first, last = row[0], row[-1]
        text = f"rank {first.rank} {self.between(first.start_ns, last.end_ns)}"
        if len(row) > 1:
            return f"{text} with {len(row) - 1} wait{'s' * (len(row) > 2)}"
        return f"{text} ({self.name(first.first)})" if first.first == first.last else text

    def _shares(self, facts: RankFacts) -> str:
        text = f"{self.at(facts.span_ns)} = {self.at(facts.work_ns)} of work"
        if self.problem.sends.holds_rank:
            text += f" + {self.long(facts.held_ns)} held by sends"
        if facts.exposed_ns:
            text += f" + {self.long(facts.exposed_ns)} waiting for its reductions"
        if facts.update_ns:
            text += f" + {self.long(facts.update_ns)} of update"
        whole = facts.span_ns or 1
        return f"{text} + {self.long(facts.idle_ns)} idle ({percent(facts.idle_ns / whole)})"

    def _ranks(self) -> Iterator[RenderableType]:
        """Yield a row per rank, and where memory binds."""
        found = self.found
        table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
        held = self.problem.sends.holds_rank
        names = ["rank", "idle", *(["held"] if held else []), "split", "fused", "W's fill"]
        names += ["peak", "of cap", "least cap", "peak at"] if found.has_costs else []
        for name in names:
            table.add_column(name, justify="right", no_wrap=True)
        for rank in _chosen(found):
            table.add_row(*(["..."] if rank is None else self._row(found.ranks[rank], held=held)))
        yield table
        yield Prose("W's fill: time of W's in which the rank would have waited for a message", style="dim")
        if found.has_costs:
            yield Prose(self._binding())
            yield Prose(self._least_cap())

    def _row(self, facts: RankFacts, *, held: bool) -> list[str]:
        peak, cap, splits = facts.peak, self.problem.caps[facts.rank], facts.splits
        row = [str(facts.rank), self.long(facts.idle_ns), *([self.long(facts.held_ns)] if held else [])]
        row += [str(sum(splits.split)), str(sum(splits.fused)), self.long(splits.filled_ns)]
        if not self.found.has_costs:
            return row
        least = self.found.least_caps
        return [
            *row,
            format_bytes(peak.held_bytes),
            percent(peak.held_bytes / cap) if cap else "no cap" if cap is None else "",
            "" if least is None else format_bytes(least[facts.rank]),
            self.at(peak.at_ns),
        ]

    def _binding(self) -> str:
        """Say on which ranks one more F does not fit where most is held."""
        if all(cap is None for cap in self.problem.caps):
            return "memory has no cap"
        tight = self.found.tight
        if not tight:
            return "memory binds on no rank: one more F would fit on each, even at its peak"
        who = f"rank {tight[0]}" if len(tight) == 1 else f"ranks {listed(tight)}"
        return f"memory binds on {who}: one more F does not fit at the peak"

    def _least_cap(self) -> str:
        """Say what the smallest cap is that works on all ranks."""
        least = self.found.least_caps
        if least is None:
            return "the smallest cap that works is not looked for with so many stages"
        most = max(least)
        text = f"{format_bytes(most)} ({most} bytes, for rank {least.index(most)})"
        if not self.found.least_cap_works:
            return f"no order runs under a cap below {text}; whether one runs with it is not known"
        return f"the smallest cap that works on all ranks: {text}"

    def _memory(self, facts: RankFacts) -> str:
        """Say how much a rank holds at its peak, when, and for which microbatches."""
        if not self.found.has_costs:
            return "the file has no costs, so nothing is known about memory"
        peak, cap = facts.peak, self.problem.caps[facts.rank]
        text = f"it holds most at {self.at(peak.at_ns)}: {format_bytes(peak.held_bytes)}"
        text += ", with no cap" if cap is None else f" of {format_bytes(cap)}"
        static = self.problem.static_bytes(facts.rank)
        text += f", {format_bytes(static)} of it all the time" if static else ""
        text += f"; {self._pairs(peak.flying)} between F and B"
        text += f", {self._pairs(peak.waiting)} between B and W" if peak.waiting else ""
        least = self.found.least_caps
        text += "" if least is None else f". No order needs less than {format_bytes(least[facts.rank])} here"
        return f"{text}."

    def _pairs(self, pairs: Sequence[tuple[int, int]]) -> str:
        if not pairs:
            return "no microbatch"
        words, ordered = list[str](), sorted(pairs)
        for stage in sorted({s for s, _ in ordered}):
            numbers = _runs([m for s, m in ordered if s == stage])
            words.append(f"{numbers} of stage {stage}" if self.several else numbers)
        return f"microbatch{'es' if len(pairs) > 1 else ''} {', '.join(words)}"

    def _split(self, facts: RankFacts) -> str:
        """Say how many backwards of a rank are split, and what that is good for."""
        splits, stages = facts.splits, self.problem.placement.stages_of(facts.rank)
        split, fused = sum(splits.split), sum(splits.fused)
        text = f"{split} of its {split + fused} backwards are split"
        if self.several and split:
            each = (f"{n} of stage {s}" for s, n in zip(stages, splits.split, strict=True))
            text += f" ({', '.join(each)})"
        uses = [
            f"{self.long(length)} {what}"
            for length, what in (
                (splits.filled_ns, "fill waits for messages"),
                (splits.last_ns, "come after all F's and B's"),
                (
                    splits.weight_ns - splits.filled_ns - splits.last_ns,
                    "run although the next F or B is there",
                ),
            )
            if length
        ]
        text += f". Of {self.long(splits.weight_ns)} of W's {', '.join(uses)}" if uses else ""
        if splits.rooms:
            times = "once" if splits.rooms == 1 else f"{splits.rooms} times"
            text += f"; {times} the next F has no room under the cap before a W ends"
        if split and self.found.hands_on(facts.rank):
            text += ". Each gradient goes to the next rank when B ends, and not only after W"
        return f"{text}." + (f"\n{self._fused(splits.saved_ns, fused)}." if fused else "")

    def _fused(self, saved_ns: int, fused: int) -> str:
        text = f"{fused} {'is' if fused == 1 else 'are'} fused: BW takes"
        if not saved_ns:
            return f"{text} as long as B and W; `--what-if split=all` says what splitting them would give"
        than = "less" if saved_ns > 0 else "more"
        return f"{text} {self.long(abs(saved_ns))} {than} than B and W would, in all"

    def _measured(self) -> Iterator[RenderableType]:
        """Say what the step really cost."""
        real = self.found.measured
        assert real is not None
        planned = self.found.timeline.makespan_ns
        text = f"the step took {self.at(real.makespan_ns)}, planned {self.at(planned)}"
        text += f": {100 * (real.makespan_ns / planned - 1):+.1f} %" if planned else ""
        yield Prose(text, style="bold")
        kinds = (
            f"{kind.letter} {self.long(measured)} ({self.long(plan)})"
            for kind, plan, measured, _ in real.kinds
        )
        yield Prose(f"on average, measured (planned): {', '.join(kinds)}")
        more = [busy - facts.work_ns for busy, facts in zip(real.busy_ns, self.found.ranks, strict=True)]
        worst = max(range(len(more)), key=lambda r: more[r])
        if more[worst] > 0:
            yield Prose(
                f"rank {worst} computed {self.long(more[worst])} longer than planned, the most of all"
            )

    def _bubbles(self, title: str) -> Iterator[RenderableType]:
        yield Prose("")
        if not self.found.bubbles:
            yield Prose(f"{title}: none", style="bold")
            return
        yield Prose(title, style="bold")
        for bubble in self.found.bubbles:
            yield from self._bubble(bubble)

    def _bubble(self, bubble: Bubble) -> Iterator[RenderableType]:
        yield Prose(self.pause(bubble.pause, bubble.before), style="bold")
        for line in self.lines(bubble):
            yield Prose(line, 4)

    def _at(self, moment: Moment) -> str:
        if moment.running is not None:
            action, start, end = moment.running
            return f"rank {moment.rank} runs {self.name(action)} ({self.between(start, end)})"
        if moment.bubble is None:
            return f"rank {moment.rank} has done its part of the step"
        return self.pause(moment.bubble.pause, moment.bubble.before)


def _runs(numbers: Sequence[int]) -> str:
    """Write increasing numbers with runs joined: ``3 to 6, 9``."""
    words, k = list[str](), 0
    while k < len(numbers):
        end = k
        while end + 1 < len(numbers) and numbers[end + 1] == numbers[end] + 1:
            end += 1
        words.append(str(numbers[k]) if end == k else f"{numbers[k]} to {numbers[end]}")
        k = end + 1
    if len(words) > 2 * _MOST_NAMED:
        words = [*words[:_MOST_NAMED], f"... ({len(numbers)} in all)"]
    return ", ".join(words)


def _chosen(found: Explanation) -> Iterator[int | None]:
    """Yield the ranks to show, and None where some are left out."""
    count = len(found.ranks)
    if count <= _MOST_RANKS:
        yield from range(count)
        return
    fullest = max(range(count), key=lambda r: found.ranks[r].peak.held_bytes / (found.problem.caps[r] or 1))
    idlest = max(range(count), key=lambda r: found.ranks[r].idle_ns)
    shown = sorted({0, 1, count - 2, count - 1, fullest, idlest, *found.deciding[:4]})
    for k, rank in enumerate(shown):
        if k and rank > shown[k - 1] + 1:
            yield None
        yield rank
