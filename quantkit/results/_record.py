"""What all newer records share: plain dicts out, checked dicts in, both driven by the types of the fields.

Not a validation library: it knows the shapes that records use (records, tuples, dicts, None, numbers, text, flags) and
refuses everything else, with the path of what is wrong.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from functools import cache
from typing import Any, TypeVar

from quantkit.errors import ReportError, suggestion

RecordType = TypeVar("RecordType", bound="Record")


class Record:
    """Base of records that read themselves back; a subclass is a frozen, keyword-only, slotted dataclass."""

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        """This record as plain dicts and lists, ready for JSON."""
        return {field.name: _plain(getattr(self, field.name)) for field in dataclasses.fields(self)}  # type: ignore[arg-type]

    @classmethod
    def from_dict(cls: type[RecordType], data: Mapping[str, Any], *, where: str = "") -> RecordType:
        """Inverse of `to_dict`, also after a round trip through JSON.

        Args:
            data: one entry per field; fields with a default may be absent.
            where: path of `data` in its document, for messages.
        Raises:
            ReportError: a field is missing, unknown or of another type.
        """
        where = where or cls.__name__
        if not isinstance(data, Mapping):
            raise ReportError(f"{where}: expected an object, found {type(data).__name__}")
        hints: dict[str, Any] = field_types(cls)  # type: ignore[arg-type]  # classes are hashable
        for name in data:
            if name not in hints:
                raise ReportError(f"{where}: unknown field {name!r}{suggestion(name, hints)}")
        missing = [name for name in required_fields(cls) if name not in data]
        if missing:
            raise ReportError(f"{where}: field {missing[0]!r} is missing")
        return cls(**{name: decode(hints[name], value, f"{where}.{name}") for name, value in data.items()})


def _plain(value: Any) -> Any:
    """Records, tuples and dicts as dicts and lists, all the way down."""
    if isinstance(value, Record):
        return value.to_dict()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value


@cache
def field_types(cls: type) -> dict[str, Any]:
    """Resolved type of each field of a record, in order."""
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def required_fields(cls: type) -> list[str]:
    """Names of the fields that have no default."""
    missing = dataclasses.MISSING
    return [
        field.name for field in dataclasses.fields(cls) if field.default is missing and field.default_factory is missing
    ]


def union_members(kind: Any) -> tuple[Any, ...]:
    """The alternatives of `A | B | None`; the type itself when it is no union."""
    return typing.get_args(kind) if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union else ()


def decode(kind: Any, value: Any, where: str) -> Any:
    """One value as its field's type says.

    Args:
        kind: a resolved type: a record, tuple[...], dict[str, ...], Literal[...], a union, or a plain type.
        value: as JSON gives it.
        where: path of the value, for messages.
    Raises:
        ReportError: the value is of another type.
    """
    members = union_members(kind)
    if members:
        if value is None and type(None) in members:
            return None
        rest = [member for member in members if member is not type(None)]
        return decode(rest[0], value, where) if len(rest) == 1 else _first_that_fits(rest, value, where)
    origin = typing.get_origin(kind)
    if origin is tuple and isinstance(value, list | tuple):
        return _decode_tuple(typing.get_args(kind), value, where)
    if origin is dict and isinstance(value, Mapping):
        item = typing.get_args(kind)[1]
        return {str(key): decode(item, entry, f"{where}.{key}") for key, entry in value.items()}
    if isinstance(kind, type) and issubclass(kind, Record):
        return value if isinstance(value, kind) else kind.from_dict(value, where=where)
    if hasattr(kind, "from_dict") and isinstance(value, Mapping):
        return kind.from_dict(dict(value))  # the records of a compression read themselves
    return _decode_plain(kind, value, where)


def _decode_tuple(items: tuple[Any, ...], value: list[Any] | tuple[Any, ...], where: str) -> tuple[Any, ...]:
    if len(items) == 2 and items[1] is Ellipsis:
        return tuple(decode(items[0], entry, f"{where}[{i}]") for i, entry in enumerate(value))
    if len(items) != len(value):
        raise ReportError(f"{where}: expected {len(items)} entries, found {len(value)}")
    return tuple(decode(kind, entry, f"{where}[{i}]") for i, (kind, entry) in enumerate(zip(items, value, strict=True)))


def _first_that_fits(kinds: list[Any], value: Any, where: str) -> Any:
    for kind in kinds[:-1]:
        try:
            return decode(kind, value, where)
        except ReportError:
            continue
    return decode(kinds[-1], value, where)


def _decode_plain(kind: Any, value: Any, where: str) -> Any:
    if typing.get_origin(kind) is typing.Literal:
        if value not in typing.get_args(kind):
            raise ReportError(f"{where}: {value!r} is not one of {', '.join(map(repr, typing.get_args(kind)))}")
        return value
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if kind is float and value is None:
        return float("nan")  # JSON has no such number; the writer stores null for it
    if kind is Any or (type(value) is kind and kind in (int, str, bool, float)):
        return value
    name = getattr(kind, "__name__", str(kind))
    raise ReportError(f"{where}: expected {name}, found {value!r}")
