"""What one attention layer keeps and reads, in bytes: the KV cache before anything is allocated.

L tokens of context. What an entry of the cache holds, and how many entries there are:

    full     L entries       a key and a value for each key/value head (MHA, GQA, MQA)
    window   min(L, w)       the same, for the last w tokens only
    mla      L entries       one latent vector and one rotary key for all heads (DeepSeek V2, V3)
    dsa      L entries       as mla, and an indexer key; a query reads the best `top_k` entries (DeepSeek V3.2)
    csa      w + L / r       one shared vector; r tokens make an entry with an indexer key; `top_k` are read (V4)
    hca      w + L / r       as csa with a large r and no indexer: all entries are read

Not the runtime's allocator: that one rounds up to pages. Not for state-space or linear-attention layers.

Sources: the formulas of csa and hca are those of DeepSeek-V4's technical report (9.62 GiB at 1,048,576 tokens for 30
and 31 layers); the 8-bit layouts of mla, dsa and csa are those of FlashMLA and vLLM (656, 132 and 584 bytes).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from quantkit.planning.kv_forms import BF16, PAGE_SIZE, ROLLBACK, KVForm

Kind = Literal["full", "window", "mla", "dsa", "csa", "hca"]
LATENT = ("mla", "dsa", "csa", "hca")


@dataclass(frozen=True, kw_only=True, slots=True)
class Attention:
    """The cache of one layer.

    Args:
        kind: see the table at the top of the file.
        num_heads: query heads.
        num_kv_heads: vectors kept per token and side; 1 for the latent kinds.
        key_dim, value_dim: widths of what is kept; value_dim is 0 where keys and values are one vector.
        rope_dim: of key_dim, the part that 8-bit layouts of the latent kinds leave in 16 bits.
        window: raw tokens that are kept; None = all.
        ratio: tokens per compressed entry; 0 = none is compressed.
        top_k: entries that a query reads; None = all.
        index_dim, index_heads: of the indexer; 0 = there is none.
        score_dim, mix_dim: multiply-adds per head for one query and one key, in decode.
        prefill_score_dim, prefill_mix_dim: the same in prefill, where mla works on full heads.
    """

    kind: Kind
    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    score_dim: int
    mix_dim: int
    prefill_score_dim: int
    prefill_mix_dim: int
    rope_dim: int = 0
    window: int | None = None
    ratio: int = 0
    top_k: int | None = None
    index_dim: int = 0
    index_heads: int = 0

    def offers(self, form: KVForm) -> bool:
        """Whether engines keep this kind of layer in that form: the latent kinds come in 16 (32) bits and fp8 only."""
        return self.kind not in LATENT or form.bits >= 16 or form.name == "fp8"

    def entry_bytes(self, form: KVForm) -> float:
        """Bytes of one entry, the indexer's key not counted."""
        if self.kind not in LATENT or form.bits >= 16:
            form = self._kept(form)
            return self.num_kv_heads * (form.key.token_bytes(self.key_dim) + form.value.token_bytes(self.value_dim))
        plain = self.key_dim - self.rope_dim
        if self.kind == "mla":
            return self.key_dim  # one scale for the tensor
        if self.kind == "dsa":
            return plain + 4 * math.ceil(plain / 128) + 2 * self.rope_dim
        return plain + 2 * self.rope_dim + 8  # csa, hca: 8 bytes of block exponents

    def page_bytes(self, form: KVForm) -> int:
        """Bytes of one page of this layer in the bundled runtime; of kinds that it pages: full and window."""
        form = self._kept(form)
        key = form.key.page_bytes(self.num_kv_heads, self.key_dim)
        return key + form.value.page_bytes(self.num_kv_heads, self.value_dim)

    def allocated_bytes(self, tokens: int, form: KVForm, dtype_bytes: int = 2) -> float:
        """Bytes that one sequence of this length takes from the pool: whole pages, and a 16-bit tail of its open page.

        The latent kinds, which the bundled runtime has no pages for, are counted without rounding.

        Args:
            tokens: length.
            form: of the cache.
            dtype_bytes: of one element of the tail.
        """
        if self.kind in LATENT:
            return self.cached_bytes(tokens, form)
        pages = math.ceil(tokens / PAGE_SIZE)
        if self.window is not None:
            pages = min(pages, math.ceil(self.window / PAGE_SIZE) + 1)  # a window lies across one page more
        tail = PAGE_SIZE + ROLLBACK if self._kept(form).key.granularity == "channel" else 0
        return pages * self.page_bytes(form) + tail * self.num_kv_heads * self.key_dim * dtype_bytes

    def index_bytes(self, form: KVForm) -> int:
        """Bytes of one key of the indexer; 8-bit ones carry a float32 scale per 128."""
        if not self.index_dim:
            return 0
        return (
            self.index_dim * form.bits // 8 if form.bits >= 16 else self.index_dim + 4 * math.ceil(self.index_dim / 128)
        )

    def cached_bytes(self, tokens: int, form: KVForm) -> float:
        """Bytes that one sequence of this length keeps in this layer."""
        raw, compressed, indexed = self._entries(tokens)
        return (raw + compressed) * self.entry_bytes(form) + indexed * self.index_bytes(form)

    def read_bytes(self, tokens: int, form: KVForm) -> float:
        """Bytes of the cache that one decode step reads at this length."""
        raw, compressed, indexed = self._entries(tokens)
        return (self._read(raw, compressed)) * self.entry_bytes(form) + indexed * self.index_bytes(form)

    def decode_flops(self, tokens: int) -> float:
        """Operations of one decode step at this length, the projections not counted."""
        raw, compressed, indexed = self._entries(tokens)
        scores = 2 * self.num_heads * (self.score_dim + self.mix_dim) * self._read(raw, compressed)
        return scores + 2 * self.index_heads * self.index_dim * indexed

    def prefill_flops(self, tokens: int) -> float:
        """Operations of a causal prefill of this many tokens, the projections not counted."""
        width = 2 * self.num_heads * (self.prefill_score_dim + self.prefill_mix_dim)
        if self.ratio:
            pairs = _pairs(tokens, self.window) + _pairs(tokens, self.top_k and self.top_k * self.ratio) / self.ratio
            indexed = _pairs(tokens, None) / self.ratio
        else:
            pairs, indexed = _pairs(tokens, self.top_k if self.kind == "dsa" else self.window), _pairs(tokens, None)
        return width * pairs + 2 * self.index_heads * self.index_dim * indexed

    def _kept(self, form: KVForm) -> KVForm:
        """Layers with a window stay in 16 bits: they keep few tokens, and their errors are known to cost accuracy."""
        return BF16 if self.kind == "window" and form.bits < 16 else form

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


def grouped(*, num_heads: int, num_kv_heads: int, head_dim: int, window: int | None = None) -> Attention:
    """Ordinary attention: MHA, GQA or MQA, over everything or over a window.

    Args:
        num_heads, num_kv_heads, head_dim: sizes.
        window: tokens that a query sees; None = all before it.
    """
    return Attention(
        kind="full" if window is None else "window",
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        key_dim=head_dim,
        value_dim=head_dim,
        score_dim=head_dim,
        mix_dim=head_dim,
        prefill_score_dim=head_dim,
        prefill_mix_dim=head_dim,
        window=window,
    )


def latent(
    *,
    num_heads: int,
    latent_dim: int,
    rope_dim: int,
    head_dim: int,
    value_dim: int,
    index_dim: int = 0,
    index_heads: int = 0,
    top_k: int | None = None,
) -> Attention:
    """Multi-head latent attention; with an indexer, the sparse form of DeepSeek V3.2.

    Args:
        num_heads: query heads.
        latent_dim, rope_dim: kept per token, `kv_lora_rank` and `qk_rope_head_dim`.
        head_dim, value_dim: of the full heads that prefill works on.
        index_dim, index_heads, top_k: of the indexer.
    """
    return Attention(
        kind="dsa" if index_dim else "mla",
        num_heads=num_heads,
        num_kv_heads=1,
        key_dim=latent_dim + rope_dim,
        value_dim=0,
        rope_dim=rope_dim,
        score_dim=latent_dim + rope_dim,
        mix_dim=latent_dim,
        prefill_score_dim=head_dim,
        prefill_mix_dim=value_dim,
        top_k=top_k if index_dim else None,
        index_dim=index_dim,
        index_heads=index_heads if index_dim else 0,
    )


def compressed(
    *,
    num_heads: int,
    head_dim: int,
    rope_dim: int,
    window: int,
    ratio: int,
    index_dim: int = 0,
    index_heads: int = 0,
    top_k: int | None = None,
) -> Attention:
    """One layer of DeepSeek V4: a window of raw tokens and, with a ratio, compressed entries before it.

    Args:
        num_heads, head_dim, rope_dim: sizes; key and value are one vector of head_dim.
        window: raw tokens.
        ratio: tokens per entry, 0 = window only.
        index_dim, index_heads, top_k: of the indexer that csa layers have.
    """
    return Attention(
        kind="csa" if index_dim else "hca" if ratio else "window",
        num_heads=num_heads,
        num_kv_heads=1,
        key_dim=head_dim,
        value_dim=0,
        rope_dim=rope_dim,
        score_dim=head_dim,
        mix_dim=head_dim,
        prefill_score_dim=head_dim,
        prefill_mix_dim=head_dim,
        window=window,
        ratio=ratio,
        top_k=top_k if index_dim else None,
        index_dim=index_dim,
        index_heads=index_heads if index_dim else 0,
    )


def _pairs(tokens: int, window: int | None) -> float:
    """Query-key pairs of a causal prefill: the sum of min(t, window) over its tokens, t as a real number."""
    if window is None or tokens <= window:
        return tokens * tokens / 2
    return window * tokens - window * window / 2
