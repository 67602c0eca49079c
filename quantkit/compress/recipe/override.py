"""Change single fields of a recipe from the command line or Python: `weights.group_size=32`, `steps.gptq.damping=0.05`.

Recipe files cannot inherit from each other; to change more than a few fields, copy and edit the recipe.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from quantkit.compress.recipe.schema import Document
from quantkit.compress.recipe.sections import option_names, step_name, step_options
from quantkit.errors import RecipeError, suggestion
from quantkit.safety.untrusted import parse_yaml

Overrides = Mapping[str, Any] | Sequence[str]


def patched(data: Mapping[str, Any], overrides: Overrides) -> dict[str, Any]:
    """Return a copy of a recipe's data with fields replaced; `load.build` checks the result.

    Args:
        data: plain data of a recipe; not modified.
        overrides: values, keyed by dotted path, or `path=value` strings with YAML values. If a path occurs twice, the
            later value counts.
    Raises:
        RecipeError: a string has no `=`, or a path does not exist in recipes; the message suggests the nearest path.
    """
    result = copy.deepcopy(dict(data))
    for path, value in _pairs(overrides):
        _assign(result, path, value)
    return result


def _pairs(overrides: Overrides) -> list[tuple[str, Any]]:
    if isinstance(overrides, Mapping):
        return list(overrides.items())
    pairs = []
    for text in [overrides] if isinstance(overrides, str) else overrides:
        path, equals, value = text.partition("=")
        if not equals:
            raise RecipeError(f"override {text!r} has no '='; write it like weights.group_size=32")
        pairs.append((path.strip(), parse_yaml(value, f"override {text!r}", RecipeError)))
    return pairs


def _assign(data: dict[str, Any], path: str, value: Any) -> None:
    valid = _paths(data)
    if path not in valid:
        raise RecipeError(_refusal(data, path, valid))
    first, *rest = path.split(".")
    if not rest:
        data[first] = value
    elif first == "steps":
        position = _names(data).index(rest[0])
        data["steps"][position] = {rest[0]: {**step_options(data["steps"][position]), rest[1]: value}}
    else:
        section = data.get(first)
        data[first] = {**(section if isinstance(section, dict) else {}), rest[0]: value}


def _names(data: Mapping[str, Any]) -> list[str]:
    """Return the name of each step of a recipe in order; "" for an entry without a name."""
    steps = data.get("steps")
    return [step_name(item) or "" for item in steps] if isinstance(steps, list) else []


def _paths(data: Mapping[str, Any]) -> list[str]:
    """Return all dotted paths that an override can set: whole sections, fields of sections, and options of steps. A
    section that is a list can only be replaced as a whole.
    """
    paths = list(Document.model_fields)
    for name, field in Document.model_fields.items():
        kinds = get_args(field.annotation)
        if type(None) in kinds:  # a section or None; entries of lists have no path of their own
            paths += [f"{name}.{key}" for key in kinds[0].model_fields]
    return paths + [f"steps.{name}.{option}" for name in _names(data) for option in option_names(name)]


def _refusal(data: Mapping[str, Any], path: str, valid: list[str]) -> str:
    first, *rest = path.split(".")
    if first == "overrides" and rest:
        return f"override {path!r}: the list 'overrides' can only be replaced as a whole; edit a copy of the recipe"
    if first == "steps" and rest and rest[0] not in _names(data):
        return f"override {path!r}: the recipe has no step {rest[0]!r}; its steps: {', '.join(_names(data)) or 'none'}"
    parent = path.rpartition(".")[0]
    family = [name for name in valid if name.rpartition(".")[0] == parent] or list(Document.model_fields)
    return f"override {path!r}: no such field{suggestion(path, valid)}; valid fields: {', '.join(family)}"
