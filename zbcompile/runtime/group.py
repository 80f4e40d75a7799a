"""The processes of one pipeline: agreement before the first message, and small texts between them."""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroup, Store, Work

from zbcompile.errors import PipelineError, UsageError
from zbcompile.runtime import torch_private
from zbcompile.runtime.calls import DistributedCalls
from zbcompile.runtime.connections import FOREVER, Tripwire, break_connections, leave_group
from zbcompile.runtime.doing import ANY_RANK
from zbcompile.runtime.grid import Place
from zbcompile.runtime.late_meeting import LateMeeting
from zbcompile.runtime.meetings import Meetings
from zbcompile.runtime.store_thread import StoreError, connect
from zbcompile.runtime.watchdog import SILENT, Watchdog

__all__ = ["PipelineGroup"]

T = TypeVar("T")

_CLOCK_ROUNDS = 16


class PipelineGroup:
    """The ranks of one pipeline: where each of them stands, what they agree on, what connects them.

    The constructor returns when all ranks are there.

    Parameters
    ----------
    group
        The process group of the pipeline's ranks; None: the default group. Or where this process stands in a
        job of several pipelines, whose ranks are then all here, and make the same calls.
    stall_limit_s
        Seconds that a rank may wait for another before the pipeline is ended on all of them.

    Attributes
    ----------
    rank, size
        This process's rank, and the number of ranks.
    members
        Their ranks in the default group.
    pipeline, pipeline_rank
        The ranks of this process's pipeline, and which of them it is.
    replicas, replica
        The ranks that run the same stages with the same weights, and which of them it is.
    pipelines
        The pipelines of its replicas, in their order.
    grid
        The same replicas by what they have of the weights, as in `Place`.
    shards
        The replicas that share the weights of this rank's stages; it alone where each has them all.
    copies
        The replicas that have the same part of the weights as this rank; all of them where each has them all.
    same_stages
        All ranks that run the stages of this one: its replicas, and those along further dimensions.
    others
        Per further dimension of the mesh, its name and the processes along it, as in `Place`.
    name
        The same on all ranks and on no other pipeline, before or after.
    watchdog
        Sees failures of all ranks and waits that last too long.
    calls
        The calls of this rank: build, steps, evaluations.
    control
        A gloo group beside the channels: it tells when a process has ended, and carries what must be timed.
    clock_offset_ns
        What to add to this machine's monotonic clock to get rank 0's; 0 on the same machine.

    Raises
    ------
    PipelineError
        A rank does not come, or is gone.
    """

    _made: ClassVar[Counter[tuple[int, ...]]] = Counter()
    _shortest = 0

    def __init__(self, group: ProcessGroup | Place | None, stall_limit_s: float) -> None:
        place = group if isinstance(group, Place) else _whole(group)
        self.members = list(place.members)
        self.rank, self.size = self.members.index(dist.get_rank()), len(self.members)
        self.pipeline = [self.members.index(member) for member in place.pipeline]
        self.replicas = [self.members.index(member) for member in place.replicas]
        self.pipeline_rank, self.replica = self.pipeline.index(self.rank), self.replicas.index(self.rank)
        self.pipelines, self.others = [self.pipeline], place.others
        self.same_stages = [self.rank]
        self.grid = [[self.members.index(member) for member in row] for row in place.grid]
        self.shards = next(row for row in self.grid if self.rank in row)
        self.copies = [row[self.shards.index(self.rank)] for row in self.grid]
        key = tuple(self.members)
        self.name = f"zbcompile/{'-'.join(map(str, key))}/{self._made[key]}"
        self._made[key] += 1
        self._groups: Counter[str] = Counter()
        # A group is made by all ranks at the same time; what is slower than this, the watchdog ends before.
        self._timeout = timedelta(seconds=2 * stall_limit_s + 10)
        store = PrefixStore(self.name, _connected(stall_limit_s))
        self.watchdog = Watchdog(store, self.rank, self.size, stall_limit_s)
        self._meetings = Meetings(self.watchdog)
        self.calls = DistributedCalls(self.watchdog, self._meetings, dist.get_rank() == 0)
        self._closed = self._control_broken = False
        atexit.register(self.close)  # before the interpreter's end, where its threads would be in the way
        self.control: ProcessGroup | None = None
        self._tripwire: Tripwire | None = None
        self.clock_offset_ns = 0
        try:
            with self.calls.building("the start"):
                self._connect()
        except BaseException:
            self.close()
            raise

    def _connect(self) -> None:
        self.control = self.new_group("gloo")
        self.watchdog.on_end.append(self._break_control)
        self._tripwire = Tripwire(self.control, (self.rank + 1) % self.size, self._note_lost)
        self.clock_offset_ns = self._clock_offset_ns()

    @property
    def writes(self) -> bool:
        """Whether this rank saves what others have, too: it is the first with its part of the weights."""
        return self.rank == self.copies[0]

    @staticmethod
    def present(group: ProcessGroup | Place | None, stall_limit_s: float) -> PipelineGroup | None:
        """Return the group to run in, or None if this process is alone.

        The default process group is initialised here if torchrun started this process and nobody has yet.
        """
        if isinstance(group, Place):
            return PipelineGroup(group, stall_limit_s) if len(group.members) > 1 else None
        if not dist.is_available():
            return None
        if not dist.is_initialized():
            if not dist.is_torchelastic_launched() or int(os.environ.get("WORLD_SIZE", "1")) == 1:
                return None
            dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
        if dist.get_world_size(group) == 1:
            return None
        return PipelineGroup(group, stall_limit_s)

    def close(self) -> None:
        """End the threads and leave the control group. The pipeline's other ranks may go on or not."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        self.watchdog.stop()
        if self.control is not None:
            self._break_control(True)
            leave_group(self.control)
        if self._tripwire is not None:
            self._tripwire.join()

    def new_group(self, backend: str, members: list[int] | None = None) -> ProcessGroup:
        """Make another process group of all ranks, or of some of them.

        All ranks call it at the same place of the same call.
        """
        ranks = self.members if members is None else [self.members[m] for m in members]
        name = f"{self.name}/{self.watchdog.call}/{backend}/{'-'.join(map(str, ranks))}"
        self._groups[name] += 1
        name = f"{name}/{self._groups[name]}"

        def make() -> ProcessGroup:
            return torch_private.new_group(name, ranks, self._timeout, backend)

        if backend != "gloo":
            return make()
        if members is None:
            self.barrier("a new group")
        words = "makes its connections"
        try:
            return self._meetings.alone(make, words, ANY_RANK)
        except ConnectionError:
            self.watchdog.broken(ANY_RANK, words)

    def new_pipeline_group(self, backend: str) -> ProcessGroup:
        """Make another process group of this process's pipeline, whose ranks all call it."""
        whole = len(self.pipeline) == self.size
        return self.new_group(backend, None if whole else self.pipeline)

    def alone(self, function: Callable[[], T], words: str, extra_s: float = 0.0) -> T:
        """Wait for a function that nothing can interrupt, in a thread of its own, and meets other ranks.

        It may use the `control` group, whose connections break when the call is ended. A `RuntimeError` of it
        is taken for a connection that broke.

        Parameters
        ----------
        function
            What to run.
        words
            What this rank does meanwhile.
        extra_s
            Seconds beyond the stall limit that it may take.
        """
        try:
            return self._meetings.alone(function, words, ANY_RANK, extra_s)
        except RuntimeError:
            self.watchdog.broken(ANY_RANK, words)

    def new_pair(self, backend: str, one: int, other: int) -> ProcessGroup | None:
        """Make a process group of two ranks of the pipeline, the lower one its rank 0; None on others."""
        pair = [self.pipeline[rank] for rank in sorted((one, other))]
        return self.new_group(backend, pair) if self.rank in pair else None

    def agree(self, parts: Mapping[str, str]) -> None:
        """Compare texts among all ranks before the first message.

        Parameters
        ----------
        parts
            Name of a part -> this rank's text of it.

        Raises
        ------
        PipelineError
            A part differs somewhere; raised on every rank, names the ranks and the part.
        """
        digests = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in parts.items()}
        what = f"the agreement on {next(iter(parts))}"
        verdict = self._meet(what, json.dumps(digests), _compared)
        if verdict:
            raise self.calls.common(
                PipelineError(
                    verdict, fix="start every rank with the same code, arguments and seed of the weights"
                )
            )

    def from_first(self, text: str | None, what: str = "the word of rank 0", extra_s: float = 0.0) -> str:
        """Return rank 0's text on every rank; the others give None. Rank 0 may take ``extra_s`` longer."""
        return self._meet(what, text or "", lambda texts: texts[0], extra_s)

    def announce(self, text: str | None, what: str, source: int = 0) -> str:
        """Return the text of rank ``source`` on every rank. That rank does not wait for the others."""
        return self._meetings.announce(what, text, source)

    def announce_in(self, ranks: Sequence[int], text: str | None, what: str, source: int = 0) -> str:
        """Return the text of number ``source`` of some ranks, such as a pipeline's, which waits for nobody.

        Ranks that are in different such groups here hear different texts.
        """
        return self._meetings.announce(what, text, ranks[source], f"from {ranks[0]}")

    def gather(self, text: str, what: str = "the exchange") -> list[str]:
        """Return every rank's text, by rank, on every rank."""
        return [str(t) for t in json.loads(self._meet(what, text, json.dumps))]

    def late_meeting(self, what: str, number: int, text: str) -> LateMeeting:
        """Leave a text for all ranks without waiting for theirs, as `LateMeeting` says."""
        return LateMeeting(self.watchdog, self._meetings, what, number, text)

    def barrier(self, what: str = "the meeting") -> None:
        """Return when every rank is here."""
        self._meet(what, "", lambda texts: "")

    def _meet(self, what: str, text: str, answer: Callable[[list[str]], str], extra_s: float = 0.0) -> str:
        """Meet all ranks; that they meet for different things is an error which each raises by itself."""
        try:
            return self._meetings.meet(what, text, answer, extra_s=extra_s)
        except PipelineError as error:
            raise self.calls.common(error) from None

    def synchronize(self) -> None:
        """Return when every rank has finished its calls so far.

        After a call that was refused, a rank that has raised for it does not wait: the others raise in their
        next call or here.

        Raises
        ------
        PipelineError
            One has failed, or has refused a call that this rank had finished.
        """
        if self.watchdog.failed is None and self.watchdog.told:
            return
        with self.calls.meeting("synchronize()"):
            self.barrier("synchronize()")

    def _clock_offset_ns(self) -> int:
        """Return the offset to rank 0's clock.

        On another machine it comes from the shortest of some round trips (as NTP does) and is right to half
        of that.
        """
        places = self.gather(_machine())
        offset = 0
        for other in range(1, self.size):
            if places[other] == places[0]:
                continue
            for _ in range(_CLOCK_ROUNDS):
                offset = self._round_trip(other, offset)
        return offset

    def _round_trip(self, other: int, best: int) -> int:
        """Measure once between ranks 0 and ``other``; return the better of the new offset and ``best``."""
        stamp = torch.zeros(1, dtype=torch.int64)
        if self.rank == 0:
            self.receive(stamp, other)
            stamp[0] = time.perf_counter_ns()
            self.send(stamp, other)
        elif self.rank == other:
            begin = time.perf_counter_ns()
            self.send(stamp, 0)
            self.receive(stamp, 0)
            end = time.perf_counter_ns()
            trip = end - begin
            if best == 0 or trip < self._shortest:
                self._shortest = trip
                return int(stamp) - (begin + end) // 2
        return best

    def send(self, data: Tensor, peer: int) -> None:
        """Send a tensor over the control group."""
        self._transfer(peer, lambda group: group.send([data], peer, 0))

    def receive(self, data: Tensor, peer: int) -> None:
        """Receive a tensor over the control group."""
        self._transfer(peer, lambda group: group.recv([data], peer, 0))

    def _transfer(self, peer: int, post: Callable[[ProcessGroup], Work]) -> None:
        assert self.control is not None
        words = f"waits for a message of rank {peer}"
        with self._meetings.waiting(words, peer):
            try:
                post(self.control).wait(FOREVER)
            except RuntimeError:
                self.watchdog.broken(peer, words)

    def _break_control(self, fatal: bool) -> None:
        if fatal and self.control is not None:
            self._control_broken = True
            break_connections(self.control)

    def _note_lost(self, peer: int) -> None:
        """Let the ranks that wait for ``peer`` know that its process has ended."""
        if not self._control_broken:
            self.watchdog.lose(peer)

    def require_size(self, wanted: int | None) -> None:
        """Raise `UsageError` if another number of ranks was asked for."""
        size = len(self.pipeline)
        if wanted is not None and wanted != size:
            raise UsageError(
                "num_ranks is the size of the pipeline's process group",
                needed=size,
                given=wanted,
                fix="leave num_ranks out, or give the group of this pipeline",
            )


def _whole(group: ProcessGroup | None) -> Place:
    """Return the place of this process in a group that is one pipeline."""
    members = tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
    return Place(members, members, ((dist.get_rank(),),))


def _connected(limit_s: float) -> Store:
    """Return the default group's key-value store. Raises `PipelineError` if it does not answer in time."""
    try:
        return connect(torch_private.own_store, limit_s)
    except StoreError as error:
        raise PipelineError(
            SILENT, where=f"rank {dist.get_rank()}", needed=f"an answer within {limit_s:g} s"
        ) from error


def _machine() -> str:
    """Return words that are the same in two processes only if they share a machine and its clock."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{os.uname().nodename} {boot.read_text().strip() if boot.exists() else ''}"


def _compared(texts: list[str]) -> str:
    """Return what is different among the digests of all ranks, or nothing."""
    everyone = [json.loads(text) for text in texts]
    for name in everyone[0]:
        odd = [rank for rank, digests in enumerate(everyone) if digests.get(name) != everyone[0][name]]
        if odd:
            return (
                f"the ranks differ in their {name}: "
                f"{_ranks(odd)} from rank 0 (refused before the first message)"
            )
    return ""


def _ranks(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
