"""Make docs/api.md: the public names of the package with their signatures and docstrings; for evals/pages.py."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap
from typing import Any

import quantkit

TITLES = {"Args": "Arguments", "Returns": "Returns", "Raises": "Raises", "Source": "Source"}
LONGEST = 100


def render() -> str:
    """Return a section per public name: functions first, then classes with their public methods and properties."""
    names = [name for name in quantkit.__all__ if name != "__version__"]
    things = {name: getattr(quantkit, name) for name in names}
    functions = {name: thing for name, thing in things.items() if inspect.isfunction(thing)}
    classes = {name: thing for name, thing in things.items() if name not in functions}
    parts = ["## Functions", *(_function(f"quantkit.{name}", thing, "###") for name, thing in functions.items())]
    return "\n\n".join([*parts, "## Classes", *(_class(name, thing) for name, thing in classes.items())])


def _function(name: str, function: Any, level: str) -> str:
    text = inspect.getdoc(function) or ""
    return f"{level} {name.rpartition('.')[2]}\n\n```python\n{_signature(name, function)}\n```\n\n{_document(text)}"


def _class(name: str, kind: type) -> str:
    is_plain = name != "LLM"  # a record, whose fields are its arguments
    parts = [f"### {name}", _document(inspect.getdoc(kind) or "", "Fields" if is_plain else "Arguments")]
    parts += _undescribed(kind)
    for member, value in vars(kind).items():
        if member.startswith("_"):
            continue
        if isinstance(value, property):
            parts.append(f"**`{name}.{member}`** (property): {_joined(inspect.getdoc(value) or '')}")
        elif inspect.isfunction(value) or isinstance(value, classmethod):
            method = value.__func__ if isinstance(value, classmethod) else value
            parts.append(_function(f"{name}.{member}", method, "####"))
    return "\n\n".join(parts)


def _undescribed(kind: type) -> list[str]:
    """Return a list of the fields that are described next to the field, not in the docstring."""
    described = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
    lines = [f"- `{field.name}`: {field.metadata['text']}" for field in described if "text" in field.metadata]
    return ["Fields that are also options of the command line:", "\n".join(lines)] if lines else []


def _signature(name: str, function: Any) -> str:
    """Return the call as in the source, without `self` and callbacks' defaults; long calls get a line per argument."""
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    assert isinstance(node, ast.FunctionDef)
    given = node.args
    given.args = [arg for arg in given.args if arg.arg not in ("self", "cls")]
    given.kw_defaults = [ast.Constant(...) if isinstance(value, ast.Lambda) else value for value in given.kw_defaults]
    result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    inside = re.split(r", (?=\*|\w+: |\w+=)", ast.unparse(given).replace("'", '"'))
    inside = [re.sub(r"^(\w+: [^=]+)=", r"\1 = ", one) for one in inside]
    if len(line := f"{name}({', '.join(inside)}){result}") < LONGEST:
        return line
    return f"{name}(\n" + "".join(f"    {one},\n" for one in inside) + f"){result}"


def _document(text: str, arguments: str = "Arguments") -> str:
    """Return a docstring as Markdown: `Args:` and the like become lists, and indented code stays code."""
    blocks = re.split(r"(?m)^(Args|Returns|Raises|Source):[ \n]", text)
    parts = [blocks[0].strip("\n")]
    for title, block in zip(blocks[1::2], blocks[2::2], strict=True):
        heading = arguments if title == "Args" else TITLES[title]
        parts.append(f"**{heading}**")
        parts.append(_list(block) if title in ("Args", "Raises") else _joined(block))
    return "\n\n".join(filter(None, parts))


def _list(block: str) -> str:
    """Return the entries `name: text` of a section as a list; deeper lines continue an entry."""
    entries: list[str] = []
    for line in block.rstrip().splitlines():
        if line.startswith("        ") and entries:
            entries[-1] += f" {line.strip()}"
        elif line.strip():
            entries.append(line.strip())
    pairs = [entry.partition(": ") for entry in entries]
    return "\n".join(f"- `{name}`{colon}{_safe(text)}" for name, colon, text in pairs)


def _joined(block: str) -> str:
    return _safe(" ".join(block.split()))


def _safe(text: str) -> str:
    """Return a text in which `<model>` outside of code is not read as HTML."""
    return "".join(
        part if place % 2 else part.replace("<", "&lt;") for place, part in enumerate(re.split(r"(`[^`]*`)", text))
    )
