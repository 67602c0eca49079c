"""Apply a recipe to a model: find the scheme of each linear, or the reason why the recipe cannot be used.

`quantize` and `plan` use this module.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

from quantkit.compress.algorithms.base import reorders_groups
from quantkit.compress.recipe.linears import LayerLinears, Schemes, count_linears, fallback_notes, group_notes
from quantkit.compress.recipe.load import Recipe, regrouped, settled, with_samples
from quantkit.engine_rules import UNKNOWN, StoredLinear, StoredModel, judge
from quantkit.errors import InputError, RecipeError, SchemeError
from quantkit.formats import REGISTRY as FORMATS
from quantkit.formats import writable
from quantkit.models.family import Family
from quantkit.models.linear_sets import find_expert, fused_conflicts
from quantkit.numerics.scales import has_two_levels
from quantkit.numerics.scheme import LinearScheme, Scheme, WeightScheme
from quantkit.results import EngineReading

Stored = Callable[[str], LinearScheme | None]  # from a linear's full name to the scheme of its codes in the source


class Assigned(NamedTuple):
    """Schemes of a model's linears.

    Args:
        schemes: for each layer, the scheme of each linear.
        warnings: warnings, one sentence each.
        dequantize: whether loaders must dequantize the weights; see `Family.decode_at_load`.
    """

    schemes: Sequence[Schemes]
    warnings: tuple[str, ...] = ()
    dequantize: bool = False


Leave = Callable[[Sequence[Schemes]], Assigned]


def assign(recipe: Recipe, layers: Sequence[LayerLinears], stored: Stored) -> list[Schemes]:
    """Return the scheme that the recipe gives each linear, with group sizes lowered until they divide its inputs.

    Args:
        recipe: the recipe.
        layers: layers of the model.
        stored: function from a linear's full name to the scheme of its codes in the source; None = the source has no
            codes of the linear.
    Raises:
        RecipeError: a linear must keep the source's codes, but the source has none, or the recipe asks for a scheme
            that cannot hold them.
    """
    towers = _tower_scheme(recipe, layers)
    heads = replace(towers, default=recipe.mtp)

    def scheme_of(layer: LayerLinears, name: str) -> LinearScheme | None:
        full = f"{layer.name}.{name}"
        if layer.is_head:
            return heads.find(full)
        return towers.find(full) if layer.beside else _scheme_of(recipe, full, stored)

    return [
        _fitted(layer.shapes, {name: scheme_of(layer, name) for name in layer.shapes}, recipe.scheme.keeps, layer.name)
        for layer in layers
    ]


def _fitted(
    shapes: Mapping[str, tuple[int, int]], schemes: Schemes, keeps: Callable[[str], bool], layer: str
) -> Schemes:
    """Return the schemes of a layer with group sizes lowered so that they divide the number of inputs of each linear.

    All experts that have the same weight scheme in the recipe get the same group size.
    """
    experts: dict[WeightScheme, int] = {}  # greatest common divisor of the experts' numbers of inputs
    for name, scheme in schemes.items():
        if scheme is not None and find_expert(name) is not None:
            experts[scheme.weight] = math.gcd(experts.get(scheme.weight, 0), shapes[name][1])

    def fitted(name: str, scheme: LinearScheme | None) -> LinearScheme | None:
        if scheme is None or keeps(f"{layer}.{name}"):
            return scheme
        width = shapes[name][1] if find_expert(name) is None else experts[scheme.weight]
        weight = scheme.weight.fitted(width)
        return scheme if weight is scheme.weight else replace(scheme, weight=weight)

    return {name: fitted(name, scheme) for name, scheme in schemes.items()}


def uniform_groups(recipe: Recipe, layers: Sequence[LayerLinears], stored: Stored) -> Recipe:
    """Return the recipe with its group size replaced by the smallest that `assign` gives to any linear. Return the same
    object if no linear gets a smaller size than the recipe's.
    """
    if recipe.scheme.default is None or recipe.scheme.default.weight.dtype.group is not None:
        return recipe
    asked = recipe.scheme.default.weight.group_size
    given = {scheme.weight.group_size for of in assign(recipe, layers, stored) for scheme in of.values() if scheme}
    sizes = [size for size in given if size is not None]
    if asked is None or not sizes or min(sizes) >= asked:
        return recipe
    return regrouped(recipe, asked, min(sizes))


def _names(layers: Sequence[LayerLinears], *, beside: bool) -> list[str]:
    return [f"{layer.name}.{name}" for layer in layers if layer.beside is beside for name in layer.shapes]


def _tower_scheme(recipe: Recipe, layers: Sequence[LayerLinears]) -> Scheme:
    """Return the rules of a recipe that apply to vision and audio towers: ignore patterns, and rules that match no
    linear of the decoder layers.
    """
    if not any(layer.beside for layer in layers):
        return Scheme(default=None)
    own = set(recipe.scheme.unmatched(_names(layers, beside=False)))
    return Scheme(default=None, rules=tuple(r for r in recipe.scheme.rules if r.linear is None or r in own))


def _scheme_of(recipe: Recipe, name: str, stored: Stored) -> LinearScheme | None:
    if not recipe.scheme.keeps(name):
        return recipe.scheme.find(name)
    scheme = stored(name)
    if scheme is None:
        raise RecipeError(
            f"an override with 'keep: source' matches {name}, but the source stores this linear unquantized; use a "
            "narrower pattern"
        )
    asked = recipe.scheme.find(name)
    if asked is None or asked.weight == scheme.weight:
        return scheme
    if not has_two_levels(scheme.weight, asked.weight):
        raise RecipeError(
            f"{name} is {scheme.describe()} in the source; its codes cannot be kept as {asked.weight.describe()} (only "
            "mxfp4 can be kept as nvfp4). Remove 'weights' from the override that matches this linear"
        )
    return asked


def fit(
    recipe: Recipe, family: Family, layers: Sequence[LayerLinears], stored: Stored, leave: Leave = Assigned,
    *, unlisted: bool = False, engine: str | None = None, hidden_size: int | None = None,
) -> tuple[Recipe, Assigned]:  # fmt: skip
    """Apply a recipe to a model, and check that the format and the engine support the result.

    Args:
        recipe: the recipe; `symmetric: auto` means zero points if the format and the engine support them for this
            model.
        family: family of the model.
        layers: layers of the model.
        stored: see `assign`.
        leave: function that, given the schemes of each layer, removes those of linears that loaders could not read, and
            adds a warning.
        unlisted: see `conflicts`.
        engine: engine that must read the result, such as `vllm:h100`. None = no particular engine; choices that the
            recipe leaves open then suit transformers.
        hidden_size: hidden size of the model, on which kernels of experts depend; None = unknown.
    Returns:
        The recipe with `symmetric: auto`, `samples: auto` and group sizes resolved, and the schemes that it assigns.
    Raises:
        InputError: the first reason why the recipe cannot be used.
    """
    model = _Model(family, layers, stored, leave, unlisted, engine, hidden_size)
    chosen, made = model.settle_groups(recipe)
    notes = (*group_notes(recipe, layers, made.schemes), *fallback_notes(recipe, layers, made.schemes))
    warnings = (*notes, *made.warnings)
    if engine is not None:
        reading = model.reading(chosen, made)
        name, why = f"{reading.engine} {reading.release}", ", ".join(filter(None, (reading.reason, reading.cache)))
        if not reading.is_right:
            is_for = "is not known to work in" if reading.reads == UNKNOWN else "does not work in"
            hint = "use a different recipe, or leave out the engine"
            raise SchemeError(f"the result of recipe {recipe.name!r} {is_for} {name} ({why}); {hint}")
        warnings = (f"{name}: {reading.reads}, {why}", *warnings)
    each = zip(layers, made.schemes, strict=True)
    widths = [layer.shapes[name][1] for layer, of in each for name, scheme in of.items() if scheme is not None]
    return with_samples(chosen, max(widths, default=0)), made._replace(warnings=warnings)


@dataclass(frozen=True, slots=True)
class _Model:
    """The arguments of `fit` other than the recipe; see `fit`."""

    family: Family
    layers: Sequence[LayerLinears]
    stored: Stored
    leave: Leave
    unlisted: bool
    engine: str | None
    hidden_size: int | None

    def settle_groups(self, recipe: Recipe) -> tuple[Recipe, Assigned]:
        """Call `settle`; if the linears get different group sizes, also try one size for the whole model.

        Loaders of compressed-tensors accept zero points only with one size for the whole model. If both ways are
        possible, prefer the result that the requested engine can read. If the engine reads both or neither, prefer the
        result with more linears that have zero points. If these numbers are equal too, keep different sizes.
        """
        alike = uniform_groups(recipe, self.layers, self.stored)
        if alike is recipe:
            return self.settle(recipe)
        try:
            made = self.settle(recipe)
        except SchemeError:
            with suppress(InputError):
                return self.settle(alike)
            raise
        with suppress(InputError):
            return max(made, self.settle(alike), key=lambda one: self._merit(*one))  # equal merit: keep several sizes
        return made

    def _merit(self, recipe: Recipe, made: Assigned) -> tuple[bool, int]:
        """Return a key that is larger for better results: whether the requested engine can read the result, then the
        number of linears with zero points.
        """
        reads = self.engine is None or self.reading(recipe, made).is_right
        return reads, sum(not scheme.weight.symmetric for of in made.schemes for scheme in of.values() if scheme)

    def settle(self, recipe: Recipe) -> tuple[Recipe, Assigned]:
        """Replace `symmetric: auto` by true or false, without changing group sizes. Use zero points (false) unless the
        format or the engine cannot read them.
        """
        first, other = settled(recipe, symmetric=False), settled(recipe, symmetric=True)
        if first is recipe:
            return recipe, self.checked(recipe)
        made, is_right = Assigned(()), None
        failure = InputError()
        try:
            made = self.checked(first)
            reading = self.reading(first, made)
            is_right, reason = reading.is_right, "with zero points, loaders could read fewer of the linears"
        except InputError as error:
            failure, reason = error, re.split("[:;] set ", str(error))[0]
        else:
            if not is_right:
                reason = f"{reading.engine} {reading.release}: {reading.reason.partition('; ')[0]}"
            elif count_linears(made.schemes) == count_linears(assign(first, self.layers, self.stored)):
                return first, made
        with suppress(InputError):
            again = self.checked(other)
            read = is_right is False and self.reading(other, again).is_right
            if read or count_linears(again.schemes) > count_linears(made.schemes):
                text = f"symmetric: auto gives the weights no zero points: {reason}"
                return other, again._replace(warnings=(text, *again.warnings))
        if not made.schemes:
            raise failure
        return first, made

    def reading(self, recipe: Recipe, made: Assigned) -> EngineReading:
        """Predict how the requested engine, or transformers if none is requested, would read the compressed model."""
        model = stored_model(recipe, self.family, self.layers, made.schemes, self.hidden_size)
        return judge(self.engine or "transformers", model)

    def checked(self, recipe: Recipe) -> Assigned:
        """Check that a recipe can be used on the model, and return the schemes that it assigns."""
        made, format_ = self.leave(assign(recipe, self.layers, self.stored)), FORMATS.load(recipe.format)
        for problem in conflicts(recipe, self.layers, made.schemes, self.unlisted):
            raise problem
        quantized = [{name: scheme for name, scheme in of.items() if scheme is not None} for of in made.schemes]
        parts = list(zip(self.layers, quantized, strict=True))
        # Called for its checks: schemes that fit alone may not fit together.
        format_.config({f"{layer.name}.{name}": scheme for layer, of in parts for name, scheme in of.items()}, ())
        remarks = format_.check_model(self.family, [of for layer, of in parts if not layer.beside])
        return made._replace(warnings=(*remarks, *made.warnings))


def stored_model(
    recipe: Recipe, family: Family, layers: Sequence[LayerLinears], assigned: Sequence[Schemes], hidden_size: int | None
) -> StoredModel:
    """Describe the checkpoint that a recipe will write, so that `engine_rules` can tell which engines read it.

    Args:
        recipe: the recipe.
        family: family of the model.
        layers, assigned: the model's linears and their schemes.
        hidden_size: hidden size of the model.
    """
    format_, goal = FORMATS.load(recipe.format), recipe.kv_cache
    kinds = dict.fromkeys(
        StoredLinear(scheme=scheme, shape=layer.shapes[name], expert=find_expert(name) is not None)
        for layer, schemes in zip(layers, assigned, strict=True)
        for name, scheme in schemes.items()
        if scheme is not None
    )
    quantized_cache = goal is not None and any(scheme.is_quantized for scheme in goal.schemes)
    fixed = goal is not None and goal.has_fixed_scales and format_.holds_cache_scales
    return StoredModel(
        format=recipe.format,
        linears=tuple(kinds) if format_.keeps_codes else (),
        cache="fp8" if fixed else "own" if quantized_cache else "",
        hidden_size=hidden_size,
        group_order=format_.holds_group_index and reorders_groups(recipe.steps.values()),
        compressed_experts=family.compressed_experts,
    )


def conflicts(
    recipe: Recipe, layers: Sequence[LayerLinears], assigned: Sequence[Schemes], unlisted: bool = False
) -> Iterator[InputError]:
    """Yield the reasons why a recipe cannot be used on a model.

    Reasons are patterns that match no linear, fused linears with different schemes, and unsupported schemes.

    Args:
        recipe: the recipe.
        layers: layers of the model.
        assigned: result of `assign`.
        unlisted: whether the model has towers that are not in `layers`; if so, patterns that match nothing are allowed.
    """
    names, towers = _names(layers, beside=False), _names(layers, beside=True)
    elsewhere = set(recipe.scheme.unmatched(towers)) if towers else set()
    for rule in () if unlisted else recipe.scheme.unmatched(names):
        if towers and rule not in elsewhere:
            if rule.keep:
                yield RecipeError(
                    f"pattern {rule.pattern!r} matches only linears outside the decoder layers, whose codes cannot be "
                    "kept; remove the override that has this pattern and 'keep: source'"
                )
            continue
        also = f" or {towers[0]!r}" if towers else ""
        yield RecipeError(
            f"pattern {rule.pattern!r} matches no linear of this model; correct it: names look like {names[0]!r}{also}"
        )
    yield from _without_inputs(layers, assigned)
    count = sum(not layer.beside for layer in layers)
    unknown = [number for number, _ in recipe.kv_cache.layers if number >= count] if recipe.kv_cache else []
    if unknown:
        yield RecipeError(f"kv_cache.layers: there is no layer {unknown[0]}; this model has layers 0 to {count - 1}")
    if recipe.kv_cache is None and not any(scheme for schemes in assigned for scheme in schemes.values()):
        yield RecipeError(f"recipe {recipe.name!r} quantizes no linear of this model; remove patterns from ignore")
    for layer, schemes in zip(layers, assigned, strict=True) if FORMATS.load(recipe.format).fuses else ():
        for conflict in fused_conflicts(layer.sets, schemes):
            yield RecipeError(f"{layer.name}: {conflict}; widen the pattern in overrides or ignore to cover them all")
    format_, alike = FORMATS.load(recipe.format), dict[tuple[LinearScheme, tuple[int, int]], str]()
    for layer, schemes in zip(layers, assigned, strict=True):  # check each pair of scheme and shape once
        for name, scheme in schemes.items():
            if scheme is not None:
                alike.setdefault((scheme, layer.shapes[name]), f"{layer.name}.{name}")
    for (scheme, shape), name in alike.items():
        try:
            format_.check(scheme, shape)
        except SchemeError as error:
            if recipe.scheme.keeps(name):
                yield SchemeError(f"the codes of {name} cannot be kept: {error}")
            else:
                yield SchemeError(f"{name}: {error}")
    other = next((name for name, step in recipe.steps.items() if not step.fits_blocks), None)
    ggml = next((scheme.weight for scheme, _ in alike if scheme.weight.dtype.block is not None), None)
    if other is not None and ggml is not None:
        yield SchemeError(f"step {other} cannot choose the scales of {ggml.describe()} blocks; use gptq or awq instead")
    if not format_.holds_group_index and reorders_groups(recipe.steps.values()):
        yield SchemeError(
            f"format {recipe.format!r} cannot store groups in activation order: "
            "set steps.gptq.act_order=weight, or set format to one of "
            f"{writable(lambda other: other.holds_group_index)}"
        )


def _without_inputs(layers: Sequence[LayerLinears], assigned: Sequence[Schemes]) -> Iterator[InputError]:
    """Yield an error if a tower's linear has static activation scales, because towers get no calibration data."""
    for layer, schemes in zip(layers, assigned, strict=True):
        for name, scheme in schemes.items():
            if layer.beside and scheme and scheme.activation and scheme.activation.is_calibrated:
                yield RecipeError(
                    f"{layer.name}.{name} is outside the decoder layers and sees no calibration data, which static "
                    f"scales of {scheme.activation.describe()} inputs need; remove its override, or set "
                    "activations.dynamic=true"
                )
                return
