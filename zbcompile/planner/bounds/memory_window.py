"""The memory-window bound: idle time that memory forces on a rank with one stage.

In window i, from the start of F(i) to the start of B(i), the microbatch is away on the other ranks for at
least the round trip. Meanwhile the rank can run only

* F(i..i+n-1), n = min(k, m-i+1) with k = headroom // M_B, since F(i+k) does not fit before B(i) ends;
* the a-1 other B's in flight when the window opens, with their W's;
* w W's pending at that moment, where a*M_B + w*M_W <= headroom and w <= i - a.

The rest of the window is idle. Windows i and i+k do not overlap, so the idle times of a chain of windows at
least k apart add up; a dynamic program picks the best chain.
"""

from __future__ import annotations

from dataclasses import dataclass

from zbcompile.planner.core.instance import Instance

__all__ = ["Window", "Windows", "memory_window_bound"]


@dataclass(frozen=True, slots=True)
class Window:
    """What can run in the window of one microbatch, and the idle time that is left.

    Attributes
    ----------
    microbatch
        The window's microbatch i, counted from 1.
    forwards
        F's that can run in it.
    in_flight
        Microbatches in flight when it opens, i included (a).
    weights_pending
        W's pending when it opens (w).
    idle_ns
        Idle time that is left.
    """

    microbatch: int
    forwards: int
    in_flight: int
    weights_pending: int
    idle_ns: int


@dataclass(frozen=True, slots=True)
class Windows:
    """A chain of windows on one rank.

    Attributes
    ----------
    round_trip_ns
        Least time from the start of F to the start of B.
    reuse
        Microbatches that fit into the headroom (k): windows so far apart do not overlap.
    chosen
        The windows of the chain.
    """

    round_trip_ns: int
    reuse: int
    chosen: tuple[Window, ...]

    @property
    def idle_ns(self) -> int:
        """Idle time of all windows of the chain."""
        return sum(window.idle_ns for window in self.chosen)

    def terms(self) -> dict[str, object]:
        """Return the evidence for a certificate.

        Every window is a list [microbatch, F's, in flight, W's pending, idle ns].
        """
        return {
            "round_trip_ns": self.round_trip_ns,
            "microbatches_that_fit": self.reuse,
            "windows": [
                [w.microbatch, w.forwards, w.in_flight, w.weights_pending, w.idle_ns] for w in self.chosen
            ],
        }


def _busiest_fillings(instance: Instance, stage: int, fits: int) -> list[tuple[int, int, int]]:
    """Return per microbatch i (most time of other B's and of W's in its window, in flight a, pending w).

    Up to w = i - a the time grows with a; beyond that, with all headroom used, it depends on a alone, so a
    suffix maximum serves every i. Needs M_W <= M_B, as in `Instance.relaxed`.
    """
    count, headroom = instance.num_microbatches, instance.headroom[instance.rank_of[stage]]
    saved, pending = instance.saved[stage], instance.pending[stage]
    both, weight = instance.backward[stage] + instance.weight[stage], instance.weight[stage]
    full: list[tuple[int, int, int]] = [(-1, 0, 0)] * (fits + 2)
    for a in range(fits, 0, -1):
        w = (headroom - a * saved) // pending if pending else count
        full[a] = max(full[a + 1], ((a - 1) * both + w * weight, a, w))
    result = []
    for i in range(1, count + 1):
        if i <= fits:
            result.append(((i - 1) * both, i, 0))
            continue
        if saved > pending:
            most = min(fits, (headroom - i * pending) // (saved - pending))
        else:
            most = fits if i * pending <= headroom else 0
        most = max(0, most)
        here = ((most - 1) * both + (i - most) * weight, most, i - most) if most else (-1, 0, 0)
        result.append(max(here, full[most + 1]))
    return result


def memory_window_bound(instance: Instance, round_trip: int, stage: int) -> Windows:
    """Return the chain of windows with the most idle time on a rank with one stage.

    Parameters
    ----------
    instance
        The problem, with the costs of `Instance.relaxed`.
    round_trip
        Least time in ns from the start of F to the start of B of the stage.
    stage
        The only stage of its rank.
    """
    count, headroom = instance.num_microbatches, instance.headroom[instance.rank_of[stage]]
    saved = instance.saved[stage]
    fits = min(count, headroom // saved) if saved > 0 else count
    if fits < 1:
        return Windows(round_trip, fits, ())
    windows: list[Window] = []
    for i, (filling, in_flight, waiting) in enumerate(_busiest_fillings(instance, stage, fits), 1):
        forwards = min(fits, count - i + 1)
        idle = round_trip - forwards * instance.forward[stage] - filling
        windows.append(Window(i, forwards, in_flight, waiting, max(0, idle)))
    best = [0] * (count + fits + 1)
    for i in range(count - 1, -1, -1):
        best[i] = max(best[i + 1], windows[i].idle_ns + best[i + fits])
    chosen, i = [], 0
    while i < count:
        if best[i] == best[i + 1]:
            i += 1
        else:
            chosen.append(windows[i])
            i += fits
    return Windows(round_trip, fits, tuple(chosen))
