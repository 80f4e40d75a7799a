"""torch's launcher with warm ranks: a script under torchrun, without the seconds that cold processes import.

The first lesson of the docs starts the command itself.
"""

from __future__ import annotations

import runpy
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from tests.support.clean_process import in_clean_process

__all__ = ["Ended", "run_script", "torchrun"]


@dataclass(frozen=True)
class Ended:
    """How a job ended, and what all of its ranks wrote.

    Attributes
    ----------
    failed
        The rank that failed first and its exit code, negative for a signal; None if all returned.
    """

    failed: tuple[int, int] | None
    stdout: str
    stderr: str


def torchrun(num_processes: int, script: Path, words: list[str], logs: Path, timeout_s: float) -> Ended:
    """Run ``torchrun --standalone --nproc-per-node num_processes script words``; ``logs`` is a new folder."""
    failed = in_clean_process(_launch, num_processes, script, words, logs, timeout_s=timeout_s)
    stdout, stderr = (_joined(logs, f"{name}.log") for name in ("stdout", "stderr"))
    return Ended(failed, stdout, stderr)


def _joined(folder: Path, name: str) -> str:
    return "".join(file.read_text() for file in sorted(folder.rglob(name)))


def _launch(num_processes: int, script: Path, words: list[str], logs: Path) -> tuple[int, int] | None:
    """Start the ranks as copies of this process, which has loaded everything and trained nothing."""
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_processes,
        run_id="test",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        start_method="fork",
        logs_specs=DefaultLogsSpecs(log_dir=str(logs), redirects=Std.ALL),
    )
    try:
        elastic_launch(config, run_script)(script, words)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        return rank, failure.exitcode
    return None


def run_script(script: Path, words: list[str]) -> None:
    """Run a script as Python does: the launcher's copy has a handler of the signal that ends it."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sys.argv, sys.path[0] = [str(script), *words], str(script.parent)
    runpy.run_path(str(script), run_name="__main__")
