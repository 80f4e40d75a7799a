"""Sections for the tests of ``zbcompile selftest``; they run in processes that import this file."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace

from zbcompile.selftest import phases
from zbcompile.selftest.run import Section, run
from zbcompile.selftest.settings import SIZES, Found, Settings

__all__ = ["ends_its_process", "loads_little", "loads_little_alone", "never_ends", "raises", "works"]


def works(rank: int, settings: Settings) -> Found:
    return Found({f"rank {rank}": rank, "device": settings.device})


def raises(rank: int, settings: Settings) -> Found:
    if rank == 1:
        raise ValueError("on purpose\x1b[2J")
    return Found()


def never_ends(rank: int, settings: Settings) -> Found:
    time.sleep(300)
    return Found()


def ends_its_process(rank: int, settings: Settings) -> Found:
    os._exit(7)


def loads_little_alone() -> None:
    """Run the section `loads_little`, and print what it told."""
    settings = replace(SIZES["tiny"], families=("gpt2",))
    report = run(settings, sections=[Section("s", "", loads_little, 1, 280)])
    if not report.ok:
        raise AssertionError(report)
    print(report.sections[0].figures["loaded"])


def loads_little(rank: int, settings: Settings) -> Found:
    """Compile with an order from a file, and tell what is loaded of what is not needed for it."""
    found = phases.bytes_held(rank, settings)
    optional = ("ortools", "numba", "rich", "transformers")
    found.figures["loaded"] = [name for name in optional if name in sys.modules]
    return found
