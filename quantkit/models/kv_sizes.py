"""Byte layout of the KV cache: how keys and values are stored, and how large a token and a page are. Torch-free.

The runtime allocates these arrays with the torch dtypes of `kernels.layouts`; planning sums their sizes.

A page holds `page_size` tokens of all heads of one layer; every array starts at a multiple of 16 bytes:

    ┌───────────────┬───────────────┬───────────┬──────────┬─────────────┬────────────┐
    │ key codes     │ value codes   │ key scale │ key zero │ value scale │ value zero │   page_bytes
    │ [head, token, │ [head, token, │ fp16, only if keys or values have them          │
    │  dim]         │  dim]         │ per token: [head, token]; per channel: [head, dim]
    └───────────────┴───────────────┴───────────┴──────────┴─────────────┴────────────┘

Source: Lin et al. 2024, QServe (scales in the page); Liu et al. 2024, KIVI (keys per channel, values per token).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from quantkit.errors import InputError, suggestion

if TYPE_CHECKING:
    from quantkit.numerics.scheme import CacheScheme, KVScheme

ALIGNMENT = 16
DEFAULT_PAGE_SIZE = 64
"""Tokens per page. With 64, the per-channel scales of integer keys cost half a bit per value."""

MAX_ROLLBACK = 16
"""Maximum number of last tokens that a sequence may discard, e.g. rejected draft tokens."""

SCALE_BYTES = 2
KV_TYPES = ("auto", "bf16", "fp16", "fp32", "fp8", "int8", "int4", "k4v3", "k4v2", "k3v2")
"""Names of the cache's number types on the command line; the runtime does not quantize the first four. The last three
give the bits of keys and of values.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """Storage of the keys or of the values.

    Args:
        bits: bits per element.
        granularity: elements that share a scale. "tensor" = all elements, and the page stores no scales; "token" = one
            token in one head; "channel" = one channel of one head within a page.
        group_size: for "token", channels that share a scale; None = all channels of the head.
        scale_bytes, zero_bytes: bytes per scale, and per zero point.
    """

    bits: int
    granularity: Literal["tensor", "token", "channel"] = "tensor"
    group_size: int | None = None
    scale_bytes: int = 0
    zero_bytes: int = 0

    def token_bytes(self, width: int) -> float:
        """Count the bytes of one token's key or value in one head, including its share of scales; 0 for width 0."""
        if not width:
            return 0
        scales = math.prod(self.scale_shape(1, DEFAULT_PAGE_SIZE, width)) / DEFAULT_PAGE_SIZE
        return math.ceil(width * self.bits / 8) + scales * (self.scale_bytes + self.zero_bytes)

    def scale_shape(self, heads: int, tokens: int, width: int) -> tuple[int, ...]:
        """Return the shape of a page's scales; (0,) if the page stores none."""
        if self.granularity == "tensor":
            return (0,)
        if self.granularity == "channel":
            return heads, width
        groups = 1 if self.group_size is None else math.ceil(width / self.group_size)
        return (heads, tokens) if groups == 1 else (heads, tokens, groups)


class PageArray(NamedTuple):
    """One array inside a page: its offset in bytes, its shape, and the bytes per element."""

    offset: int
    shape: tuple[int, ...]
    item_bytes: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the array, without padding."""
        return math.prod(self.shape) * self.item_bytes

    @property
    def end(self) -> int:
        """Offset of the first byte after the array."""
        return self.offset + self.num_bytes


def page_arrays(
    key: Side, value: Side, *, heads: int, key_dim: int, value_dim: int, page_size: int = DEFAULT_PAGE_SIZE
) -> dict[str, PageArray]:
    """Return the arrays of one page of one layer, keyed by name, in memory order.

    Args:
        key, value: storage of keys and of values; codes of less than a byte are packed along the channels.
        heads, key_dim, value_dim: number of key/value heads and their channels; value_dim 0 = values are not stored.
        page_size: tokens per page.
    """
    shapes: list[tuple[str, tuple[int, ...], int]] = []
    sides = [("key", key, key_dim), *([("value", value, value_dim)] if value_dim else [])]
    for name, side, width in sides:
        # Codes of less than a byte are packed, so the last dimension then counts bytes.
        whole = max(1, side.bits // 8)
        shapes.append((name, (heads, page_size, width * side.bits // 8 // whole), whole))
    for name, side, width in sides:
        shape = side.scale_shape(heads, page_size, width)
        shapes += [(f"{name}_scale", shape, side.scale_bytes), (f"{name}_zero", shape, side.zero_bytes)]
    arrays: dict[str, PageArray] = {}
    end = 0
    for name, shape, item_bytes in shapes:
        if item_bytes:
            arrays[name] = PageArray(_aligned(end), shape, item_bytes)
            end = arrays[name].end
    return arrays


def padded_bytes(arrays: dict[str, PageArray]) -> int:
    """Count the bytes of one page including padding."""
    return _aligned(max(array.end for array in arrays.values()))


def has_residual(key: Side) -> bool:
    """Whether the newest keys wait in a residual window for a full page, as keys with scales per channel do."""
    return key.granularity == "channel"


def has_value_residual(key: Side, value: Side) -> bool:
    """Whether the newest values wait in a residual window too, as values with scales per token do if the keys wait."""
    return has_residual(key) and value.granularity == "token"


def residual_tokens(key: Side, page_size: int = DEFAULT_PAGE_SIZE) -> int:
    """Return the number of tokens in a sequence's residual window; 0 unless keys are quantized per channel.

    The window holds one page, which is quantized only when it is full, and `MAX_ROLLBACK` further tokens.
    """
    return page_size + MAX_ROLLBACK if has_residual(key) else 0


def residual_numbers(
    key: Side, value: Side, *, heads: int, key_dim: int, value_dim: int, page_size: int = DEFAULT_PAGE_SIZE
) -> int:
    """Count the numbers in the residual windows of one sequence in one layer; for the arguments, see `page_arrays`."""
    channels = key_dim + (value_dim if has_value_residual(key, value) else 0)
    return residual_tokens(key, page_size) * heads * channels


def side_of(scheme: CacheScheme, dtype_bytes: int) -> Side:
    """Return how the runtime stores keys or values with this scheme.

    Args:
        scheme: number type and granularity.
        dtype_bytes: bytes per unquantized element.
    """
    if scheme.dtype is None:
        return Side(bits=8 * dtype_bytes)
    if scheme.granularity not in ("token", "channel"):
        return Side(bits=scheme.dtype.bits)
    return Side(
        bits=scheme.dtype.bits,
        granularity=scheme.granularity,
        scale_bytes=SCALE_BYTES,
        zero_bytes=0 if scheme.symmetric else SCALE_BYTES,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class KVForm:
    """Storage of keys and values in the cache.

    Args:
        name: value of --kv-cache.
        key, value: storage of keys and of values.
        layers: (layer number, form) of each layer whose form differs from this form.
    """

    name: str
    key: Side
    value: Side
    layers: tuple[tuple[int, KVForm], ...] = ()

    @property
    def bits(self) -> int:
        """Bits per element of keys or of values, whichever is smaller."""
        return min(self.key.bits, self.value.bits)

    def of(self, index: int) -> KVForm:
        """Return the form of one layer."""
        return dict(self.layers).get(index, self)


def _both(name: str, side: Side) -> KVForm:
    return KVForm(name=name, key=side, value=side)


def _integers(name: str, key_bits: int, value_bits: int) -> KVForm:
    """Return the form with an fp16 scale and zero point per channel of a page for keys, and for values an fp16 scale
    per token and head. Values of 4 bits also have a zero point.
    """
    zero = SCALE_BYTES if value_bits == 4 else 0
    return KVForm(
        name=name,
        key=Side(bits=key_bits, granularity="channel", scale_bytes=SCALE_BYTES, zero_bytes=SCALE_BYTES),
        value=Side(bits=value_bits, granularity="token", scale_bytes=SCALE_BYTES, zero_bytes=zero),
    )


# Forms of the bundled runtime. fp8: a fixed scale per tensor.
BF16 = _both("bf16", Side(bits=16))
FP32 = _both("fp32", Side(bits=32))
FP8 = _both("fp8", Side(bits=8))
INT8, INT4 = _integers("int8", 8, 8), _integers("int4", 4, 4)
_FEWER_BITS = [_integers(f"k{key}v{value}", key, value) for key, value in ((4, 3), (4, 2), (3, 2))]
KV_FORMS = {form.name: form for form in (BF16, FP8, INT8, INT4, *_FEWER_BITS, FP32)}


def find_kv_form(name: str, dtype: str = "bfloat16") -> KVForm:
    """Return the storage form of a KV cache type.

    Args:
        name: name of the type: a key of KV_FORMS, or "auto" for the model's dtype.
        dtype: dtype of the model.
    Raises:
        InputError: no form has this name; the message suggests the nearest.
    """
    if name == "auto":
        return FP32 if dtype == "float32" else BF16
    if name not in KV_FORMS:
        raise InputError(
            f"unknown KV cache type {name!r}{suggestion(name, KV_FORMS)}; supported: {', '.join(KV_FORMS)}"
        )
    return KV_FORMS[name]


def form_of_schemes(name: str, schemes: Sequence[KVScheme], dtype_bytes: int) -> KVForm:
    """Return the form of a KV cache whose schemes a recipe or a checkpoint gives.

    Args:
        name: name of the form in tables.
        schemes: one scheme per layer, or one scheme for all layers.
        dtype_bytes: bytes per element of unquantized keys and values.
    """
    forms = [
        KVForm(name=name, key=side_of(scheme.key, dtype_bytes), value=side_of(scheme.value, dtype_bytes))
        for scheme in schemes
    ]
    usual = max(forms, key=forms.count)
    return replace(usual, layers=tuple((index, form) for index, form in enumerate(forms) if form != usual))


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
