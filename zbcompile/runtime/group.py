"""The processes of one pipeline: agreement before the first message, and small texts between them."""

from __future__ import annotations

import hashlib
import os
import time
from collections import Counter
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import ClassVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import ProcessGroup

from zbcompile.errors import PipelineError, UsageError
from zbcompile.runtime import torch_private

__all__ = ["PipelineGroup"]

_DIGEST = 32
_CLOCK_ROUNDS = 16


class PipelineGroup:
    """The ranks of one pipeline and a gloo group of their own for control, whatever else they communicate.

    Parameters
    ----------
    group
        The process group of the pipeline's ranks; None: the default group.
    timeout_s
        Limit in seconds of one operation of the control group and of the groups made here.

    Attributes
    ----------
    rank, size
        This process's rank in the pipeline, and the number of its ranks.
    members
        Their ranks in the default group.
    name
        The same on all ranks and on no other pipeline, before or after.
    control
        The gloo group.
    """

    _made: ClassVar[Counter[tuple[int, ...]]] = Counter()
    _shortest = 0

    def __init__(self, group: ProcessGroup | None, timeout_s: float) -> None:
        self.members: list[int] = dist.get_process_group_ranks(group or dist.group.WORLD)
        self.rank, self.size = dist.get_rank(group), len(self.members)
        self.timeout = timedelta(seconds=timeout_s)
        key = tuple(self.members)
        self.name = f"zbcompile/{'-'.join(map(str, key))}/{self._made[key]}"
        self._made[key] += 1
        self._groups: Counter[str] = Counter()
        self.control = self.new_group("gloo")

    @staticmethod
    def present(group: ProcessGroup | None, timeout_s: float) -> PipelineGroup | None:
        """Return the group to run in, or None if this process is alone.

        The default process group is initialised here if torchrun started this process and nobody has yet.
        """
        if not dist.is_available():
            return None
        if not dist.is_initialized():
            if not dist.is_torchelastic_launched() or int(os.environ.get("WORLD_SIZE", "1")) == 1:
                return None
            dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
        if dist.get_world_size(group) == 1:
            return None
        return PipelineGroup(group, timeout_s)

    def new_group(self, backend: str, members: list[int] | None = None) -> ProcessGroup:
        """Make another process group of all ranks, or of some given by their rank in the pipeline."""
        ranks = self.members if members is None else [self.members[m] for m in members]
        name = f"{self.name}/{backend}/{'-'.join(map(str, ranks))}"
        self._groups[name] += 1
        return torch_private.new_group(f"{name}/{self._groups[name]}", ranks, self.timeout, backend)

    def runner_name(self) -> str:
        """Return a name for the next runner of this pipeline (training, evaluation of each shape)."""
        self._groups["runner"] += 1
        return f"{self.name}/runner/{self._groups['runner']}"

    def new_pair(self, backend: str, one: int, other: int) -> ProcessGroup | None:
        """Make a process group of two ranks, the lower one its rank 0. Returns None on all others."""
        return self.new_group(backend, sorted((one, other))) if self.rank in (one, other) else None

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
        digests = b"".join(hashlib.sha256(text.encode()).digest() for text in parts.values())
        mine = torch.frombuffer(bytearray(digests), dtype=torch.uint8)
        everyone = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(everyone, mine, group=self.control)
        for k, name in enumerate(parts):
            found = [bytes(t[k * _DIGEST : (k + 1) * _DIGEST].tolist()) for t in everyone]
            odd = [r for r, digest in enumerate(found) if digest != found[0]]
            if odd:
                raise PipelineError(
                    f"the ranks differ in their {name}: "
                    f"{_ranks(odd)} from rank 0 (refused before the first message)",
                    fix="start every rank with the same code, arguments and seed of the weights",
                )

    def from_first(self, text: str | None) -> str:
        """Return rank 0's text on every rank; the others give None."""
        data = torch.frombuffer(bytearray((text or "").encode() or b"\0"), dtype=torch.uint8)
        size = torch.tensor([data.numel()])
        dist.broadcast(size, group=self.control, group_src=0)
        if self.rank != 0:
            data = torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(data, group=self.control, group_src=0)
        return bytes(data.tolist()).decode()

    def gather(self, text: str) -> list[str]:
        """Return every rank's text, by rank, on every rank."""
        data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([data.numel()]), group=self.control)
        longest = max(int(s) for s in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: data.numel()] = data
        everyone = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(everyone, padded, group=self.control)
        return [bytes(t[: int(n)].tolist()).decode() for t, n in zip(everyone, sizes, strict=True)]

    def barrier(self) -> None:
        """Return when every rank is here."""
        dist.all_reduce(torch.zeros(1), group=self.control)

    def clock_offset_ns(self) -> int:
        """Return what to add to this machine's monotonic clock to get rank 0's; 0 on the same machine.

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
            dist.recv(stamp, group=self.control, group_src=other)
            stamp[0] = time.perf_counter_ns()
            dist.send(stamp, group=self.control, group_dst=other)
        elif self.rank == other:
            begin = time.perf_counter_ns()
            dist.send(stamp, group=self.control, group_dst=0)
            dist.recv(stamp, group=self.control, group_src=0)
            end = time.perf_counter_ns()
            trip = end - begin
            if best == 0 or trip < self._shortest:
                self._shortest = trip
                return int(stamp) - (begin + end) // 2
        return best

    def require_size(self, wanted: int | None) -> None:
        """Raise `UsageError` if another number of ranks was asked for."""
        if wanted is not None and wanted != self.size:
            raise UsageError(
                "num_ranks is the size of the pipeline's process group",
                needed=self.size,
                given=wanted,
                fix="leave num_ranks out, or give the group of this pipeline",
            )


def _machine() -> str:
    """Return words that are the same in two processes only if they share a machine and its clock."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{os.uname().nodename} {boot.read_text().strip() if boot.exists() else ''}"


def _ranks(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
