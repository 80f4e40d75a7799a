"""What the processes of `test_store` run: the store lives in rank 0, which stands still for a while."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.support.ways_out import LIMIT_S, Seen, attempt, batch, failing, make_pipeline
from zbcompile.compiler import evaluation as evaluation_module
from zbcompile.compiler import stages as stages_module
from zbcompile.runtime.group import PipelineGroup
from zbcompile.runtime.launch import _loopback_store
from zbcompile.runtime.verbs import Rank

STILL_S = LIMIT_S + 4.0


def move_store(rank: int) -> None:
    """Make a default process group whose store lives in rank 0, as under ``env://``."""
    size, old = dist.get_world_size(), dist.distributed_c10d._get_default_store()
    if rank == 0:
        store = _loopback_store()
        old.set("port", str(store.port))
    else:
        store = dist.TCPStore("127.0.0.1", int(old.get("port")), is_master=False)
    # A rank that leaves a group at once breaks the connections of those that still make theirs.
    store.set(f"ready/{rank}", "1")
    store.wait([f"ready/{r}" for r in range(size)])
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    store.set(f"there/{rank}", "1")
    store.wait([f"there/{r}" for r in range(size)])


def stand_still(rank: int, where: str) -> dict[str, Any]:
    """Stop rank 0, which keeps the store, in a build, a step or an evaluation."""
    move_store(rank)
    x, y = batch()
    times = [time.monotonic()]

    def freeze() -> None:
        times[0] = time.monotonic()
        subprocess.Popen(["sh", "-c", f"sleep {STILL_S}; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
        raise RuntimeError("rank 0 goes on")

    place = {"build": stages_module, "evaluation": evaluation_module, "step": Rank}[where]
    name = "_run" if where == "step" else "capture"
    pipeline = make_pipeline()
    if where != "build":
        pipeline.step(x, target=y)
        pipeline.synchronize()
        # Rank 0 stands still when all others have left this meeting, not while they are in it.
        store = dist.distributed_c10d._get_default_store()
        store.set(f"left/{rank}", "1")
        if rank == 0:
            store.wait([f"left/{r}" for r in range(dist.get_world_size())])
    with failing(place, name, rank == 0, freeze):
        seen: Seen = attempt(
            lambda: pipeline.eval(x) if where == "evaluation" else pipeline.step(x, target=y)
        )
    again = attempt(lambda: pipeline.step(x, target=y)) if where != "build" else None
    return {"seen": seen, "again": again, "stopped_at": times[0]}


def start_without_store(rank: int) -> tuple[Seen, float]:
    """Have rank 0, which keeps the store, stand still for a moment in which rank 1 starts a pipeline's group.

    Returns
    -------
    tuple
        How that ended, and after how many seconds.
    """
    move_store(rank)
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        store.set("pid", str(os.getpid()))
        store.wait(["looks"])
        subprocess.Popen(["sh", "-c", f"sleep 3; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
        return Seen("", "", time.monotonic()), 0.0
    state = Path(f"/proc/{int(store.get('pid'))}/stat")
    store.set("looks", "1")
    while state.read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.01)
    begin = time.monotonic()
    seen = attempt(lambda: PipelineGroup(None, 1.0))
    return seen, seen.at - begin


def listeners(pid: int) -> list[str]:
    """Return the addresses, in hexadecimal, on which a process listens for TCP."""
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(descriptor)
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target.removeprefix("socket:[").removesuffix("]"))
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.append(fields[1].rpartition(":")[0])
    return found


def listening(rank: int, parent: int) -> dict[str, list[str]]:
    """Return where this process and its parent listen, after a step."""
    x, y = batch()
    with make_pipeline() as pipeline:
        pipeline.step(x, target=y)
        found = {"own": listeners(os.getpid()), "store": listeners(parent)}
        pipeline.synchronize()
    return found
