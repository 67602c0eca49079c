"""The `steps:` of a recipe: names looked up among the algorithms, options checked against their fields."""

from __future__ import annotations

import dataclasses
from typing import Any, get_type_hints

from pydantic import create_model

from quantkit.compress.algorithms import REGISTRY
from quantkit.compress.recipe.schema import RecipeSection, validate
from quantkit.errors import InputError, RecipeError
from quantkit.untrusted import shorten


def build_steps(items: list[Any], where: str) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The steps of a recipe, in order.

    Args:
        items: as in the file: a bare name, or one name with its options.
        where: the file, for messages.
    Returns:
        steps: by name.
        options: by name, every default filled in.
    Raises:
        RecipeError: an unknown step or option, a wrong type, or a step given twice.
    """
    steps: dict[str, Any] = {}
    options: dict[str, dict[str, Any]] = {}
    for position, item in enumerate(items):
        path = f"steps[{position}]"
        name, given = _split(item, where, path)
        kind = _find(name, where, path)
        if name in steps:
            raise RecipeError(f"{where}: {path}: step {name!r} is given twice; remove one of them")
        options[name] = validate(_options_model(kind), given, where, f"{path}.{name}").model_dump()
        steps[name] = _construct(kind, options[name], where, f"{path}.{name}")
    return steps, options


def step_name(item: Any) -> str | None:
    """Name of one entry of `steps:`, normalised; None when it has no readable one."""
    name = next(iter(item), None) if isinstance(item, dict) and len(item) == 1 else item
    return name.replace("_", "-") if isinstance(name, str) else None


def option_names(name: str) -> list[str]:
    """Options of the step called `name`; none when there is no such step."""
    try:
        return [field.name for field in dataclasses.fields(REGISTRY.load(name))]
    except InputError:
        return []


def _split(item: Any, where: str, path: str) -> tuple[str, dict[str, Any]]:
    name = step_name(item)
    if name is None:
        raise RecipeError(
            f"{where}: {path}: expected a step such as 'gptq' or 'gptq: {{damping: 0.01}}', found {shorten(item)}"
        )
    given = next(iter(item.values())) if isinstance(item, dict) else None
    return name, {} if given is None else given


def _find(name: str, where: str, path: str) -> Any:
    try:
        return REGISTRY.load(name)
    except InputError as error:
        raise RecipeError(f"{where}: {path}: {error}") from None


def _options_model(kind: Any) -> type[RecipeSection]:
    """A strict model with the fields of a step's dataclass."""
    hints = get_type_hints(kind)
    fields: dict[str, Any] = {field.name: (hints[field.name], field.default) for field in dataclasses.fields(kind)}
    return create_model(kind.__name__, __base__=RecipeSection, **fields)


def _construct(kind: Any, options: dict[str, Any], where: str, path: str) -> Any:
    try:
        return kind(**options)
    except (InputError, ValueError) as error:
        raise RecipeError(f"{where}: {path}: {error}") from None
