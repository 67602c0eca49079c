"""The Python door: the same things as the command line, with recipes given by name, file or object."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from quantkit.pipeline import quantize as _run
from quantkit.pipeline.events import SILENT, Listener
from quantkit.recipe import Recipe, load, shipped
from quantkit.recipe.load import build
from quantkit.recipe.override import Overrides, patched
from quantkit.results import CompressionResult

__all__ = ["list_recipes", "load_recipe", "quantize"]


def quantize(
    model: str | Path | None = None,
    recipe: str | Path | Recipe = "awq-int4",
    output: str | Path | None = None,
    *,
    overrides: Overrides = (),
    device: str = "auto",
    activations: Literal["ram", "disk"] = "ram",
    resume: bool = True,
    overwrite: bool = False,
    listener: Listener = SILENT,
) -> CompressionResult:
    """Compress a model to a new checkpoint.

    Args:
        model: a directory or a hub id; None = the demo model that comes with quantkit.
        recipe: a shipped name, a file, or a Recipe.
        output: directory to create; None = `./<model>-<recipe>`.
        overrides: recipe fields to replace, `{"weights.group_size": 32}` or `["weights.group_size=32"]`.
        device: "auto", "cpu", "cuda" or "cuda:1".
        activations: where hidden states are kept between layers; "disk" when they do not fit in memory.
        resume: go on where an interrupted run with the same inputs stopped.
        overwrite: replace an existing output directory.
        listener: told about progress.
    Returns:
        what was done: sizes, errors per linear, times.
    Raises:
        QuantkitError: see `quantkit.errors`.
    """
    return _run(
        None if model is None else str(model),
        load_recipe(recipe, overrides),
        output,
        device=device,
        activations=activations,
        resume=resume,
        overwrite=overwrite,
        listener=listener,
    )


def load_recipe(recipe: str | Path | Recipe, overrides: Overrides = ()) -> Recipe:
    """Read and check a recipe.

    Args:
        recipe: a shipped name, a file, or a Recipe (to change fields of).
        overrides: recipe fields to replace, by dotted path.
    Raises:
        RecipeError: one line that says file, field, value and what is valid.
    """
    if isinstance(recipe, Recipe):
        data = {"description": recipe.description, "gates": list(recipe.gates), **recipe.source}
        return build(patched(data, overrides), recipe.name) if overrides else recipe
    return load(recipe, overrides)


def list_recipes() -> dict[str, str]:
    """The shipped recipes: description by name."""
    return {name: load(name).description for name in shipped()}
