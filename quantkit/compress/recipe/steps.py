"""Build the `steps:` of a recipe: look up each algorithm by name, and check its options."""

import dataclasses
from typing import Any, get_type_hints

from pydantic import create_model

from quantkit.compress.algorithms import REGISTRY
from quantkit.compress.algorithms.base import Step
from quantkit.compress.recipe.schema import RecipeSection, as_recipe_error, validate
from quantkit.errors import InputError, RecipeError
from quantkit.safety.untrusted import shorten


def build_steps(items: list[Any]) -> dict[str, Step]:
    """Return the steps of a recipe in order, keyed by name, with every option filled in.

    Args:
        items: entries of `steps:`; each is the name of a step, or a mapping from the name to its options.
    Raises:
        RecipeError: a step or option is unknown, an option has the wrong type, or a step is given twice.
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
    """Return the name of one entry of `steps:`, with hyphens for underscores; None if it has no valid name."""
    name = next(iter(item), None) if isinstance(item, dict) and len(item) == 1 else item
    return name.replace("_", "-") if isinstance(name, str) else None


def step_options(item: Any) -> Any:
    """Return the options of one entry of `steps:`; empty if it has none."""
    given = next(iter(item.values())) if isinstance(item, dict) else None
    return {} if given is None else given


def option_names(name: str) -> list[str]:
    """Return the option names of the step `name`; empty if there is no such step."""
    try:
        return [field.name for field in dataclasses.fields(REGISTRY.load(name))]
    except InputError:
        return []


def _options_model(kind: Any) -> type[RecipeSection]:
    """Return a strict pydantic model with the fields of a step's dataclass."""
    # Steps stay plain dataclasses: code that runs them does not depend on how their options were validated.
    hints = get_type_hints(kind, include_extras=True)
    fields: dict[str, Any] = {field.name: (hints[field.name], field.default) for field in dataclasses.fields(kind)}
    return create_model(kind.__name__, __base__=RecipeSection, **fields)
