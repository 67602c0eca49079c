"""Linears that stay in the codes of the source (`keep: source`): whether they can, and putting them into a layer."""

from collections.abc import Mapping

from quantkit.checkpoints.model_reader import ModelReader
from quantkit.compress.calibration.layer import LayerContext
from quantkit.compress.recipe import Recipe
from quantkit.errors import RecipeError, located
from quantkit.formats.base import Format
from quantkit.numerics.scheme import LinearScheme


def check_kept(
    recipe: Recipe, reader: ModelReader, format_: Format, linears: Mapping[str, LinearScheme]
) -> tuple[str, ...]:
    """Refuse what cannot be kept bit for bit; one linear of each scheme is tried out.

    Args:
        recipe: says what is kept.
        reader: of the source.
        format_: that is written.
        linears: scheme of each quantized linear by full name.
    Returns:
        a sentence for each scheme that is kept.
    Raises:
        RecipeError, SchemeError: says what is in the way.
    """
    kept: dict[LinearScheme, list[str]] = {}
    for name, scheme in linears.items():
        if recipe.scheme.keeps(name):
            kept.setdefault(scheme, []).append(name)
    for step, made in recipe.steps.items() if kept else ():
        if hasattr(made, "open"):
            raise RecipeError(f"the step {step} changes all weights, so none can be kept: drop it, or keep: source")
    for scheme, names in kept.items():
        with located(f"{names[0]} cannot be kept as the source has it"):
            format_.encode(reader.codes(f"{names[0]}.weight"), scheme)
    return tuple(
        f"{len(names)} linears keep the codes of the source ({scheme.describe()})" for scheme, names in kept.items()
    )


def keep_codes(recipe: Recipe, reader: ModelReader, layer: LayerContext) -> None:
    """Give a layer the codes of those of its linears that are kept."""
    for name in layer.schemes:
        full = f"{layer.name}.{name}"
        if recipe.scheme.keeps(full):
            layer.keep(name, reader.codes(f"{full}.weight"))
