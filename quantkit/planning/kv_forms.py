"""Forms of the KV cache, and the bytes of a token and of a page in each. Arithmetic only; torch-free.

The bundled runtime allocates by `kernels.layouts`, which needs torch; a test keeps the two equal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from quantkit.errors import InputError, suggestion

PAGE_SIZE = 64
"""Tokens per page of the bundled runtime; keys that are quantized per channel share a scale over a page."""

_ALIGNMENT = 16
ROLLBACK = 16
"""Tokens of the last step that the runtime may take back; its 16-bit tail has room for them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """How the keys, or the values, are stored.

    Args:
        bits: of one element.
        granularity: what shares a scale: "tensor" (nothing is stored), "token" (one token's values of one head) or
            "channel" (one channel of one head over a page).
        group_size: with "token", elements that share a scale; None = the whole head.
        scale_bytes: of a scale, and of its zero point.
    """

    bits: int
    granularity: Literal["tensor", "token", "channel"] = "tensor"
    group_size: int | None = None
    scale_bytes: int = 0
    zero_bytes: int = 0

    def token_bytes(self, width: int, page_size: int = PAGE_SIZE) -> float:
        """Bytes of one token's key or value of one head, its share of scales included."""
        return math.ceil(width * self.bits / 8) + self._scales(width, page_size) * (self.scale_bytes + self.zero_bytes)

    def page_bytes(self, heads: int, width: int, page_size: int = PAGE_SIZE) -> int:
        """Bytes of a page of all heads; codes, scales and zero points each start at a multiple of 16."""
        scales = round(heads * page_size * self._scales(width, page_size))
        codes = heads * page_size * (width * self.bits // 8)
        return sum(_aligned(size) for size in (codes, scales * self.scale_bytes, scales * self.zero_bytes))

    def _scales(self, width: int, page_size: int) -> float:
        """Scales per token and head."""
        if self.granularity == "tensor":
            return 0
        if self.granularity == "channel":
            return width / page_size
        return 1 if self.group_size is None else math.ceil(width / self.group_size)


@dataclass(frozen=True, kw_only=True, slots=True)
class KVForm:
    """How keys and values are stored in the cache.

    Args:
        name: as given to --kv-cache.
        key, value: each side.
        layers: forms of layers that differ, by number.
    """

    name: str
    key: Side
    value: Side
    layers: tuple[tuple[int, KVForm], ...] = ()

    @property
    def bits(self) -> int:
        """Of one element of a key or a value, whichever has fewer."""
        return min(self.key.bits, self.value.bits)

    def of(self, index: int) -> KVForm:
        """The form of one layer."""
        return dict(self.layers).get(index, self)


def _both(name: str, side: Side) -> KVForm:
    return KVForm(name=name, key=side, value=side)


# The bundled runtime's own: a fixed scale per tensor; an fp16 scale per token and head; keys with fp16 scale and zero
# point per channel of a page beside values with both per token. `kernels.layouts` is what the runtime allocates by.
BF16 = _both("bf16", Side(bits=16))
FP32 = _both("fp32", Side(bits=32))
FP8 = _both("fp8", Side(bits=8))
INT8 = _both("int8", Side(bits=8, granularity="token", scale_bytes=2))
INT4 = KVForm(
    name="int4",
    key=Side(bits=4, granularity="channel", scale_bytes=2, zero_bytes=2),
    value=Side(bits=4, granularity="token", scale_bytes=2, zero_bytes=2),
)
KV_FORMS = {form.name: form for form in (BF16, FP8, INT8, INT4, FP32)}


def find_kv_form(name: str, dtype: str = "bfloat16") -> KVForm:
    """The form of the cache called `name`.

    Args:
        name: a key of KV_FORMS, or "auto" for what the model computes in.
        dtype: of the model.
    Raises:
        InputError: no such form; suggests the nearest.
    """
    if name == "auto":
        return FP32 if dtype == "float32" else BF16
    if name not in KV_FORMS:
        raise InputError(
            f"unknown KV cache type {name!r}{suggestion(name, KV_FORMS)}; there are: {', '.join(KV_FORMS)}"
        )
    return KV_FORMS[name]


def from_schemes(name: str, schemes: Sequence[Any], dtype_bytes: int) -> KVForm:
    """The form of a cache whose layers a recipe or a checkpoint describes.

    Args:
        name: for tables.
        schemes: a `KVScheme` per layer, or one for all.
        dtype_bytes: of keys and values that are not quantized.
    """

    def side(kept: Any) -> Side:
        if kept.dtype is None:
            return Side(bits=8 * dtype_bytes)
        stored = kept.granularity in ("token", "channel")
        return Side(
            bits=kept.dtype.bits,
            granularity=kept.granularity if stored else "tensor",
            scale_bytes=2 if stored else 0,
            zero_bytes=2 if stored and not kept.symmetric else 0,
        )

    forms = [KVForm(name=name, key=side(scheme.key), value=side(scheme.value)) for scheme in schemes]
    usual = max(forms, key=forms.count)
    return replace(usual, layers=tuple((index, form) for index, form in enumerate(forms) if form != usual))


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
