"""The JSON Schemas (draft 2020-12) that the package ships for other programs and editors.

The readers of this package do not use them: they check more, and need no dependency.
"""

from __future__ import annotations

from importlib.resources import files

from zbcompile.errors import UsageError

__all__ = ["SCHEMAS", "schema_text"]

SCHEMAS = ("schedule", "profile", "measured", "checkpoint")


def schema_text(name: str) -> str:
    """Return the text of the schema of a format.

    Parameters
    ----------
    name
        One of `SCHEMAS`.

    Raises
    ------
    UsageError
        No schema has that name.
    """
    if name not in SCHEMAS:
        raise UsageError(f"no schema is called {name[:40]!r}", needed=" or ".join(SCHEMAS))
    return files("zbcompile.formats").joinpath(f"{name}.schema.json").read_text(encoding="utf-8")
