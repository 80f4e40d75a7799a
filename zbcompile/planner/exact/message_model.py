"""Messages in the exact model: what a send mode does to its ranks, as the one lowering and the clock have it.

`zbcompile.schedule.communication` says where sends and receives stand in an order, and
`zbcompile.schedule.event_graph` when their transfers run. Both follow from the order of the compute actions,
and so do these constraints. Per message a variable: the start of its transfer, which is no earlier than

- the end of the action that makes it, and the arrival of what the same action sends before it, where a send
  waits for the one before;
- the start of the message before it on its channel, plus the time for which that one keeps the channel;
- the end of the last action before its receive is posted.

Its user starts when it has arrived, and so does the action after its maker. With D receives posted ahead,
that of the k-th message of a channel is posted behind the user of message k - D, but before the first use of
a later message. Where receives join exchanges it is posted right before that use, an activation's before the
W's in front of its user, and what comes next on its rank waits until it has arrived.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ortools.sat.python import cp_model

from zbcompile.planner.core.instance import B, F, Op, W
from zbcompile.planner.exact.order_model import Literal, OrderModel, negated
from zbcompile.planner.exact.ticks import Way
from zbcompile.schedule.ir import Kind

__all__ = ["add_messages"]

_SENDS = frozenset(kind for kind in Kind if kind.is_send)
_RECEIVES = frozenset(kind for kind in Kind if kind.is_recv)
_COMPUTE = frozenset(kind for kind in Kind if kind.is_compute)


@dataclass(eq=False, slots=True)
class _Message:
    """One message.

    Attributes
    ----------
    way
        What it has in common with those of other microbatches.
    maker, user
        The action that makes it and the one that needs it.
    begin
        The start of its transfer.
    """

    way: Way
    maker: Op
    user: Op
    begin: cp_model.IntVar

    @property
    def arrival(self) -> cp_model.LinearExpr:
        """When it is there."""
        return self.begin + self.way.lag


def add_messages(orders: OrderModel) -> None:
    """Add the messages of a problem to the model of its orders."""
    mode = orders.ticks.mode
    channels: dict[tuple[int, int], list[_Message]] = {}
    sent: dict[Op, list[_Message]] = {}
    for way in orders.ticks.ways:
        for i in range(orders.instance.num_microbatches):
            maker, user = (way.side, way.source, i), (way.side, way.target, i)
            message = _Message(way, maker, user, orders.time(f"message{way.side}.{maker}>{way.target}"))
            channels.setdefault(way.channel, []).append(message)
            sent.setdefault(maker, []).append(message)
    for maker, messages in sent.items():
        messages.sort(key=lambda message: message.way.target)
        for k, message in enumerate(messages):
            orders.add_wait(message.begin, orders.end(maker), orders.start[maker])
            orders.add_wait(orders.start[message.user], message.arrival, message.begin)
            orders.model.add(orders.free[maker] >= message.arrival)
            orders.arrivals.setdefault(maker, []).append((message.arrival, message.begin))
            if k and mode.waits_before & _SENDS:
                orders.add_wait(message.begin, messages[k - 1].arrival, messages[k - 1].begin)
    for messages in channels.values():
        channel = _Channel(orders, messages)
        channel.in_turn()
        if not mode.joins_exchange:
            channel.post_ahead(mode.receive_depth)
        elif channel.mixed:
            channel.join_exchanges()
        else:
            channel.join_own_exchanges()


class _Channel:
    """The messages from one rank to another: how the order of the ranks' actions decides theirs.

    Attributes
    ----------
    mixed
        Whether messages of several kinds share it. If not, their order is that of the microbatches.
    """

    def __init__(self, orders: OrderModel, messages: list[_Message]) -> None:
        self.orders, self.model, self.messages = orders, orders.model, messages
        self.mixed = any(message.way != messages[0].way for message in messages)
        self.rank = messages[0].way.channel[1]

    def _sent(self, a: _Message, b: _Message) -> Literal:
        """Return whether a is sent before b."""
        if a.maker == b.maker:
            return a.way.target < b.way.target
        return self.orders.precedes(a.maker, b.maker)

    def _used(self, a: _Message, b: _Message) -> Literal:
        """Return whether a is used no later than b."""
        return a.user == b.user or self.orders.precedes(a.user, b.user)

    def _other_than(self, message: _Message) -> list[_Message]:
        return [other for other in self.messages if other is not message]

    def in_turn(self) -> None:
        """Let every message wait for those before it."""
        for message in self.messages:
            for other in self._other_than(message):
                since = other.begin + other.way.busy
                self.orders.add_wait(message.begin, since, other.begin, (self._sent(other, message),))

    def post_ahead(self, depth: int) -> None:
        """Let every message wait for its receive: behind the user of the one ``depth`` places before."""
        if self.mixed:
            for message in self.messages:
                self._open(message, depth)
            return
        for early, late in zip(self.messages, self.messages[depth:], strict=False):
            since = self.orders.end(early.user)
            self.orders.add_wait(late.begin, since, self.orders.start[early.user])

    @cached_property
    def _place(self) -> dict[int, cp_model.IntVar]:
        """Per message, by identity, how many are sent before it."""
        places = {}
        for message in self.messages:
            place = self.model.new_int_var(0, len(self.messages) - 1, "place")
            self.model.add(place == sum(self._sent(o, message) for o in self._other_than(message)))
            places[id(message)] = place
        return places

    def _far(self, message: _Message, other: _Message, depth: int) -> Literal:
        """Return whether ``other`` is sent ``depth`` or more places after ``message``."""
        if message.way == other.way:
            ahead = other.maker[2] - message.maker[2]
            if ahead >= depth or ahead <= 0:
                return ahead >= depth
        far = self.model.new_bool_var("far")
        away = self._place[id(other)] - self._place[id(message)]
        self.model.add(away >= depth).only_enforce_if(far)
        self.model.add(away < depth).only_enforce_if(~far)
        return far

    def _open(self, message: _Message, depth: int) -> None:
        """Let the messages ``depth`` and more places after one wait for what opens their receives.

        That is the end of its user; or, where one of them is used no later than it, the end of the last
        action before the first such use.
        """
        orders, model, others = self.orders, self.model, self._other_than(message)
        far = {id(o): self._far(message, o, depth) for o in others}
        others = [o for o in others if far[id(o)] is not False]
        opened = orders.time("opened")
        early = [o for o in others if self._used(o, message) is not False]
        clean = [self._both(far[id(o)], self._used(o, message)) for o in early]
        plain = model.new_bool_var("plain")
        model.add_bool_or([plain, *clean])
        orders.add_wait(opened, orders.end(message.user), orders.start[message.user], (plain,))
        for first in early:
            here = model.new_bool_var("first")
            before = [self._both(far[id(o)], self._used(o, first)) for o in others if o.user != first.user]
            reasons = [negated(far[id(first)]), negated(self._used(first, message))]
            model.add_bool_or([here, *before, *reasons])
            self._behind_all_before(opened, first.user, here)
        for other in others:
            orders.add_wait(other.begin, opened, opened, (far[id(other)],))

    def _both(self, a: Literal, b: Literal) -> Literal:
        """Return a literal that only holds if both do."""
        if a is False or b is False:
            return False
        both = self.model.new_bool_var("both")
        self.model.add_bool_and([a, b]).only_enforce_if(both)
        return both

    def _behind_all_before(self, time: cp_model.IntVar, user: Op, when: Literal = True) -> None:
        """Let a time be no earlier than the end of all that its rank runs before an action."""
        orders = self.orders
        for op in orders.rank_ops(self.rank, F, B, W):
            if op != user:
                since, reasons = orders.end(op), (orders.precedes(op, user), when, *orders.there(op))
                orders.add_wait(time, since, orders.start[op], reasons)

    def join_own_exchanges(self) -> None:
        """Post every receive right before its use: where the order of the channel is that of its uses.

        What runs before a B ends before its exchange begins. Before an F only what is no W does.
        """
        orders = self.orders
        for message in self.messages:
            if message.way.side == B:
                self._behind_all_before(message.begin, message.user)
                continue
            posted = self._posted(message, F, B)
            orders.add_wait(message.begin, posted, posted)
            self._keep_apart(message, posted, orders.rank_ops(self.rank, W))

    def join_exchanges(self) -> None:
        """Post every receive before the first use of its message or of one sent after it."""
        orders, model = self.orders, self.model
        own = [
            self._posted(message, F, B, *((W,) if message.way.side == B else ())) for message in self.messages
        ]
        for message in self.messages:
            posted = orders.time("exchange")
            chosen = []
            for other, place in zip(self.messages, own, strict=True):
                later = other is message or self._sent(message, other)
                if later is False:
                    continue
                model.add(posted <= place).only_enforce_if(*([] if later is True else [later]))
                chosen.append(model.new_bool_var("place"))
                model.add(posted == place).only_enforce_if(chosen[-1])
                model.add_bool_or([later, ~chosen[-1]])
                orders.add_cause(posted, place, (later,))
            model.add_bool_or(chosen)
            orders.add_wait(message.begin, posted, posted)
            self._keep_apart(message, posted, orders.rank_ops(self.rank, F, B, W))

    def _posted(self, message: _Message, *kinds: int) -> cp_model.IntVar:
        """Return the end of the last action of some kinds before a message's use; 0 if there is none."""
        orders, model, user = self.orders, self.model, message.user
        posted, none = orders.time("posted"), model.new_bool_var("none")
        model.add(posted == 0).only_enforce_if(none)
        chosen: list[Literal] = [none]
        for op in orders.rank_ops(self.rank, *kinds):
            before = op != user and orders.precedes(op, user)
            if before is False:
                continue
            there = orders.there(op)
            orders.add_wait(posted, orders.end(op), orders.start[op], (before, *there))
            last = model.new_bool_var("last")
            model.add(posted == orders.end(op)).only_enforce_if(last)
            for literal in (before, *there):
                if literal is not True:
                    model.add_implication(last, literal)
            chosen.append(last)
        model.add_bool_or(chosen)
        return posted

    def _keep_apart(self, message: _Message, posted: cp_model.IntVar, ops: list[Op]) -> None:
        """Let actions end before a receive is posted or start after its message has arrived."""
        orders = self.orders
        for op in ops:
            if op == message.user:
                continue
            over, there = self.model.new_bool_var("over"), orders.there(op)
            self.model.add(orders.end(op) <= posted).only_enforce_if([over, *there])
            reasons = (~over, *there)
            orders.add_wait(orders.start[op], message.arrival, message.begin, reasons)
