"""Formats are described, not programmed: reader, writer and JSON Schema come from the same fields.

A `Record` is an object with named fields, a `Document` a whole file. Rules that join several fields stay
code, in the file of their format.

A reader takes nothing that the schema refuses. It refuses more: sums, names that do not exist, text that is
not printable, 1.0 in place of 1.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from zbcompile.errors import FormatError
from zbcompile.formats.fields import at, format_json, guarded, moved, parse_json, quoted
from zbcompile.formats.shapes import Schema, Shape, refer

__all__ = ["Document", "Field", "Part", "Record"]

T = TypeVar("T")
_NEEDED = object()


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Field:
    """A field of a record.

    Attributes
    ----------
    doc
        What it means, for the schema.
    default
        Its value where it is left out; a function is given the values of the fields before it. Without a
        default the field must be there.
    key
        What the value is called in Python; left out: as the field.
    null
        Null says the same as leaving it out.
    brief
        The writer leaves it out where it has its default.
    """

    name: str
    shape: Shape[Any]
    doc: str = ""
    default: object = _NEEDED
    key: str = ""
    null: bool = False
    brief: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", self.key or self.name)

    @property
    def needed(self) -> bool:
        """Whether the field must be there."""
        return self.default is _NEEDED

    def default_after(self, values: Mapping[str, Any]) -> object:
        """Return the default, given the values of the fields before."""
        return self.default(values) if callable(self.default) else self.default

    def take(self, left: dict[str, object], where: str, values: Mapping[str, Any]) -> object:
        """Take the field from an object and return its value, or its default."""
        if self.name in left:
            value = left.pop(self.name)
            if value is not None or not self.null:
                return self.shape.read(value, at(where, self.name))
        if self.needed:
            raise FormatError(f"field {self.name!r} is missing", where=where)
        return self.default_after(values)

    def put(self, values: Mapping[str, Any], written: dict[str, object]) -> None:
        """Write the field into an object, unless it is left out."""
        if self.key not in values and not self.needed:
            return
        value = values[self.key]
        if self.brief and value == self.default_after(values):
            return
        try:
            written[self.name] = self.shape.write(value)
        except FormatError as error:
            raise moved(error, at(self.name, error.where) if error.where else self.name) from None

    def properties(self, definitions: Schema) -> Schema:
        """Return the entry of the field in a schema."""
        shape = refer(self.shape, definitions)
        about: Schema = {"description": self.doc} if self.doc else {}
        if isinstance(self.default, (int, str)):
            about["default"] = self.default
        if self.null:
            shape = {"anyOf": [shape, {"type": "null"}]}
        return {self.name: {**about, **shape}}


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Part:
    """The fields of a record that stand among those of another one.

    Attributes
    ----------
    key
        What the value of the record is called in Python.
    """

    key: str
    record: Record[Any]

    def take(self, left: dict[str, object], where: str, values: Mapping[str, Any]) -> object:
        """Take the record's fields from an object and return the record's value."""
        found = self.record.taken(left, where)
        return guarded(lambda: self.record.build(**found), where)

    def put(self, values: Mapping[str, Any], written: dict[str, object]) -> None:
        """Write the record's fields into an object."""
        self.record.put(values[self.key], written)

    def properties(self, definitions: Schema) -> Schema:
        """Return the entries of the record's fields in a schema."""
        return self.record.properties(definitions)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Record(Shape[T]):
    """An object with these fields and no others.

    Attributes
    ----------
    build
        Makes the value from those of the fields, by their names in Python.
    doc
        What it is, for the schema.
    parts
        Returns the values of the fields, by their names in Python; optional fields whose value it lacks are
        not written. Without it the values are attributes.
    """

    build: Callable[..., T]
    fields: tuple[Field | Part, ...]
    doc: str = ""
    name: str = ""
    parts: Callable[[T], Mapping[str, Any]] | None = None

    def read(self, value: object, where: str) -> T:
        found = self.values(value, where)
        return guarded(lambda: self.build(**found), where)

    def values(self, value: object, where: str) -> dict[str, Any]:
        """Return the values of the fields, by their names in Python, without building from them.

        Raises
        ------
        FormatError
            A field is missing, unknown or wrong; the message names it.
        """
        if not isinstance(value, dict):
            raise FormatError("expected an object", where=where, given=quoted(value))
        left = dict(value)
        found = self.taken(left, where)
        if left:
            raise FormatError(
                f"unknown field {quoted(next(iter(left)))}",
                where=where,
                fix="remove it or correct its name; `zbcompile schema` prints the fields",
            )
        return found

    def taken(self, left: dict[str, object], where: str) -> dict[str, Any]:
        """Take the fields from an object, which keeps the others, and return their values."""
        found: dict[str, Any] = {}
        for field in self.fields:
            found[field.key] = field.take(left, where, found)
        return found

    def write(self, value: T) -> dict[str, object]:
        written: dict[str, object] = {}
        self.put(value, written)
        return written

    def put(self, value: T, written: dict[str, object]) -> None:
        """Write the fields into an object."""
        if self.parts is None:
            values: Mapping[str, Any] = {field.key: getattr(value, field.key) for field in self.fields}
        else:
            values = self.parts(value)
        for field in self.fields:
            field.put(values, written)

    def properties(self, definitions: Schema) -> Schema:
        """Return the schemas of the fields, by their names in the file."""
        result: Schema = {}
        for field in self.fields:
            result |= field.properties(definitions)
        return result

    def needed(self) -> list[str]:
        """Return the names of the fields that must be there."""
        names: list[str] = []
        for field in self.fields:
            if isinstance(field, Part):
                names += field.record.needed()
            elif field.needed:
                names.append(field.name)
        return names

    def schema(self, definitions: Schema) -> Schema:
        return {
            "type": "object",
            **({"description": self.doc} if self.doc else {}),
            "properties": self.properties(definitions),
            "required": self.needed(),
            "additionalProperties": False,
        }


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Document(Generic[T]):
    """A file format: a record with the name and version of the format before its fields.

    Attributes
    ----------
    name
        Of the format, as ``zbcompile.schedule``.
    title
        For people.
    """

    name: str
    version: int
    title: str
    record: Record[T]

    def values(self, text: str, where: str) -> dict[str, Any]:
        """Return the values of the fields of a file, by their names in Python.

        Raises
        ------
        FormatError
            The text is broken, of another format or version, or out of bounds; the message names the field.
        """
        return self.values_of(parse_json(text, where), where)

    def values_of(self, value: object, where: str) -> dict[str, Any]:
        """Return the same of a file that has been parsed; raises as `values`."""
        if not isinstance(value, dict):
            raise FormatError("expected an object", where=where, given=quoted(value))
        self._check_head(value, where)
        return self.record.values({k: v for k, v in value.items() if k not in ("format", "version")}, where)

    def loads(self, text: str, where: str) -> T:
        """Return what a file stands for.

        Raises
        ------
        FormatError
            As for `values`.
        """
        found = self.values(text, where)
        return guarded(lambda: self.record.build(**found), where)

    def dumps(self, value: T) -> str:
        """Return the text of a file. The same value gives the same bytes.

        Raises
        ------
        FormatError
            A file cannot carry a value; the message names the field.
        """
        head: dict[str, object] = {"format": self.name, "version": self.version}
        return format_json(head | self.record.write(value))

    def json_schema(self) -> str:
        """Return the text of the JSON Schema (draft 2020-12)."""
        definitions: Schema = {}
        body: dict[str, Any] = self.record.schema(definitions)
        head = {"format": {"const": self.name}, "version": {"const": self.version}}
        document = {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "$id": f"urn:{self.name.replace('.', ':')}:{self.version}",
            "title": self.title,
            **({"$defs": definitions} if definitions else {}),
            **body,
            "properties": head | body["properties"],
            "required": [*head, *body["required"]],
        }
        return json.dumps(document, indent=2) + "\n"

    def _check_head(self, value: Mapping[str, object], where: str) -> None:
        """Refuse another format or version."""
        given = value.get("format")
        if given != self.name:
            raise FormatError(
                f"not a {self.name} file",
                where=where,
                needed=f'"format": "{self.name}"',
                given=quoted(given),
                fix="give the file to the command that reads its format",
            )
        if "version" not in value:
            raise FormatError("field 'version' is missing", where=where)
        number = value["version"]
        if type(number) is not int or number != self.version:
            raise FormatError(
                "this version of the format is not known",
                where=at(where, "version"),
                needed=self.version,
                given=quoted(number),
                fix="write the file again with this zbcompile, or update zbcompile",
            )
