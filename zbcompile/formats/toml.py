"""TOML in: what people write by hand. It stands for the same values as JSON; the same fields check it."""

from __future__ import annotations

import tomllib

from zbcompile.errors import FormatError

__all__ = ["MAX_CHARACTERS", "is_toml", "parse_toml"]

MAX_CHARACTERS = 4 << 20
"""Most characters of a file: the parser is slow, and who writes by hand writes less."""


def is_toml(text: str, where: str) -> bool:
    """Return whether a text is meant as TOML: by the name of its file, else where no JSON object begins.

    Parameters
    ----------
    where
        The name of the file.
    """
    name = where.lower()
    if name.endswith((".toml", ".json")):
        return name.endswith(".toml")
    return not text.lstrip("\ufeff \t\r\n").startswith(("{", "[{")) and "=" in text


def parse_toml(text: str, where: str) -> object:
    """Parse TOML.

    Raises
    ------
    FormatError
        The text is not TOML, is nested too deeply or too long; the message names line and column where known.
    """
    if len(text) > MAX_CHARACTERS:
        raise FormatError(
            "too long for TOML", where=where, needed=f"at most {MAX_CHARACTERS} characters", fix="write JSON"
        )
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise FormatError("not readable: nested too deeply", where=where) from None
    except ValueError as error:
        raise FormatError(f"not TOML: {str(error)[:200]}", where=where) from None
