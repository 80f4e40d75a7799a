"""The dependency rules: what actions of one microbatch wait for. One walk says it, all else is made from it.

For every edge s -> t of the profile::

    F(t)  waits for  F(s)   plus the link's time, when s and t are on different ranks
    B(s)  waits for  F(s)
    B(s)  waits for  B(t)   plus the link's time, where a gradient flows
    W(s)  waits for  B(s)

A fused BW stands for its B and its W: it waits for what B waits for, and its gradient is ready when it ends.
The rules are the same for every microbatch, and no microbatch waits for another one.

`dependencies` yields them as rows. `Rules` has them as tables by kind and stage;
`zbcompile.schedule.dependency_graph` has them as a networkx graph, which planning begins with. The event
graph and the judge use the rows themselves, so that `show` and `check` load no graph library. The rules hold
no circle, because an edge of a profile goes to a later stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from zbcompile.schedule.costs import Edge, Profile
from zbcompile.schedule.ir import Action, Kind, Placement, Schedule
from zbcompile.schedule.messages import Message
from zbcompile.schedule.problem import Problem

__all__ = [
    "COMPUTE_KINDS",
    "OWN_STAGE",
    "SENT_BY",
    "Dependency",
    "Rules",
    "Step",
    "Wait",
    "dependencies",
    "durations",
    "fused_pairs",
    "predecessors",
    "unfused",
]

_F, _B, _W, _BW = Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT, Kind.FULL_BACKWARD

COMPUTE_KINDS = (_F, _B, _W, _BW)
"""The compute kinds as tables number them, from 0."""

OWN_STAGE = {_B: _F, _W: _B, _BW: _F}
"""The kind of action of its own stage that an action waits for."""


SENT_BY = {Kind.SEND_F: _F, Kind.SEND_B: _B}
"""The kind of action whose result a send sends: where BW stands for B, that of BW."""


class Step(NamedTuple):
    """An action without its microbatch. Equal to a `zbcompile.schedule.positions.Key`."""

    kind: Kind
    stage: int
    peer: int | None = None


def unfused(action: Action) -> Step:
    """Return the step of an action; BW waits for what B waits for."""
    return Step(_B if action.kind is _BW else action.kind, action.stage, action.peer)


class Dependency(NamedTuple):
    """One thing that a step waits for.

    Attributes
    ----------
    before, after
        ``after`` starts no sooner than ``lag_ns`` after the end of ``before``.
    lag_ns
        Travel time in ns.
    reason
        ``own stage``, ``activation`` or ``gradient``; with messages as steps of their own also ``send``,
        ``message`` and ``receive``, in place of an activation or gradient that goes to another rank.
    """

    before: Step
    after: Step
    lag_ns: int
    reason: str


def dependencies(problem: Problem, *, messages: bool = False) -> Iterator[Dependency]:
    """Walk over the rules of one microbatch, with B and W and without BW.

    Parameters
    ----------
    messages
        Whether what goes to another rank travels through a send and a receive, as steps of their own.

    Yields
    ------
    Dependency
        By stage, and for each stage what its F, its B and its W waits for.
    """
    stages = range(problem.num_stages)
    steps = {kind: [Step(kind, s) for s in stages] for kind in (_F, _B, _W)}
    into: list[list[Edge]] = [[] for _ in stages]
    back: list[list[Edge]] = [[] for _ in stages]
    for edge in problem.profile.edges:
        into[edge.target].append(edge)
        if edge.has_gradient:
            back[edge.source].append(edge)
    rank_of = problem.placement.rank_of
    for s in stages:
        activations = [(edge.source, edge) for edge in into[s]]
        gradients = [(edge.target, edge) for edge in back[s]]
        for kind, values in ((_F, activations), (_B, gradients), (_W, [])):
            after = steps[kind][s]
            if kind in OWN_STAGE:
                yield Dependency(steps[OWN_STAGE[kind]][s], after, 0, "own stage")
            for source, edge in values:
                before, lag = steps[kind][source], problem.lag_ns(edge, backward=kind is _B)
                if messages and rank_of[source] != rank_of[s]:
                    yield from _by_message(before, after, lag)
                else:
                    yield Dependency(before, after, lag, "gradient" if kind is _B else "activation")


def _by_message(before: Step, after: Step, lag_ns: int) -> Iterator[Dependency]:
    """Yield the way of a value to another rank: it is sent, travels, and is received."""
    message = Message(before.kind is _B, before.stage, after.stage, 0)
    send, receive = (Step(a.kind, a.stage, a.peer) for a in (message.send, message.recv))
    yield Dependency(before, send, 0, "send")
    yield Dependency(send, receive, lag_ns, "message")
    yield Dependency(receive, after, 0, "receive")


class Wait(NamedTuple):
    """What an action waits for: one of a kind (a place in `COMPUTE_KINDS`) and stage, and the travel time."""

    kind: int
    stage: int
    lag_ns: int


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules of one problem as tables.

    Attributes
    ----------
    waits
        ``waits[kind][stage]``: what an action waits for, in the order of `dependencies`; kinds are places in
        `COMPUTE_KINDS`. A gradient counts as made by B, also where BW makes it.
    forward_from, backward_from
        Per stage, as (other stage, lag in ns), what its F, or its B or BW, waits for of other stages.
    """

    waits: tuple[tuple[tuple[Wait, ...], ...], ...]
    forward_from: tuple[tuple[tuple[int, int], ...], ...]
    backward_from: tuple[tuple[tuple[int, int], ...], ...]

    @staticmethod
    def of(problem: Problem) -> Rules:
        """Collect the rules of a problem, once per profile and placement."""
        return _rules_of(problem.profile, problem.placement)

    @staticmethod
    def of_rows(num_stages: int, rows: Iterable[Dependency]) -> Rules:
        """Collect rules from rows between compute steps."""
        place = {kind: k for k, kind in enumerate(COMPUTE_KINDS)}
        found: list[list[list[Wait]]] = [[[] for _ in range(num_stages)] for _ in (_F, _B, _W)]
        for before, after, lag, _ in rows:
            found[place[after.kind]][after.stage].append(Wait(place[before.kind], before.stage, lag))
        return Rules._of(tuple(tuple(map(tuple, row)) for row in found))

    @staticmethod
    def _of(split: tuple[tuple[tuple[Wait, ...], ...], ...]) -> Rules:
        """Add BW, which waits as B does, and what comes from other stages."""
        forward, backward = (
            tuple(tuple((w.stage, w.lag_ns) for w in row if w.stage != s) for s, row in enumerate(rows))
            for rows in split[:2]
        )
        return Rules((*split, split[1]), forward, backward)

    def with_lags(self, change: Callable[[Wait], int]) -> Rules:
        """Return the rules with other travel times in ns between stages."""
        return Rules._of(
            tuple(
                tuple(
                    tuple(w._replace(lag_ns=change(w)) if w.stage != s else w for w in row)
                    for s, row in enumerate(rows)
                )
                for rows in self.waits[:3]
            )
        )

    @property
    def lags(self) -> list[int]:
        """Travel times of one microbatch in ns, between stages."""
        return [lag for rows in (self.forward_from, self.backward_from) for row in rows for _, lag in row]


@lru_cache(maxsize=4)
def _rules_of(profile: Profile, placement: Placement) -> Rules:
    return Rules.of_rows(profile.num_stages, dependencies(Problem.of(profile, placement)))


def durations(problem: Problem, microbatch: int | None = None) -> dict[Kind, tuple[int, ...]]:
    """Return the time of each compute kind per stage in ns, host overhead included.

    As the profile says, or what one microbatch takes.
    """
    profile = problem.profile if microbatch is None else problem.profile_of(microbatch)
    stages, extra = profile.stages, profile.overhead_ns
    return {
        _F: tuple(s.forward_ns + extra for s in stages),
        _B: tuple(s.backward_input_ns + extra for s in stages),
        _W: tuple(s.backward_weight_ns + extra for s in stages),
        _BW: tuple(s.full_backward_ns + extra for s in stages),
    }


def predecessors(
    action: Action, rules: Rules, fused: frozenset[tuple[int, int]]
) -> Iterator[tuple[Action, int]]:
    """Yield what a compute action waits for, as (action, lag in ns).

    Parameters
    ----------
    fused
        The (stage, microbatch) pairs that the schedule runs as BW.
    """
    i = action.microbatch
    for kind, stage, lag in rules.waits[COMPUTE_KINDS.index(action.kind)][action.stage]:
        before = COMPUTE_KINDS[kind]
        if before is _B and (stage, i) in fused:
            before = _BW
        yield Action(before, stage, i), lag


def fused_pairs(schedule: Schedule) -> frozenset[tuple[int, int]]:
    """Return the (stage, microbatch) pairs that run as BW."""
    return frozenset((a.stage, a.microbatch) for row in schedule.order for a in row if a.kind is _BW)
