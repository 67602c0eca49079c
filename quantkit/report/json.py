"""`report.json`: a report as one JSON document, and the schema it keeps, made from the types of the records.

Numbers that JSON cannot say (infinite, not a number) become null. `metrics` repeats what gates can be about under the
names that gates use, for readers with `jq`; it is computed, and ignored when a report is read back.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import typing
from pathlib import Path
from typing import Any

from quantkit.errors import ReportError
from quantkit.results import SCHEMA_VERSION, Report
from quantkit.results._record import field_types, is_union, required_fields
from quantkit.results.gates.metrics import METRICS, gate_numbers
from quantkit.untrusted import read_object

SCHEMA_URL = "https://json-schema.org/draft/2020-12/schema"


def dumps(report: Report) -> str:
    """A report as JSON text; equal reports give equal bytes."""
    document = {**report.to_dict(), "metrics": gate_numbers(report)}
    return json.dumps(json_ready(document), ensure_ascii=False, allow_nan=False, indent=1) + "\n"


def read_report(path: Path | str) -> Report:
    """The report in a file, or in a checkpoint's directory.

    Raises:
        ReportError: no such file, not JSON, of another version, or not a report.
    """
    path = Path(path)
    file = path / "report.json" if path.is_dir() else path
    if not file.exists():
        todo = f"`quantkit verify {path}` makes one" if path.is_dir() else "give a checkpoint's directory or its report"
        raise ReportError(f"{file}: no such file; {todo}")
    data = read_object(file, ReportError, "is it cut short, or no report?")
    try:
        return Report.from_dict(data)
    except ReportError as error:
        raise ReportError(f"{file}: {error}") from None


def schema() -> dict[str, Any]:
    """JSON Schema of `report.json`; the copy in docs/ is made from this."""
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


def json_ready(value: Any) -> Any:
    """The same with null for numbers that JSON does not have."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: json_ready(item) for key, item in value.items()}
    return [json_ready(item) for item in value] if isinstance(value, list | tuple) else value


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
