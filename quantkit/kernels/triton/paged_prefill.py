# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
# ruff: noqa: ANN001, ANN202
"""Attention of several new tokens per sequence, of prompts and drafts: over its cached pages and, causally, each other.

One program takes some new tokens of a sequence and the query heads of one key head as the rows of its products, walks
over the cached pages as `paged_decode` does, in every KV type, and then over the fresh keys up to its own last token,
which are read unquantized where they lie. Codes become numbers in registers, so a long cached prefix needs no copy.
Shapes: B sequences, T new tokens, Hq and Hkv heads, D channels of a key, Dv of a value, S tokens per page.
Source: Dao 2023, FlashAttention-2; Kwon et al. 2023, PagedAttention.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quantkit.kernels.attention import AttentionOptions
from quantkit.kernels.batch import ForwardBatch
from quantkit.kernels.layouts import KVViews
from quantkit.kernels.triton import capability, configs, pages, power_of_two
from quantkit.kernels.triton.paged_decode import _load_query, _place, _score, _scores, _tail_scores, _weigh


@triton.jit
def _seen_by(scores, own, at, window, softcap, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr):
    """Capped scores of the keys, at positions `at`, that a row at position `own` sees: up to its own, in its window."""
    if HAS_SOFTCAP:
        scores = softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)
    seen = at[None, :] <= own[:, None]
    if HAS_WINDOW:
        seen &= own[:, None] - at[None, :] < window
    return tl.where(seen, scores, float("-inf"))


@triton.jit
def _fresh_scores(q, q_high, key, stride, index, real, SPLIT: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """(ROWS, TILE) products of queries with fresh keys."""
    channels = tl.arange(0, BLOCK)
    mask = real[:, None] & (channels < WIDTH)[None, :]
    at = key + index.to(tl.int64)[:, None] * stride + channels[None, :]
    found = tl.zeros((q.shape[0], index.shape[0]), tl.float32)
    found = _score(q, tl.load(at, mask=mask, other=0.0).to(q.dtype), found)
    if SPLIT:
        found = _score(q_high, tl.load(at + WIDTH, mask=mask, other=0.0).to(q.dtype), found)
    return found


@triton.jit
def _weigh_fresh(
    scores, top, total, acc, acc_high, value, stride, index, real,
    DTYPE: tl.constexpr, SPLIT: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One step of the running softmax over fresh values; `scores` is -inf where a row does not see a key."""
    new_top = tl.maximum(top, tl.max(scores, 1))
    anchor = tl.where(new_top == float("-inf"), 0.0, new_top)
    decay = tl.exp(top - anchor)
    weights = tl.exp(scores - anchor[:, None])
    total = total * decay + tl.sum(weights, 1)
    channels = tl.arange(0, BLOCK)
    mask = real[:, None] & (channels < WIDTH)[None, :]
    at = value + index.to(tl.int64)[:, None] * stride + channels[None, :]
    narrow = weights.to(DTYPE)
    values = tl.load(at, mask=mask, other=0.0).to(DTYPE)
    acc = tl.dot(narrow, values, acc * decay[:, None], input_precision="ieee")
    if SPLIT:
        values = tl.load(at + WIDTH, mask=mask, other=0.0).to(DTYPE)
        acc_high = tl.dot(narrow, values, acc_high * decay[:, None], input_precision="ieee")
    return new_top, total, acc, acc_high


@triton.jit
def _over_cache(
    q, q_high, own, first, cached, head, sequence, tail, tail_rows, table,
    k_codes, k_scale, k_zero, v_codes, v_scale, v_zero, tail_strides, kc_strides, ks_strides, vc_strides, vs_strides,
    scale, k_factor, softcap, window,
    K_KIND: tl.constexpr, K_GRANULARITY: tl.constexpr, V_KIND: tl.constexpr, V_GRANULARITY: tl.constexpr,
    NATIVE_FP8: tl.constexpr, HAS_TAIL: tl.constexpr, TAIL: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, ROWS: tl.constexpr, K_WIDTH: tl.constexpr, K_BLOCK: tl.constexpr,
    V_WIDTH: tl.constexpr, V_BLOCK: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Running softmax over what is cached from `first` on: pages, then keys that wait for theirs to be complete."""
    top, total = tl.full((ROWS,), float("-inf"), tl.float32), tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, V_BLOCK), tl.float32)
    acc_high = acc
    whole = cached // PAGE * PAGE if HAS_TAIL else cached
    for start in range(first // TILE * TILE, whole, TILE):
        at, inside, seen, page = _place(table, start, first, whole, PAGE, TILE)
        scores = _scores(
            q, q_high, k_codes, k_scale, k_zero, page, head, inside, seen, kc_strides, ks_strides,
            K_KIND, K_GRANULARITY, NATIVE_FP8, K_WIDTH, K_BLOCK, ROWS, TILE,
        )  # fmt: skip
        top, total, acc, acc_high = _weigh(
            _seen_by(scores * (scale * k_factor), own, at, window, softcap, HAS_WINDOW, HAS_SOFTCAP),
            top, total, acc, acc_high, v_codes, v_scale, v_zero, page, head, inside, seen, vc_strides, vs_strides,
            softcap, q.dtype, V_KIND, V_GRANULARITY, NATIVE_FP8, False, V_WIDTH, V_BLOCK,
        )  # fmt: skip
    if HAS_TAIL:
        row = tl.load(tail_rows + sequence)
        for start in range(tl.maximum(first // TILE * TILE, whole), cached, TILE):
            at, inside, seen, page = _place(table, start, first, cached, PAGE, TILE)
            scores = _tail_scores(
                q, q_high, tail, row, head, at, seen, tail_strides, TAIL, K_KIND == 3, K_WIDTH, K_BLOCK, ROWS, TILE
            )
            top, total, acc, acc_high = _weigh(
                _seen_by(scores * scale, own, at, window, softcap, HAS_WINDOW, HAS_SOFTCAP), top, total, acc, acc_high,
                v_codes, v_scale, v_zero, page, head, inside, seen, vc_strides, vs_strides, softcap, q.dtype,
                V_KIND, V_GRANULARITY, NATIVE_FP8, False, V_WIDTH, V_BLOCK,
            )  # fmt: skip
    return top, total, acc, acc_high


@triton.jit
def _over_fresh(
    q, q_high, own, first, cached, stop, key, key_stride, value, value_stride, top, total, acc, acc_high,
    scale, softcap, window, K_SPLIT: tl.constexpr, V_SPLIT: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, K_WIDTH: tl.constexpr, K_BLOCK: tl.constexpr, V_WIDTH: tl.constexpr,
    V_BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The fresh keys and values of the sequence, up to number `stop`, join the running softmax."""
    for index in range(tl.maximum(first - cached, 0) // TILE * TILE, stop, TILE):
        fresh = index + tl.arange(0, TILE)
        real = fresh < stop
        scores = _fresh_scores(q, q_high, key, key_stride, fresh, real, K_SPLIT, K_WIDTH, K_BLOCK)
        top, total, acc, acc_high = _weigh_fresh(
            _seen_by(scores * scale, own, cached + fresh, window, softcap, HAS_WINDOW, HAS_SOFTCAP),
            top, total, acc, acc_high, value, value_stride, fresh, real, q.dtype, V_SPLIT, V_WIDTH, V_BLOCK,
        )  # fmt: skip
    return top, total, acc, acc_high


@triton.jit
def _prefill_kernel(
    query, key, value, tail, tail_rows, page_table, query_starts, positions, sinks, out,
    k_codes, k_scale, k_zero, v_codes, v_scale, v_zero,
    query_strides, key_strides, value_strides, tail_strides, out_strides, table_stride,
    kc_strides, ks_strides, vc_strides, vs_strides, scale, k_fixed, v_fixed, k_unit, v_unit, softcap, window,
    K_KIND: tl.constexpr, K_GRANULARITY: tl.constexpr, V_KIND: tl.constexpr, V_GRANULARITY: tl.constexpr,
    NATIVE_FP8: tl.constexpr, HAS_TAIL: tl.constexpr, TAIL: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, GROUP: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr,
    K_WIDTH: tl.constexpr, K_BLOCK: tl.constexpr, V_WIDTH: tl.constexpr, V_BLOCK: tl.constexpr,
    PAGE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """ROWS / LANES new tokens of one sequence, GROUP query heads of one key head each. INT4 widths are halves."""
    head, sequence = tl.program_id(1).to(tl.int64), tl.program_id(2)
    begin = tl.load(query_starts + sequence).to(tl.int64)
    count = (tl.load(query_starts + sequence + 1) - begin).to(tl.int32)
    # The last tokens, which see most, are begun first.
    number = tl.cdiv(count, ROWS // LANES) - 1 - tl.program_id(0)
    if count < 2 or number < 0:
        return
    cached = tl.load(positions + begin).to(tl.int32)
    rows = tl.arange(0, ROWS)
    token, lane = number * (ROWS // LANES) + rows // LANES, rows % LANES
    kept, own = (token < count) & (lane < GROUP), cached + token
    heads = head * GROUP + lane
    q_at = query + (begin + token)[:, None] * query_strides[0] + heads[:, None] * query_strides[1]
    q, q_high = _load_query(q_at, kept, K_KIND == 3, K_WIDTH, K_BLOCK)
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(cached + number * (ROWS // LANES) - window + 1, 0)
    top, total, acc, acc_high = _over_cache(
        q, q_high, own, first, cached, head, sequence, tail, tail_rows, page_table + sequence * table_stride,
        k_codes, k_scale, k_zero, v_codes, v_scale, v_zero, tail_strides, kc_strides, ks_strides, vc_strides,
        vs_strides, scale, tl.load(k_fixed + head) * k_unit, softcap, window, K_KIND, K_GRANULARITY, V_KIND,
        V_GRANULARITY, NATIVE_FP8, HAS_TAIL, TAIL, HAS_WINDOW, HAS_SOFTCAP, ROWS, K_WIDTH, K_BLOCK, V_WIDTH, V_BLOCK,
        PAGE, TILE,
    )  # fmt: skip
    v_factor = tl.load(v_fixed + head) * v_unit
    acc, acc_high = acc * v_factor, acc_high * v_factor
    stop = tl.minimum((number + 1) * (ROWS // LANES), count)
    top, total, acc, acc_high = _over_fresh(
        q, q_high, own, first, cached, stop, key + begin * key_strides[0] + head * key_strides[1], key_strides[0],
        value + begin * value_strides[0] + head * value_strides[1], value_strides[0], top, total, acc, acc_high,
        scale, softcap, window, K_KIND == 3, V_KIND == 3, HAS_WINDOW, HAS_SOFTCAP,
        K_WIDTH, K_BLOCK, V_WIDTH, V_BLOCK, TILE,
    )  # fmt: skip
    if HAS_SINKS:
        sink = tl.load(sinks + heads, mask=kept, other=0.0).to(tl.float32)
        new_top = tl.maximum(top, sink)
        decay = tl.exp(top - new_top)
        total = total * decay + tl.exp(sink - new_top)
        acc, acc_high = acc * decay[:, None], acc_high * decay[:, None]
    channels = tl.arange(0, V_BLOCK)
    at = out + (begin + token)[:, None] * out_strides[0] + heads[:, None] * out_strides[1] + channels[None, :]
    mask = kept[:, None] & (channels < V_WIDTH)[None, :]
    tl.store(at, (acc / total[:, None]).to(out.dtype.element_ty), mask=mask)
    if V_KIND == 3:
        tl.store(at + V_WIDTH, (acc_high / total[:, None]).to(out.dtype.element_ty), mask=mask)


def attend(
    query: Tensor, key: Tensor, value: Tensor, views: KVViews, batch: ForwardBatch, options: AttentionOptions,
    out: Tensor,
) -> None:  # fmt: skip
    """Attention of the sequences that have more than one new token; see `attention.attend`.

    Args:
        query: (T, Hq, D), rotated; channels contiguous.
        key: (T, Hkv, D), likewise.
        value: (T, Hkv, Dv), likewise.
        views: the layer's pages and tails; not modified.
        batch: what belongs to whom.
        options: scale, window and the like.
        out: (T, Hq, Dv); the rows of those sequences are written.
    """
    layout = views.layout
    group = query.shape[1] // layout.num_heads
    lanes = power_of_two(group)
    choice = configs.prefill(views, query.shape[1], query.device)
    rows = max(choice.rows, lanes)
    native = capability(query.device) >= pages.FP8_CAPABILITY
    k_width, v_width = pages.width(views.key, layout.head_dim), pages.width(views.value, layout.value_width)
    tail = views.key_tail
    grid = (-(-max(batch.query_lengths) // (rows // lanes)), layout.num_heads, len(batch.query_lengths))
    _prefill_kernel[grid](
        query, key, value, tail, batch.tail_rows, batch.page_table, batch.query_starts, batch.positions,
        options.sinks, out,
        views.key.codes, views.key.scale, views.key.zero, views.value.codes, views.value.scale, views.value.zero,
        query.stride()[:2], key.stride()[:2], value.stride()[:2], (0, 0, 0) if tail is None else tail.stride()[:3],
        out.stride()[:2], batch.page_table.stride(0), *pages.strides(views.key), *pages.strides(views.value),
        float(options.scale), pages.fixed(views.key), pages.fixed(views.value),
        pages.unit(views.key, native), pages.unit(views.value, native),
        float(options.softcap or 1.0), int(options.window or 0),
        K_KIND=pages.KINDS[views.key.scheme.dtype], K_GRANULARITY=pages.granularity(views.key),
        V_KIND=pages.KINDS[views.value.scheme.dtype], V_GRANULARITY=pages.granularity(views.value),
        NATIVE_FP8=native, HAS_TAIL=tail is not None, TAIL=max(1, layout.tail_tokens),
        HAS_WINDOW=options.window is not None, HAS_SOFTCAP=options.softcap is not None,
        HAS_SINKS=options.sinks is not None, GROUP=group, LANES=lanes, ROWS=rows,
        K_WIDTH=k_width, K_BLOCK=pages.block(k_width), V_WIDTH=v_width, V_BLOCK=pages.block(v_width),
        PAGE=layout.page_size, TILE=choice.tile, num_warps=choice.warps, num_stages=choice.stages,
    )  # fmt: skip
