"""Linears that keep the codes of the source (`keep: source`): check that the codes can be kept, and add them to a
layer.
"""

from collections.abc import Mapping
from dataclasses import replace

from quantkit.checkpoints.model_reader import ModelReader
from quantkit.compress.calibration.layer import LayerContext
from quantkit.compress.recipe import Recipe
from quantkit.errors import RecipeError, located
from quantkit.formats.base import Format
from quantkit.numerics.scales import with_two_levels
from quantkit.numerics.scheme import LinearScheme
from quantkit.numerics.tensor import QuantizedTensor
from quantkit.results import LinearRecord


def check_kept(
    recipe: Recipe, reader: ModelReader, format_: Format, linears: Mapping[str, LinearScheme]
) -> tuple[str, ...]:
    """Check that linears with `keep: source` can keep the source's codes bit for bit; test one linear of each scheme.

    Args:
        recipe: the recipe.
        reader: reader of the source.
        format_: output format.
        linears: scheme of each quantized linear, keyed by full name.
    Returns:
        One sentence for the user about each scheme whose codes are kept.
    Raises:
        RecipeError, SchemeError: codes cannot be kept; the message says why.
    """
    kept: dict[LinearScheme, list[str]] = {}
    for name, scheme in linears.items():
        if recipe.scheme.keeps(name):
            kept.setdefault(scheme, []).append(name)
    for step, made in recipe.steps.items() if kept else ():
        if made.replaces_model:
            raise RecipeError(
                f"the step {step} changes all weights, so no codes can be kept; remove the step, or remove keep: source"
            )
    for scheme, names in kept.items():
        with located(f"the codes of {names[0]} cannot be kept"):
            codes = reader.codes(f"{names[0]}.weight")
            for weight in [codes] if codes.scheme == scheme.weight else with_two_levels([codes]) or ():
                format_.encode(weight, scheme)
    changed = {scheme for scheme, names in kept.items() if reader.stored_scheme(f"{names[0]}.weight") != scheme}
    return tuple(
        f"{len(names)} linears keep the codes of the source ({scheme.describe()}"
        + ("; linears whose scales this scheme cannot hold exactly are rounded)" if scheme in changed else ")")
        for scheme, names in kept.items()
    )


def keep_codes(recipe: Recipe, reader: ModelReader, layer: LayerContext) -> None:
    """Give the linears of a layer with `keep: source` the codes of the source. If a linear's scheme cannot hold its
    codes exactly, leave the linear without codes, and add a note.
    """
    names = [name for name in layer.schemes if recipe.scheme.keeps(f"{layer.name}.{name}")]
    others: dict[str, QuantizedTensor] = {}
    for name in names:
        codes = reader.codes(f"{layer.name}.{name}.weight")
        if codes.scheme == layer.schemes[name].weight:
            _keep(layer, name, codes)
        else:
            others[name] = codes
    while others:
        first = next(iter(others))
        together = layer.sharing(first)
        codes_of = [others.pop(name) for name in together if name in others]
        made = with_two_levels(codes_of) if len(codes_of) == len(together) else None
        for name, weight in zip(together, made or (), strict=made is not None):
            _keep(layer, name, weight)
        if made is None:
            what = layer.schemes[first].weight.describe()
            layer.chosen.notes.append(
                f"{', '.join(together)}: rounded instead of keeping the source's codes, because their scales span "
                f"too wide a range for {what}"
            )


def _keep(layer: LayerContext, name: str, weight: QuantizedTensor) -> None:
    """Set the codes of a linear, which no later step changes. From then on, the layer computes with their dequantized
    values, as after `LayerContext.commit`.
    """
    if weight.input_scale is not None:
        weight = replace(weight, input_scale=weight.input_scale.to(layer.device))
    layer.chosen.records[name] = LinearRecord(
        name=name,
        scheme=layer.schemes[name].describe(),
        shape=weight.shape,
        bits_per_weight=8 * weight.stored_bytes / weight.codes.numel(),
        rounding_error=0.0,
        error=0.0,
        measure="weight",
    )
    layer.chosen.quantized[name] = weight
    layer.weight(name).copy_(weight.dequantize(weight.values_dtype))
