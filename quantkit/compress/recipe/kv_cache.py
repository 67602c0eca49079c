"""The `kv_cache:` of a recipe: names looked up, defaults filled in, what does not go together refused."""

from __future__ import annotations

from typing import Any, Literal

from quantkit.compress.recipe.schema import CacheSide, KVCacheSection, as_recipe_error
from quantkit.errors import RecipeError
from quantkit.numerics.kv_cache import CacheGoal, find_cache_scheme
from quantkit.numerics.scheme import CacheScheme, KVScheme

# What suits a number type where the recipe does not say: floats bear one scale for all, integers need one per token,
# and four bits need keys by channel, whose sizes differ by channel far more than by token.
_GRANULARITY = {("keys", "fp8"): "tensor", ("values", "fp8"): "tensor", ("keys", "int4"): "channel"}


def build_cache(section: KVCacheSection) -> CacheGoal:
    """What a recipe asks of the KV cache.

    Args:
        section: of the recipe.
    Raises:
        RecipeError: a number type or granularity that no cache has, or parts that contradict each other.
    """
    key, value = _side(section, "keys"), _side(section, "values")
    if section.rotation != "none" and key.granularity != "token":
        raise RecipeError(
            f"kv_cache.rotation: {section.rotation} spreads a token's channels, which only helps keys with "
            f"one scale per token, and keys are {key.describe()}; set kv_cache.keys.granularity=token or rotation=none"
        )
    if key.is_fixed != value.is_fixed or (key.is_fixed and key.granularity != value.granularity):
        raise RecipeError(
            f"kv_cache: keys {key.describe()} and values {value.describe()}: fixed scales are stored for "
            "both or for neither, and alike; set kv_cache.granularity for both"
        )
    scheme = KVScheme(key=key, value=value, rotation=section.rotation)
    return CacheGoal(scheme=scheme, outliers=section.outliers == "detect", remedy=section.remedy, clip=section.clip)


def cache_fields(section: KVCacheSection) -> dict[str, Any]:
    """The section as plain data with every default filled in; raises as `build_cache`."""
    scheme = build_cache(section).scheme
    sides = {
        name: {"dtype": side.dtype.name, "granularity": side.granularity}
        for name, side in (("keys", scheme.key), ("values", scheme.value))
        if side.dtype is not None
    }
    return {**section.model_dump(), **sides, "granularity": None}


def _side(section: KVCacheSection, name: Literal["keys", "values"]) -> CacheScheme:
    given: CacheSide = getattr(section, name)
    dtype, usual = given.dtype or section.dtype, "token"
    if section.rotation == "none" or name == "values":  # a rotation is of all channels of a token
        usual = _GRANULARITY.get((name, dtype), usual)
    with as_recipe_error(f"kv_cache.{name}"):
        return find_cache_scheme(name, dtype, given.granularity or section.granularity or usual)
