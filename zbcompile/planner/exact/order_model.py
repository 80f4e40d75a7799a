"""The exact model for CP-SAT: which backwards are fused, starts, one action of a rank at a time, memory.

Variables: the start of every F, backward and W; whether a backward is fused, which makes it a BW and leaves
out its W; per rank the booleans "a is before b" that its memory and its messages need. The k-th of each
(kind, stage) is microbatch k, and a W that is left out has no place. Where sends hold their rank, messages
are in the model too (`zbcompile.planner.exact.message_model`); memory is
`zbcompile.planner.exact.memory_model`'s.

A step ends on every rank as early as its order allows (`zbcompile.schedule.simulate`). For the span the model
may end a rank later, so that another one starts later: its value is never more than that of its order, and
seldom less. `zbcompile.planner.exact.early_ends` adds what is missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ortools.sat.python import cp_model, cp_model_helper

from zbcompile.planner.core.instance import BW, B, Codes, F, Fusing, Op, W, numbered
from zbcompile.planner.core.paths import Paths
from zbcompile.planner.exact.ticks import Ticks
from zbcompile.schedule.ir import Kind

__all__ = ["Cause", "Literal", "OrderModel", "negated"]

Literal = cp_model_helper.Literal | bool
"""A boolean variable, its negation, or True or False."""

Time = cp_model.LinearExpr | int

_SENDS = frozenset(kind for kind in Kind if kind.is_send)


def negated(literal: Literal) -> Literal:
    """Return the opposite of a literal."""
    return not literal if isinstance(literal, bool) else ~literal


class Cause(NamedTuple):
    """Something that may decide how early a time can be.

    Attributes
    ----------
    time
        The variable that waits.
    since
        The time it waits for.
    of
        The variable that ``since`` counts from; its time has a cause of its own.
    when
        Literals under which it waits.
    """

    time: cp_model.IntVar
    since: Time
    of: cp_model.IntVar
    when: tuple[Literal, ...]


class OrderModel:
    """All orders of one problem in ticks.

    Parameters
    ----------
    ticks
        The problem.
    horizon
        When everything has ended.
    lower
        The objective is no less.
    fusing
        Which backwards may be, or are, fused.

    Attributes
    ----------
    model
        The CP-SAT model.
    start, fused, before
        Its variables: starts of F's, backwards and W's (that of a W that is left out says nothing); whether a
        backward is fused; whether one action comes before another.
    free
        Where sends hold their rank, when the rank goes on after an action that sends.
    value
        The objective.
    in_reach
        Whether a single microbatch ends within the horizon. If not, the model says nothing: no order does.
    causes, arrivals
        For `zbcompile.planner.exact.early_ends`: what times may wait for; and when what an action sends is
        there, with the variable that this counts from.
    """

    def __init__(self, ticks: Ticks, horizon: int, lower: int, fusing: Fusing) -> None:
        self.ticks, self.instance, self.horizon = ticks, ticks.instance, horizon
        self.paths = Paths.of(self.instance.relaxed())
        self.model, self.in_reach = cp_model.CpModel(), True
        self.causes: list[Cause] = []
        self.arrivals: dict[Op, list[tuple[Time, cp_model.IntVar]]] = {}
        self.fused = {(s, i): lit for s in self._stages() for i, lit in enumerate(self._choices(s, fusing))}
        self.start = {op: self._start_variable(op) for op in self.ops()}
        self.before: dict[tuple[Op, Op], cp_model.IntVar] = {}
        senders = {(way.side, way.source) for way in ticks.ways}
        self.free = {
            op: self.time(f"free{op}") for op in self.ops() if (op[0], op[1]) in senders and op[0] != W
        }
        self._dependencies()
        for rank in range(self.instance.num_ranks):
            self._one_at_a_time(rank)
        self.value = self.model.new_int_var(min(lower, horizon), horizon, "value")
        self._objective()

    def _stages(self) -> range:
        return range(self.instance.num_stages)

    def _choices(self, s: int, fusing: Fusing) -> list[Literal]:
        """Return for each microbatch of a stage whether its backward is fused, decided where it is clear."""
        instance, m = self.instance, self.instance.num_microbatches
        cheaper = instance.fused[s] < instance.backward[s] + instance.weight[s]
        matters = cheaper or instance.memory.uses[s].split_holds_more or bool(self.ticks.ways)
        if fusing is Fusing.AUTO and matters:
            return [self.model.new_bool_var(f"fused{s}.{i}") for i in range(m)]
        return [fusing is Fusing.ALWAYS] * m

    def ops(self) -> Iterator[Op]:
        """Yield every F, backward and W."""
        for s in self._stages():
            for kind in (F, B, W):
                for i in range(self.instance.num_microbatches):
                    yield kind, s, i

    def time(self, name: str) -> cp_model.IntVar:
        """Return a new variable for a time."""
        return self.model.new_int_var(0, self.horizon, name)

    def split(self, op: Op) -> Literal:
        """Return whether the backward of an action's microbatch is split."""
        return negated(self.fused[op[1], op[2]])

    def there(self, *ops: Op) -> tuple[Literal, ...]:
        """Return what makes actions run: a W runs where its backward is split."""
        return tuple(lit for op in ops if op[0] == W and (lit := self.split(op)) is not True)

    def length(self, op: Op) -> Time:
        """Return the duration of an action, of a W that is left out 0."""
        kind, s, i = op
        instance, fused = self.instance, self.fused[s, i]
        if kind == F:
            return instance.forward[s]
        split, whole = (instance.backward[s], instance.fused[s]) if kind == B else (instance.weight[s], 0)
        return split + (whole - split) * fused

    def end(self, op: Op) -> Time:
        """Return the end of an action."""
        return self.start[op] + self.length(op)

    def add_cause(self, time: cp_model.IntVar, of: cp_model.IntVar, when: Sequence[Literal] = ()) -> None:
        """Say that a time may be as early as another one where all of ``when`` hold."""
        self.causes.append(Cause(time, of, of, tuple(literal for literal in when if literal is not True)))

    def add_wait(
        self,
        time: cp_model.IntVar,
        since: Time,
        of: cp_model.IntVar,
        when: Sequence[Literal] = (),
    ) -> None:
        """Let a time be no earlier than another one, where all of ``when`` hold. ``of``: see `Cause`."""
        if any(literal is False for literal in when):
            return
        held = tuple(literal for literal in when if literal is not True)
        self.model.add(time >= since).only_enforce_if(held)
        self.causes.append(Cause(time, since, of, held))

    def _start_variable(self, op: Op) -> cp_model.IntVar:
        kind, s, i = op
        instance = self.instance
        head = self.paths.head[s if kind == F else instance.num_stages + s]
        head += self._shortest((B, s, i)) if kind == W else 0
        latest = self.horizon - self._shortest(op)
        if op == (F, 0, 0) and self.ticks.one_source:
            head = latest = instance.steps.lead(instance.stages_of, instance.objective)
        self.in_reach = self.in_reach and head <= latest
        return self.model.new_int_var(head, max(head, latest), f"{op}")

    def _shortest(self, op: Op) -> int:
        """Return the least duration of an action that runs; 0 for a W that may be left out."""
        kind, s, i = op
        instance, fused = self.instance, self.fused[s, i]
        if kind == F:
            return instance.forward[s]
        if kind == W:
            return instance.weight[s] if fused is False else 0
        split, whole = instance.backward[s], instance.fused[s]
        return split if fused is False else whole if fused is True else min(split, whole)

    def _travel(self, op: Op) -> int:
        """Return the least time from the end of an action until all that it sends has arrived.

        Sends that wait for each other travel one after the other.
        """
        lags = [way.lag for way in self.ticks.ways if (way.side, way.source) == op[:2]]
        return sum(lags) if self.ticks.mode.waits_before & _SENDS else max(lags)

    def _dependencies(self) -> None:
        instance, start = self.instance, self.start
        for s in self._stages():
            waits = [(kind, wait) for kind in (F, B, W) for wait in instance.rules.waits[kind][s]]
            for i in range(instance.num_microbatches):
                for kind, (before, other, lag) in waits:
                    source = (before, other, i)
                    when = self.there((kind, s, i)) if other != s else ()
                    self.add_wait(start[kind, s, i], self.end(source) + lag, start[source], when)
                for kind in (F, B, W) if i else ():
                    source = (kind, s, i - 1)
                    self.add_wait(start[kind, s, i], self.end(source), start[source])

    def rank_ops(self, rank: int, *kinds: int) -> list[Op]:
        """Return the actions of some kinds of a rank."""
        return [
            (kind, s, i)
            for s in self.instance.stages_of[rank]
            for kind in kinds
            for i in range(self.instance.num_microbatches)
        ]

    def _one_at_a_time(self, rank: int) -> None:
        self.model.add_no_overlap(
            [interval for op in self.rank_ops(rank, F, B, W) for interval in self._intervals(op)]
        )

    def _intervals(self, op: Op) -> list[cp_model.IntervalVar]:
        """Return when an action keeps its rank busy: one interval, or one for each form of a backward."""
        kind, s, i = op
        model, instance, start, fused = self.model, self.instance, self.start[op], self.fused[s, i]
        if op in self.free:
            travel = self._travel(op)
            least = min(self._shortest(op) + travel, self.horizon)
            size = model.new_int_var(least, self.horizon, f"held{op}")
            model.add(size >= self.length(op) + travel)
            return [model.new_interval_var(start, size, self.free[op], f"i{op}")]
        forms: list[tuple[int, Literal]] = [(instance.forward[s], True)]
        if kind != F:
            forms = [(instance.backward[s] if kind == B else instance.weight[s], negated(fused))]
        if kind == B:
            forms.append((instance.fused[s], fused))
        return [
            model.new_optional_fixed_size_interval_var(start, length, there, f"i{op}")
            if there is not True
            else model.new_fixed_size_interval_var(start, length, f"i{op}")
            for length, there in forms
            if there is not False
        ]

    def precedes(self, a: Op, b: Op) -> Literal:
        """Return whether a comes before b on their rank; it says nothing where one of them does not run."""
        if a[1] == b[1]:
            if a[0] <= b[0] and a[2] <= b[2]:
                return True
            if b[0] <= a[0] and b[2] <= a[2]:
                return False
        if (b, a) in self.before:
            return ~self.before[b, a]
        if (a, b) not in self.before:
            literal, there = self.model.new_bool_var(f"{a}<{b}"), self.there(a, b)
            for first, then, way in ((a, b, literal), (b, a, ~literal)):
                after = self.free.get(first, self.end(first))
                self.model.add(self.start[then] >= after).only_enforce_if([way, *there])
            self.before[a, b] = literal
        return self.before[a, b]

    def chain(self) -> None:
        """Tell the solver that what comes after a later microbatch comes after the earlier one too."""
        for (a, b), literal in self.before.items():
            later = ((a[0], a[1], a[2] + 1), b)
            if later in self.before and not self.there(a, later[0], b):
                self.model.add_implication(self.before[later], literal)

    def ends(self, rank: int) -> list[Time]:
        """Return the ends of the last backwards and W's of a rank's stages: the last is the rank's last W."""
        last = self.instance.num_microbatches - 1
        return [self.end((W, s, last)) for s in self.instance.stages_of[rank]]

    def _objective(self) -> None:
        for rank, stages in enumerate(self.instance.stages_of):
            firsts: list[Time] = [self.start[F, x, 0] for x in stages]
            ends = self.ends(rank)
            if self.instance.steps.any:
                gathers, reductions = self._channel(rank, ends)
                firsts, ends = firsts + gathers, ends + reductions
            update = self.instance.steps.update[rank]
            for end in ends:
                if self.instance.objective == "makespan":
                    self.model.add(self.value >= end + update)
                    continue
                for first in firsts:
                    self.model.add(self.value >= end + update - first)
        self.model.minimize(self.value)

    def _channel(self, rank: int, ends: list[Time]) -> tuple[list[Time], list[Time]]:
        """Put gathers and reductions on a rank's channel: return starts of gathers and ends of reductions.

        They are in any order: that of the first F's and that of the last W's is as good as any other, because
        all gathers may begin with the step, and nothing waits for a reduction.
        """
        steps, model, intervals = self.instance.steps, self.model, list[cp_model.IntervalVar]()
        gathers, reductions = list[Time](), list[Time]()
        for s, end in zip(self.instance.stages_of[rank], ends, strict=True):
            if steps.gather[s]:
                gather = self.time(f"gather{s}")
                model.add(self.start[F, s, 0] >= gather + steps.gather[s])
                intervals.append(
                    model.new_fixed_size_interval_var(gather, steps.gather[s], f"on channel {s}")
                )
                gathers.append(gather)
            if steps.reduce[s]:
                reduction = self.time(f"reduce{s}")
                model.add(reduction >= end)
                intervals.append(
                    model.new_fixed_size_interval_var(reduction, steps.reduce[s], f"on channel {s}")
                )
                reductions.append(reduction + steps.reduce[s])
        model.add_no_overlap(intervals)
        return gathers, reductions

    def hint(self, codes: Codes, starts: Sequence[Sequence[int]]) -> None:
        """Hint at a known order: which backwards it fuses, its starts in ticks, and what comes first.

        Parameters
        ----------
        codes
            The order.
        starts
            When its actions start, rank by rank.
        """
        place = {op: (k, starts[r][k]) for r, row in enumerate(numbered(codes)) for k, op in enumerate(row)}
        hint = self.model.add_hint
        for (s, i), literal in self.fused.items():
            if not isinstance(literal, bool):
                hint(literal, (BW, s, i) in place)
        place |= {(B, s, i): where for (kind, s, i), where in place.items() if kind == BW}
        for op, variable in self.start.items():
            if op in place:
                hint(variable, place[op][1])
        for (a, b), literal in self.before.items():
            if a in place and b in place:
                hint(literal, place[a][0] < place[b][0])

    def codes(self, solver: cp_model.CpSolver) -> Codes:
        """Return the order of a solution. Every action has a length, so no two of a rank start together."""
        rows = []
        for rank in range(self.instance.num_ranks):
            row = []
            for op in self.rank_ops(rank, F, B, W):
                kind, s, i = op
                fused = solver.boolean_value(self.fused[s, i])
                if not (kind == W and fused):
                    row.append((solver.value(self.start[op]), BW if kind == B and fused else kind, s))
            rows.append([(kind, s) for _, kind, s in sorted(row)])
        return rows
