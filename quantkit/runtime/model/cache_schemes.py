"""Number types of each layer's keys and values: as the user asks, or else as the checkpoint says."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from quantkit.checkpoints.kv_cache_entries import read_cache_schemes, read_scales
from quantkit.checkpoints.reader import CheckpointReader
from quantkit.errors import CheckpointError, QuantkitError, SchemeError
from quantkit.kernels.layouts import Layout, kv_scheme
from quantkit.models.config import ConfigReader
from quantkit.models.kv_sizes import KV_TYPES
from quantkit.models.layer_state_sizes import StateShape
from quantkit.numerics.kv_cache import FP8_HEAD, LayerCache, Scales
from quantkit.numerics.scheme import KVScheme
from quantkit.runtime.model.config import ModelConfig

OTHERS = " and others"
"""Added to the name of the most common number type if the layers of a cache have several types."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredCache:
    """KV cache settings and scales of a checkpoint.

    Args:
        schemes: scheme of each layer according to config.json; None = config.json has none.
        scales: fixed scales of keys and of values of each layer; None for a layer without scales.
        note: why quantkit ignores settings or scales of the checkpoint; empty if it follows all of them.
        latent: whether the model has latent attention, in which the values are a part of the keys.
    """

    schemes: tuple[KVScheme, ...] | None = None
    scales: tuple[tuple[Scales, Scales] | None, ...]
    note: str = ""
    latent: bool = False

    def choose(self, name: str | None) -> tuple[LayerCache, ...]:
        """Return the cache scheme of each layer for a short name; see `layouts.kv_scheme`.

        Args:
            name: `auto` follows the checkpoint. `fp8` uses the checkpoint's scales if every layer has them, otherwise
                scales of 1.0. Other names ignore the checkpoint; None = unquantized, in the dtype of the computation.
        Raises:
            SchemeError: the name is unknown.
        """
        preset = KVScheme() if name is None else kv_scheme(name, latent=self.latent)
        if name == "auto" and self.schemes is not None:
            return tuple(map(_with_scales, self.schemes, self.scales))
        if name == "fp8" and None not in self.scales:
            by_head = KVScheme(key=FP8_HEAD, value=FP8_HEAD)
            several = any(isinstance(scale, tuple) for scales in self.scales for scale in scales or ())
            return tuple(_with_scales(by_head if several else preset, scales) for scales in self.scales)
        return (LayerCache(scheme=preset),) * len(self.scales)


def read_stored_cache(reader: CheckpointReader, config: ModelConfig) -> StoredCache:
    """Read a checkpoint's KV cache settings; of its tensors, only the scales are read.

    Args:
        reader: reader of the checkpoint.
        config: config of the model.
    Raises:
        CheckpointError: a scale is missing or not positive, or the number of scales is wrong.
    """
    count = config.num_layers
    try:
        schemes, note = read_cache_schemes(reader.config, count), ""
    except SchemeError as error:
        schemes = None
        note = f"quantkit ignores the checkpoint's KV cache settings and keeps keys and values unquantized: {error}"
    # The scales are stored in the attention module, as its projections are.
    attention = config.family.parts.output.rpartition(".")[0]
    heads = 1 if config.latent else config.num_kv_heads
    names = [f"{config.family.layers}.{index}.{attention}" for index in range(count)]
    try:
        # A layer without keys needs no scales; with 1.0 they do not count as missing.
        scales = tuple(
            (1.0, 1.0)
            if isinstance(config.attention(index), StateShape)
            else read_scales(name, heads, reader.__contains__, reader.tensor)
            for index, name in enumerate(names)
        )
    except CheckpointError as error:
        # Scales that config.json announces must be valid; for other scales a note is enough.
        if schemes is not None:
            raise
        scales = (None,) * count
        note = note or f"quantkit ignores KV cache scales of the checkpoint that config.json does not mention: {error}"
    for index, pair in enumerate(scales):
        is_announced = schemes is not None and (schemes[index].key.is_fixed or schemes[index].value.is_fixed)
        # Layers with a window are never quantized and so need no scales.
        if is_announced and pair is None and config.windows[index] is None:
            raise CheckpointError(
                f"{reader.path}: config.json says that KV cache scales are stored, but {names[index]}.k_scale and "
                "v_scale are missing; calibrate again, or choose another KV type with --kv-cache"
            )
    return StoredCache(schemes=schemes, scales=scales, note=note, latent=bool(config.latent))


def follows_checkpoint(path: str | Path) -> bool:
    """Whether the KV type `auto` quantizes keys or values of this checkpoint; False if its settings cannot be read."""
    try:
        config = CheckpointReader(Path(path)).config
        schemes = read_cache_schemes(config, ConfigReader(config).count("num_hidden_layers", default=1))
    except QuantkitError:
        return False
    return schemes is not None and any(scheme.is_quantized for scheme in schemes)


def cache_type(layouts: Sequence[Layout], asked: str) -> str:
    """Return the short name of a cache's number type.

    If the user named a type other than `auto`, or no layer is quantized, this is the name that the user gave. Otherwise
    it is the most common type of the quantized layers, followed by `OTHERS` if they have several types. The name of a
    type is the value of `--kv-cache` with the same scheme. If there is no such value, it is the number type of the
    keys, or of the values if the keys are unquantized.

    Args:
        layouts: layout of each layer.
        asked: the name that the user gave.
    """
    names = Counter(_type_name(layout.scheme) for layout in layouts if layout.scheme.is_quantized)
    if asked != "auto" or not names:
        return asked
    return names.most_common(1)[0][0] + (OTHERS if len(names) > 1 else "")


def _type_name(scheme: KVScheme) -> str:
    name = next((name for name in KV_TYPES if kv_scheme(name) == scheme), None)
    dtype = scheme.key.dtype or scheme.value.dtype
    assert dtype is not None
    return name or dtype.name


def _with_scales(scheme: KVScheme, scales: tuple[Scales, Scales] | None) -> LayerCache:
    key, value = scales or (1.0, 1.0)
    return LayerCache(
        scheme=scheme,
        key_scale=key if scheme.key.is_fixed else 1.0,
        value_scale=value if scheme.value.is_fixed else 1.0,
    )
