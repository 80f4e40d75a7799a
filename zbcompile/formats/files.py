"""Reads and writes whole files. ``-`` is a pipe, sizes are bounded, and no half-written file remains.

An `Output` is checked when it is made, before the work whose result it takes.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
from collections.abc import Iterable
from dataclasses import dataclass

from zbcompile.errors import FormatError, UsageError
from zbcompile.formats.streams import check_output, read_input, reason, write_output

__all__ = ["MAX_BYTES", "Output", "check_distinct", "read_text", "write_text"]

MAX_BYTES = 64 << 20
"""Largest file that is read: 64 ranks and 512 microbatches with communication take about 8 MB."""

_DESCRIPTOR = re.compile(r"/dev/fd/([0-9]{1,6})|/proc/self/fd/([0-9]{1,6})|/dev/(stdin|stdout|stderr)")
_STANDARD = {"stdin": 0, "stdout": 1, "stderr": 2}
_TRIES = 100


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
            data = read_input(limit_bytes + 1)
        else:
            with open(path, "rb") as file:
                data = file.read(limit_bytes + 1)
    except FormatError:
        raise
    except (OSError, ValueError) as error:
        raise FormatError(f"cannot read: {reason(error)}", where=where) from None
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
    """Write a whole file; ``-`` is standard output.

    Raises
    ------
    UsageError
        The place cannot be written.
    """
    Output.to(path).write(text)


@dataclass(frozen=True, slots=True)
class Output:
    """A place that takes one text.

    Attributes
    ----------
    name
        As the user wrote it; ``-`` is standard output.
    place
        The file that is replaced, without links on the way to it; the open descriptor, for names such as
        ``/dev/stdout`` and ``/dev/fd/3``; None for standard output, and for what is written in place: devices
        and pipes.
    """

    name: str
    place: str | int | None

    @staticmethod
    def to(path: str | os.PathLike[str]) -> Output:
        """Check that a place can be written.

        Raises
        ------
        UsageError
            It cannot: the folder is missing or takes no new file, the file is read-only, the name is a
            folder's, the stream is closed.
        """
        name = str(path)
        if name == "-":
            check_output()
            return Output(name, None)
        try:
            return Output(name, _checked_place(name))
        except (OSError, ValueError) as error:
            raise _cannot(error, name) from None

    def write(self, text: str) -> None:
        """Write the text: a file under a temporary name beside it, which then takes its name.

        Raises
        ------
        UsageError
            The place cannot be written any more.
        """
        if self.name == "-":
            write_output(text)
            return
        try:
            if isinstance(self.place, str):
                _replace(self.place, text)
                return
            target = self.name if self.place is None else os.dup(self.place)
            with open(target, "w", encoding="utf-8", newline="") as file:
                file.write(text)
        except (OSError, ValueError) as error:
            raise _cannot(error, self.name) from None


def check_distinct(outputs: Iterable[Output]) -> None:
    """Refuse two outputs at one place: the second would replace the first, or be mixed with it.

    Raises
    ------
    UsageError
        Two of them are the same.
    """
    seen: set[str | int] = set()
    for output in outputs:
        place = 1 if output.name == "-" else output.place
        if place in seen:
            raise UsageError("two results go to the same place", where=output.name, fix="name two files")
        if place is not None:
            seen.add(place)


def _cannot(error: OSError | ValueError, name: str) -> UsageError:
    return UsageError(f"cannot write: {reason(error)}", where=name or "''")


def _checked_place(name: str) -> str | int | None:
    """Return where to write a name; raises OSError where that is not possible."""
    match = _DESCRIPTOR.fullmatch(name)
    if match is not None:
        number = _STANDARD[match[3]] if match[3] else int(match[1] or match[2])
        os.write(number, b"")
        return number
    if not name:
        raise ValueError("the name is empty")
    try:
        mode = os.stat(name).st_mode
    except FileNotFoundError:
        if name.endswith(os.sep):
            raise IsADirectoryError(0, "Is a directory") from None
        mode = None
    if mode is not None and stat.S_ISDIR(mode):
        raise IsADirectoryError(0, "Is a directory")
    if mode is not None and not (mode & 0o222 and os.access(name, os.W_OK)):
        raise PermissionError(0, "the file is read-only")
    if mode is not None and not stat.S_ISREG(mode):
        if stat.S_ISSOCK(mode):
            raise ValueError("it is a socket")
        return None
    target = os.path.realpath(name)
    descriptor, temporary = _temporary(target)
    os.close(descriptor)
    os.unlink(temporary)
    return target


def _temporary(target: str) -> tuple[int, str]:
    """Open a new file beside the target; a name that another process left behind is not taken."""
    for left in reversed(range(_TRIES)):
        name = f".zbcompile-{os.getpid()}-{secrets.token_hex(4)}.tmp"
        path = os.path.join(os.path.dirname(target), name)
        try:
            return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), path
        except FileExistsError:
            if not left:
                raise
    raise AssertionError


def _replace(target: str, text: str) -> None:
    descriptor, temporary = _temporary(target)
    try:
        with open(descriptor, "w", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
            with contextlib.suppress(FileNotFoundError):
                os.fchmod(file.fileno(), stat.S_IMODE(os.stat(target).st_mode))
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
