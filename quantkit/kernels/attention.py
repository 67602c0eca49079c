"""Attention over a paged cache and the fresh keys of this step, and storing those: plain torch, any device.

A new token sees what its sequence had before this step, as the cache holds it, and causally the fresh, never quantized
keys and values of this step. One call serves decode, prefill chunks and verification of drafts, mixed at will.
Shapes: B sequences, T new tokens of all of them, H heads (Hq of queries, Hkv of keys), D channels, S tokens per page,
C tokens already cached, L new tokens of one sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from quantkit.kernels.batch import ForwardBatch
from quantkit.kernels.kv_numbers import dequantize, quantize
from quantkit.kernels.layouts import KVViews, PagedArray


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadNorms:
    """Root mean square norms of each head's queries and keys, before the rotation.

    Args:
        query, key: weights (D,).
        eps, offset: see `ops.rms_norm`.
    """

    query: Tensor
    key: Tensor
    eps: float
    offset: float


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionOptions:
    """What attention does besides softmax(q . k) v.

    Args:
        scale: of the scores.
        window: a key is seen if query position - key position < window; None = all.
        softcap: scores become softcap * tanh(score / softcap); None = as they are.
        sinks: (Hq,) float32, a further score of each head that takes part in the softmax and has no value; None = none.
        interleaved: angles turn channels (2i, 2i + 1) instead of (i, i + R/2); see `ops.rotary_`.
        norms: of queries and keys; None = none.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    interleaved: bool = False
    norms: HeadNorms | None = None


class TorchAttention:
    """Attention of one layer: `attend`, then `store`; see `ops.Stepwise`."""

    def __init__(self, views: KVViews) -> None:
        self._views = views

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, batch: ForwardBatch, options: AttentionOptions
    ) -> Tensor:
        """See `ops.PagedAttention`; queries and keys are normed and rotated already."""
        out = attend(query, key, value, self._views, batch, options)
        store(key, value, self._views, batch)
        return out


class RotatedAttention:
    """Attention whose queries and keys are multiplied by one orthogonal matrix first; see `ops.Stepwise`.

    Their products stay what they are; what is stored of the keys is spread over all channels.

    Args:
        inner: attends and stores.
        matrix: (D, D) float32, on the device of the pages.
    """

    def __init__(self, inner: Callable[..., Tensor], matrix: Tensor) -> None:
        self._inner, self._matrix = inner, matrix

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, batch: ForwardBatch, options: AttentionOptions
    ) -> Tensor:
        """See `ops.PagedAttention`; queries and keys are normed and rotated already."""
        query, key = ((states.float() @ self._matrix).to(states.dtype) for states in (query, key))
        return self._inner(query, key, value, batch, options)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Span:
    """One sequence of a batch: its number in it, its new tokens start:stop, and C tokens before them."""

    row: int
    start: int
    stop: int
    cached: int


def _spans(batch: ForwardBatch) -> Iterator[_Span]:
    start = 0
    for row, (new, length) in enumerate(zip(batch.query_lengths, batch.context_lengths, strict=True)):
        if new:
            yield _Span(row=row, start=start, stop=start + new, cached=length - new)
        start += new


def attend(
    query: Tensor, key: Tensor, value: Tensor, views: KVViews, batch: ForwardBatch, options: AttentionOptions
) -> Tensor:
    """Attention of new tokens to the cache and to each other; the cache is not modified.

    Args:
        query: (T, Hq, D), rotated.
        key: (T, Hkv, D), rotated; Hkv divides Hq.
        value: (T, Hkv, Dv).
        views: the layer's pages and tails.
        batch: what belongs to whom; its page table covers all cached tokens.
        options: scale, window and the like.
    Returns:
        (T, Hq, Dv), dtype of query.
    """
    out = query.new_empty(query.shape[0], query.shape[1], value.shape[2])
    for span in _spans(batch):
        new = slice(span.start, span.stop)
        first = 0 if options.window is None else max(0, span.cached - options.window + 1)
        keys, values = key[new].transpose(0, 1), value[new].transpose(0, 1)  # (Hkv, L, D)
        if span.cached > first:
            old_keys, old_values = _gather(views, batch, span, first, query.dtype)
            keys, values = torch.cat([old_keys, keys], dim=1), torch.cat([old_values, values], dim=1)
        out[new] = _attend_one(query[new].transpose(0, 1), keys, values, options).transpose(0, 1)
    return out


def _gather(views: KVViews, batch: ForwardBatch, span: _Span, first: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cached keys and values (Hkv, C - first, D) of tokens first..C of a sequence. Slots past its end are cut off."""
    size = views.layout.page_size
    from_page, to_page = first // size, -(-span.cached // size)
    pages = batch.page_table[span.row, from_page:to_page]
    origin = from_page * size
    values = _read(views.value, pages, dtype)[:, first - origin : span.cached - origin]
    # Keys before this position are in pages: all, or those of pages that were quantized when they became complete.
    paged = span.cached if views.key_tail is None else max(span.cached // size * size, first)
    parts = []
    if paged > first:
        whole = pages[: -(-paged // size) - from_page]
        parts.append(_read(views.key, whole, dtype)[:, first - origin : paged - origin])
    if views.key_tail is not None and span.cached > paged:
        parts.append(_read_tail(views.key_tail, batch.tail_rows[span.row], paged, span.cached).to(dtype))
    return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0], values


def _read(array: PagedArray, pages: Tensor, dtype: torch.dtype) -> Tensor:
    """Keys or values of whole pages, (Hkv, len(pages) * S, D)."""
    codes, scale, zero = (
        None if part is None else part.index_select(0, pages) for part in (array.codes, array.scale, array.zero)
    )
    assert codes is not None
    if array.scheme.dtype is None:
        values = codes.to(dtype)
    else:
        values = dequantize(
            codes, scale, zero, array.scheme, dtype, 1.0 if array.fixed is None else array.fixed[:, None, None]
        )
    return values.transpose(0, 1).flatten(1, 2)


def _read_tail(tail: Tensor, row: Tensor, start: int, stop: int) -> Tensor:
    """(Hkv, stop - start, D) of positions start..stop from a sequence's tail."""
    slots = torch.arange(start, stop, device=tail.device) % tail.shape[2]
    return tail[row.expand(stop - start), :, slots].transpose(0, 1)


def _attend_one(query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Attention of one sequence: queries (Hq, L, D) are the last L of the keys (Hkv, N, D)."""
    length, total = query.shape[1], key.shape[1]
    if options.softcap is not None or options.sinks is not None:
        return _attend_plain(query, key, value, _mask(length, total, options.window, query.device), options)
    sdpa = partial(F.scaled_dot_product_attention, scale=options.scale)
    if length == total and (options.window is None or options.window >= total):
        causal: Tensor = sdpa(query[None], key[None], value[None], is_causal=True, enable_gqa=True)
        return causal[0]
    # The query heads of one key head as further queries: keys are read once, not once per query head.
    groups = query.shape[0] // key.shape[0]
    mask = None if length == 1 else _mask(length, total, options.window, query.device).repeat(groups, 1)
    grouped = query.reshape(1, key.shape[0], groups * length, query.shape[2])
    out: Tensor = sdpa(grouped, key[None], value[None], mask)
    return out.view(query.shape[0], length, value.shape[2])


def _mask(length: int, total: int, window: int | None, device: torch.device) -> Tensor:
    """(L, N), true where a key is seen."""
    queries = torch.arange(total - length, total, device=device).unsqueeze(1)
    keys = torch.arange(total, device=device)
    seen = keys <= queries
    return seen if window is None else seen & (queries - keys < window)


def _attend_plain(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, options: AttentionOptions) -> Tensor:
    """Attention in float32 with every option spelled out."""
    groups = query.shape[0] // key.shape[0]
    grouped = query.float().view(-1, groups, *query.shape[1:])  # (Hkv, G, L, D)
    scores = grouped @ key.float().unsqueeze(1).transpose(-1, -2) * options.scale  # (Hkv, G, L, N)
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    scores = scores.masked_fill(~mask, -torch.inf).flatten(0, 1)  # (Hq, L, N)
    if options.sinks is not None:
        sinks = options.sinks.float()[:, None, None].expand(-1, scores.shape[1], 1)
        weights = torch.softmax(torch.cat([scores, sinks], dim=-1), dim=-1)[..., :-1]
    else:
        weights = torch.softmax(scores, dim=-1)
    out = weights.view(-1, groups, *weights.shape[1:]) @ value.float().unsqueeze(1)  # (Hkv, G, L, Dv)
    return out.flatten(0, 1).to(query.dtype)


def store(key: Tensor, value: Tensor, views: KVViews, batch: ForwardBatch) -> None:
    """Put the fresh keys and values of this step into the cache, quantized as the layout says.

    Keys that are quantized per channel go to the sequence's tail; a page that this step completes is quantized into the
    pool as well. The tail keeps its tokens, so a page with tokens that are taken back is simply quantized again.

    Args:
        key: (T, Hkv, D), rotated.
        value: (T, Hkv, Dv).
        views: the layer's pages and tails; modified.
        batch: slots of the new tokens, and what belongs to whom.
    """
    pages = torch.div(batch.slots, views.layout.page_size, rounding_mode="floor")
    offsets = batch.slots - pages * views.layout.page_size
    _write(views.value, value, pages, offsets)
    if views.key_tail is None:
        _write(views.key, key, pages, offsets)
        return
    store_tails(key, views, batch)


def store_tails(key: Tensor, views: KVViews, batch: ForwardBatch, least: int = 1) -> None:
    """The part of `store` for keys that are quantized per channel.

    Args:
        key: (T, Hkv, D), rotated.
        views: the layer's pages and tails; modified.
        batch: what belongs to whom.
        least: sequences with fewer new tokens are left out.
    """
    for span in _spans(batch):
        if span.stop - span.start >= least:
            _store_tail(key[span.start : span.stop].transpose(0, 1), views, batch, span)


def _write(array: PagedArray, fresh: Tensor, pages: Tensor, offsets: Tensor) -> None:
    """Store (T, Hkv, D) token by token."""
    if array.scheme.dtype is None:
        array.codes[pages, :, offsets] = fresh.to(array.codes.dtype)
        return
    codes, scale, zero = quantize(fresh, array.scheme, 1.0 if array.fixed is None else array.fixed[:, None])
    for target, stored in ((array.codes, codes), (array.scale, scale), (array.zero, zero)):
        if target is not None and stored is not None:
            target[pages, :, offsets] = stored


def _store_tail(fresh: Tensor, views: KVViews, batch: ForwardBatch, span: _Span) -> None:
    """Keys (Hkv, L, D) of one sequence into its tail, and the pages that they complete into the pool."""
    tail, size = views.key_tail, views.layout.page_size
    assert tail is not None
    row, length = batch.tail_rows[span.row], span.cached + fresh.shape[1]
    from_page, to_page = span.cached // size, length // size
    if to_page > from_page:
        keys = fresh.to(tail.dtype)
        if span.cached > from_page * size:
            keys = torch.cat([_read_tail(tail, row, from_page * size, span.cached), keys], dim=1)
        whole = keys[:, : (to_page - from_page) * size].reshape(keys.shape[0], -1, size, keys.shape[2])
        pages = batch.page_table[span.row, from_page:to_page].long()
        stored = quantize(whole.transpose(0, 1), views.key.scheme)  # of (pages, H, S, D)
        for target, part in zip((views.key.codes, views.key.scale, views.key.zero), stored, strict=True):
            if target is not None and part is not None:
                target[pages] = part
    kept = min(fresh.shape[1], tail.shape[2])
    slots = torch.arange(length - kept, length, device=tail.device) % tail.shape[2]
    tail[row.expand(kept), :, slots] = fresh[:, -kept:].transpose(0, 1).to(tail.dtype)
