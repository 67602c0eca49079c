"""Base class of all records: converts a record to plain data and back, and checks the type of every field.

Fields may hold records, tuples, dicts, None, numbers, text and booleans. A document with any other value is refused;
the message gives the path of the field. Documents of earlier schema versions are converted to the current version.
"""

# pydantic was tried and rejected: it refuses a null in place of a float that JSON cannot represent, suggests no name
# for a misspelt field, would need a different schema, and adds 0.2 s to the start of `quantkit inspect`.

import dataclasses
import types
import typing
from collections.abc import Mapping
from functools import cache
from typing import Any, TypeVar

from quantkit.errors import ReportError, suggestion

RecordType = TypeVar("RecordType", bound="Record")

SCHEMA_VERSION = 2
"""Version of the fields of quantkit.json, quantkit-run.json and report.json."""

# Names of fields in schema version 1 -> current names, in every kind of record.
_RENAMED = {"damage": "sensitivity", "left_alone": "ignored", "unit": "group", "units": "groups"}


class Record:
    """Base class of records; every subclass is a frozen, keyword-only, slotted dataclass."""

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        """Convert this record to plain dicts and tuples, ready for JSON."""
        return dataclasses.asdict(self)  # type: ignore[call-overload,no-any-return]  # every subclass is a dataclass

    @classmethod
    def from_dict(cls: type[RecordType], data: Mapping[str, Any], *, where: str = "") -> RecordType:
        """Create a record from the result of `to_dict`, which may have been written as JSON and read back.

        Args:
            data: one entry per field; fields with a default may be absent.
            where: path of `data` in its document, for messages.
        Raises:
            ReportError: a field is missing, unknown or of the wrong type, or the document has a later version.
        """
        where = where or cls.__name__
        if not isinstance(data, Mapping):
            raise ReportError(f"{where}: expected a JSON object, found {type(data).__name__}")
        hints: dict[str, Any] = field_types(cls)  # type: ignore[arg-type]  # classes are hashable
        if "schema_version" in hints:
            data = _as_current(data, where)  # before the check, because other versions have other fields
        for name in data:
            if name not in hints:
                raise ReportError(f"{where}: unknown field {name!r}{suggestion(name, hints)}")
        missing = [name for name in required_fields(cls) if name not in data]
        if missing:
            raise ReportError(f"{where}: field {missing[0]!r} is missing")
        return cls(**{name: _decode(hints[name], value, f"{where}.{name}") for name, value in data.items()})


@cache
def field_types(cls: type) -> dict[str, Any]:
    """Return the resolved type of each field of a record, in order."""
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def required_fields(cls: type) -> list[str]:
    """Return the names of a record's fields that have no default."""
    missing = dataclasses.MISSING
    return [
        field.name for field in dataclasses.fields(cls) if field.default is missing and field.default_factory is missing
    ]


def is_union(kind: Any) -> bool:
    """Whether a type is a union; the only unions that records use have the form `A | None`."""
    return typing.get_origin(kind) in (types.UnionType, typing.Union)


def _as_current(data: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Convert a document of an earlier version to the current version."""
    version = data.get("schema_version", SCHEMA_VERSION)
    if version == 1:
        return {**_renamed(data), "schema_version": SCHEMA_VERSION}
    if version != SCHEMA_VERSION:
        raise ReportError(
            f"{where} has schema version {version}, but this quantkit reads versions 1 to {SCHEMA_VERSION}; "
            "run `quantkit verify` again with this version"
        )
    return data


def _renamed(value: Any) -> Any:
    if isinstance(value, Mapping):
        entries = {_RENAMED.get(key, key): _renamed(entry) for key, entry in value.items()}
        return {**entries, "action": "ignore"} if entries.get("action") == "leave alone" else entries
    return [_renamed(entry) for entry in value] if isinstance(value, list | tuple) else value


def _decode(kind: Any, value: Any, where: str) -> Any:
    """Convert one JSON value to the type of its field."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if is_union(kind):
        present = next(member for member in inner if member is not types.NoneType)
        return None if value is None else _decode(present, value, where)
    if origin is tuple and isinstance(value, list | tuple):
        kinds = inner[:1] * len(value) if inner[-1] is Ellipsis else inner
        if len(kinds) != len(value):
            raise ReportError(f"{where}: expected {len(kinds)} entries, found {len(value)}")
        return tuple(_decode(kinds[i], entry, f"{where}[{i}]") for i, entry in enumerate(value))
    if origin is dict and isinstance(value, Mapping):
        return {str(key): _decode(inner[1], entry, f"{where}.{key}") for key, entry in value.items()}
    if isinstance(kind, type) and issubclass(kind, Record):
        return kind.from_dict(value, where=where)
    if origin is typing.Literal and value not in inner:
        raise ReportError(f"{where}: {value!r} is not one of {', '.join(map(repr, inner))}")
    # JSON has a single number type, and other programs may write 1.0 as 1.
    if kind is float and (value is None or type(value) is int):
        return float("nan" if value is None else value)  # null stands for a number that JSON lacks, such as NaN
    # Exact types: for `isinstance`, a boolean is an integer, but a boolean in place of a number is a mistake.
    if kind is Any or origin is typing.Literal or type(value) is kind:
        return value
    raise ReportError(f"{where}: expected {getattr(kind, '__name__', kind)}, found {value!r}")
