"""Memory layout of keys and values in the KV cache: the arrays of one page, their bytes, and pages per budget.

`models.kv_sizes` defines the bytes of a page; this module adds torch types. Allocator, kernels and planner use the same
functions, so planned and allocated bytes are equal. `reference.kv_codes` defines how numbers are rounded.

INT4 packs channel i and channel i + D/2 into byte i. A score is then the sum of two dot products over D/2 channels, and
needs no shuffle:

    byte    0          1                D/2-1
    low   │ dim 0    │ dim 1    │ ... │ dim D/2-1 │     q[:D/2] . low
    high  │ dim D/2  │ dim D/2+1│ ... │ dim D-1   │   + q[D/2:] . high

INT2 packs channels i, i + D/4, i + D/2 and i + 3 D/4 into byte i, from the lowest bits up. INT3 stores the two lower
bits of its codes like INT2, then D/8 bytes with the upper bits: bit j of byte i belongs to channel i + j D/8.

Source: Lin et al. 2024, QServe (scales in the page); Liu et al. 2024, KIVI (keys per channel, values per token).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantkit.errors import SchemeError, suggestion
from quantkit.models import kv_sizes
from quantkit.models.kv_sizes import KV_TYPES, KVForm, PageArray, Side
from quantkit.models.layer_state_sizes import AttentionShape, StateShape
from quantkit.numerics.kv_cache import INT8_CHANNEL, PRESETS, LayerCache
from quantkit.numerics.scheme import CacheScheme, KVScheme

SCALE_DTYPE = torch.float16

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_UNQUANTIZED = LayerCache()


@dataclass(frozen=True, kw_only=True, slots=True)
class PagedArray:
    """The keys or the values in all pages of a layer. Shapes: N pages, H heads, S tokens per page, D channels.

    Args:
        scheme: scheme of the keys or the values.
        codes: (N, H, S, D): unquantized in the model's dtype, or uint8 codes; with fewer than 8 bits, packed along D.
        scale, zero: fp16, (N, H, S) per token or (N, H, D) per channel; None if the scheme has none.
        fixed: (H,) float32, scales of granularity "tensor" and "head"; None = all scales are 1.
    """

    scheme: CacheScheme
    codes: Tensor
    scale: Tensor | None
    zero: Tensor | None
    fixed: Tensor | None

    @property
    def stored(self) -> list[Tensor]:
        """All stored arrays: codes, then scales and zeros if the scheme has them."""
        return [one for one in (self.codes, self.scale, self.zero) if one is not None]

    def put(self, where: tuple[Any, ...], values: Sequence[Tensor | None]) -> None:
        """Write codes, scale and zero (see `kv_codes.codes_of`) at one index of each array."""
        for array, value in zip(self.stored, (one for one in values if one is not None), strict=True):
            array[where] = value


@dataclass(frozen=True, kw_only=True, slots=True)
class KVViews:
    """The pool of one layer as typed arrays.

    Args:
        layout: layout of the pool.
        pool: (N, page_bytes) uint8, memory of the arrays.
        key, value: keys and values in the pool; in latent attention both are the keys.
        key_residual: (rows, H, residual_tokens, D) in the model's dtype, the newest keys of each sequence; the token at
            position p is in slot p % residual_tokens. None unless keys are quantized per channel.
        value_residual: the newest values in the same way; None unless `has_value_residual` of the layout is true.
    """

    layout: "KVLayout"
    pool: Tensor
    key: PagedArray
    value: PagedArray
    key_residual: Tensor | None
    value_residual: Tensor | None

    @property
    def residuals(self) -> list[tuple[PagedArray, Tensor]]:
        """Pairs (array, residual window) of the keys and of the values, if they wait there for a complete page."""
        sides = ((self.key, self.key_residual), (self.value, self.value_residual))
        return [(array, window) for array, window in sides if window is not None]


@dataclass(frozen=True, kw_only=True, slots=True)
class KVLayout:
    """Layout of one layer's keys and values.

    Args:
        num_heads: key/value heads, H.
        head_dim: channels of a key and of a value, D.
        rope_dim: for latent attention: the first `rope_dim` channels belong only to the key; the other channels are
            also the value. 0 = ordinary attention.
        sinks: whether attention has sinks, which only the torch kernel supports.
        page_size: tokens per page, S.
        dtype: dtype of unquantized keys and values, of the residual window, and of the computation.
        is_windowed: whether the layer sees only the newest tokens.
        cache: number types of keys and values (by default `dtype`), and the fixed scales of types that have these.
    Raises:
        SchemeError: no kernel supports the scheme, or the channels do not fill whole bytes.
    """

    num_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype
    cache: LayerCache = _UNQUANTIZED
    rope_dim: int = 0
    sinks: bool = False
    is_windowed: bool = False

    def __post_init__(self) -> None:
        if self.rope_dim and (self.has_residual or self.scheme.rotation != "none"):
            what = "rotated keys" if self.scheme.rotation != "none" else f"{self.scheme.key.describe()} keys"
            raise SchemeError(
                f"latent attention does not support {what}, because its keys are also its values; use bf16, fp8 or int8"
            )
        for what, scheme in (("keys", self.scheme.key), ("values", self.scheme.value)):
            bits = 8 if scheme.dtype is None else scheme.dtype.bits
            if self.head_dim * bits % 8:
                raise SchemeError(
                    f"int{bits} {what} need a number of channels that fills whole bytes, not {self.head_dim}; use int8"
                )

    @property
    def scheme(self) -> KVScheme:
        """Number types of keys and values."""
        return self.cache.scheme

    @property
    def value_dim(self) -> int:
        """Number of channels of a value."""
        return self.head_dim - self.rope_dim

    @property
    def has_residual(self) -> bool:
        """Whether the newest keys stay in `dtype` because a page is quantized only when complete."""
        return kv_sizes.has_residual(self._sides[0])

    @property
    def has_value_residual(self) -> bool:
        """Whether the newest values stay in `dtype` too, because most of the attention is on them."""
        return kv_sizes.has_value_residual(*self._sides)

    @property
    def residual_tokens(self) -> int:
        """Number of tokens in a sequence's residual window; 0 if the layer has none.

        The window holds one page, plus the maximum number of tokens that the engine may discard after a step (rejected
        drafts).
        """
        return kv_sizes.residual_tokens(self._sides[0], self.page_size)

    @property
    def residual_bytes(self) -> int:
        """Bytes of one sequence's residual windows in this layer."""
        key, value = self._sides
        dims = {"heads": self.num_heads, "key_dim": self.head_dim, "value_dim": self.value_dim}
        return kv_sizes.residual_numbers(key, value, **dims, page_size=self.page_size) * self.dtype.itemsize

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of this layer, padding included."""
        return kv_sizes.padded_bytes(self.blocks())

    @property
    def _sides(self) -> tuple[Side, Side]:
        size = self.dtype.itemsize
        return kv_sizes.side_of(self.scheme.key, size), kv_sizes.side_of(self.scheme.value, size)

    def blocks(self) -> dict[str, PageArray]:
        """Return the arrays of a page, keyed by name, in memory order."""
        key, value = self._sides
        kept = 0 if self.rope_dim else self.head_dim
        dims = {"heads": self.num_heads, "key_dim": self.head_dim, "value_dim": kept}
        return kv_sizes.page_arrays(key, value, **dims, page_size=self.page_size)

    def new_residuals(self, rows: int, device: torch.device) -> list[Tensor]:
        """Allocate the residual windows of this many sequences: of keys, then of values, where the layout has them."""
        has = (self.has_residual, self.has_value_residual)
        shape = (rows, self.num_heads, self.residual_tokens, self.head_dim)
        return [torch.empty(shape, dtype=self.dtype, device=device) for _ in range(sum(has))]

    def views(self, pool: Tensor, residuals: Sequence[Tensor] = ()) -> KVViews:
        """Return typed views of a pool; nothing is copied.

        Args:
            pool: (N, page_bytes) uint8, contiguous.
            residuals: windows of keys and of values, see `new_residuals`.
        """
        arrays = {
            name: pool[:, array.offset : array.end].view(self._dtype_of(name)).view(-1, *array.shape)
            for name, array in self.blocks().items()
        }

        def side(name: str) -> PagedArray:
            scheme, scales, fixed = getattr(self.scheme, name), getattr(self.cache, f"{name}_scale"), None
            if scheme.is_fixed and scales != 1.0:  # otherwise no factor is needed
                fixed = torch.tensor(scales, dtype=torch.float32).reshape(-1).expand(self.num_heads)
            return PagedArray(
                scheme=scheme,
                codes=arrays[name],
                scale=arrays.get(f"{name}_scale"),
                zero=arrays.get(f"{name}_zero"),
                fixed=None if fixed is None else fixed.contiguous().to(pool.device),
            )

        key = side("key")
        value = key if self.rope_dim else side("value")
        windows = (*residuals, None, None)
        return KVViews(layout=self, pool=pool, key=key, value=value, key_residual=windows[0], value_residual=windows[1])

    def _dtype_of(self, array: str) -> torch.dtype:
        if array not in ("key", "value"):
            return SCALE_DTYPE
        return self.dtype if getattr(self.scheme, array).dtype is None else torch.uint8


@dataclass(frozen=True, kw_only=True, slots=True)
class StateLayout:
    """State of one recurrent layer, in float32: one row per running sequence, no pages.

    Args:
        shape: sizes of one sequence's state.
        page_size: tokens per page of the other layers.
    """

    shape: StateShape
    page_size: int

    @property
    def scheme(self) -> KVScheme:
        """Number types: states are never quantized."""
        return _UNQUANTIZED.scheme

    @property
    def page_bytes(self) -> int:
        """Bytes that a page takes in this layer: none."""
        return 0

    @property
    def residual_bytes(self) -> int:
        """Bytes of one sequence's state."""
        return self.shape.num_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class EntryLayout:
    """Layout of a DeepSeek-V4 cache, whose entries each represent several tokens: pages of entries and of indexer keys.

    Each running sequence also has a row with a window of single tokens and the inputs of its next entries.

    Args:
        shape: shape of the layer's cache; its `has_rows` must be true.
        page_size: tokens per page.
        dtype: dtype of unquantized values.
        scheme: number types; entries and single tokens both use the type of the keys.
    Raises:
        SchemeError: the number type has fewer than 4 bits, or has 4 bits and a number of channels is odd.
    """

    shape: AttentionShape
    page_size: int
    dtype: torch.dtype
    scheme: KVScheme

    def __post_init__(self) -> None:
        for kept in (self.scheme.key, self.scheme.value):
            if kept.dtype is not None and kept.dtype.bits < 4:
                raise SchemeError(f"entries and indexer keys cannot be stored as {kept.describe()}; use int8 or int4")
        if not self.shape.offers(self.form):
            widths = f"{self.shape.key_dim - self.shape.rope_dim} and {self.shape.index_dim}"
            raise SchemeError(f"int4 entries and indexer keys need even numbers of channels, not {widths}; use int8")

    @property
    def form(self) -> KVForm:
        """The layout as a `KVForm`, from which planning computes bytes."""
        return kv_sizes.form_of_schemes("", [self.scheme], self.dtype.itemsize)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of this layer."""
        return self.shape.page_bytes(self.form, self.page_size)

    @property
    def residual_bytes(self) -> int:
        """Bytes that one sequence needs besides its pages."""
        return self.shape.row_bytes(self.form, self.dtype.itemsize)


Layout = KVLayout | StateLayout | EntryLayout


def kv_scheme(name: str, *, latent: bool = False) -> KVScheme:
    """Return the scheme for the short name of a KV cache type.

    Args:
        name: auto, bf16, fp16 or fp32 (not quantized, see `kv_dtype`), fp8, int8, int4, k4v3, k4v2, k3v2.
        latent: whether the keys are also the values, as in latent attention. INT8 keys then have scales per token
            instead of per channel.
    Raises:
        SchemeError: the name is unknown.
    """
    if name not in KV_TYPES:
        raise SchemeError(
            f"unknown KV cache type {name!r}{suggestion(name, KV_TYPES)}; supported: {', '.join(KV_TYPES)}"
        )
    scheme = PRESETS.get(name, _UNQUANTIZED.scheme)
    return KVScheme(key=scheme.value, value=scheme.value) if latent and scheme.key == INT8_CHANNEL else scheme


def kv_dtype(name: str, default: torch.dtype) -> torch.dtype:
    """Return the dtype of unquantized keys and values for a KV cache type: bf16, fp16, fp32, else `default`."""
    return _DTYPES.get(name, default)


def page_bytes(layouts: Sequence[Layout]) -> int:
    """Return the bytes of one page in all layers together."""
    return sum(layout.page_bytes for layout in layouts)


def residual_bytes(layouts: Sequence[Layout], max_sequences: int) -> int:
    """Return the bytes of residual windows and states for this many sequences in all layers."""
    return max_sequences * sum(layout.residual_bytes for layout in layouts)


def pages_for_budget(layouts: Sequence[Layout], max_sequences: int, budget_bytes: int) -> int:
    """Return how many pages of all layers fit into the budget next to residual windows and states; 0 if none fit."""
    left = budget_bytes - residual_bytes(layouts, max_sequences)
    # If all layers are recurrent, pages take no bytes and only count tokens.
    return max(0, left // max(1, page_bytes(layouts)))
