"""The JSON Schemas (draft 2020-12) of the file formats, for other programs and editors.

They are made from the descriptions that the readers and writers work by.
"""

from __future__ import annotations

from typing import Any

from zbcompile.errors import UsageError
from zbcompile.formats import checkpoint_json, measured_json, profile_json, schedule_json, selftest_json
from zbcompile.formats.records import Document

__all__ = ["SCHEMAS", "schema_text"]

SCHEMAS: dict[str, Document[Any]] = {
    "schedule": schedule_json.FILE,
    "profile": profile_json.FILE,
    "measured": measured_json.FILE,
    "checkpoint": checkpoint_json.FILE,
    "selftest": selftest_json.FILE,
}


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
    return SCHEMAS[name].json_schema()
