"""Replaces a folder whole: a new one is filled beside it, and then takes its name.

Whoever looks at the name finds the old folder or the new one, also when a process is killed in between. Where
the file system can exchange two names at once, there is always one of them; elsewhere the old folder has
another name for a moment, under which `present` finds it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
from collections.abc import Callable

from zbcompile.errors import UsageError
from zbcompile.formats.streams import reason

__all__ = ["begin", "finish", "partial", "present"]

_HERE, _EXCHANGE = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of Linux


def partial(target: str) -> str:
    """Return the folder to fill, beside the target."""
    return _beside(target, "partial")


def present(target: str) -> str:
    """Return the folder that is whole: the target, or what it was when a replacement was cut short."""
    before = _beside(target, "previous")
    return before if not os.path.lexists(target) and os.path.isdir(before) else target


def begin(target: str, belongs: Callable[[str], bool]) -> str:
    """Make the folder to fill, in place of one that was left half full, and return its path.

    Parameters
    ----------
    target
        The folder that is to be made or replaced.
    belongs
        Whether a file of the target, by name, may be replaced.

    Raises
    ------
    UsageError
        The target is no folder or holds other files, or nothing can be written beside it.
    """
    try:
        foreign = next((name for name in _names(target) if not belongs(name)), None)
        if foreign is not None:
            raise UsageError(
                "the folder holds something else than a checkpoint, which saving would delete",
                where=os.path.join(target, foreign),
                fix="give a folder of its own, which need not be there",
            )
        folder = partial(target)
        shutil.rmtree(folder, ignore_errors=True)
        os.makedirs(folder)
    except OSError as error:
        raise UsageError(f"cannot write: {reason(error)}", where=target) from None
    return folder


def finish(target: str) -> None:
    """Let the filled folder take the target's name, and delete what had it.

    Raises
    ------
    OSError
        It cannot.
    """
    folder, before = partial(target), _beside(target, "previous")
    _sync(folder)
    if not os.path.isdir(target):
        os.rename(folder, target)
    elif not _exchange(folder, target):
        shutil.rmtree(before, ignore_errors=True)
        os.rename(target, before)
        os.rename(folder, target)
    _sync(os.path.dirname(target))
    for old in (folder, before):
        shutil.rmtree(old, ignore_errors=True)


def _beside(target: str, word: str) -> str:
    head, tail = os.path.split(target)
    return os.path.join(head, f".{tail}.zbcompile-{word}")


def _names(target: str) -> list[str]:
    return sorted(os.listdir(target)) if os.path.lexists(target) else []


def _exchange(one: str, other: str) -> bool:
    """Exchange two names at once; return whether that was possible."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError, TypeError):
        return False
    return bool(rename(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE) == 0)


def _sync(folder: str) -> None:
    """Bring the names in a folder to the disk, where the system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
