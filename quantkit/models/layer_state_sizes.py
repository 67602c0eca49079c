"""Bytes that one attention or recurrent layer keeps and reads, before anything is allocated. Torch-free.

L tokens of context. What an entry of the cache holds, and how many entries there are:

    full     L entries       a key and a value for each key/value head (MHA, GQA, MQA)
    window   min(L, w)       the same, for the last w tokens only
    mla      L entries       one latent vector and one rotary key for all heads (DeepSeek V2, V3)
    dsa      L entries       as mla, and an indexer key; a query reads the best `top_k` entries (DeepSeek V3.2)
    csa      w + L / r       one shared vector; r tokens make an entry with an indexer key; `top_k` are read (V4)
    hca      w + L / r       as csa with a large r and no indexer: all entries are read

Of V4, entries are in pages; the window and what the next entries are made of are beside them, a row of each sequence.
A recurrent layer (state-space, linear attention) keeps a state of one size, whatever the length: `StateShape`, with G
heads of queries and keys of N channels, and H heads of values of P channels. `models.recurrent` says what is computed.

Sources: the formulas of csa and hca are those of DeepSeek-V4's technical report (9.62 GiB at 1,048,576 tokens for 30
and 31 layers); the 8-bit layouts of mla, dsa and csa are those of FlashMLA and vLLM (656, 132 and 584 bytes).
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from quantkit.models.kv_sizes import DEFAULT_PAGE_SIZE, KVForm, padded_bytes, page_arrays, residual_tokens

# Channels that share a power of two in quantized entries of csa and hca, in keys of their indexer; bytes of exponents
# come in as many as these.
ENTRY_BLOCK, ENTRY_EXPONENTS = 64, 8
INDEX_BLOCK, INDEX_EXPONENTS = 32, 4


def exponent_bytes(width: int, block: int, multiple: int) -> int:
    """Bytes of the exponents, one each block, of so many quantized channels, a multiple of so many."""
    return math.ceil(math.ceil(width / block) / multiple) * multiple


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionShape:
    """The cache of one layer.

    Args:
        num_heads: query heads.
        num_kv_heads: vectors kept per token and side; 1 for the latent kinds.
        key_dim, value_dim: widths of what is kept; value_dim is 0 where keys and values are one vector.
        rope_dim: of key_dim, the part that 8-bit layouts of the latent kinds leave in 16 bits.
        window: raw tokens that are kept; None = all.
        ratio: tokens per compressed entry; 0 = none is compressed.
        top_k: entries that a query reads; None = all.
        index_dim, index_heads: of the indexer; 0 = there is none.
        full_dims: widths of the full heads' keys and values that prefill of mla works on; None = those that are kept.
    """

    num_heads: int
    num_kv_heads: int = 1
    key_dim: int
    value_dim: int = 0
    rope_dim: int = 0
    window: int | None = None
    ratio: int = 0
    top_k: int | None = None
    index_dim: int = 0
    index_heads: int = 0
    full_dims: tuple[int, int] | None = None

    @property
    def kind(self) -> Literal["full", "window", "mla", "dsa", "csa", "hca"]:
        """See the table at the top of the file."""
        if self.ratio:
            return "csa" if self.index_dim else "hca"
        if self.window is not None:
            return "window"
        if self.value_dim:
            return "full"
        return "dsa" if self.index_dim else "mla"

    @property
    def is_paged(self) -> bool:
        """Whether the bundled runtime has pages for it."""
        return self.kind != "dsa"

    @property
    def has_rows(self) -> bool:
        """Whether its newest tokens are in a row of each sequence in place of pages: all layers of V4."""
        return self.window is not None and not self.value_dim

    @property
    def series(self) -> int:
        """Entries that a token is part of: those of csa overlap."""
        return 2 if self.index_dim else 1

    @property
    def past_tokens(self) -> int:
        """Tokens before the next one that entries may still be made of."""
        return max(0, self.series * self.ratio - 1)

    @property
    def past_width(self) -> int:
        """Numbers that are kept of each: a value and a gate of each channel of entries and of the indexer's keys."""
        return 2 * self.series * (self.key_dim + self.index_dim)

    def describe(self) -> str:
        """Short form for tables, e.g. `GQA 32/8 x 128` or `window 1024, GQA 32/8 x 128`."""
        if self.value_dim:
            few = "GQA" if self.num_kv_heads > 1 else "MQA"
            text = f"{'MHA' if self.num_heads == self.num_kv_heads else few} "
            text += f"{self.num_heads}/{self.num_kv_heads} x {self.key_dim}"
            return text if self.window is None else f"window {self.window}, {text}"
        if self.window is None:
            text = f"MLA {self.key_dim - self.rope_dim}+{self.rope_dim}"
            return f"{text}, indexer {self.index_dim}, top {self.top_k}" if self.index_dim else text
        text = f"window {self.window} x {self.key_dim}"
        if self.ratio:
            text += f", 1 of {self.ratio} compressed"
        return text if self.top_k is None else f"{text}, top {self.top_k}"

    def offers(self, form: KVForm) -> bool:
        """Whether engines keep this kind of layer in that form.

        Latent attention comes in 16 (32) bits and fp8 only; the bundled runtime keeps that without indexer in int8 too.
        Codes of 4 bits are two to a byte.
        """
        if form.bits >= 16:
            return True
        if self.kind in ("mla", "dsa"):
            return form.name == "fp8" or (self.kind == "mla" and form.name == "int8")
        widths = self.key_dim - self.rope_dim, self.value_dim, self.index_dim
        return form.bits != 4 or not any(width % 2 for width in widths)

    def entry_bytes(self, form: KVForm) -> float:
        """Bytes of one entry, the indexer's key not counted."""
        plain = self.key_dim - self.rope_dim
        if self.kind not in ("dsa", "csa", "hca") or form.bits >= 16:
            return self.num_kv_heads * (form.key.token_bytes(self.key_dim) + form.value.token_bytes(self.value_dim))
        if self.kind == "dsa":
            return plain + 4 * math.ceil(plain / 128) + 2 * self.rope_dim
        exponents = exponent_bytes(plain, ENTRY_BLOCK, ENTRY_EXPONENTS)
        return math.ceil(plain * form.bits / 8) + 2 * self.rope_dim + exponents

    def page_bytes(self, form: KVForm, page_size: int = DEFAULT_PAGE_SIZE) -> int:
        """Bytes of one page of this layer in the bundled runtime; of kinds that it pages."""
        if self.has_rows:
            return sum(self.page_parts(form, page_size))
        dims = {"heads": self.num_kv_heads, "key_dim": self.key_dim, "value_dim": self.value_dim}
        return padded_bytes(page_arrays(form.key, form.value, **dims, page_size=page_size))

    def page_parts(self, form: KVForm, page_size: int) -> tuple[int, int]:
        """Bytes of a page of V4's entries, and of their indexer's keys; an entry may be in several pages."""
        share = page_size / self.ratio if self.ratio else 0.0
        return math.ceil(self.entry_bytes(form) * share), math.ceil(self.index_bytes(form) * share)

    def row_bytes(self, form: KVForm, dtype_bytes: int) -> int:
        """Bytes that one sequence takes beside its pages of V4's entries: its window, and what entries are made of."""
        return int((self.window or 0) * self.entry_bytes(form)) + self.past_tokens * self.past_width * dtype_bytes

    def allocated_bytes(
        self, tokens: int, form: KVForm, dtype_bytes: int = 2, page_size: int = DEFAULT_PAGE_SIZE
    ) -> float:
        """Bytes that one sequence of this length takes from the pool: whole pages, and the residual window's.

        Kinds that the bundled runtime has no pages for are counted without rounding.

        Args:
            tokens: length.
            form: of the cache.
            dtype_bytes: of one element of the residual window, and of what quantized entries are made of.
            page_size: tokens per page.
        """
        if not self.is_paged:
            return self.cached_bytes(tokens, form)
        pages = math.ceil(tokens / page_size)
        if self.has_rows:
            plain = form.bits // 8 if form.bits >= 16 else dtype_bytes
            return pages * self.page_bytes(form, page_size) + self.row_bytes(form, plain)
        if self.window is not None:
            pages = min(pages, math.ceil(self.window / page_size) + 1)  # a window lies across one page more
        residual = residual_tokens(form.key, page_size) * self.num_kv_heads * self.key_dim * dtype_bytes
        return pages * self.page_bytes(form, page_size) + residual

    def index_bytes(self, form: KVForm) -> int:
        """Bytes of one key of the indexer; quantized ones carry 4 bytes of scales per 128."""
        if form.bits >= 16:
            return self.index_dim * form.bits // 8
        return math.ceil(self.index_dim * form.bits / 8) + 4 * math.ceil(self.index_dim / 128)

    def token_bytes(self, form: KVForm) -> float:
        """Bytes that one more token adds to a short context, before a window is full."""
        entries = 1 + (1 / self.ratio if self.ratio else 0)
        return self.entry_bytes(form) * entries + self.index_bytes(form) / (self.ratio or 1)

    def cached_bytes(self, tokens: int, form: KVForm) -> float:
        """Bytes that one sequence of this length keeps in this layer."""
        raw, compressed, indexed = self._entries(tokens)
        return (raw + compressed) * self.entry_bytes(form) + indexed * self.index_bytes(form)

    def read_bytes(self, tokens: int, form: KVForm) -> float:
        """Bytes of the cache that one decode step reads at this length."""
        raw, compressed, indexed = self._entries(tokens)
        return self._read(raw, compressed) * self.entry_bytes(form) + indexed * self.index_bytes(form)

    def decode_flops(self, tokens: int) -> float:
        """Operations of one decode step at this length, the projections not counted."""
        raw, compressed, indexed = self._entries(tokens)
        return self._flops(self.key_dim + self._mixed, self._read(raw, compressed), indexed)

    def prefill_flops(self, tokens: int) -> float:
        """Operations of a causal prefill of this many tokens, the projections not counted."""
        if self.ratio:
            # An entry stands for `ratio` tokens: pairs are counted with tokens and divided by it.
            pairs = _pairs(tokens, self.window) + _pairs(tokens, self.top_k and self.top_k * self.ratio) / self.ratio
            indexed = _pairs(tokens, None) / self.ratio
        else:
            pairs, indexed = _pairs(tokens, self.top_k if self.kind == "dsa" else self.window), _pairs(tokens, None)
        return self._flops(sum(self.full_dims or (self.key_dim, self._mixed)), pairs, indexed)

    def _flops(self, width: int, pairs: float, indexed: float) -> float:
        """Operations of queries times keys, of mixing the values, and of the indexer's scan."""
        return 2 * self.num_heads * width * pairs + 2 * self.index_heads * self.index_dim * indexed

    @property
    def _mixed(self) -> int:
        """Channels that are added up by the scores: of mla the latent vector without its rotary part."""
        latent = self.kind in ("mla", "dsa")
        return self.value_dim or self.key_dim - (self.rope_dim if latent else 0)

    def _entries(self, tokens: int) -> tuple[float, float, float]:
        """Raw entries, compressed entries, and keys of the indexer."""
        raw = tokens if self.window is None else min(tokens, self.window)
        compressed = tokens / self.ratio if self.ratio else 0.0
        indexed = 0.0 if not self.index_dim else compressed if self.ratio else float(tokens)
        return raw, compressed, indexed

    def _read(self, raw: float, compressed: float) -> float:
        if self.top_k is None:
            return raw + compressed
        return raw + min(compressed, self.top_k) if self.ratio else min(raw, self.top_k)


def _pairs(tokens: int, window: int | None) -> float:
    """Query-key pairs of a causal prefill: the sum of min(t, window) over its tokens, t as a real number."""
    if window is None or tokens <= window:
        return tokens * tokens / 2
    return window * tokens - window * window / 2


_STATE_BYTES = 4  # float32: a state is added to once per token, and would lose what is small in 16 bits


@dataclass(frozen=True, kw_only=True, slots=True)
class StateShape:
    """State that one recurrent layer keeps of a sequence, whatever its length.

    Args:
        key_heads, key_dim: of queries and keys, G and N.
        value_heads, value_dim: of values, H and P.
        conv_width: W.
    """

    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int
    conv_width: int
    has_rows: ClassVar[bool] = False
    """It keeps no tokens, so none in a row either."""
    window: ClassVar[None] = None
    """Nor is the state about the newest tokens only."""

    @property
    def kind(self) -> Literal["state"]:
        """Kind of the layer, see `AttentionShape.kind`."""
        return "state"

    @property
    def num_kv_heads(self) -> int:
        """Zero: the layer has no heads of keys and values that a cache could hold."""
        return 0

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values of a token."""
        return 2 * self.key_heads * self.key_dim + self.values

    @property
    def values(self) -> int:
        """Channels of all values of a token."""
        return self.value_heads * self.value_dim

    @property
    def num_bytes(self) -> int:
        """Bytes of the state and of the last tokens that the convolution still reads."""
        numbers = self.values * self.key_dim + (self.conv_width - 1) * self.channels
        return _STATE_BYTES * numbers

    def describe(self) -> str:
        """Short form for tables, e.g. `state 32 x 128 x 128`."""
        return "nothing" if not self.channels else f"state {self.value_heads} x {self.key_dim} x {self.value_dim}"

    def offers(self, form: KVForm) -> bool:
        """Whether it is kept beside a cache in that form: always, as it is no part of it."""
        return True

    def page_bytes(self, form: KVForm) -> int:
        """Zero: the layer takes no pages."""
        return 0

    def allocated_bytes(
        self, tokens: int, form: KVForm, dtype_bytes: int = 2, page_size: int = DEFAULT_PAGE_SIZE
    ) -> float:
        """Bytes of one sequence of any length."""
        return self.num_bytes

    def token_bytes(self, form: KVForm) -> float:
        """Bytes that one more token adds."""
        return 0.0

    def cached_bytes(self, tokens: int, form: KVForm) -> float:
        """Bytes of one sequence of any length."""
        return self.num_bytes

    def read_bytes(self, tokens: int, form: KVForm) -> float:
        """Bytes that a decode step reads; it writes as many."""
        return self.num_bytes

    def decode_flops(self, tokens: int) -> float:
        """Operations of a decode step, the projections not counted: the state decays, is added to and is read."""
        return 2 * 3 * self.values * self.key_dim

    def prefill_flops(self, tokens: int) -> float:
        """Operations of so many tokens, as `decode_flops` counts them."""
        return tokens * self.decode_flops(1)


NOTHING = StateShape(key_heads=0, key_dim=0, value_heads=0, value_dim=0, conv_width=1)
"""Shape of a layer that looks at each token by itself."""
