"""Schemes and scales of a KV cache, and the rotation of its keys.

The runtime rounds keys and values (`kernels.reference.kv_codes`), and `calibration.kv_cache` chooses their scales.
Source of the rotation: Ashkboos et al. 2024, QuaRot (online Hadamard of keys and queries after the position embedding).
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from quantkit.errors import SchemeError, suggestion
from quantkit.numerics.dtype import FP8, INT2, INT3, INT4, INT8, find_dtype
from quantkit.numerics.hadamard import Rotation
from quantkit.numerics.scheme import CacheScheme, KVScheme

FP8_TENSOR = CacheScheme(dtype=FP8, granularity="tensor")
FP8_HEAD = CacheScheme(dtype=FP8, granularity="head")
FP8_TOKEN = CacheScheme(dtype=FP8)
INT8_TOKEN = CacheScheme(dtype=INT8)
INT8_CHANNEL = CacheScheme(dtype=INT8, granularity="channel", symmetric=False)
INT4_TOKEN = CacheScheme(dtype=INT4, symmetric=False)
INT4_CHANNEL = CacheScheme(dtype=INT4, granularity="channel", symmetric=False)
INT3_CHANNEL = CacheScheme(dtype=INT3, granularity="channel", symmetric=False)
INT3_TOKEN = CacheScheme(dtype=INT3)
INT2_TOKEN = CacheScheme(dtype=INT2)
_BOTH = (INT4_TOKEN, INT8_TOKEN, FP8_TENSOR, FP8_HEAD, FP8_TOKEN)
VALUE_SCHEMES = (*_BOTH, INT3_TOKEN, INT2_TOKEN)
"""Schemes in which a cache can store values. Those of 2 and 3 bits are rotated, see `turned`."""
KEY_SCHEMES = (*_BOTH, INT4_CHANNEL, INT8_CHANNEL, INT3_CHANNEL)
"""Schemes in which a cache can store keys. With 2 bits, keys would be useless."""

PRESETS = {
    "fp8": KVScheme(key=FP8_TENSOR, value=FP8_TENSOR),
    "int8": KVScheme(key=INT8_CHANNEL, value=INT8_TOKEN),
    "int4": KVScheme(key=INT4_CHANNEL, value=INT4_TOKEN),
    "k4v3": KVScheme(key=INT4_CHANNEL, value=INT3_TOKEN),
    "k4v2": KVScheme(key=INT4_CHANNEL, value=INT2_TOKEN),
    "k3v2": KVScheme(key=INT3_CHANNEL, value=INT2_TOKEN),
}
"""Schemes of a whole cache, keyed by short name; other short names keep keys and values unquantized."""
Scales = float | tuple[float, ...]
"""Fixed scales: one number for all heads, or one per key/value head."""

UNQUANTIZED = KVScheme()


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCache:
    """Storage of one layer's keys and values.

    Args:
        scheme: schemes of keys and values; the default stores both unquantized.
        key_scale, value_scale: scales of keys and values, if they are fixed.
    """

    scheme: KVScheme = UNQUANTIZED
    key_scale: Scales = 1.0
    value_scale: Scales = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheGoal:
    """Settings of a recipe for the KV cache of every layer.

    Args:
        scheme: schemes of keys and values.
        layers: layers whose schemes differ from `scheme`, each as its number and its schemes; empty if `scheme` has
            fixed scales.
        outliers: whether to look for layers whose keys have outliers that the scheme cannot represent well.
        remedy: scheme of the keys in layers with outliers: "channel" (the same bits, a range per channel), "int8" or
            "fp8" per token, "leave" (not quantized), or "auto": the first of the four that helps.
        clip: how fixed scales are chosen: "absmax" covers the largest magnitude, "mse" gives the least squared error.
    """

    scheme: KVScheme
    layers: tuple[tuple[int, KVScheme], ...] = ()
    outliers: bool = True
    remedy: Literal["auto", "channel", "int8", "fp8", "leave"] = "auto"
    clip: Literal["absmax", "mse"] = "absmax"

    @property
    def has_fixed_scales(self) -> bool:
        """Whether the checkpoint must store scales."""
        return self.scheme.key.is_fixed or self.scheme.value.is_fixed

    @property
    def schemes(self) -> tuple[KVScheme, ...]:
        """All schemes of this goal: `scheme`, and those of the layers that differ."""
        return (self.scheme, *(scheme for _, scheme in self.layers))

    @property
    def needs_data(self) -> bool:
        """Whether calibration data is needed, for fixed scales or to find outliers."""
        return self.has_fixed_scales or (self.outliers and any(scheme.key.dtype for scheme in self.schemes))

    def of_layer(self, index: int) -> "CacheGoal":
        """Return the settings for one layer."""
        return replace(self, scheme=dict(self.layers).get(index, self.scheme), layers=())


def find_cache_scheme(side: str, dtype: str, granularity: str) -> CacheScheme:
    """Return the cache scheme with this number type and granularity.

    Args:
        side: "keys" or "values".
        dtype, granularity: see `CacheScheme`.
    Raises:
        SchemeError: a cache does not support the combination; the message lists the supported ones.
    """
    number = find_dtype(dtype)
    known = KEY_SCHEMES if side == "keys" else VALUE_SCHEMES
    for scheme in known:
        if scheme.dtype == number and scheme.granularity == granularity:
            return scheme
    valid = [scheme.describe() for scheme in known]
    asked = f"{number.name} per {granularity}"
    raise SchemeError(
        f"a KV cache cannot store {side} as {asked}{suggestion(asked, valid)}; supported: {', '.join(valid)}"
    )


def scheme_to_dict(scheme: KVScheme) -> dict[str, Any]:
    """Return a scheme as plain data, as in config.json and manifests; the inverse of `scheme_from_dict`."""

    def side(kept: CacheScheme) -> dict[str, str] | None:
        return None if kept.dtype is None else {"dtype": kept.dtype.name, "granularity": kept.granularity}

    return {"keys": side(scheme.key), "values": side(scheme.value), "rotation": scheme.rotation}


def scheme_from_dict(data: Mapping[str, Any]) -> KVScheme:
    """Return the scheme that `scheme_to_dict` turned into plain data.

    Raises:
        SchemeError: the data is not a supported scheme.
    """

    def side(name: str) -> CacheScheme:
        kept = data.get(name)
        if kept is None:
            return CacheScheme()
        if not isinstance(kept, Mapping) or not all(isinstance(kept.get(key), str) for key in ("dtype", "granularity")):
            raise SchemeError(f"KV cache {name} are {kept!r}; expected a mapping with dtype and granularity, or null")
        return find_cache_scheme(name, kept["dtype"], kept["granularity"])

    if not isinstance(data, Mapping):
        raise SchemeError(f"the KV cache of a layer is {data!r}; expected a mapping with keys and values")
    rotation = data.get("rotation", "none")
    if rotation not in ("none", "hadamard"):
        raise SchemeError(f"KV cache rotation {rotation!r} is not supported; supported: none, hadamard")
    return KVScheme(key=side("keys"), value=side("values"), rotation=rotation)


def turned(values: Tensor) -> Tensor:
    """Rotate values as a cache stores them in 2 or 3 bits: change signs, then apply `hadamard` without normalising.

    Args:
        values: (..., D); D is a multiple of 4. Not modified.
    Returns:
        (..., D) float32; integers of 16 bits give exact results.
    """
    matrix, signs = _turning(values.shape[-1], values.device)
    return ((values.double() * signs) @ matrix).float()


def turned_back(values: Tensor) -> Tensor:
    """Undo `turned`, except for a factor: the result is `turning_block(D)` times the original values (..., D)."""
    matrix, signs = _turning(values.shape[-1], values.device)
    return ((values.double() @ matrix) * signs).float()


@functools.cache
def _turning(width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the matrix (D, D) and the signs (D,) of the rotation, in float64.

    Without signs, a number that all channels have in common would end up in one channel. The signs spread it evenly,
    because they are a bent function: the parity of the products of neighbouring bits of the channel's number.
    """
    number = torch.arange(width)
    products = number & (number >> 1) & 0x5555
    odd = torch.stack([(products >> bit) & 1 for bit in range(0, 16, 2)]).sum(0) % 2
    matrix = (hadamard(width).double() * turning_block(width) ** 0.5).round()
    return matrix.to(device), (1.0 - 2.0 * odd).double().to(device)


def turning_block(width: int) -> int:
    """Return the number of channels in a block of the rotation: the largest power of two that divides the width."""
    return width & -width


def hadamard(width: int) -> Tensor:
    """Return the orthogonal, symmetric matrix that rotates keys and queries of this width.

    It is block-diagonal: each block is a normalised Sylvester matrix of the largest power of two that divides the
    width.

    Args:
        width: channels of a head, D.
    Returns:
        (D, D) float32.
    """
    size = turning_block(width)
    # No random signs: config.json records "hadamard" without a seed, so the matrix depends on the width alone.
    block = Rotation(block=torch.ones(1, 1), signs=torch.ones(size)).apply(torch.eye(size))
    return torch.kron(torch.eye(width // size), block)
