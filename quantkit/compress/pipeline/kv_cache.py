"""Check a recipe's KV cache before the run, calibrate it for each layer, describe it in config.json, and verify the
result.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.checkpoints.kv_cache_entries import CONFIG_KEY, cache_tensors, describe_cache, read_cache_schemes
from quantkit.checkpoints.reader import CheckpointReader
from quantkit.compress.calibration.kv_cache import calibrate_cache
from quantkit.compress.calibration.layer import LayerContext
from quantkit.compress.recipe import Recipe
from quantkit.errors import AuditError, ModelError, SchemeError
from quantkit.formats import REGISTRY as FORMATS
from quantkit.formats import writable
from quantkit.formats.base import Format
from quantkit.models.family import Family
from quantkit.numerics.kv_cache import CacheGoal, scheme_from_dict
from quantkit.results import CacheRecord, LayerRecord

_KINDS = ("layer_types", "layers_block_type")  # keys of config.json that give the kind of each layer
_ATTENDS = ("attention", "hybrid")  # words in the names of layer kinds that cache keys and values


def check_cache(recipe: Recipe, config: Mapping[str, Any]) -> None:
    """Refuse a KV cache that the model or the format does not support, before any work.

    Args:
        recipe: the recipe.
        config: contents of the model's config.json.
    Raises:
        ModelError: the model, or one of its layers, caches something other than keys and values.
        SchemeError: the format cannot store what the cache needs.
    """
    goal = recipe.kv_cache
    if goal is None:
        return
    inner = config.get("text_config")
    described = {**(inner if isinstance(inner, Mapping) else {}), **config}
    kinds = {str(kind) for key in _KINDS for kind in described.get(key) or ()}
    # A layer of the kind "linear_attention" keeps a state, although the name contains the word attention.
    others = sorted(kind for kind in kinds if not any(word in kind for word in _ATTENDS) or "linear" in kind)
    kept = f"some layers of this model keep a state instead of keys and values ({', '.join(others)})" if others else ""
    if latent := described.get("kv_lora_rank"):
        kept = f"this model caches a latent (kv_lora_rank={latent}) instead of keys and values"
    if kept:
        raise ModelError(f"{kept}, which kv_cache does not support; leave kv_cache out of the recipe")
    format_: Format = FORMATS.load(recipe.format)
    scaled = writable(lambda other: other.holds_cache_scales)
    if goal.has_fixed_scales and not format_.holds_cache_scales:
        raise SchemeError(
            f"format {recipe.format!r} cannot store scales of the KV cache: set format={scaled}, "
            "or kv_cache.granularity=token, which needs no stored scales"
        )
    if not format_.describes_cache:
        raise SchemeError(f"format {recipe.format!r} cannot describe a KV cache: set format={scaled}")


def choose_cache(goal: CacheGoal, family: Family, layer: LayerContext) -> CacheRecord:
    """Choose the KV cache of a layer whose weights are final, and return the record of the choice.

    Args:
        goal: cache that the recipe asks for.
        family: family of the model.
        layer: the layer; the scales to write are added to it, and a note if the choice differs from the goal.
    """
    record = calibrate_cache(layer, goal)
    if goal.has_fixed_scales:
        name, by_head = _attention_module(layer.block, family), goal.scheme.key.granularity == "head"
        layer.chosen.cache_scales = cache_tensors(name, record.key_scale, record.value_scale, by_head=by_head)
    return record


def _attention_module(block: nn.Module, family: Family) -> str:
    """Return the relative name of a layer's attention module."""
    name: str = family.parts.output.rpartition(".")[0]
    modules = dict(block.named_modules())
    if name and name in modules:
        return name
    numbered = [other for other, module in modules.items() if other and hasattr(module, "layer_idx")]
    if len(numbered) != 1:
        raise ModelError(
            f"cannot find the attention module in the decoder layers (candidates: {', '.join(numbered) or 'none'}); "
            "leave kv_cache out of the recipe"
        )
    return str(numbered[0])


def check_scales(scales: Mapping[str, Tensor]) -> None:
    """Check that all scales are positive numbers.

    Raises:
        AuditError: a scale is zero, negative or not finite; the message names the tensor.
    """
    for name, scale in scales.items():
        if not bool(((scale > 0) & torch.isfinite(scale)).all()):
            raise AuditError(f"the scale {name} is zero, negative or not finite; please report this defect of quantkit")


def with_cache(
    recipe: Recipe, config: Mapping[str, Any], described: dict[str, Any], records: Sequence[LayerRecord]
) -> dict[str, Any]:
    """Return the config.json to write: the source's entries, the format's entries, and the recipe's KV cache.

    The entry for the recipe's KV cache replaces a KV cache entry of the source.

    Args:
        recipe: the recipe.
        config: contents of the source's config.json.
        described: entries that the format adds.
        records: record of each layer.
    """
    if recipe.kv_cache is None:
        return {**config, **described}
    config = {key: value for key, value in config.items() if key != CONFIG_KEY}
    layers = [scheme_from_dict(record.kv_cache.scheme) for record in records if record.kv_cache is not None]
    return {**config, **describe_cache(described, recipe.kv_cache.scheme, layers)}


def check_cache_written(
    folder: Path, recipe: Recipe, config: Mapping[str, Any], records: Sequence[LayerRecord]
) -> None:
    """Check that a finished checkpoint describes the chosen cache, and that its stored scales equal those in the
    records.

    Args:
        folder: folder of the checkpoint.
        recipe: the recipe.
        config: contents of the checkpoint's config.json.
        records: record of each layer.
    Raises:
        AuditError: the checkpoint does not match the recipe or the records.
    """
    if recipe.kv_cache is None:
        return
    schemes = read_cache_schemes(config, len(records))
    reader = CheckpointReader(folder)
    for index, record in enumerate(records):
        kept = record.kv_cache
        if kept is None or schemes is None or schemes[index] != scheme_from_dict(kept.scheme):
            raise AuditError(
                f"{record.name}: the KV cache in config.json differs from the chosen one; please report this defect of "
                "quantkit"
            )
        for side, scales in (("k", kept.key_scale), ("v", kept.value_scale)):
            names = [n for n in reader.names if n.startswith(f"{record.name}.") and n.endswith(f".{side}_scale")]
            stored = [value for name in names for value in reader.tensor(name).flatten().tolist()]
            if len(stored) != len(scales) or not all(map(math.isclose, stored, scales)):
                raise AuditError(
                    f"{record.name}: the stored {side}_scale is {stored}, but the calibrated one is {list(scales)}; "
                    "please report this defect of quantkit"
                )
