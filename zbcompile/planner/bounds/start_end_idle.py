"""Idle time at the start and the end of a rank with several stages.

Start. Before its first B a rank runs F's alone, and each of them adds M_B. The first B is that of some stage
s of the rank, and from the rank's first F to B(1) of s passes at least the longest path that leads from an F
of the rank to that B; the least of these over s holds for whichever comes first. What the F's that fit into
the headroom do not fill of it is idle. The same holds before the first F of a stage for which every B of the
rank waits: until then the rank runs F's of other stages alone, and none of those that come after that stage;
all their M_B's are held when that F starts, and its own beside them. The larger of these idle times counts.

End. Let s0 be the stage whose B ends the rank's backward, and s1 another stage of the rank whose B(m) comes
after every F and every other B of the rank. Between the end of B(m) of s1 and the start of B(m) of s0 only
B's of s0 that are in flight and W's can run, and all bytes then held are M_B's of s0 and M_W's. What the most
time of these does not fill of the longest path is idle.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from zbcompile.planner.bounds.knapsack import fractional
from zbcompile.planner.core.instance import Instance
from zbcompile.planner.core.paths import NO_PATH, Paths

__all__ = ["StartWindow", "end_idle", "pending_time", "start_idle", "start_windows"]


@dataclass(frozen=True, slots=True)
class StartWindow:
    """A time at the start of a rank in which it runs F's alone.

    Attributes
    ----------
    until
        The stage whose first F ends it; ``None``: the rank's first B does.
    length_ns
        Its least length.
    stages
        The stages whose F's can run in it.
    forward_ns
        Most time of their F's that fit into the headroom.
    """

    until: int | None
    length_ns: int
    stages: tuple[int, ...]
    forward_ns: int

    @property
    def idle_ns(self) -> int:
        """What the F's do not fill."""
        return max(0, self.length_ns - self.forward_ns)


def start_windows(instance: Instance, paths: Paths, rank: int) -> Iterator[StartWindow]:
    """Yield the window before a rank's first B, then those before a stage that every B waits for."""
    stages = instance.stages_of[rank]
    length = min(max(paths.f_to_b(a, s) for a in stages) for s in stages)
    yield StartWindow(None, length, stages, _forward_time(instance, rank, stages, 0))
    for s in stages:
        if all(paths.f_to_b(s, a) != NO_PATH for a in stages):
            before = tuple(a for a in stages if paths.f_to_f(s, a) == NO_PATH)
            length = max(paths.f_to_f(a, s) for a in stages)
            yield StartWindow(s, length, before, _forward_time(instance, rank, before, instance.saved[s]))


def _forward_time(instance: Instance, rank: int, stages: Sequence[int], beside: int) -> int:
    """Return the most time of F's of some stages that fit into a rank's headroom beside some bytes."""
    items = [(instance.forward[s], instance.saved[s], instance.num_microbatches) for s in stages]
    return fractional(items, instance.headroom[rank] - beside)


def start_idle(instance: Instance, paths: Paths, rank: int) -> tuple[int, dict[str, object]]:
    """Return the idle time at the start of a rank in ns, and its terms for a witness."""
    window = max(start_windows(instance, paths, rank), key=lambda window: window.idle_ns)
    return window.idle_ns, {
        "start_window_ns": window.length_ns,
        "start_stages": list(window.stages),
        "start_forward_ns": window.forward_ns,
        "start_idle_ns": window.idle_ns,
    }


def end_idle(instance: Instance, paths: Paths, rank: int) -> tuple[int, dict[str, object]]:
    """Return the idle time at the end of a rank in ns, and its terms for a witness."""
    best = 0
    terms: dict[str, object] = {"end_idle_ns": 0}
    for s0, s1 in sorted(_last_pairs(paths, instance.stages_of[rank])):
        length = paths.b_to_b(s1, s0) - instance.backward[s1]
        most, in_flight = _end_work(instance, rank, s0)
        if length - most > best:
            best = length - most
            terms = {
                "end_stages": [s1, s0],
                "end_window_ns": length,
                "end_in_flight": in_flight,
                "end_work_ns": most,
                "end_idle_ns": best,
            }
    return best, terms


def _last_pairs(paths: Paths, stages: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield (s0, s1) where B(m) of s1 comes after all F's and B's of the rank but the B's of s0."""
    for s1 in stages:
        after = (s for s in stages if s != s1 and paths.b_to_b(s, s1) == NO_PATH)
        last = list(islice(after, 2))
        ends = len(last) == 1 and paths.b_to_b(s1, last[0]) != NO_PATH
        if ends and all(paths.f_to_b(s, s1) != NO_PATH for s in stages):
            yield last[0], s1


def _end_work(instance: Instance, rank: int, s0: int) -> tuple[int, int]:
    """Return (most time of B's of s0 but the last and of W's, microbatches of s0 then in flight)."""
    best = (0, 1)
    for in_flight in range(1, instance.num_microbatches + 1):
        headroom = instance.headroom[rank] - in_flight * instance.saved[s0]
        if headroom < 0:
            break
        time = (in_flight - 1) * (instance.backward[s0] + instance.weight[s0]) + pending_time(
            instance, rank, headroom
        )
        best = max(best, (time, in_flight))
    return best


def pending_time(instance: Instance, rank: int, headroom: int, own: int | None = None) -> int:
    """Return the most W time in ns that can be pending on a rank within some bytes.

    Parameters
    ----------
    instance
        The problem.
    rank
        The rank.
    headroom
        Bytes for the M_W's.
    own
        A stage of which one W is left out, or ``None``.
    """
    items = [
        (instance.weight[s], instance.pending[s], instance.num_microbatches - (1 if s == own else 0))
        for s in instance.stages_of[rank]
    ]
    return fractional(items, headroom)
