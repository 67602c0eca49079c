"""A recipe on the linears of a model: the scheme of each, and why it cannot be had. For a run and for a plan of one."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

from quantkit.compress.algorithms.base import reorders_groups
from quantkit.compress.recipe.load import Recipe, regrouped, settled
from quantkit.engines import UNKNOWN, StoredLinear, StoredModel, judge
from quantkit.errors import InputError, RecipeError, SchemeError
from quantkit.formats import REGISTRY as FORMATS
from quantkit.formats import writable
from quantkit.models.family import Family
from quantkit.models.linear_sets import LinearSet, find_expert, fused_conflicts
from quantkit.numerics.scales import has_two_levels
from quantkit.numerics.scheme import LinearScheme, Scheme, WeightScheme
from quantkit.results import EngineReading

Schemes = dict[str, LinearScheme | None]
"""Of the linears of a layer by relative name; None = ignored."""

Stored = Callable[[str], LinearScheme | None]  # by full name


class Assigned(NamedTuple):
    """Schemes of a model's linears.

    Args:
        schemes: of each layer.
        warnings: one sentence each.
        dequantize: whether loaders must dequantize the weights, see `Family.decode_at_load`.
    """

    schemes: Sequence[Schemes]
    warnings: tuple[str, ...] = ()
    dequantize: bool = False


Leave = Callable[[Sequence[Schemes]], Assigned]


class LayerLinears(NamedTuple):
    """A layer's full name, (N, K) of its quantizable linears by relative name, and which of them belong together.

    `beside`: no decoder layer but a module of a vision or audio tower, which is quantized only where a rule says so
    that names nothing in the decoder layers.
    """

    name: str
    shapes: Mapping[str, tuple[int, int]]
    sets: Sequence[LinearSet]
    beside: bool = False


def assign(recipe: Recipe, layers: Sequence[LayerLinears], stored: Stored) -> list[Schemes]:
    """Schemes that a recipe's rules give each linear of each layer, in groups that divide its inputs if there are any.

    Args:
        recipe: the recipe.
        layers: of the model.
        stored: by full name, the scheme of the codes that the source has of a linear; None = it has none.
    Raises:
        RecipeError: a linear is to keep codes that there are not.
    """
    towers = _tower_scheme(recipe, layers)

    def scheme_of(layer: LayerLinears, name: str) -> LinearScheme | None:
        full = f"{layer.name}.{name}"
        return towers.find(full) if layer.beside else _scheme_of(recipe, full, stored)

    return [
        _fitted(layer.shapes, {name: scheme_of(layer, name) for name in layer.shapes}, recipe.scheme.keeps, layer.name)
        for layer in layers
    ]


def _fitted(
    shapes: Mapping[str, tuple[int, int]], schemes: Schemes, keeps: Callable[[str], bool], layer: str
) -> Schemes:
    """The schemes of a layer in groups that divide the inputs of each linear; engines fuse experts, which share one."""
    experts: dict[WeightScheme, int] = {}  # what all of them have a multiple of
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
    """A recipe whose groups are all as small as the smallest that `assign` gives; itself where they are so already."""
    if recipe.scheme.default is None:
        return recipe
    asked = recipe.scheme.default.weight.group_size
    given = {scheme.weight.group_size for of in assign(recipe, layers, stored) for scheme in of.values() if scheme}
    sizes = [size for size in given if size is not None]
    if asked is None or not sizes or min(sizes) >= asked:
        return recipe
    return regrouped(recipe, asked, min(sizes))


def group_notes(asked: Recipe, layers: Sequence[LayerLinears], assigned: Sequence[Schemes]) -> tuple[str, ...]:
    """A sentence on the linears whose groups are smaller than a recipe asks, if there are any.

    Args:
        asked: the recipe as it was given.
        layers: of the model.
        assigned: what its linears have.
    """
    smaller: dict[tuple[int, int], list[str]] = {}
    widths: dict[int, set[int]] = {}
    for layer, schemes in zip(layers, assigned, strict=True):
        for name, scheme in schemes.items():
            rule = asked.scheme.find(full := f"{layer.name}.{name}")
            if scheme is None or rule is None or asked.scheme.keeps(full):
                continue
            before, after = rule.weight.group_size, scheme.weight.group_size
            if before is not None and after is not None and before != after:
                smaller.setdefault((before, after), []).append(full)
                if layer.shapes[name][1] % before:
                    widths.setdefault(before, set()).add(layer.shapes[name][1])
    if not smaller:
        return ()
    total = _count(assigned)
    what = "; ".join(
        (f"all {total} linears" if len(names) == total else f"{len(names)} of {total} linears, such as {names[0]},")
        + f" have groups of {after} instead"
        for (before, after), names in smaller.items()
    )
    why = ", ".join(
        f"group_size {before} does not divide {' and '.join(map(str, sorted(own)))} inputs"
        for before, own in widths.items()
    )
    return (f"{why}: {what}",)


def _names(layers: Sequence[LayerLinears], *, beside: bool) -> list[str]:
    return [f"{layer.name}.{name}" for layer in layers if layer.beside is beside for name in layer.shapes]


def _tower_scheme(recipe: Recipe, layers: Sequence[LayerLinears]) -> Scheme:
    """Part of a recipe about towers: what it ignores anywhere, and the rules that name nothing else."""
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
            f"{name}: keep: source matches this linear, but the source stores it unquantized; make the pattern "
            "more specific"
        )
    asked = recipe.scheme.find(name)
    if asked is None or asked.weight == scheme.weight:
        return scheme
    if not has_two_levels(scheme.weight, asked.weight):
        raise RecipeError(
            f"{name} is {scheme.describe()} in the source, which cannot be kept as {asked.weight.describe()}: only "
            "mxfp4 as nvfp4; leave out the weights beside keep"
        )
    return asked


def fit(
    recipe: Recipe, family: Family, layers: Sequence[LayerLinears], stored: Stored, leave: Leave = Assigned,
    *, unlisted: bool = False, engine: str | None = None, hidden_size: int | None = None,
) -> tuple[Recipe, Assigned]:  # fmt: skip
    """A recipe on a model, checked.

    Args:
        recipe: with `symmetric: auto`, weights have zero points if format and reader take them for this model.
        family: of the model.
        layers: of it.
        stored: see `assign`.
        leave: takes schemes away from linears that loaders could not read, and says so.
        unlisted: see `conflicts`.
        engine: that is to read the result, such as `vllm:h100`; None = transformers where a recipe leaves something
            open, and nobody else.
        hidden_size: of the model, which kernels of experts mind; None = not known.
    Returns:
        the recipe with nothing left open, and what it gives the model.
    Raises:
        InputError: the first reason why it cannot be used.
    """
    model = _Model(family, layers, stored, leave, unlisted, engine, hidden_size)
    chosen, made = model.settle_groups(recipe)
    warnings = (*group_notes(recipe, layers, made.schemes), *made.warnings)
    if engine is not None:
        reading = model.reading(chosen, made)
        said = ", ".join(filter(None, (reading.reads, reading.reason, reading.cache)))
        text = f"{reading.engine} {reading.release}: {said}"
        if not reading.is_right:
            is_for = "is not known to work in" if reading.reads == UNKNOWN else "does not work in"
            raise SchemeError(f"the result of recipe {recipe.name!r} {is_for} {text}")
        warnings = (text, *warnings)
    return chosen, made._replace(warnings=warnings)


@dataclass(frozen=True, slots=True)
class _Model:
    """Facts that `fit` needs besides a recipe."""

    family: Family
    layers: Sequence[LayerLinears]
    stored: Stored
    leave: Leave
    unlisted: bool
    engine: str | None
    hidden_size: int | None

    def settle_groups(self, recipe: Recipe) -> tuple[Recipe, Assigned]:
        """`settle`, with groups of one size in the whole model where format or reader do not take several.

        Loaders of compressed-tensors take zero points with one size only, which are worth more than larger groups.
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
            return max(made, self.settle(alike), key=lambda one: self._merit(*one))  # the first of equals
        return made

    def _merit(self, recipe: Recipe, made: Assigned) -> tuple[bool, int]:
        """Whether who is named reads it, and how many linears have zero points."""
        reads = self.engine is None or self.reading(recipe, made).is_right
        return reads, sum(not scheme.weight.symmetric for of in made.schemes for scheme in of.values() if scheme)

    def settle(self, recipe: Recipe) -> tuple[Recipe, Assigned]:
        """`fit`, whoever reads it: with zero points where they are left open and nothing speaks against them."""
        first, other = settled(recipe, symmetric=False), settled(recipe, symmetric=True)
        if first is recipe:
            return recipe, self.checked(recipe)
        made, is_right = Assigned(()), None
        failure = InputError()
        try:
            made = self.checked(first)
            reading = self.reading(first, made)
            is_right, reason = reading.is_right, "fewer of them would be loaded with zero points"
        except InputError as error:
            failure, reason = error, str(error).partition(": set ")[0]
        else:
            if not is_right:
                reason = f"{reading.engine} {reading.release}: {reading.reason.partition('; ')[0]}"
            elif _count(made.schemes) == _count(assign(first, self.layers, self.stored)):
                return first, made
        with suppress(InputError):
            again = self.checked(other)
            read = is_right is False and self.reading(other, again).is_right
            if read or _count(again.schemes) > _count(made.schemes):
                text = f"symmetric: auto gives these weights no zero points: {reason}"
                return other, again._replace(warnings=(text, *again.warnings))
        if not made.schemes:
            raise failure
        return first, made

    def reading(self, recipe: Recipe, made: Assigned) -> EngineReading:
        """Answer of the engine that will read it, transformers where none is named."""
        model = stored_model(recipe, self.family, self.layers, made.schemes, self.hidden_size)
        return judge(self.engine or "transformers", model)

    def checked(self, recipe: Recipe) -> Assigned:
        """What a recipe gives the model."""
        made, format_ = self.leave(assign(recipe, self.layers, self.stored)), FORMATS.load(recipe.format)
        for problem in conflicts(recipe, self.layers, made.schemes, self.unlisted):
            raise problem
        quantized = [{name: scheme for name, scheme in of.items() if scheme is not None} for of in made.schemes]
        parts = list(zip(self.layers, quantized, strict=True))
        # For its refusals: schemes that fit alone may not go together.
        format_.config({f"{layer.name}.{name}": scheme for layer, of in parts for name, scheme in of.items()}, ())
        remarks = format_.check_model(self.family, [of for layer, of in parts if not layer.beside])
        return made._replace(warnings=(*remarks, *made.warnings))


def _count(assigned: Sequence[Schemes]) -> int:
    return sum(scheme is not None for schemes in assigned for scheme in schemes.values())


def stored_model(
    recipe: Recipe,
    family: Family,
    layers: Sequence[LayerLinears],
    assigned: Sequence[Schemes],
    hidden_size: int | None,
) -> StoredModel:
    """Description of the future checkpoint, for the rules of engines.

    Args:
        recipe: the recipe.
        family: of the model.
        layers, assigned: its linears and their schemes.
        hidden_size: of the model.
    """
    format_, goal = FORMATS.load(recipe.format), recipe.kv_cache
    kinds = dict.fromkeys(
        StoredLinear(scheme=scheme, shape=layer.shapes[name], expert=find_expert(name) is not None)
        for layer, schemes in zip(layers, assigned, strict=True)
        for name, scheme in schemes.items()
        if scheme is not None
    )
    quantized_cache = goal is not None and goal.scheme.is_quantized
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
    """Why a recipe cannot be used on a model: rules that mean nothing, sets that do not agree, a format that lacks it.

    Args:
        recipe: the recipe.
        layers: of the model.
        assigned: as `assign` gives it.
        unlisted: whether the model has towers that are not among the layers, of which rules may be.
    """
    names, towers = _names(layers, beside=False), _names(layers, beside=True)
    elsewhere = set(recipe.scheme.unmatched(towers)) if towers else set()
    for rule in () if unlisted else recipe.scheme.unmatched(names):
        if towers and rule not in elsewhere:
            if rule.keep:
                yield RecipeError(f"pattern {rule.pattern!r}: only linears of decoder layers can keep their codes")
            continue
        also = f" or {towers[0]!r}" if towers else ""
        yield RecipeError(
            f"pattern {rule.pattern!r} matches no linear of this model; names look like {names[0]!r}{also}"
        )
    yield from _without_inputs(layers, assigned)
    if recipe.kv_cache is None and not any(scheme for schemes in assigned for scheme in schemes.values()):
        yield RecipeError(f"recipe {recipe.name!r} leaves every linear alone; take patterns out of ignore")
    for layer, schemes in zip(layers, assigned, strict=True):
        for conflict in fused_conflicts(layer.sets, schemes):
            hint = "widen the pattern in overrides or ignore to cover all of them"
            yield RecipeError(f"{layer.name}: {conflict}; {hint}")
    format_, alike = FORMATS.load(recipe.format), dict[tuple[LinearScheme, tuple[int, int]], str]()
    for layer, schemes in zip(layers, assigned, strict=True):  # thousands of linears have a few schemes and shapes
        for name, scheme in schemes.items():
            if scheme is not None:
                alike.setdefault((scheme, layer.shapes[name]), f"{layer.name}.{name}")
    for (scheme, shape), name in alike.items():
        try:
            format_.check(scheme, shape)
        except SchemeError as error:
            if recipe.scheme.keeps(name):
                yield SchemeError(f"{name} cannot be kept as the source has it: {error}")
            else:
                yield SchemeError(f"{name}: {error}")
    if not format_.holds_group_index and reorders_groups(recipe.steps.values()):
        yield SchemeError(
            f"format {recipe.format!r} cannot store groups in activation order: "
            f"set steps.gptq.act_order=weight, or format to one of {writable(lambda other: other.holds_group_index)}"
        )


def _without_inputs(layers: Sequence[LayerLinears], assigned: Sequence[Schemes]) -> Iterator[InputError]:
    """Towers are rounded without data, so nothing is known of their inputs."""
    for layer, schemes in zip(layers, assigned, strict=True):
        for name, scheme in schemes.items():
            if layer.beside and scheme and scheme.activation and scheme.activation.is_calibrated:
                yield RecipeError(
                    f"{layer.name}.{name} is outside the decoder layers and sees no calibration data, which scales of "
                    f"{scheme.activation.describe()} inputs need; drop its override, or set activations.dynamic=true"
                )
                return
