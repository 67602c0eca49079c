"""Estimate the bytes that one attention or recurrent layer keeps and reads. Torch-free.

For a context of L tokens, each kind of layer keeps this many cache entries, each with this content:

    full     L entries       a key and a value for each key/value head (MHA, GQA, MQA)
    window   min(L, w)       the same, for the last w tokens only
    mla      L entries       one latent vector and one rotary key for all heads (DeepSeek V2, V3)
    dsa      L entries       as mla, plus an indexer key; a query reads the best `top_k` entries (DeepSeek V3.2)
    csa      w + L / r       one shared vector; r tokens are compressed into an entry with an indexer key; a query
                             reads the best `top_k` (DeepSeek V4)
    hca      w + L / r       as csa, but with a large r and no indexer: a query reads all entries

In DeepSeek V4, which has csa and hca layers, pages hold the compressed entries. The window and the inputs of the next
entries are in one row per sequence.
A recurrent layer (state-space, linear attention) keeps a state of fixed size, independent of the length: `StateShape`,
with G heads of queries and keys of N channels, and H heads of values of P channels. `models.recurrent` defines the
computation.

Sources: DeepSeek-V4's technical report for the formulas of csa and hca (9.62 GiB at 1,048,576 tokens for 30 and 31
layers); FlashMLA and vLLM for the 8-bit layouts of mla, dsa and csa (656, 132 and 584 bytes).
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from quantkit.models.kv_sizes import DEFAULT_PAGE_SIZE, KVForm, Side, padded_bytes, page_arrays, residual_numbers

# Channels that share one power-of-two scale, and the multiple to which the number of exponent bytes is rounded up: in
# quantized entries of csa and hca, then in keys of the indexer.
ENTRY_BLOCK, ENTRY_EXPONENTS = 64, 8
INDEX_BLOCK, INDEX_EXPONENTS = 32, 4


def exponent_bytes(width: int, block: int, multiple: int) -> int:
    """Count the exponent bytes of `width` channels: one for each block, rounded up to a multiple of `multiple`."""
    return math.ceil(math.ceil(width / block) / multiple) * multiple


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionShape:
    """Shape of the KV cache of one layer.

    Args:
        num_heads: number of query heads.
        num_kv_heads: number of key vectors, and of value vectors, per token; 1 if a vector serves as key and value.
        key_dim, value_dim: channels of a stored key and value; value_dim is 0 if one vector serves as both.
        rope_dim: channels of key_dim that 8-bit layouts of the latent kinds keep in 16 bits.
        window: number of last tokens that are kept uncompressed; None = all.
        ratio: tokens per compressed entry; 0 = no compression.
        top_k: entries that a query reads; None = all.
        index_dim, index_heads: channels and heads of the indexer; 0 = no indexer.
        full_dims: channels of a head's key and value in prefill of mla; None = as stored.
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
        """Kind of the layer, see the table at the top of the module."""
        if self.ratio:
            return "csa" if self.index_dim else "hca"
        if self.window is not None:
            return "window"
        if self.value_dim:
            return "full"
        return "dsa" if self.index_dim else "mla"

    @property
    def is_paged(self) -> bool:
        """Whether the bundled runtime stores this kind of layer in pages."""
        return self.kind != "dsa"

    @property
    def has_rows(self) -> bool:
        """Whether each sequence's newest tokens are in a row instead of pages, as in all layers of DeepSeek V4."""
        return self.window is not None and not self.value_dim

    @property
    def series(self) -> int:
        """Number of compressed entries that include a given token; 2 for csa, whose entries overlap."""
        return 2 if self.index_dim else 1

    @property
    def past_tokens(self) -> int:
        """Number of newest tokens whose inputs must be kept, because future compressed entries include them."""
        return max(0, self.series * self.ratio - 1)

    @property
    def past_width(self) -> int:
        """How many numbers are kept for each of the `past_tokens`.

        They are one value and one gate per series of entries and per channel of the entry and of the indexer's key.
        """
        return 2 * self.series * (self.key_dim + self.index_dim)

    def describe(self) -> str:
        """Return a short form for tables, e.g. `GQA 32/8 x 128` or `window 1024, GQA 32/8 x 128`."""
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
        """Whether engines can store this kind of layer's cache in this form.

        Engines store latent attention in 16 or 32 bits or in fp8; without an indexer, the bundled runtime also supports
        int8. Codes of fewer than 8 bits share bytes, so the channels must fill whole bytes. DeepSeek-V4's entries need
        at least 4 bits.
        """
        if form.bits >= 16:
            return True
        if self.kind in ("mla", "dsa"):
            return form.name == "fp8" or (self.kind == "mla" and form.name == "int8")
        if self.has_rows and form.bits < 4:
            return False
        of_keys = (self.key_dim - self.rope_dim, self.index_dim)
        return not any(width * form.key.bits % 8 for width in of_keys) and self.value_dim * form.value.bits % 8 == 0

    def _key(self, form: KVForm) -> Side:
        """Return how keys are stored. If they are also the values (mla), int8 keys have scales per token."""
        return form.value if self.kind == "mla" and form.name == "int8" else form.key

    def entry_bytes(self, form: KVForm) -> float:
        """Count the bytes of one entry without the indexer's key."""
        plain = self.key_dim - self.rope_dim
        if self.kind not in ("dsa", "csa", "hca") or form.bits >= 16:
            return self.num_kv_heads * (
                self._key(form).token_bytes(self.key_dim) + form.value.token_bytes(self.value_dim)
            )
        if self.kind == "dsa":
            return plain + 4 * math.ceil(plain / 128) + 2 * self.rope_dim
        exponents = exponent_bytes(plain, ENTRY_BLOCK, ENTRY_EXPONENTS)
        return math.ceil(plain * form.bits / 8) + 2 * self.rope_dim + exponents

    def page_bytes(self, form: KVForm, page_size: int = DEFAULT_PAGE_SIZE) -> int:
        """Count the bytes of one page of this layer in the bundled runtime. The layer must be of a paged kind."""
        if self.has_rows:
            return sum(self.page_parts(form, page_size))
        dims = {"heads": self.num_kv_heads, "key_dim": self.key_dim, "value_dim": self.value_dim}
        return padded_bytes(page_arrays(self._key(form), form.value, **dims, page_size=page_size))

    def page_parts(self, form: KVForm, page_size: int) -> tuple[int, int]:
        """Count the bytes of a page of DeepSeek V4: those of the compressed entries, and those of the indexer keys."""
        share = page_size / self.ratio if self.ratio else 0.0
        return math.ceil(self.entry_bytes(form) * share), math.ceil(self.index_bytes(form) * share)

    def row_bytes(self, form: KVForm, dtype_bytes: int) -> int:
        """Count the bytes of one sequence's row in DeepSeek V4: its window, and the inputs of the next entries."""
        return int((self.window or 0) * self.entry_bytes(form)) + self.past_tokens * self.past_width * dtype_bytes

    def allocated_bytes(
        self, tokens: int, form: KVForm, dtype_bytes: int = 2, page_size: int = DEFAULT_PAGE_SIZE
    ) -> float:
        """Count the bytes that a sequence of this length takes from the pool: whole pages and the residual window.

        For kinds that the bundled runtime does not store in pages, the count is not rounded up to whole pages.

        Args:
            tokens: length of the sequence.
            form: form of the cache.
            dtype_bytes: bytes per number in the residual window, or per number of the inputs of DeepSeek V4's entries.
            page_size: tokens per page.
        """
        if not self.is_paged:
            return self.cached_bytes(tokens, form)
        pages = math.ceil(tokens / page_size)
        if self.has_rows:
            plain = form.bits // 8 if form.bits >= 16 else dtype_bytes
            return pages * self.page_bytes(form, page_size) + self.row_bytes(form, plain)
        if self.window is not None:
            pages = min(pages, math.ceil(self.window / page_size) + 1)  # a window may start inside a page
        dims = {"heads": self.num_kv_heads, "key_dim": self.key_dim, "value_dim": self.value_dim}
        waiting = residual_numbers(self._key(form), form.value, **dims, page_size=page_size)
        return pages * self.page_bytes(form, page_size) + waiting * dtype_bytes

    def index_bytes(self, form: KVForm) -> int:
        """Count the bytes of one key of the indexer; a quantized key has 4 bytes of scales per 128 channels."""
        if form.bits >= 16:
            return self.index_dim * form.bits // 8
        return math.ceil(self.index_dim * form.bits / 8) + 4 * math.ceil(self.index_dim / 128)

    def token_bytes(self, form: KVForm) -> float:
        """Count the bytes that one more token adds to a context shorter than the window."""
        entries = 1 + (1 / self.ratio if self.ratio else 0)
        return self.entry_bytes(form) * entries + self.index_bytes(form) / (self.ratio or 1)

    def cached_bytes(self, tokens: int, form: KVForm) -> float:
        """Count the bytes that one sequence of this length keeps in this layer."""
        raw, compressed, indexed = self._entries(tokens)
        return (raw + compressed) * self.entry_bytes(form) + indexed * self.index_bytes(form)

    def read_bytes(self, tokens: int, form: KVForm) -> float:
        """Count the bytes of the cache that one decode step reads at this length."""
        raw, compressed, indexed = self._entries(tokens)
        return self._read(raw, compressed) * self.entry_bytes(form) + indexed * self.index_bytes(form)

    def decode_flops(self, tokens: int) -> float:
        """Count the operations of one decode step at this length, without the projections."""
        raw, compressed, indexed = self._entries(tokens)
        return self._flops(self.key_dim + self._mixed, self._read(raw, compressed), indexed)

    def prefill_flops(self, tokens: int) -> float:
        """Count the operations of a causal prefill of this many tokens, without the projections."""
        if self.ratio:
            # An entry stands for `ratio` tokens, so count pairs of tokens and divide by `ratio`.
            pairs = _pairs(tokens, self.window) + _pairs(tokens, self.top_k and self.top_k * self.ratio) / self.ratio
            indexed = _pairs(tokens, None) / self.ratio
        else:
            pairs, indexed = _pairs(tokens, self.top_k if self.kind == "dsa" else self.window), _pairs(tokens, None)
        return self._flops(sum(self.full_dims or (self.key_dim, self._mixed)), pairs, indexed)

    def _flops(self, width: int, pairs: float, indexed: float) -> float:
        """Count the operations of queries times keys, of the weighted sum of values, and of the indexer's scan."""
        return 2 * self.num_heads * width * pairs + 2 * self.index_heads * self.index_dim * indexed

    @property
    def _mixed(self) -> int:
        """Channels of the weighted sum of values; for mla and dsa, of the latent vector without its rotary part."""
        latent = self.kind in ("mla", "dsa")
        return self.value_dim or self.key_dim - (self.rope_dim if latent else 0)

    def _entries(self, tokens: int) -> tuple[float, float, float]:
        """Count the uncompressed entries, the compressed entries, and the keys of the indexer."""
        raw = tokens if self.window is None else min(tokens, self.window)
        compressed = tokens / self.ratio if self.ratio else 0.0
        indexed = 0.0 if not self.index_dim else compressed if self.ratio else float(tokens)
        return raw, compressed, indexed

    def _read(self, raw: float, compressed: float) -> float:
        if self.top_k is None:
            return raw + compressed
        return raw + min(compressed, self.top_k) if self.ratio else min(raw, self.top_k)


def _pairs(tokens: int, window: int | None) -> float:
    """Count the query-key pairs of a causal prefill: the integral of min(t, window) for t from 0 to `tokens`."""
    if window is None or tokens <= window:
        return tokens * tokens / 2
    return window * tokens - window * window / 2


_STATE_BYTES = 4  # float32: every token adds to the state, and 16 bits would lose small additions


@dataclass(frozen=True, kw_only=True, slots=True)
class StateShape:
    """Shape of the fixed-size state that one recurrent layer keeps per sequence.

    Args:
        key_heads, key_dim: number of query and key heads, and channels of such a head (G and N).
        value_heads, value_dim: number of value heads, and channels of such a head (H and P).
        conv_width: width of the convolution, W.
    """

    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int
    conv_width: int
    has_rows: ClassVar[bool] = False
    """The layer keeps no rows of recent tokens."""
    window: ClassVar[None] = None
    """The layer has no sliding window."""

    @property
    def kind(self) -> Literal["state"]:
        """Kind of the layer, see `AttentionShape.kind`."""
        return "state"

    @property
    def num_kv_heads(self) -> int:
        """Zero: the layer has no cached keys and values."""
        return 0

    @property
    def channels(self) -> int:
        """Channels of the convolution: all queries, keys and values of a token."""
        return 2 * self.key_heads * self.key_dim + self.values

    @property
    def values(self) -> int:
        """Channels of a token's values in all heads."""
        return self.value_heads * self.value_dim

    @property
    def num_bytes(self) -> int:
        """Bytes of the state and of the last tokens that the convolution needs."""
        numbers = self.values * self.key_dim + (self.conv_width - 1) * self.channels
        return _STATE_BYTES * numbers

    def describe(self) -> str:
        """Return a short form for tables, e.g. `state 32 x 128 x 128`."""
        return "nothing" if not self.channels else f"state {self.value_heads} x {self.key_dim} x {self.value_dim}"

    def offers(self, form: KVForm) -> bool:
        """True: the state is stored separately, so the cache of other layers may have any form."""
        return True

    def page_bytes(self, form: KVForm) -> int:
        """Zero: the layer takes no pages."""
        return 0

    def allocated_bytes(
        self, tokens: int, form: KVForm, dtype_bytes: int = 2, page_size: int = DEFAULT_PAGE_SIZE
    ) -> float:
        """Count the bytes of one sequence's state, which do not depend on the sequence's length."""
        return self.num_bytes

    def token_bytes(self, form: KVForm) -> float:
        """Zero: one more token adds no bytes."""
        return 0.0

    def cached_bytes(self, tokens: int, form: KVForm) -> float:
        """Count the bytes of one sequence's state, which do not depend on the sequence's length."""
        return self.num_bytes

    def read_bytes(self, tokens: int, form: KVForm) -> float:
        """Count the bytes of one sequence's state that a decode step reads; the step also writes the whole state."""
        return self.num_bytes

    def decode_flops(self, tokens: int) -> float:
        """Count the operations of a decode step without the projections: decay, update and read the state."""
        return 2 * 3 * self.values * self.key_dim

    def prefill_flops(self, tokens: int) -> float:
        """Count the operations of a prefill of this many tokens, without the projections."""
        return tokens * self.decode_flops(1)


NOTHING = StateShape(key_heads=0, key_dim=0, value_heads=0, value_dim=0, conv_width=1)
"""Shape of a layer without attention or state, such as an MLP alone."""
