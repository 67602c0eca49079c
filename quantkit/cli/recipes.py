"""`quantkit recipes`: list, print and check recipes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from quantkit.cli._output import CommandGroup, Output
from quantkit.report.table import Column, Table

if TYPE_CHECKING:
    from quantkit.compress.recipe import Recipe


@click.group("recipes", cls=CommandGroup, short_help="List, show and check recipes.")
def command() -> None:
    """A recipe says in which number types a model is stored, and which algorithms choose the numbers.

    \b
    Examples:
      quantkit recipes list
      quantkit recipes show gptq-int4 > mine.yaml
      quantkit recipes check mine.yaml
    """


@command.command("list")
def list_command(output_to: Output) -> None:
    """List the shipped recipes.

    \b
    Examples:
      quantkit recipes list
      quantkit recipes list --json
    """
    from quantkit.compress.recipe import load, shipped

    recipes = {name: load(name) for name in shipped()}
    listed = [{"name": name, "description": recipe.description} for name, recipe in recipes.items()]
    hint = "to see what a recipe is for: quantkit recipes show NAME"
    output_to.result({"recipes": listed}, _table(recipes), hint)


@command.command("show", short_help="Print a shipped recipe, ready to copy.")
@click.argument("name")
def show_command(output_to: Output, *, name: str) -> None:
    """Print the recipe NAME, ready to be copied and edited. With --json, every default is filled in.

    \b
    Examples:
      quantkit recipes show awq-int4
      quantkit recipes show awq-int4 > mine.yaml
    """
    from pathlib import Path

    from quantkit.compress.recipe import load, shipped
    from quantkit.errors import RecipeError
    from quantkit.safety.untrusted import read_text

    recipe = load(name)
    if output_to.as_json:
        output_to.result({"description": recipe.description, "gates": list(recipe.gates), **recipe.source})
    else:
        # Print the file itself, because parsing drops its comments.
        click.echo(read_text(shipped().get(name, Path(name)), RecipeError), nl=False)


@command.command("check", short_help="Check whether a recipe file is valid.")
@click.argument("file")
def check_command(output_to: Output, *, file: str) -> None:
    """Check whether the recipe in FILE is valid, and report settings that are probably a mistake.

    \b
    Examples:
      quantkit recipes show awq-int4 > mine.yaml
      quantkit recipes check mine.yaml
    """
    from quantkit.compress.recipe import check

    remarks = check(file)
    lines = [f"{file}: valid", *(f"remark: {text}" for text in remarks)]
    output_to.result({"file": file, "valid": True, "remarks": remarks}, "\n".join(lines))


def _table(recipes: dict[str, Recipe]) -> Table:
    rows = []
    for name, recipe in recipes.items():
        default = recipe.scheme.default
        activations = "" if default is None or default.activation is None else default.activation.dtype.name
        steps = ", ".join(recipe.steps)
        weights = "unchanged" if default is None else default.weight.describe()
        if recipe.kv_cache is not None and recipe.kv_cache.scheme.key.dtype is not None:
            weights += f", KV {recipe.kv_cache.scheme.key.dtype.name}{' and others' if recipe.kv_cache.layers else ''}"
        rows.append((name, weights, activations, steps))
    return Table(columns=tuple(map(Column, ("recipe", "weights", "activations", "steps"))), rows=tuple(rows))
