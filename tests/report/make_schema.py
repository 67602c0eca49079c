"""Writes docs/report.schema.json, the JSON Schema of `report.json`, from the types and docstrings of the records.

Run it after a change of a record, from the repository's root: python tests/report/make_schema.py
"""

from __future__ import annotations

import dataclasses
import json
import re
import typing
from pathlib import Path
from typing import Any

from quantkit.results import SCHEMA_VERSION, Report
from quantkit.results._record import field_types, is_union, required_fields
from quantkit.results.gates import METRICS

SCHEMA = Path(__file__).parents[2] / "docs" / "report.schema.json"
SCHEMA_URL = "https://json-schema.org/draft/2020-12/schema"


def schema() -> dict[str, Any]:
    """JSON Schema of `report.json`."""
    definitions: dict[str, Any] = {}
    _define(Report, definitions)
    report = definitions.pop("Report")
    report["properties"]["schema_version"] = {"const": SCHEMA_VERSION}
    report["properties"]["metrics"] = {
        "type": "object",
        "description": "Numbers that gates can be about, by the name a gate uses: " + ", ".join(METRICS) + ".",
        "additionalProperties": {"type": ["number", "null"]},
    }
    report["required"] = [*report["required"], "schema_version"]
    return {"$schema": SCHEMA_URL, "title": "quantkit report", **report, "$defs": dict(sorted(definitions.items()))}


def _define(cls: type, definitions: dict[str, Any]) -> None:
    """Add the schema of a record, and of all records it holds, to `definitions`."""
    definitions[cls.__name__] = {}  # a place holder, so that records that hold each other end
    described = _field_descriptions(cls)
    properties = {}
    for name, kind in field_types(cls).items():
        description = {"description": described[name]} if name in described else {}
        properties[name] = {**_schema_of(kind, definitions), **description}
    definitions[cls.__name__] = {
        "type": "object",
        "description": (cls.__doc__ or "").split("\n", 1)[0],
        "properties": properties,
        "required": required_fields(cls),
        "additionalProperties": False,
    }


def _schema_of(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    if kind is Any:
        return {}
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if is_union(kind):
        return {"anyOf": [_schema_of(member, definitions) for member in inner]}
    if origin is tuple and len(inner) == 2 and inner[1] is Ellipsis:
        return {"type": "array", "items": _schema_of(inner[0], definitions)}
    if origin is tuple:
        items = [_schema_of(item, definitions) for item in inner]
        return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}
    if origin is dict:
        return {"type": "object", "additionalProperties": _schema_of(inner[1], definitions)}
    if origin is typing.Literal:
        return {"enum": list(inner)}
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        if kind.__name__ not in definitions:
            _define(kind, definitions)
        return {"$ref": f"#/$defs/{kind.__name__}"}
    # A float may be infinite in a broken model, which JSON says as null.
    plain = {str: "string", bool: "boolean", int: "integer", float: ["number", "null"], type(None): "null"}
    return {"type": plain[kind]}


def _field_descriptions(cls: type) -> dict[str, str]:
    """What the docstring's Args say of each field."""
    text = (cls.__doc__ or "").partition("Args:\n")[2]
    descriptions: dict[str, str] = {}
    names: list[str] = []
    for line in text.splitlines():
        match = re.match(r"        (\w+(?:, \w+)*): (.*)", line)
        if match:
            names = match[1].split(", ")
            descriptions.update(dict.fromkeys(names, match[2]))
        elif line.strip() and names:
            descriptions.update({name: f"{descriptions[name]} {line.strip()}" for name in names})
    return descriptions


if __name__ == "__main__":
    SCHEMA.write_text(json.dumps(schema(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
