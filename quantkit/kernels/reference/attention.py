"""Attention over a paged cache and a step's new keys, and storage of new keys and values. Plain torch, any device.

A new token attends to its sequence's earlier tokens as stored in the cache, and to this step's new tokens up to itself,
which are not quantized. One call may mix decode, prefill chunks and verification of drafts.
Shapes: B sequences, T new tokens in total, H heads (Hq of queries, Hkv of keys), D channels, S tokens per page,
C tokens already cached, L new tokens of one sequence.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from quantkit.kernels.layouts import KVViews, PagedArray
from quantkit.kernels.reference.kv_codes import codes_of, decode_states
from quantkit.kernels.types import AttentionOptions, ForwardBatch, States


class TorchAttention:
    """Attention of one layer: `attend`, then `store`. `ops.Stepwise` calls it with normalized and rotated states."""

    def __init__(self, views: KVViews) -> None:
        self._views = views

    def __call__(self, states: States, batch: ForwardBatch, options: AttentionOptions) -> Tensor:
        out = attend(states, self._views, batch, options)
        store(*states[1:], self._views, batch)
        return out


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """One sequence of a batch: its index, its new tokens, and the number C of tokens before them."""

    row: int
    new: slice
    cached: int


def spans(batch: ForwardBatch) -> Iterator[Span]:
    """Yield a `Span` for each sequence of a batch that has new tokens."""
    start = 0
    for row, (new, length) in enumerate(zip(batch.query_lengths, batch.context_lengths, strict=True)):
        if new:
            yield Span(row=row, new=slice(start, start + new), cached=length - new)
        start += new


def attend(states: States, views: KVViews, batch: ForwardBatch, options: AttentionOptions) -> Tensor:
    """Attend from new tokens to the cache and to each other; the cache is not modified.

    Args:
        states: queries, keys and values; queries and keys are rotated.
        views: pages and residual windows of the layer.
        batch: the batch of the step; its page table covers all cached tokens.
        options: scale, window and further options.
    Returns:
        (T, Hq, D), dtype of the queries; D is the value width.
    """
    query, key, value = states
    out = query.new_empty(*query.shape[:2], value.shape[2])
    for span in spans(batch):
        first = 0 if options.window is None else max(0, span.cached - options.window + 1)
        keys, values = key[span.new].transpose(0, 1), value[span.new].transpose(0, 1)  # (Hkv, L, D)
        if span.cached > first:
            old_keys, old_values = _gather(views, batch, span, first, query.dtype)
            keys, values = torch.cat([old_keys, keys], dim=1), torch.cat([old_values, values], dim=1)
        out[span.new] = _attend_one(query[span.new].transpose(0, 1), keys, values, options).transpose(0, 1)
    return out


def _gather(views: KVViews, batch: ForwardBatch, span: Span, first: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cached keys and values (Hkv, C - first, D) of tokens first..C of a sequence."""
    size = views.layout.page_size
    from_page, to_page = first // size, -(-span.cached // size)
    pages = batch.page_table[span.row, from_page:to_page]
    origin = from_page * size
    if views.layout.rope_dim:
        latents = _read(views.key, pages, dtype)[:, first - origin : span.cached - origin]
        return latents, latents[..., views.layout.rope_dim :]

    def side(array: PagedArray, window: Tensor | None) -> Tensor:
        # Tokens before position `paged` are in pages: all, or with a residual window only those of complete pages.
        paged = span.cached if window is None else max(span.cached // size * size, first)
        pieces = []
        if paged > first:
            whole = pages[: -(-paged // size) - from_page]
            pieces.append(_read(array, whole, dtype)[:, first - origin : paged - origin])
        if window is not None and span.cached > paged:
            pieces.append(_read_residual(window, batch.residual_rows[span.row], paged, span.cached).to(dtype))
        return torch.cat(pieces, dim=1) if len(pieces) > 1 else pieces[0]

    return side(views.key, views.key_residual), side(views.value, views.value_residual)


def _read(array: PagedArray, pages: Tensor, dtype: torch.dtype) -> Tensor:
    """Return keys or values of whole pages, (Hkv, len(pages) * S, D)."""
    codes, scale, zero = (
        None if one is None else one.index_select(0, pages) for one in (array.codes, array.scale, array.zero)
    )
    assert codes is not None
    if array.scheme.dtype is None:
        values = codes.to(dtype)
    else:
        values = decode_states(
            codes, scale, zero, array.scheme, dtype, 1.0 if array.fixed is None else array.fixed[:, None, None]
        )
    return values.transpose(0, 1).flatten(1, 2)


def page_keys(views: KVViews, pages: Tensor) -> Tensor:
    """Return the keys of complete pages (P,) of a layer, as attention reads them: (Hkv, P, S, D) float32."""
    keys = _read(views.key, pages, torch.float32)  # (Hkv, P * S, D)
    return keys.view(len(keys), len(pages), -1, keys.shape[2])


def _read_residual(residual: Tensor, row: Tensor, start: int, stop: int) -> Tensor:
    """Return the keys or values (Hkv, stop - start, D) of positions start..stop from a sequence's residual window."""
    slots = torch.arange(start, stop, device=residual.device) % residual.shape[2]
    return residual[row.expand(stop - start), :, slots].transpose(0, 1)


def _attend_one(query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Attend for one sequence of N tokens: queries (Hq, L, D) of its last L tokens, keys and values (Hkv, N, D)."""
    length, total = query.shape[1], key.shape[1]
    if options.softcap is not None or options.sinks is not None:
        return attend_plainly(query, key, value, seen_by(length, total, options.window, query.device), options)
    sdpa = partial(F.scaled_dot_product_attention, scale=options.scale)
    if length == total and (options.window is None or options.window >= total):
        causal: Tensor = sdpa(query[None], key[None], value[None], is_causal=True, enable_gqa=True)
        return causal[0]
    # The query heads of one key head become further queries, so keys are read once, not once per query head.
    groups = query.shape[0] // key.shape[0]
    mask = None if length == 1 else seen_by(length, total, options.window, query.device).repeat(groups, 1)
    grouped = query.reshape(1, key.shape[0], groups * length, query.shape[2])
    out: Tensor = sdpa(grouped, key[None], value[None], mask)
    return out.view(query.shape[0], length, value.shape[2])


def seen_by(length: int, total: int, window: int | None, device: torch.device) -> Tensor:
    """Return a mask (L, N), true where a query sees a key: causal, and within the window if there is one."""
    queries = torch.arange(total - length, total, device=device).unsqueeze(1)
    keys = torch.arange(total, device=device)
    seen = keys <= queries
    return seen if window is None else seen & (queries - keys < window)


def attend_plainly(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, options: AttentionOptions) -> Tensor:
    """Attend in float32, with optional softcap and sinks."""
    groups = query.shape[0] // key.shape[0]
    grouped = query.float().view(-1, groups, *query.shape[1:])  # (Hkv, G, L, D)
    scores = grouped @ key.float().unsqueeze(1).transpose(-1, -2) * options.scale  # (Hkv, G, L, N)
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    scores = scores.masked_fill(~mask, -torch.inf).flatten(0, 1)  # (Hq, L, N)
    if options.sinks is None:
        weights = torch.softmax(scores, dim=-1)
    else:
        sinks = options.sinks[:, None, None].expand(*scores.shape[:2], 1)
        weights = torch.softmax(torch.cat([scores, sinks], dim=-1), dim=-1)[..., :-1]
    out = weights.view(-1, groups, *weights.shape[1:]) @ value.float().unsqueeze(1)  # (Hkv, G, L, D)
    return out.flatten(0, 1).to(query.dtype)


def store(key: Tensor, value: Tensor, views: KVViews, batch: ForwardBatch) -> None:
    """Store the step's new keys and values in the cache, quantized as the layout says.

    Keys that are quantized per channel go to the sequence's residual window. If the values of the layer are quantized
    per token, they go there too. If this step completes a page, that page is also quantized and written to the page
    pool. Its tokens stay in the window as long as the engine may discard some of them (rejected drafts), because the
    page must then be quantized again.

    Args:
        key: (T, Hkv, D), rotated.
        value: (T, Hkv, D).
        views: pages and residual windows of the layer; modified.
        batch: the batch of the step, with the slots of the new tokens.
    """
    pages = torch.div(batch.slots, views.layout.page_size, rounding_mode="floor")
    offsets = batch.slots - pages * views.layout.page_size
    if not views.layout.rope_dim and views.value_residual is None:
        _write(views.value, value, pages, offsets)
    if views.key_residual is None:
        _write(views.key, key, pages, offsets)
    store_residuals(key, value, views, batch)


def store_residuals(key: Tensor, value: Tensor, views: KVViews, batch: ForwardBatch) -> None:
    """Store keys and values that have residual windows; a part of `store`.

    Args:
        key: (T, Hkv, D), rotated.
        value: (T, Hkv, D).
        views: pages and residual windows of the layer; modified.
        batch: the batch of the step.
    """
    for states, (array, window) in zip((key, value), views.residuals, strict=False):
        _store_waiting(states, array, window, views.layout.page_size, batch)


def _store_waiting(states: Tensor, array: PagedArray, residual: Tensor, size: int, batch: ForwardBatch) -> None:
    for span in spans(batch):
        fresh, row = states[span.new].transpose(0, 1), batch.residual_rows[span.row]  # (Hkv, L, D)
        length = span.cached + fresh.shape[1]
        from_page, to_page = span.cached // size, length // size
        if to_page > from_page:
            tokens = fresh.to(residual.dtype)
            if span.cached > from_page * size:
                tokens = torch.cat([_read_residual(residual, row, from_page * size, span.cached), tokens], dim=1)
            whole = tokens[:, : (to_page - from_page) * size].reshape(tokens.shape[0], -1, size, tokens.shape[2])
            pages = batch.page_table[span.row, from_page:to_page].long()
            array.put((pages,), codes_of(whole.transpose(0, 1), array.scheme))  # of (pages, H, S, D)
        kept = min(fresh.shape[1], residual.shape[2])
        slots = torch.arange(length - kept, length, device=residual.device) % residual.shape[2]
        residual[row.expand(kept), :, slots] = fresh[:, -kept:].transpose(0, 1).to(residual.dtype)


def _write(array: PagedArray, fresh: Tensor, pages: Tensor, offsets: Tensor) -> None:
    """Write new keys or values (T, Hkv, D) token by token."""
    if array.scheme.dtype is None:
        array.codes[pages, :, offsets] = fresh.to(array.codes.dtype)
        return
    fixed = 1.0 if array.fixed is None else array.fixed[:, None]
    array.put((pages, slice(None), offsets), codes_of(fresh, array.scheme, fixed))
