"""The `kv_cache:` of a recipe: names looked up, defaults filled in, what does not go together refused."""

from __future__ import annotations

from typing import Any

from quantkit.compress.recipe.schema import CacheSide, Document, KVCacheSection
from quantkit.errors import RecipeError, SchemeError
from quantkit.numerics.kv_cache import CacheGoal, find_cache_scheme
from quantkit.numerics.scheme import CacheScheme, KVScheme

# What suits a number type where the recipe does not say: floats bear one scale for all, integers need one per token,
# and four bits need keys by channel, whose sizes differ by channel far more than by token.
_GRANULARITY = {"fp8": "tensor", "int8": "token", "int4": "token"}
_KEYS = {"int4": "channel"}


def build_cache(document: Document, where: str) -> CacheGoal | None:
    """What a recipe asks of the KV cache; None when it says nothing.

    Args:
        document: the whole recipe.
        where: the file, for messages.
    Raises:
        RecipeError: a number type or granularity that no cache has, or parts that contradict each other.
    """
    section = document.kv_cache
    if section is None:
        return None
    key, value = (_side(section, name, where) for name in ("keys", "values"))
    if section.rotation != "none" and key.granularity != "token":
        raise RecipeError(
            f"{where}: kv_cache.rotation: {section.rotation} spreads a token's channels, which only helps keys with "
            f"one scale per token, and keys are {key.describe()}; set kv_cache.keys.granularity=token or rotation=none"
        )
    if key.is_fixed != value.is_fixed or (key.is_fixed and key.granularity != value.granularity):
        raise RecipeError(
            f"{where}: kv_cache: keys {key.describe()} and values {value.describe()}: fixed scales are stored for "
            "both or for neither, and alike; set kv_cache.granularity for both"
        )
    scheme = KVScheme(key=key, value=value, rotation=section.rotation)
    return CacheGoal(scheme=scheme, outliers=section.outliers == "detect", remedy=section.remedy, clip=section.clip)


def cache_source(document: Document, where: str) -> dict[str, Any]:
    """The section as plain data with every default filled in; nothing when the recipe has none."""
    goal = build_cache(document, where)
    if goal is None or document.kv_cache is None:
        return {}
    sides = {
        name: {"dtype": side.dtype.name, "granularity": side.granularity}
        for name, side in (("keys", goal.scheme.key), ("values", goal.scheme.value))
        if side.dtype is not None
    }
    return {"kv_cache": {**document.kv_cache.model_dump(), **sides, "granularity": None}}


def _side(section: KVCacheSection, name: str, where: str) -> CacheScheme:
    given: CacheSide = getattr(section, name)
    dtype = given.dtype or section.dtype
    usual = _KEYS.get(dtype, _GRANULARITY.get(dtype, "token")) if name == "keys" else _GRANULARITY.get(dtype, "token")
    if section.rotation != "none" and name == "keys" and section.granularity is None:
        usual = "token"
    try:
        return find_cache_scheme(name, dtype, given.granularity or section.granularity or usual)
    except SchemeError as error:
        raise RecipeError(f"{where}: kv_cache.{name}: {error}") from None
