"""A wait in words: how long, for what, followed to its root, and what else the rank could run meanwhile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from zbcompile.schedule.ir import Action, Kind
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.wait_roots import Link
from zbcompile.schedule.waits import Pause
from zbcompile.show.bubbles import Bubble, Other
from zbcompile.show.units import TimeUnit, format_bytes, time_unit

__all__ = ["WaitWords", "listed"]

_MOST_NAMED = 6
_MOST_THROUGH = 3


class WaitWords:
    """Writes the waits of one order.

    Parameters
    ----------
    problem
        The problem of the order.
    unit
        The unit of points in time.
    abstract
        The costs are not times.
    """

    def __init__(self, problem: Problem, unit: TimeUnit, *, abstract: bool = False) -> None:
        self.unit, self.abstract = unit, abstract
        self.several = problem.num_stages > problem.num_ranks

    def at(self, time_ns: int) -> str:
        """Write a point in time."""
        return self.unit.text(time_ns)

    def long(self, time_ns: int) -> str:
        """Write a length of time, in the unit that suits it."""
        return time_unit(time_ns, abstract=self.abstract).text(time_ns)

    def between(self, start_ns: int, end_ns: int) -> str:
        """Write from when to when."""
        return f"{self.unit.number(start_ns)} to {self.at(end_ns)}"

    def name(self, action: Action) -> str:
        """Name an action: B3, or B3 of stage 5 where ranks have several stages."""
        short = f"{action.kind.letter}{action.microbatch}"
        return f"{short} of stage {action.stage}" if self.several else short

    def pause(self, pause: Pause, before: Action) -> str:
        """Say how long a rank is held or idle, and before what."""
        where = f"({self.between(pause.start_ns, pause.end_ns)}) before {self.name(before)}"
        states = [("held by a send", pause.held_ns), ("idle", pause.idle_ns)]
        text = " and ".join(f"{state} for {self.long(length)}" for state, length in states if length)
        return f"rank {pause.rank} is {text} {where}"

    def lines(self, bubble: Bubble) -> Iterator[str]:
        """Yield a chain, messages that go on from rank to rank in one line, then what else could run."""
        chain, rank, needs, k = bubble.chain, bubble.pause.rank, bubble.before, 0
        while k < len(chain):
            link = chain[k]
            if link.kind != "made":
                text = self._reason(link)
                yield f"root: {text}" if k == len(chain) - 1 else text
                if link.kind == "room" and link.until is not None:
                    needs = link.until
                k, rank = k + 1, link.rank
                continue
            end, turns = k, _is_forward(link.action) is not _is_forward(needs)
            while not turns and end + 1 < len(chain) and _goes_on(chain[end], chain[end + 1]):
                end += 1
            if link.rank == rank and end == k:
                yield f"rank {rank} runs {self.name(needs)} right behind {self.name(link.action)}"
            else:
                ranks = dict.fromkeys(other.rank for other in chain[k:end])
                yield self._message(needs, chain[end], [r for r in ranks if r not in (rank, chain[end].rank)])
            k, rank, needs = end + 1, chain[end].rank, chain[end].action
        if bubble.pause.idle_ns:
            others = [self._other(other) for other in bubble.others]
            if not bubble.weights_left:
                others.append("no W is due")
            yield f"meanwhile: {'; '.join(others)}"

    def _message(self, needs: Action, link: Link, through: Sequence[int]) -> str:
        """Say from where what an action waits for comes, and through which ranks it came without delay."""
        what = "an activation" if needs.kind is Kind.FORWARD else "a gradient"
        text = f"{self.name(needs)} waits for {what} of rank {link.rank}, which runs {self.name(link.action)}"
        text += f" from {self.between(link.start_ns, link.end_ns)}"
        if not through:
            return text
        if len(through) == 1:
            return f"{text}; rank {through[0]} hands it on at once"
        many = len(through) > _MOST_THROUGH
        who = f"{len(through)} ranks between them" if many else f"ranks {listed(through[::-1])}"
        return f"{text}; {who} hand it on at once"

    def _reason(self, link: Link) -> str:
        """Say why an action that was waited for ran no sooner."""
        name, rank = self.name(link.action), link.rank
        busy = f"; rank {rank} computes without a pause from {self.at(link.since_ns)} on"
        if link.kind == "start":
            return f"rank {rank} begins {name} with the step"
        if link.kind == "room":
            assert link.until is not None
            until = f"{self.name(link.until)} ends at {self.at(link.until_ns)}"
            return f"rank {rank} has no room under its cap for {name} until {until}{busy}"
        if link.kind == "order":
            return f"rank {rank} runs {self._counted(link.first)} before {name}, whose data is there{busy}"
        if link.kind == "receive":
            return f"rank {rank} posts the receive for {name} only at {self.at(link.until_ns)}"
        if link.kind == "gather":
            until = self.at(link.until_ns)
            return f"rank {rank} gathers the parameters of stage {link.action.stage} until {until}"
        assert link.until is not None
        sent = "activation" if link.until.kind is Kind.SEND_F else "gradient"
        sent = f"the {sent} of microbatch {link.until.microbatch}"
        if link.kind == "channel":
            return f"the message for {name} travels behind {sent}, until {self.at(link.until_ns)}"
        text = f"sending {sent} to rank {link.until_rank} holds rank {rank} until {self.at(link.until_ns)}"
        return f"{text}: rank {link.until_rank} runs {self.name(link.first[0])} first" if link.first else text

    def _counted(self, actions: Sequence[Action]) -> str:
        """Write actions by name, and many by their counts: ``3 F, 2 W``."""
        if len(actions) <= 3:
            return " and ".join(map(self.name, actions)) or "nothing"
        count = Counter(action.kind for action in actions)
        return ", ".join(f"{count[kind]} {kind.letter}" for kind in Kind if count[kind])

    def _other(self, other: Other) -> str:
        """Say why a rank does not run another action meanwhile."""
        name = self.name(other.action)
        if other.action.kind is Kind.BACKWARD_WEIGHT:
            due = "1 W is due" if other.count == 1 else f"{other.count} W's are due"
            return f"{due}, longer than the wait" if other.why == "long" else f"{due} and kept for later"
        if other.why == "late":
            return f"{name} is not there before {self.at(other.ready_ns)}"
        if other.why == "room":
            return f"{name} lacks {format_bytes(other.lacking_bytes)} under the cap"
        if other.why == "long":
            return f"{name} could run but takes longer than the wait"
        return f"{name} could run; the order puts it later"


def _goes_on(one: Link, other: Link) -> bool:
    """Return whether a message went on at once: same kind, same microbatch, from another stage."""
    if other.kind != "made" or one.action.stage == other.action.stage:
        return False
    same_kind = _is_forward(one.action) is _is_forward(other.action)
    return same_kind and one.action.microbatch == other.action.microbatch


def _is_forward(action: Action) -> bool:
    return action.kind is Kind.FORWARD


def listed(numbers: Sequence[int]) -> str:
    """Write numbers as ``1, 2 and 3``, and many as their first ones and the last."""
    words = [str(n) for n in numbers]
    if len(words) > 2 * _MOST_NAMED:
        return f"{', '.join(words[:_MOST_NAMED])}, ... {words[-1]} ({len(words)} in all)"
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
