"""JSON in and out: strict parsing, checks of single values that name the place of a fault, stable bytes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NoReturn, TypeVar

from zbcompile.errors import FormatError, UsageError, printable
from zbcompile.schedule.limits import MAX_AMOUNT

__all__ = [
    "MAX_TEXT",
    "at",
    "format_json",
    "guarded",
    "integer",
    "items",
    "moved",
    "parse_json",
    "plain",
    "quoted",
    "readable",
    "text",
]

MAX_TEXT = 1000
"""Most characters of a text in a file."""

_MAX_DEPTH = 16
_LINE = 110
_encode = json.JSONEncoder(allow_nan=False).encode
T = TypeVar("T")


def parse_json(text: str, where: str) -> object:
    """Parse JSON strictly: no NaN or Infinity, no key twice.

    Raises
    ------
    FormatError
        The text is not such JSON, or is nested too deeply; the message names line and column where known.
    """

    def constant(name: str) -> NoReturn:
        raise ValueError(f"{name} is not JSON")

    def pairs(entries: list[tuple[str, object]]) -> dict[str, object]:
        result = dict(entries)
        if len(result) != len(entries):
            keys = [key for key, _ in entries]
            raise ValueError(f"key {next(k for k in keys if keys.count(k) > 1)[:40]!r} appears twice")
        return result

    try:
        return json.loads(text, parse_constant=constant, object_pairs_hook=pairs)
    except json.JSONDecodeError as error:
        line = f"{where}, line {error.lineno}, column {error.colno}"
        raise FormatError(f"not JSON: {error.msg}", where=line) from None
    except RecursionError:
        raise FormatError("not readable: nested too deeply", where=where) from None
    except ValueError as error:
        raise FormatError(f"not JSON: {str(error)[:200]}", where=where) from None


def format_json(value: object) -> str:
    """Write JSON with stable bytes.

    Keys keep their order. A value is on one line where it fits into 110 columns; the entries of a longer list
    fill lines.
    """
    return _render(value, 0) + "\n"


def _render(value: object, indent: int) -> str:
    if not isinstance(value, (dict, list)):
        return _encode(value)
    if len(value) <= _LINE:  # more entries never fit on one line
        compact = _encode(value)
        if len(compact) + indent <= _LINE:
            return compact
    pad = " " * (indent + 1)
    if isinstance(value, dict):
        body = ",\n".join(f"{pad}{json.dumps(k)}: {_render(v, indent + 1)}" for k, v in value.items())
        return "{\n" + body + "\n" + " " * indent + "}"
    return "[\n" + ",\n".join(_fill(value, indent + 1)) + "\n" + " " * indent + "]"


def _fill(values: Sequence[object], indent: int) -> Iterator[str]:
    pad, line = " " * indent, ""
    for text in _short_lists(values, indent) or (_render(value, indent) for value in values):
        if line and ("\n" in text or len(line) + len(text) + 2 > _LINE):
            yield line
            line = ""
        line = f"{line}, {text}" if line else pad + text
        if "\n" in text:
            yield line
            line = ""
    if line:
        yield line


def _short_lists(values: Sequence[object], indent: int) -> list[str] | None:
    """Return the texts of many short lists, encoded in one go; None where some value is not such a list."""
    if not all(type(value) is list and len(value) <= _LINE for value in values):
        return None
    parts = _encode(values)[2:-2].split("], [")
    if len(parts) != len(values) or max(map(len, parts)) + 2 + indent > _LINE:
        return None  # lists within lists, or text that looks like the end of one
    return [f"[{part}]" for part in parts]


def at(where: str, name: str) -> str:
    """Return the place of a field of an object, for messages."""
    return f"{where}.{name}" if where else name


def guarded(build: Callable[[], T], where: str) -> T:
    """Run a constructor and turn its `UsageError` into a `FormatError` with the place in the file."""
    try:
        return build()
    except UsageError as error:
        if isinstance(error, FormatError) and error.where.startswith(where):
            raise
        raise moved(error, f"{where}, {error.where}" if error.where else where) from None


def moved(error: UsageError, where: str) -> FormatError:
    """Return a `FormatError` that says the same of a place in a file."""
    return FormatError(error.what, where=where, needed=error.needed, given=error.given, fix=error.fix)


def integer(value: object, where: str, *, low: int = 0, high: int = MAX_AMOUNT) -> int:
    """Return a value that is a whole number in a range; true, 1.0 and "1" are not.

    Raises
    ------
    FormatError
        It is not.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise FormatError("expected a whole number", where=where, given=quoted(value))
    if not low <= value <= high:
        raise FormatError("number out of range", where=where, needed=f"{low} to {high}", given=quoted(value))
    return value


def items(value: object, where: str, *, high: int) -> list[object]:
    """Return a value that is a list with at most ``high`` entries.

    Raises
    ------
    FormatError
        It is not.
    """
    if not isinstance(value, list):
        raise FormatError("expected a list", where=where, given=quoted(value))
    if len(value) > high:
        raise FormatError("too many entries", where=where, needed=f"at most {high}", given=len(value))
    return value


def plain(value: object, where: str, depth: int = 0) -> object:
    """Return a JSON value unchanged if it has printable text, finite numbers and bounded nesting only.

    Raises
    ------
    FormatError
        It has anything else.
    """
    if depth > _MAX_DEPTH:
        raise FormatError("nested too deeply", where=where, needed=f"at most {_MAX_DEPTH} levels")
    if isinstance(value, str):
        return text(value, where)
    if isinstance(value, float) and not math.isfinite(value):
        raise FormatError("expected a finite number", where=where, given=value)
    if isinstance(value, (list, tuple)):
        return [plain(entry, where, depth + 1) for entry in value]
    if isinstance(value, Mapping):
        return {text(key, where): plain(entry, where, depth + 1) for key, entry in value.items()}
    if value is None or isinstance(value, (bool, int, float)):
        return value
    raise FormatError("not a JSON value", where=where, given=type(value).__name__)


def text(value: object, where: str) -> str:
    """Return a value that is printable text of at most 1000 characters.

    Raises
    ------
    FormatError
        It is not.
    """
    if not isinstance(value, str):
        raise FormatError("expected text", where=where, given=quoted(value))
    if len(value) > MAX_TEXT or not value.isprintable():
        raise FormatError(
            "expected printable text", where=where, needed=f"at most {MAX_TEXT} characters, none of control"
        )
    return value


def readable(text: str) -> str:
    """Return text for people as a file may carry it: printable, of at most 1000 characters.

    What is written can be read again, whatever the module of a stage is called.
    """
    return printable(text).replace("\n", " ")[:MAX_TEXT]


def quoted(value: object) -> str:
    """Return a value of a file as messages quote it: at most 40 characters of ASCII."""
    shown = ascii(value) if isinstance(value, (str, int, float, bool, type(None))) else type(value).__name__
    return shown if len(shown) <= 40 else shown[:37] + "..."
