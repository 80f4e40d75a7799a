"""Reads and writes whole files. ``-`` is a pipe, sizes are bounded, and no half-written file remains."""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
import sys

from zbcompile.errors import FormatError, UsageError

__all__ = ["MAX_BYTES", "read_text", "write_text"]

MAX_BYTES = 64 << 20
"""Largest file that is read: 64 ranks and 512 microbatches with communication take about 8 MB."""

_COUNTER = itertools.count()


def read_text(path: str | os.PathLike[str], *, limit_bytes: int = MAX_BYTES) -> str:
    """Return the text of a file, or of standard input for ``-``.

    Parameters
    ----------
    limit_bytes
        Largest size; no more than that is held in memory.

    Raises
    ------
    FormatError
        The file is not there, not a file, not UTF-8, or larger than the limit.
    """
    where = "standard input" if str(path) == "-" else str(path)
    try:
        if str(path) == "-":
            data = sys.stdin.buffer.read(limit_bytes + 1)
        else:
            with open(path, "rb") as file:
                data = file.read(limit_bytes + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise FormatError(f"cannot read: {reason}", where=where) from None
    if len(data) > limit_bytes:
        raise FormatError(
            "the file is too large", where=where, needed=f"at most {limit_bytes} bytes", given="more"
        )
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FormatError(
            f"not UTF-8 text: byte {error.start} is {data[error.start]:#04x}", where=where
        ) from None


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a whole file: to a temporary file beside it, which then takes its name. ``-`` is standard output.

    Pipes and devices are written in place.

    Raises
    ------
    UsageError
        The place cannot be written.
    """
    if str(path) == "-":
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    target = os.path.realpath(path)
    try:
        mode = os.stat(target).st_mode if os.path.exists(target) else None
        if mode is not None and not stat.S_ISREG(mode):
            with open(target, "w", encoding="utf-8", newline="") as file:
                file.write(text)
            return
        _replace(target, text, mode)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"cannot write: {reason}", where=str(path)) from None


def _replace(target: str, text: str, mode: int | None) -> None:
    name = f".zbcompile-{os.getpid()}-{next(_COUNTER)}.tmp"
    temporary = os.path.join(os.path.dirname(target), name)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with open(descriptor, "w", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
            if mode is not None:
                os.fchmod(file.fileno(), stat.S_IMODE(mode))
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
