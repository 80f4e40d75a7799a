"""Where to cut a line of calls so that the step is shortest: what stages cost a step, and a search over cuts.

``(F, B, W) before every cut + messages --> positions of the chosen cuts``. No torch: only numbers.

Two things bound the span of a step on ranks of one stage each, and an order that meets them is mostly found:
the work of every rank, and the way through a later rank. Between its first F and its last W, rank r waits
until microbatch 0 has reached rank t, t has run F and B of all m microbatches, and the last one is back::

    F_r + .. + F_(t-1)  +  m (F_t + B_t)  +  B_(t-1) + .. + B_r  +  W_r  +  two messages for each cut between

So a stage with little W, which nothing can fill, must be lighter than the others.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

__all__ = ["Line", "Work", "least_span_ns"]


@dataclass(frozen=True, slots=True)
class Work:
    """Times of F, B and W in ns."""

    forward_ns: int
    backward_input_ns: int
    backward_weight_ns: int

    @property
    def total_ns(self) -> int:
        """Time of F, B and W."""
        return self.forward_ns + self.backward_input_ns + self.backward_weight_ns

    @property
    def chain_ns(self) -> int:
        """Time of F and B: what a microbatch passes through on its way down and back."""
        return self.forward_ns + self.backward_input_ns

    def __add__(self, other: Work) -> Work:
        return Work(
            self.forward_ns + other.forward_ns,
            self.backward_input_ns + other.backward_input_ns,
            self.backward_weight_ns + other.backward_weight_ns,
        )

    def __sub__(self, other: Work) -> Work:
        return Work(
            self.forward_ns - other.forward_ns,
            self.backward_input_ns - other.backward_input_ns,
            self.backward_weight_ns - other.backward_weight_ns,
        )


def least_span_ns(stages: Sequence[Work], messages_ns: Sequence[int], num_microbatches: int | None) -> int:
    """Return what the span of a step is at least (see above).

    Parameters
    ----------
    stages
        One per rank.
    messages_ns
        Time of a message across each cut.
    num_microbatches
        None leaves the way through later ranks out and gives the work of one microbatch.
    """
    if num_microbatches is None:
        return max(work.total_ns for work in stages)
    spans = [num_microbatches * work.total_ns for work in stages]
    for r, first in enumerate(stages):
        way = first.chain_ns + first.backward_weight_ns
        for t in range(r + 1, len(stages)):
            way += 2 * messages_ns[t - 1]
            spans.append(way + num_microbatches * stages[t].chain_ns)
            way += stages[t].chain_ns
    return max(spans)


@dataclass(frozen=True, slots=True)
class _Label:
    """Some stages from the start: the cost of their cuts, the longest way that leads on, and the last cut."""

    price: tuple[int, int]
    way: int
    end: int
    before: _Label | None


class Line:
    """Calls in order, with the points where they may be cut.

    Parameters
    ----------
    before
        Work before each cut, in order, and last the whole work.
    messages_ns
        Time of a message across each cut.
    prices
        (bytes, depth) of each cut: the less the better.
    num_stages, num_microbatches
        As for `least_span_ns`.
    """

    def __init__(
        self,
        before: Sequence[Work],
        messages_ns: Sequence[int],
        prices: Sequence[tuple[int, int]],
        num_stages: int,
        num_microbatches: int | None,
    ) -> None:
        nothing = Work(0, 0, 0)
        self._ends = [nothing, *before]
        self._total = [work.total_ns for work in self._ends]
        self._messages = [0, *messages_ns, 0]
        self._prices = [(0, 0), *prices, (0, 0)]
        self._num_stages, self._num_microbatches = num_stages, num_microbatches

    def cuts(self, tolerance: float) -> list[int]:
        """Return the positions of the cuts: of those whose span is near the least.

        Near means within ``tolerance`` times the mean work of a rank. The cuts with the lowest prices are
        taken, and among these the ones with the least span.
        """
        least = self._least_cap()
        mean = (self._num_microbatches or 1) * self._total[-1] / self._num_stages
        near = least + int(tolerance * mean)
        wide = self._chosen(near, priced=True)
        if wide is None:
            raise AssertionError("the least span is not met")
        low, high, best = least - 1, near, wide
        while high - low > max(1, least // 100_000):
            middle = (low + high) // 2
            found = self._chosen(middle, priced=True)
            if found is not None and found.price == wide.price:
                high, best = middle, found
            else:
                low = middle
        return _positions(best)

    def _least_cap(self) -> int:
        """Return the least span of any cuts, by bisection."""
        times = self._num_microbatches or 1
        low = times * self._total[-1] // self._num_stages - 1
        step = max(1, low // 50)
        high = low + step
        while self._chosen(high, priced=False) is None:
            low, step = high, 2 * step
            high += step
        while high - low > max(1, low // 100_000):
            middle = (low + high) // 2
            if self._chosen(middle, priced=False) is None:
                low = middle
            else:
                high = middle
        return high

    def _chosen(self, cap: int, *, priced: bool) -> _Label | None:
        """Return the cheapest cuts with a span of at most ``cap``, by dynamic programming over stages.

        Of two ways to the same cut, one that costs no more and leads on no later makes the other useless.
        """
        last = len(self._ends) - 1
        labels: dict[int, list[_Label]] = {0: [_Label((0, 0), -(1 << 62), 0, None)]}
        for stage in range(self._num_stages):
            left = self._num_stages - stage - 1
            after: dict[int, list[_Label]] = {}
            for known in labels.values():
                for end in self._reach(known[0].end, left, cap):
                    if (end == last) == (left == 0):
                        self._extend(known, end, cap, priced, after)
            labels = after
        return min(labels.get(last, ()), key=lambda label: label.price, default=None)

    def _reach(self, start: int, left: int, cap: int) -> Iterator[int]:
        """Return the ends of a stage from ``start`` that fit, and leave no more than ``left`` stages hold."""
        most = cap // (self._num_microbatches or 1)
        end = max(start + 1, bisect_left(self._total, self._total[-1] - left * most))
        while end < len(self._total) and self._total[end] - self._total[start] <= most:
            yield end
            end += 1

    def _extend(
        self, known: Sequence[_Label], end: int, cap: int, priced: bool, after: dict[int, list[_Label]]
    ) -> None:
        """Add to ``after`` the labels that come of one more stage, up to ``end``."""
        start = known[0].end
        before = self._ends[start].chain_ns
        stage = self._ends[end] - self._ends[start]
        way_through = before + (self._num_microbatches or 0) * stage.chain_ns
        own = stage.backward_weight_ns - before
        for label in known:
            if self._num_microbatches is not None and label.way + way_through > cap:
                continue
            size, depth = self._prices[end]
            price = (label.price[0] + size, label.price[1] + depth) if priced else (0, 0)
            new = _Label(price, max(label.way, own) + 2 * self._messages[end], end, label)
            others = after.setdefault(end, [])
            if not any(other.price <= new.price and other.way <= new.way for other in others):
                others[:] = [o for o in others if not (new.price <= o.price and new.way <= o.way)]
                others.append(new)


def _positions(label: _Label) -> list[int]:
    """Return the positions of the cuts before a label's end, in order."""
    found = []
    at = label.before
    while at is not None and at.end:
        found.append(at.end - 1)
        at = at.before
    return found[::-1]
