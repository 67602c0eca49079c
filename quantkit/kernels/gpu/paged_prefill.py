# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
# ruff: noqa: ANN001, ANN202
"""Attention of several new tokens per sequence, of prompts and drafts: over its cached pages and, causally, each other.

One program takes some new tokens of a sequence and the query heads of one key head as the rows of its products, walks
over the cached pages as `paged_decode` does, in every KV type, and then over the fresh keys up to its own last token,
which are read unquantized where they lie. Codes become numbers in registers, so a long cached prefix needs no copy.
Few new tokens over a long prefix, such as drafts to verify, are as little work for the chip as a decode step is: then
the prefix is cut in `parts`, and a program has no more rows than there are tokens for.
Shapes: B sequences, T new tokens, Hq and Hkv heads, D channels of a key, Dv of a value, S tokens per page.
Source: Dao 2023, FlashAttention-2; Kwon et al. 2023, PagedAttention.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quantkit.kernels.attention import AttentionOptions
from quantkit.kernels.batch import ForwardBatch
from quantkit.kernels.gpu import configs, pages, power_of_two
from quantkit.kernels.gpu.paged_decode import _load_query, _page_at, _place, _score, _scores, _tail_scores, _weigh
from quantkit.kernels.gpu.split_kv import chunk, join_parts, part_bounds, put_out, scratch
from quantkit.kernels.layouts import KVViews


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
    q, q_high, own, first, begin, end, cached, head, sequence, tail, tail_rows, table,
    k_codes, k_scale, k_zero, v_codes, v_scale, v_zero, tail_strides, kc_strides, ks_strides, vc_strides, vs_strides,
    scale, k_factor, v_factor, softcap, window,
    K_KIND: tl.constexpr, K_GRANULARITY: tl.constexpr, V_KIND: tl.constexpr, V_GRANULARITY: tl.constexpr,
    NATIVE_FP8: tl.constexpr, HAS_TAIL: tl.constexpr, TAIL: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, ROWS: tl.constexpr, K_WIDTH: tl.constexpr, K_BLOCK: tl.constexpr,
    V_WIDTH: tl.constexpr, V_BLOCK: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Running softmax over begin..end of what is cached: pages, then keys that wait for theirs to be complete."""
    top, total = tl.full((ROWS,), float("-inf"), tl.float32), tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, V_BLOCK), tl.float32)
    acc_high = acc
    whole = cached // PAGE * PAGE if HAS_TAIL else cached
    coming = _page_at(table, begin, tl.minimum(end, whole), PAGE)
    for start in range(begin, tl.minimum(end, whole), TILE):
        page = coming
        coming = _page_at(table, start + TILE, tl.minimum(end, whole), PAGE)
        at, inside, seen = _place(start, first, end, PAGE, TILE)
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
        coming = _page_at(table, tl.maximum(begin, whole), end, PAGE)
        for start in range(tl.maximum(begin, whole), end, TILE):
            page = coming
            coming = _page_at(table, start + TILE, end, PAGE)
            at, inside, seen = _place(start, first, end, PAGE, TILE)
            scores = _tail_scores(
                q, q_high, tail, row, head, at, seen, tail_strides, TAIL, K_KIND == 3, K_WIDTH, K_BLOCK, ROWS, TILE
            )
            top, total, acc, acc_high = _weigh(
                _seen_by(scores * scale, own, at, window, softcap, HAS_WINDOW, HAS_SOFTCAP), top, total, acc, acc_high,
                v_codes, v_scale, v_zero, page, head, inside, seen, vc_strides, vs_strides, softcap, q.dtype,
                V_KIND, V_GRANULARITY, NATIVE_FP8, False, V_WIDTH, V_BLOCK,
            )  # fmt: skip
    return top, total, acc * v_factor, acc_high * v_factor


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
    query, key, value, tail, tail_rows, page_table, query_starts, positions, sinks, out, part_out, part_sums, counters,
    k_codes, k_scale, k_zero, v_codes, v_scale, v_zero,
    query_strides, key_strides, value_strides, tail_strides, out_strides, table_stride,
    kc_strides, ks_strides, vc_strides, vs_strides, scale, k_fixed, v_fixed, k_unit, v_unit, softcap, window, num_parts,
    K_KIND: tl.constexpr, K_GRANULARITY: tl.constexpr, V_KIND: tl.constexpr, V_GRANULARITY: tl.constexpr,
    NATIVE_FP8: tl.constexpr, HAS_TAIL: tl.constexpr, TAIL: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, GROUP: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr,
    K_WIDTH: tl.constexpr, K_BLOCK: tl.constexpr, V_WIDTH: tl.constexpr, V_BLOCK: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr, IN_PARTS: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """ROWS / LANES new tokens of one sequence, GROUP query heads of one key head each. INT4 widths are halves."""
    head, sequence = tl.program_id(1).to(tl.int64), tl.program_id(2)
    begin = tl.load(query_starts + sequence).to(tl.int64)
    count = (tl.load(query_starts + sequence + 1) - begin).to(tl.int32)
    # The last tokens, which see most, are begun first.
    number, part = tl.cdiv(count, ROWS // LANES) - 1 - tl.program_id(0) // num_parts, tl.program_id(0) % num_parts
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
    start, end, num_active = part_bounds(first, cached, part, num_parts, TILE)
    if part >= num_active:
        return
    top, total, acc, acc_high = _over_cache(
        q, q_high, own, first, start, end, cached, head, sequence, tail, tail_rows,
        page_table + sequence * table_stride, k_codes, k_scale, k_zero, v_codes, v_scale, v_zero,
        tail_strides, kc_strides, ks_strides, vc_strides, vs_strides, scale, tl.load(k_fixed + head) * k_unit,
        tl.load(v_fixed + head) * v_unit, softcap, window, K_KIND, K_GRANULARITY, V_KIND, V_GRANULARITY,
        NATIVE_FP8, HAS_TAIL, TAIL, HAS_WINDOW, HAS_SOFTCAP, ROWS, K_WIDTH, K_BLOCK, V_WIDTH, V_BLOCK, PAGE, TILE,
    )  # fmt: skip
    stop = tl.where(part == 0, tl.minimum((number + 1) * (ROWS // LANES), count), 0)
    top, total, acc, acc_high = _over_fresh(
        q, q_high, own, first, cached, stop, key + begin * key_strides[0] + head * key_strides[1], key_strides[0],
        value + begin * value_strides[0] + head * value_strides[1], value_strides[0], top, total, acc, acc_high,
        scale, softcap, window, K_KIND == 3, V_KIND == 3, HAS_WINDOW, HAS_SOFTCAP,
        K_WIDTH, K_BLOCK, V_WIDTH, V_BLOCK, TILE,
    )  # fmt: skip
    at = (begin + token) * out_strides[0] + heads * out_strides[1]
    if IN_PARTS:  # noqa: SIM102 - one is known to the compiler, the other to the device
        if num_active > 1:
            tile = (sequence * tl.num_programs(1) + head.to(tl.int32)) * (tl.num_programs(0) // num_parts) + number
            join_parts(
                part_out, part_sums, counters + tile, tile * num_parts, part, num_active, rows, kept,
                top, total, acc, acc_high, out, at, rows, kept, sinks, heads, HAS_SINKS, ROWS, ROWS, CHUNK,
                V_KIND == 3, V_WIDTH, V_BLOCK, WIDTH, BLOCK,
            )  # fmt: skip
            return
    put_out(out, at, kept, sinks, heads, top, total, acc, acc_high, HAS_SINKS, V_KIND == 3, V_WIDTH, V_BLOCK)


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
    layout, count = views.layout, len(batch.query_lengths)
    lanes, most = power_of_two(query.shape[1] // layout.num_heads), max(batch.query_lengths)
    choice = configs.prefill(views, query.shape[1], query.device)
    rows = max(16, lanes, min(choice.rows, power_of_two(most) * lanes))
    numbers = -(-most // (rows // lanes))
    tiles = numbers * layout.num_heads * count
    cut = configs.decode(views, count, query.shape[1], query.device)
    parts = pages.num_parts(tiles, batch.page_table.shape[1] * layout.page_size, cut, query.device)
    memory = scratch(tiles, parts, rows, layout.value_width, query.device)
    tensors, constants = pages.arguments(query, key, value, views, batch, options, out, memory)
    _prefill_kernel[(numbers * parts, layout.num_heads, count)](
        *tensors, parts, **constants, ROWS=rows, TILE=choice.tile, IN_PARTS=parts > 1,
        CHUNK=chunk(rows, constants["BLOCK"]), num_warps=choice.warps, num_stages=choice.stages,
    )  # fmt: skip
