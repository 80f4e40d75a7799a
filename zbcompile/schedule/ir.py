"""The IR: kinds, actions, placements and schedules. A schedule is an order of actions per rank, nothing else.

A schedule stores no times: `zbcompile.schedule.simulate` derives them, so that one order replays under any
costs.

Text form of an action, which round-trips through `Action.parse`::

    2F0      forward of stage 2, microbatch 0
    2B0      gradient of stage 2's inputs          2W0   gradient of stage 2's parameters
    2BW0     both, fused
    2SF0>3   send stage 2's output to stage 3      3RF0<2  receive it on stage 3
    3SB0>2   send the gradient back to stage 2     2RB0<3  receive it on stage 2
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from zbcompile.errors import FormatError, UsageError
from zbcompile.schedule.notebook import Pictured

__all__ = ["MAX_COUNT", "PLACEMENTS", "Action", "Kind", "Placement", "Schedule"]

MAX_COUNT = 1 << 20
"""Largest number of stages, ranks or microbatches that a file may state."""

PLACEMENTS = ("linear", "looped", "v")
"""The names of `Placement.named`. The last two take any number of stages per rank."""


class Kind(enum.Enum):
    """What an action does. The values are the names that files carry.

    Attributes
    ----------
    letter
        The short form on the screen and in the text form: F, B, W, BW, SF, RF, SB, RB, UNSHARD, RESHARD,
        REDUCE_GRAD.
    is_compute
        True for F, B, W and BW.
    is_send
        True for a send of an activation or of a gradient.
    is_recv
        True for a receive of an activation or of a gradient.
    is_message
        True for a send or a receive: it has a peer stage.
    is_of_stage
        True for UNSHARD, RESHARD and REDUCE_GRAD, which belong to a stage and to no microbatch.
    """

    FORWARD = "forward"
    BACKWARD_INPUT = "backward_input"
    BACKWARD_WEIGHT = "backward_weight"
    FULL_BACKWARD = "full_backward"
    SEND_F = "send_f"
    RECV_F = "recv_f"
    SEND_B = "send_b"
    RECV_B = "recv_b"
    UNSHARD = "unshard"
    RESHARD = "reshard"
    REDUCE_GRAD = "reduce_grad"

    letter: str
    is_compute: bool
    is_send: bool
    is_recv: bool
    is_message: bool
    is_of_stage: bool

    __hash__ = object.__hash__  # members are singletons; Enum's own hash is slow Python code


_LETTERS = ("F", "B", "W", "BW", "SF", "RF", "SB", "RB", "UNSHARD", "RESHARD", "REDUCE_GRAD")
for _kind, _letter in zip(Kind, _LETTERS, strict=True):
    _kind.letter = _letter
    _kind.is_send = _kind in (Kind.SEND_F, Kind.SEND_B)
    _kind.is_recv = _kind in (Kind.RECV_F, Kind.RECV_B)
    _kind.is_message = _kind.is_send or _kind.is_recv
    _kind.is_of_stage = _kind in (Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE_GRAD)
    _kind.is_compute = not (_kind.is_message or _kind.is_of_stage)
_BY_LETTER = {kind.letter: kind for kind in Kind}
_NUMBER_TEXT = re.compile("[0-9]{1,7}")
_ACTION_TEXT = re.compile(r"([0-9]{1,7})(BW|SF|RF|SB|RB|F|B|W)([0-9]{1,7})(?:([<>])([0-9]{1,7}))?")
_STAGE_TEXT = re.compile("([0-9]{1,7})(UNSHARD|RESHARD|REDUCE_GRAD)")


def _number(text: str) -> int:
    if not _NUMBER_TEXT.fullmatch(text):
        raise ValueError(f"{text[:40]!r} is not a number of at most 7 digits")
    return int(text)


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that a rank does for one stage and one microbatch, or for a stage as a whole.

    At a send the rank hands the message to the channel; at a receive it posts the buffer. The rank waits for
    a received message only at the compute action that uses it.

    Attributes
    ----------
    microbatch
        The microbatch; 0 for the actions of a stage as a whole.
    peer
        The other stage of a send or receive; None for all others.

    Raises
    ------
    UsageError
        A send or receive without a peer, another action with one, or an action of a stage as a whole with a
        microbatch.
    """

    kind: Kind
    stage: int
    microbatch: int
    peer: int | None = None

    def __post_init__(self) -> None:
        if (self.peer is None) == self.kind.is_message:
            wanted = "a peer stage" if self.kind.is_message else "no peer"
            raise UsageError(f"{self.kind.value} takes {wanted}", given=self.peer)
        if self.microbatch and self.kind.is_of_stage:
            raise UsageError(f"{self.kind.value} takes no microbatch", needed=0, given=self.microbatch)

    def __str__(self) -> str:
        if self.kind.is_of_stage:
            return f"{self.stage}{self.kind.letter}"
        text = f"{self.stage}{self.kind.letter}{self.microbatch}"
        if self.peer is None:
            return text
        return f"{text}{'>' if self.kind.is_send else '<'}{self.peer}"

    @staticmethod
    def parse(text: str) -> Action:
        """Read the text form.

        Raises
        ------
        FormatError
            The text is not an action; the message quotes its first 40 characters.
        """
        match = _ACTION_TEXT.fullmatch(text)
        if match is None:
            whole = _STAGE_TEXT.fullmatch(text)
            if whole is not None:
                return Action(_BY_LETTER[whole.group(2)], int(whole.group(1)), 0)
            raise FormatError(
                f"{text[:40]!r} is not an action",
                fix="write stage, letter, microbatch, as 2F0 or 2SF0>3 (letters F B W BW SF RF SB RB), "
                "or a stage with UNSHARD, RESHARD or REDUCE_GRAD",
            )
        stage, letter, microbatch, arrow, peer = match.groups()
        kind = _BY_LETTER[letter]
        expected = None if kind.is_compute else (">" if kind.is_send else "<")
        if arrow != expected:
            raise FormatError(
                f"{text[:40]!r}: {kind.value} "
                + ("takes no peer" if expected is None else f"needs a peer written '{expected}stage'"),
            )
        return Action(kind, int(stage), int(microbatch), None if peer is None else int(peer))


@dataclass(frozen=True, slots=True)
class Placement:
    """Which rank runs which stage.

    Attributes
    ----------
    rank_of
        The rank of every stage.

    Raises
    ------
    UsageError
        The placement has no stage, or some rank between 0 and the highest has none.
    """

    rank_of: tuple[int, ...]
    _stages: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.rank_of:
            raise UsageError("a placement needs at least one stage")
        ranks = set(self.rank_of)
        if ranks != set(range(len(ranks))):
            raise UsageError(
                "a placement must use the ranks 0, 1, ... without a hole",
                given=sorted(ranks),
                fix="number the ranks from 0 and give every rank a stage",
            )
        stages: list[list[int]] = [[] for _ in ranks]
        for stage, rank in enumerate(self.rank_of):
            stages[rank].append(stage)
        object.__setattr__(self, "_stages", tuple(map(tuple, stages)))

    @staticmethod
    def linear(num_ranks: int) -> Placement:
        """Place one stage on each rank, in order."""
        return Placement(tuple(range(num_ranks)))

    @staticmethod
    def looped(num_ranks: int, stages_per_rank: int = 2) -> Placement:
        """Place stage s on rank s mod p.

        Notes
        -----
        Source: Megatron's interleaving, arXiv 2104.04473, section 2.2.
        """
        return Placement(tuple(range(num_ranks)) * stages_per_rank)

    @staticmethod
    def v(num_ranks: int, stages_per_rank: int = 2) -> Placement:
        """Place the stages down the ranks and back up again: 0 1 .. p-1 p-1 .. 1 0.

        Notes
        -----
        Source: arXiv 2405.15362, section 3.
        """
        down = tuple(range(num_ranks))
        return Placement(
            tuple(r for leg in range(stages_per_rank) for r in (down if leg % 2 == 0 else down[::-1]))
        )

    @staticmethod
    def named(name: str, num_ranks: int, stages_per_rank: int = 1) -> Placement:
        """Build a placement by its name.

        Parameters
        ----------
        name
            ``linear`` (with one stage per rank only), ``looped`` or ``v``.

        Raises
        ------
        UsageError
            The name is unknown, or ``linear`` with several stages per rank.
        """
        if name == "linear" and stages_per_rank == 1:
            return Placement.linear(num_ranks)
        if name == "looped":
            return Placement.looped(num_ranks, stages_per_rank)
        if name == "v":
            return Placement.v(num_ranks, stages_per_rank)
        raise UsageError(
            f"unknown placement {name!r} for {stages_per_rank} stages per rank",
            fix="use linear (one stage per rank), looped, v, or an explicit list of ranks",
        )

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.rank_of)

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return len(self._stages)

    @property
    def is_contiguous(self) -> bool:
        """Whether stages lie on the ranks in their order, so that a rank's are neighbours."""
        return list(self.rank_of) == sorted(self.rank_of)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages of a rank, in increasing order."""
        return self._stages[rank]

    @property
    def name(self) -> str:
        """``linear``, ``looped`` or ``v`` where the placement is one of these, else ``map``."""
        p, n = self.num_ranks, self.num_stages
        if n % p == 0:
            if self == Placement.looped(p, n // p):
                return "linear" if n == p else "looped"
            if self == Placement.v(p, n // p):
                return "v"
        return "map"


@dataclass(frozen=True, slots=True)
class Schedule(Pictured):
    """An order of actions for every rank.

    Attributes
    ----------
    order
        Per rank, its actions from first to last.
    """

    placement: Placement
    num_microbatches: int
    order: tuple[tuple[Action, ...], ...]

    @staticmethod
    def of(placement: Placement, num_microbatches: int, order: Sequence[Iterable[Action]]) -> Schedule:
        """Build a schedule from any sequences of actions."""
        return Schedule(placement, num_microbatches, tuple(tuple(row) for row in order))

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the placement."""
        return self.placement.num_ranks

    @property
    def num_stages(self) -> int:
        """Number of stages of the placement."""
        return self.placement.num_stages

    def actions(self) -> Iterator[tuple[int, int, Action]]:
        """Yield all actions as (rank, position, action)."""
        for rank, row in enumerate(self.order):
            for position, action in enumerate(row):
                yield rank, position, action

    def compute_only(self) -> Schedule:
        """Return the order of F, B, W and BW alone: without messages and actions of stages as a whole."""
        return Schedule.of(
            self.placement,
            self.num_microbatches,
            [[a for a in row if a.kind.is_compute] for row in self.order],
        )

    @property
    def has_communication(self) -> bool:
        """Whether the order contains a send or a receive."""
        return any(a.kind.is_message for row in self.order for a in row)

    @property
    def has_stage_actions(self) -> bool:
        """Whether the order contains an action of a stage as a whole."""
        return any(a.kind.is_of_stage for row in self.order for a in row)

    @property
    def split_backwards(self) -> tuple[int, int]:
        """How many backwards are split into B and W, and how many there are."""
        kinds = [a.kind for row in self.order for a in row]
        split = kinds.count(Kind.BACKWARD_INPUT)
        return split, split + kinds.count(Kind.FULL_BACKWARD)

    def check_names(self) -> None:
        """Check that there is a row per rank, and that actions name stages and microbatches that exist.

        Raises
        ------
        FormatError
            One does not; the message names the rank and the position.
        """
        stages, count = self.num_stages, self.num_microbatches
        if len(self.order) != self.num_ranks:
            raise FormatError("one row of actions per rank", needed=self.num_ranks, given=len(self.order))
        if not 1 <= count <= MAX_COUNT:
            raise FormatError("number of microbatches", needed=f"1 to {MAX_COUNT}", given=count)
        for rank, row in enumerate(self.order):
            for k, action in enumerate(row):
                if action.stage < stages and action.microbatch < count and (action.peer or 0) < stages:
                    continue
                raise FormatError(
                    f"{action} names a stage or microbatch that is not there",
                    where=f"rank {rank}, position {k}",
                    needed=f"stages 0 to {stages - 1}, microbatches 0 to {count - 1}",
                )

    def __str__(self) -> str:
        head = f"placement {' '.join(map(str, self.placement.rank_of))}\nmicrobatches {self.num_microbatches}"
        rows = (f"rank {rank}: {' '.join(map(str, row))}" for rank, row in enumerate(self.order))
        return "\n".join((head, *rows)) + "\n"

    @staticmethod
    def parse(text: str) -> Schedule:
        """Read what ``str(schedule)`` wrote.

        Raises
        ------
        FormatError
            The text is not a schedule; the message names the line.
        """
        lines = [(n, line.strip()) for n, line in enumerate(text.splitlines(), 1) if line.strip()]
        if len(lines) < 3 or not lines[0][1].startswith("placement "):
            raise FormatError("not a schedule text: expected 'placement', 'microbatches' and 'rank' lines")
        try:
            placement = Placement(tuple(_number(w) for w in lines[0][1].split(maxsplit=MAX_COUNT + 1)[1:]))
            word, count = lines[1][1].split()
            if word != "microbatches":
                raise ValueError(f"expected 'microbatches', got {word[:40]!r}")
            num_microbatches = _number(count)
        except ValueError as error:
            raise FormatError(f"broken schedule text: {error}", where="lines 1-2") from None
        order = []
        for rank, (number, line) in enumerate(lines[2:]):
            head, _, body = line.partition(":")
            if head != f"rank {rank}":
                raise FormatError(f"expected 'rank {rank}:'", where=f"line {number}", given=ascii(head[:40]))
            order.append([Action.parse(word) for word in body.split()])
        schedule = Schedule.of(placement, num_microbatches, order)
        schedule.check_names()
        return schedule
