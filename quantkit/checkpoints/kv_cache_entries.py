"""Read and write a checkpoint's description of its KV cache: entries of config.json, and tensors with fixed scales.

FP8 with fixed scales follows the convention of compressed-tensors and vLLM: `quantization_config.kv_cache_scheme`, and
in each attention module the tensors `k_scale` and `v_scale`, float32, of shape [1] or [key/value heads, 1, 1].
quantkit's own entry of config.json describes all other number types and granularities. Under `layers` are the layers
that differ from the scheme at the top of the entry:

    "quantkit_kv_cache": {"version": 1, "keys": {"dtype": "int4", "granularity": "channel"},
                          "values": {"dtype": "int4", "granularity": "token"}, "rotation": "none",
                          "layers": {"3": {"keys": null, "values": {...}, "rotation": "none"}}}

The entry is outside `quantization_config`, so other loaders ignore it and compute with 16-bit keys and values.
Source of the names: vLLM `model_loader/weight_utils.py` (`maybe_remap_kv_scale_name`), ModelOpt `unified_export_hf.py`.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from quantkit.errors import CheckpointError, SchemeError
from quantkit.formats.compressed_tensors import cache_only_config, fp8_cache_args
from quantkit.numerics.kv_cache import FP8_HEAD, FP8_TENSOR, Scales, scheme_from_dict, scheme_to_dict
from quantkit.numerics.scheme import KVScheme

CONFIG_KEY = "quantkit_kv_cache"
VERSION = 1

_STRATEGIES = {"tensor": "tensor", "head": "attn_head"}
_FIXED = {"tensor": KVScheme(key=FP8_TENSOR, value=FP8_TENSOR), "attn_head": KVScheme(key=FP8_HEAD, value=FP8_HEAD)}
# Pattern for the ends of the names that tools give to scales and zero points of a KV cache.
CACHE_TENSORS = r"\.(kv|[qkv])_scale|\.[qkv]_proj\.output_scale|\.(q|k|v|prob)_zero_point"
# Names, relative to the attention module, of the scale of keys ({} = k) or values ({} = v); `kv_scale` is for both.
_NAMES = ("{}_scale", "attn.{}_scale", "{}_proj.{}_scale", "{}_proj.output_scale", "qkv_proj.{}_scale", "kv_scale")


def is_cache_scale(name: str) -> bool:
    """Whether a tensor with this full name is a scale or zero point of the KV cache, not of a weight."""
    return re.search(f"({CACHE_TENSORS})$", name) is not None


def cache_tensors(
    attention: str, keys: tuple[float, ...], values: tuple[float, ...], *, by_head: bool
) -> dict[str, Tensor]:
    """Return the tensors that store the fixed KV cache scales of one layer, keyed by name.

    Args:
        attention: name of the attention module.
        keys, values: scales of the keys and scales of the values; each holds one number, or one per key/value head.
        by_head: whether each head has its own scale.
    """
    scales, shape = {"k": keys, "v": values}, (-1, 1, 1) if by_head else (1,)
    return {
        f"{attention}.{side}_scale": torch.tensor(own, dtype=torch.float32).reshape(shape)
        for side, own in scales.items()
    }


def describe_cache(described: Mapping[str, Any], asked: KVScheme, layers: Sequence[KVScheme]) -> dict[str, Any]:
    """Return the entries that the format writes to config.json, with the entries for the KV cache added.

    Args:
        described: entries that the format writes; not modified.
        asked: KV cache scheme of the recipe.
        layers: KV cache scheme of each layer.
    """
    entries = dict(described)
    if asked.key.is_fixed:
        section = dict(entries.get("quantization_config") or cache_only_config())
        section["kv_cache_scheme"] = fp8_cache_args(_STRATEGIES[asked.key.granularity])
        entries["quantization_config"] = section
    if not asked.key.is_fixed or any(layer != asked for layer in layers):
        different = {str(index): scheme_to_dict(layer) for index, layer in enumerate(layers) if layer != asked}
        entries[CONFIG_KEY] = {"version": VERSION, **scheme_to_dict(asked), "layers": different}
    return entries


def read_cache_schemes(config: Mapping[str, Any], num_layers: int) -> tuple[KVScheme, ...] | None:
    """Read the KV cache scheme of each layer from config.json; None if config.json has no entry for the cache.

    Args:
        config: contents of config.json.
        num_layers: number of decoder layers.
    Raises:
        SchemeError: the scheme is not supported; the message shows the scheme.
    """
    # quantkit's own entry takes precedence, because only it describes layers that differ.
    entry = config.get(CONFIG_KEY)
    if entry is not None:
        return _own(entry, num_layers)
    section = config.get("quantization_config")
    if not isinstance(section, Mapping):
        return None
    given = section.get("kv_cache_scheme")
    inner = section.get("quantization")
    algorithm = (inner if isinstance(inner, Mapping) else section).get("kv_cache_quant_algo")
    if given == "static" or (given is None and algorithm == "FP8"):
        return (_FIXED["tensor"],) * num_layers
    if given is None and algorithm is None:
        return None
    if not isinstance(given, Mapping):
        raise SchemeError(
            f"config.json: KV cache type {given or algorithm!r} is not supported; supported: FP8 with fixed scales"
        )
    strategy, dynamic = given.get("strategy") or "tensor", bool(given.get("dynamic"))
    if given.get("type") != "float" or given.get("num_bits") != 8 or dynamic or strategy not in tuple(_FIXED):
        raise SchemeError(
            f"kv_cache_scheme with {given.get('num_bits')}-bit {given.get('type')}, strategy {strategy!r}, "
            f"dynamic={dynamic} is not supported; supported: 8-bit float, strategy tensor or attn_head, dynamic=False"
        )
    return (_FIXED[strategy],) * num_layers


def read_scales(
    attention: str, num_heads: int, names: Callable[[str], bool], tensor: Callable[[str], Tensor]
) -> tuple[Scales, Scales] | None:
    """Read the fixed scales of one layer's keys and values; None if the checkpoint has no scales for this layer.

    Args:
        attention: full name of the attention module.
        num_heads: number of key/value heads.
        names: predicate that tells whether the checkpoint has a tensor with a given name.
        tensor: function that reads the tensor with a given name.
    Raises:
        CheckpointError: only keys or only values have scales, a scale is not positive, or their number is wrong.
    """
    scales: list[Scales] = []
    for side in ("k", "v"):
        stored = next((n for n in (f"{attention}.{name.format(side, side)}" for name in _NAMES) if names(n)), None)
        if stored is not None:
            scales.append(_checked(stored, tensor(stored), num_heads))
    if len(scales) == 1:
        raise CheckpointError(
            f"{attention} has KV cache scales for only its keys or only its values; download the checkpoint again"
        )
    return (scales[0], scales[1]) if scales else None


def _own(entry: Any, num_layers: int) -> tuple[KVScheme, ...]:
    if not isinstance(entry, Mapping) or entry.get("version") != VERSION:
        version = entry.get("version") if isinstance(entry, Mapping) else entry
        raise SchemeError(
            f"config.json: {CONFIG_KEY} has version {version!r}, but this quantkit reads version {VERSION}; "
            "update quantkit"
        )
    layers = entry.get("layers") or {}
    if not isinstance(layers, Mapping):
        raise SchemeError(
            f"config.json: {CONFIG_KEY}.layers is {layers!r}, not an object keyed by layer number; correct it"
        )
    if unknown := sorted(layers.keys() - set(map(str, range(num_layers)))):
        raise SchemeError(
            f"config.json: {CONFIG_KEY}.layers names layer {unknown[0]!r}, but the model has {num_layers} layers; "
            "copy the original config.json"
        )
    default = scheme_from_dict(entry)
    return tuple(
        scheme_from_dict(layers[str(index)]) if str(index) in layers else default for index in range(num_layers)
    )


def _checked(name: str, stored: Tensor, num_heads: int) -> Scales:
    values = stored.float().flatten().tolist()
    if len(values) not in (1, num_heads):
        raise CheckpointError(
            f"{name} has {len(values)} values; expected 1, or one per head ({num_heads}); download the checkpoint again"
        )
    if not all(0 < value < float("inf") for value in values):
        wrong = next(value for value in values if not 0 < value < float("inf"))
        raise CheckpointError(
            f"{name} is {wrong:.4g}, but a scale of the KV cache must be positive and finite; "
            "download the checkpoint again, or choose another KV type with --kv-cache"
        )
    # Three dimensions mean one scale per head, even if there is only one head.
    return values[0] if stored.dim() <= 1 and len(values) == 1 else tuple(values)
