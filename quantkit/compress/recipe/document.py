"""The text of a recipe to plain data: a mapping that is not empty.

Not a schema: what the keys mean is said in `schema`.
"""

from __future__ import annotations

from typing import Any

from quantkit.errors import RecipeError
from quantkit.untrusted import parse_yaml, shorten

__all__ = ["parse", "parse_value"]


def parse(text: str, where: str) -> dict[str, Any]:
    """The mapping that a recipe file holds.

    Args:
        text: content of the file.
        where: the file, for messages.
    Raises:
        RecipeError: not YAML, empty, or not a mapping; the message names the line where there is one.
    """
    data = parse_yaml(text, where, RecipeError)
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
    return parse_yaml(text, where, RecipeError)
