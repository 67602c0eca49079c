"""YAML text to plain data, stricter than YAML: no duplicate keys, and 1e-3 is a number.

Not a schema: what the keys mean is said in `schema`.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any

import yaml

from quantkit.errors import RecipeError

__all__ = ["parse", "parse_value"]


class _Loader(yaml.SafeLoader):
    """Safe YAML that refuses a key given twice in the same mapping."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """The mapping of a node; overrides PyYAML, which keeps the last of two equal keys without a word."""
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = key_node.value
            if not isinstance(key_node, yaml.ScalarNode):
                continue  # a list as a key is refused by PyYAML itself
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


# YAML 1.1 reads 1e-3 as text because it has no dot; people and YAML 1.2 read it as a number.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?[0-9]+(?:\.[0-9]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def parse(text: str, where: str) -> dict[str, Any]:
    """The mapping that a recipe file holds.

    Args:
        text: content of the file.
        where: the file, for messages.
    Raises:
        RecipeError: not YAML, empty, or not a mapping; the message names the line where there is one.
    """
    data = _load(text, where)
    if data is None:
        raise RecipeError(f"{where}: the file is empty; a recipe needs at least 'weights'")
    if not isinstance(data, dict):
        raise RecipeError(f"{where}: expected keys such as 'weights: ...', found {shorten(data)}")
    return data


def parse_value(text: str, where: str) -> Any:
    """One YAML value, as given after `--set path=`.

    Raises:
        RecipeError: not YAML.
    """
    return _load(text, where)


def shorten(value: Any, limit: int = 60) -> str:
    """`repr` of a value for a one-line message.

    Args:
        value: anything.
        limit: characters to keep.
    """
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _load(text: str, where: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)  # a SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f" line {mark.line + 1}:" if mark else ""
        problem = ", ".join(filter(None, (error.context, error.problem)))
        raise RecipeError(f"{where}:{line} {_one_line(problem)}") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: an impossible date such as 2024-13-01
        raise RecipeError(f"{where}: not valid YAML: {_one_line(str(error))}") from None


def _one_line(text: str) -> str:
    return " ".join(text.split())
