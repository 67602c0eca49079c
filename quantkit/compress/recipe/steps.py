"""The `steps:` of a recipe: names looked up among the algorithms, options checked against their fields."""

import dataclasses
from typing import Any, get_type_hints

from pydantic import create_model

from quantkit.compress.algorithms import REGISTRY
from quantkit.compress.algorithms.base import Step
from quantkit.compress.recipe.schema import RecipeSection, as_recipe_error, validate
from quantkit.errors import InputError, RecipeError
from quantkit.safety.untrusted import shorten


def build_steps(items: list[Any]) -> dict[str, Step]:
    """The steps of a recipe by name, in order; their fields are the options, every default filled in.

    Args:
        items: as in the file: a bare name, or one name with its options.
    Raises:
        RecipeError: an unknown step or option, a wrong type, or a step given twice.
    """
    steps: dict[str, Step] = {}
    for position, item in enumerate(items):
        path = f"steps[{position}]"
        with as_recipe_error(path):
            name = step_name(item)
            if name is None:
                raise RecipeError(f"expected a step such as 'gptq' or 'gptq: {{damping: 0.01}}', found {shorten(item)}")
            kind = REGISTRY.load(name)
            if name in steps:
                raise RecipeError(f"step {name!r} is given twice; remove one of them")
        options = validate(_options_model(kind), step_options(item), f"{path}.{name}")
        steps[name] = kind(**options.model_dump())
    return steps


def step_name(item: Any) -> str | None:
    """Name of one entry of `steps:`, normalised; None when it has no readable one."""
    name = next(iter(item), None) if isinstance(item, dict) and len(item) == 1 else item
    return name.replace("_", "-") if isinstance(name, str) else None


def step_options(item: Any) -> Any:
    """Return the options that one entry of `steps:` gives its step."""
    given = next(iter(item.values())) if isinstance(item, dict) else None
    return {} if given is None else given


def option_names(name: str) -> list[str]:
    """Options of the step called `name`; none when there is no such step."""
    try:
        return [field.name for field in dataclasses.fields(REGISTRY.load(name))]
    except InputError:
        return []


def _options_model(kind: Any) -> type[RecipeSection]:
    """A strict model with the fields of a step's dataclass."""
    # Steps stay plain dataclasses: what made them valid need not be known where they run.
    hints = get_type_hints(kind, include_extras=True)
    fields: dict[str, Any] = {field.name: (hints[field.name], field.default) for field in dataclasses.fields(kind)}
    return create_model(kind.__name__, __base__=RecipeSection, **fields)
