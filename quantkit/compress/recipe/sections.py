"""Convert sections of a recipe: `weights:`, `activations:` and `kv_cache:` to schemes and to plain data with every
default filled in, and `steps:` to steps with every option filled in.
"""

import dataclasses
from typing import Any, Literal, get_type_hints

from pydantic import create_model

from quantkit.compress.algorithms import REGISTRY
from quantkit.compress.algorithms.base import Step
from quantkit.compress.recipe import schema
from quantkit.compress.recipe.schema import RecipeSection, as_recipe_error, validate
from quantkit.errors import InputError, RecipeError
from quantkit.numerics.dtype import find_dtype
from quantkit.numerics.kv_cache import CacheGoal, find_cache_scheme, scheme_to_dict
from quantkit.numerics.scheme import ActivationScheme, CacheScheme, KVScheme, WeightScheme
from quantkit.safety.untrusted import shorten

# Default granularity of number types; "token" for types not listed. Floats work with one scale for all tokens; integers
# need one per token. Integer keys need one per channel, because they differ far more by channel than by token.
_GRANULARITY = {
    ("keys", "fp8"): "tensor",
    ("values", "fp8"): "tensor",
    ("keys", "int8"): "channel",
    ("keys", "int4"): "channel",
    ("keys", "int3"): "channel",
}


def weight_fields(weights: schema.WeightsSection) -> dict[str, Any]:
    """Return `weights` as plain data, with `group_size: auto` replaced by the number type's default."""
    fields = weights.model_dump()
    return fields if fields["group_size"] != "auto" else {**fields, "group_size": _own_group(fields["dtype"])}


def changed_weights(weights: schema.WeightsSection, changes: schema.WeightChanges) -> dict[str, Any]:
    """Return the `weights` of an override as plain data. Fields that are missing are taken from the recipe's `weights`.

    Args:
        weights: section `weights` of the recipe.
        changes: section `weights` of the override.
    """
    inherited, given = weight_fields(weights), changes.model_dump(exclude_none=True)
    dtype = given.get("dtype", inherited["dtype"])
    if dtype != inherited["dtype"] and (find_dtype(dtype).group or find_dtype(inherited["dtype"]).group):
        inherited["group_size"] = _own_group(dtype)  # group sizes of one type do not suit the other
    if given.get("group_size") == "auto":
        given["group_size"] = _own_group(dtype)
    return {**inherited, **given}


def activation_fields(activations: schema.ActivationsSection) -> dict[str, Any]:
    """Return `activations` as plain data, with a missing group size replaced by the number type's default."""
    fields = activations.model_dump()
    return {**fields, "group_size": fields["group_size"] or find_dtype(fields["dtype"]).group}


def weight_scheme(fields: dict[str, Any], path: str) -> WeightScheme:
    """Convert the plain data of a `weights` section to a scheme.

    Args:
        fields: plain data from `weight_fields` or `changed_weights`.
        path: location in the recipe file, for messages.
    Raises:
        RecipeError: the scheme is not valid.
    """
    size, rows, strict = fields["group_size"], 1, isinstance(fields["group_size"], dict)
    size = size["size"] if strict else size
    if isinstance(size, str) and "x" in size:
        rows, size = map(int, size.split("x"))
    with as_recipe_error(path):
        dtype, symmetric = find_dtype(fields["dtype"]), fields["symmetric"]
        if dtype.block is not None:  # the type decides whether there are minimums
            symmetric = not dtype.has_minimums
        return WeightScheme(
            dtype=dtype,
            group_size=size if isinstance(size, int) else None,
            # "auto": zero points wherever the scheme allows them; `assignment.fit` decides the rest for the model.
            symmetric=(dtype.kind == "float" or rows != 1 or size == "tensor") if symmetric == "auto" else symmetric,
            block_rows=None if size == "tensor" else rows,
            signed_scales=fields.get("signed_scales", True),
            strict_groups=strict,
        )


def activation_scheme(fields: dict[str, Any]) -> ActivationScheme:
    """Convert the plain data of the section `activations` to a scheme.

    Args:
        fields: plain data from `activation_fields`.
    Raises:
        RecipeError: the scheme is not valid.
    """
    dynamic = fields["dynamic"]
    with as_recipe_error("activations"):
        scheme = ActivationScheme(
            dtype=find_dtype(fields["dtype"]),
            granularity="token" if dynamic else "tensor",
            dynamic=dynamic,
            group_size=fields["group_size"],
        )
    if fields["clip"] != "absmax" and dynamic:
        raise RecipeError(
            "activations.clip: only static scales are clipped; leave it out, or set activations.dynamic=false"
        )
    return scheme


def build_cache(section: schema.KVCacheSection) -> CacheGoal:
    """Build the KV cache scheme that a recipe asks for.

    Args:
        section: section `kv_cache` of the recipe.
    Raises:
        RecipeError: a KV cache cannot have this number type or granularity, or settings contradict each other.
    """
    scheme, layers = _cache_scheme(section), dict[int, KVScheme]()
    for index, entry in enumerate(section.layers):
        with as_recipe_error(f"kv_cache.layers[{index}]"):
            given = KVScheme() if entry.skip else _cache_scheme(_changed_cache(section, entry))
            if given.key.is_fixed or scheme.key.is_fixed:
                raise RecipeError("scales are fixed, so all layers need one type; set kv_cache.granularity=token")
            if twice := [number for number in entry.numbers if number in layers]:
                raise RecipeError(f"layer {twice[0]} has two entries; remove one")
        layers |= dict.fromkeys(entry.numbers, given)
    return CacheGoal(
        scheme=scheme,
        layers=tuple(sorted(layers.items(), key=lambda pair: pair[0])),
        outliers=section.outliers == "detect",
        remedy=section.remedy,
        clip=section.clip,
    )


def _cache_scheme(section: schema.KVCacheSection) -> KVScheme:
    """Return the KV cache scheme of all layers that have no entry in `kv_cache.layers`."""
    key, value = _side(section, "keys"), _side(section, "values")
    if section.rotation != "none" and key.granularity != "token":
        raise RecipeError(
            f"kv_cache.rotation: {section.rotation} only helps keys with one scale per token, but keys are "
            f"{key.describe()}; set kv_cache.keys.granularity=token or kv_cache.rotation=none"
        )
    if key.is_fixed != value.is_fixed or (key.is_fixed and key.granularity != value.granularity):
        rule = (
            "fixed scales must have the same granularity for both"
            if key.is_fixed and value.is_fixed
            else "either both or neither must have fixed scales"
        )
        raise RecipeError(
            f"kv_cache: keys are {key.describe()} and values are {value.describe()}, but {rule}; set only "
            "kv_cache.granularity, which applies to both"
        )
    return KVScheme(key=key, value=value, rotation=section.rotation)


def _changed_cache(section: schema.KVCacheSection, entry: schema.CacheLayers) -> schema.KVCacheSection:
    """Return `section` with its keys and values replaced by those that `entry` gives."""
    sides = {}
    for name in ("keys", "values"):
        own, given = getattr(section, name), getattr(entry, name)
        if given is not None:
            # Each type has its own default granularity, so only an entry without a type keeps the section's.
            kept = own.granularity if given.dtype is None else None
            sides[name] = schema.CacheSide(dtype=given.dtype or own.dtype, granularity=given.granularity or kept)
    return section.model_copy(update=sides)


def cache_fields(section: schema.KVCacheSection) -> dict[str, Any]:
    """Return the section `kv_cache` as plain data with every default filled in.

    Raises:
        RecipeError: see `build_cache`.
    """
    goal = build_cache(section)
    fields = {**section.model_dump(exclude={"layers"}), **_sides(goal.scheme), "granularity": None}
    if not section.layers:  # left out, so that older recipes keep their identity
        return fields
    return {
        **fields,
        "layers": [_layer_fields(entry, goal.of_layer(entry.numbers[0]).scheme) for entry in section.layers],
    }


def _layer_fields(entry: schema.CacheLayers, scheme: KVScheme) -> dict[str, Any]:
    """Return an entry of `kv_cache.layers` as plain data with every default filled in."""
    if entry.skip:
        return {"numbers": list(entry.numbers), "skip": True}
    sides = {name: side for name, side in _sides(scheme).items() if getattr(entry, name) is not None}
    return {"numbers": list(entry.numbers), **sides}


def _sides(scheme: KVScheme) -> dict[str, Any]:
    """Return number type and granularity of keys and of values as plain data, without unquantized keys or values."""
    return {name: side for name in ("keys", "values") if (side := scheme_to_dict(scheme)[name]) is not None}


def _side(section: schema.KVCacheSection, name: Literal["keys", "values"]) -> CacheScheme:
    given: schema.CacheSide = getattr(section, name)
    dtype, usual = given.dtype or section.dtype, "token"
    if section.rotation == "none" or name == "values":  # rotated keys need token scales
        usual = _GRANULARITY.get((name, dtype), usual)
    with as_recipe_error(f"kv_cache.{name}"):
        return find_cache_scheme(name, dtype, given.granularity or section.granularity or usual)


def _own_group(dtype: str) -> int | str:
    return find_dtype(dtype).group or "channel"


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
