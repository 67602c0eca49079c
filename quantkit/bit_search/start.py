"""The recipe that a search starts from."""

import json
from collections.abc import Mapping
from pathlib import Path

from quantkit.compress.recipe import Recipe, load
from quantkit.compress.recipe.load import build
from quantkit.compress.recipe.override import Overrides, patched
from quantkit.formats import REGISTRY as FORMATS

_DEFAULT = "gptq-int4"
# The search chooses the overrides itself, and the recipe's gates are for another size: both are cleared.
_DEFAULT_GGUF, _CLEARED = "gguf-q4_k", ("overrides", "gates")


def start_recipe(
    name: str | Path | None, format_name: str | None = None, changes: Overrides = (), *, cache_only: bool = False
) -> Recipe:
    """Read the recipe that a search starts from.

    Args:
        name: name of a shipped recipe, or path of a .yaml file; None = the default for the format.
        format_name: on-disk format; None = the recipe's.
        changes: fields to replace, see `load`.
        cache_only: whether the default is a recipe that keeps the weights as they are.
    Raises:
        InputError: there is no such format.
        RecipeError: see `load`.
    """
    fields: dict[str, object] = {}
    if format_name is not None:
        fields["format"] = FORMATS.find(format_name)
    if name is None and cache_only:
        data = {"name": "kv-cache", "kv_cache": {"dtype": "int4", "outliers": "off"}, **fields}
        return build(patched(data, changes), "the default recipe of a search for a KV cache")
    if name is None:
        is_gguf = fields.get("format") == "gguf"
        name = _DEFAULT_GGUF if is_gguf else _DEFAULT
        fields |= {field: [] for field in _CLEARED} if is_gguf else {}
    if isinstance(changes, Mapping):
        return load(name, {**fields, **changes})
    given = [changes] if isinstance(changes, str) else changes
    return load(name, [*(f"{path}={json.dumps(value)}" for path, value in fields.items()), *given])
