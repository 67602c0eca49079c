# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
# ruff: noqa: ANN001, ANN202
"""Attention of one new token per sequence over its cached pages and its own fresh key, in every KV type.

One program takes the query heads of one key head and a part of the sequence; the last of them merges the parts. Lengths
are read on the device (a new token's position is what its sequence has cached), so the launch is the same for every
step of a batch. Codes go to the products as small integers: scales per token are applied to scores and probabilities,
scales per channel to the query, once per tile. INT4 is two half products, one for the low and one for the high nibbles.
Shapes: B sequences, T new tokens, Hq and Hkv heads, D channels of a key, Dv of a value, S tokens per page.
Source: Dao et al. 2023, Flash-Decoding; Kwon et al. 2023, PagedAttention; layouts: `kernels.layouts`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quantkit.kernels.attention import AttentionOptions
from quantkit.kernels.batch import ForwardBatch
from quantkit.kernels.gpu import configs, pages, power_of_two
from quantkit.kernels.gpu.split_kv import chunk, join_parts, part_bounds, put_out, scratch
from quantkit.kernels.layouts import KVViews


@triton.jit
def _numbers(codes, KIND: tl.constexpr, NATIVE_FP8: tl.constexpr, DTYPE: tl.constexpr):
    """Codes as numbers; e4m3 decoded by hand is 256 times too small."""
    if KIND == 1 and NATIVE_FP8:
        numbers = codes.to(tl.float8e4nv, bitcast=True).to(DTYPE)
    elif KIND == 1:
        wide = codes.to(tl.uint16)
        bits = ((wide & 0x7F) << 7) | ((wide & 0x80) << 8)
        numbers = bits.to(tl.float16, bitcast=True).to(DTYPE)
    elif KIND == 2:
        numbers = codes.to(tl.int8, bitcast=True).to(DTYPE)
    else:
        numbers = codes.to(DTYPE)
    return numbers


@triton.jit
def _score(q, k, total):
    return tl.dot(q, tl.trans(k), total, input_precision="ieee")


@triton.jit
def _scores(
    q, q_high, codes, scale, zero, page, head, inside, seen, code_strides, scale_strides,
    KIND: tl.constexpr, GRANULARITY: tl.constexpr, NATIVE_FP8: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """(ROWS, TILE) products of queries with the keys of a tile, in units of the fixed scale."""
    channels = tl.arange(0, BLOCK)
    mask = seen[:, None] & (channels < WIDTH)[None, :]
    at = page * code_strides[0] + head * code_strides[1] + inside.to(tl.int64)[:, None] * code_strides[2]
    loaded = tl.load(codes + at + channels[None, :], mask=mask, other=0)
    base = page * scale_strides[0] + head * scale_strides[1]
    empty = tl.zeros((ROWS, TILE), tl.float32)
    if KIND != 3:
        found = _score(q, _numbers(loaded, KIND, NATIVE_FP8, q.dtype), empty)
        if GRANULARITY == 1:
            found *= tl.load(scale + base + inside, mask=seen, other=0.0).to(tl.float32)[None, :]
    elif GRANULARITY == 1:
        total = tl.sum(q.to(tl.float32), 1) + tl.sum(q_high.to(tl.float32), 1)
        found = _score(q_high, (loaded >> 4).to(q.dtype), _score(q, (loaded & 15).to(q.dtype), empty))
        found *= tl.load(scale + base + inside, mask=seen, other=0.0).to(tl.float32)[None, :]
        found += total[:, None] * tl.load(zero + base + inside, mask=seen, other=0.0).to(tl.float32)[None, :]
    else:
        real = channels < WIDTH
        low_at, high_at = base + channels, base + WIDTH + channels
        shift = tl.sum(q.to(tl.float32) * tl.load(zero + low_at, mask=real, other=0.0).to(tl.float32)[None, :], 1)
        shift += tl.sum(
            q_high.to(tl.float32) * tl.load(zero + high_at, mask=real, other=0.0).to(tl.float32)[None, :], 1
        )
        low = (q.to(tl.float32) * tl.load(scale + low_at, mask=real, other=0.0).to(tl.float32)[None, :]).to(q.dtype)
        high = (q_high.to(tl.float32) * tl.load(scale + high_at, mask=real, other=0.0).to(tl.float32)[None, :]).to(
            q.dtype
        )
        found = _score(high, (loaded >> 4).to(q.dtype), _score(low, (loaded & 15).to(q.dtype), empty)) + shift[:, None]
    return found


@triton.jit
def _tail_scores(
    q, q_high, tail, row, head, positions, seen, strides,
    TAIL: tl.constexpr, SPLIT: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """As `_scores`, for the newest keys, which are not quantized yet. SPLIT: the query comes in halves."""
    channels = tl.arange(0, BLOCK)
    mask = seen[:, None] & (channels < WIDTH)[None, :]
    at = tail + row * strides[0] + head * strides[1] + (positions % TAIL).to(tl.int64)[:, None] * strides[2]
    found = tl.zeros((ROWS, TILE), tl.float32)
    found = _score(q, tl.load(at + channels[None, :], mask=mask, other=0.0).to(q.dtype), found)
    if SPLIT:
        found = _score(q_high, tl.load(at + WIDTH + channels[None, :], mask=mask, other=0.0).to(q.dtype), found)
    return found


@triton.jit
def _weigh(
    scores, top, total, acc, acc_high, codes, scale, zero, page, head, inside, seen, code_strides, scale_strides,
    softcap, DTYPE: tl.constexpr, KIND: tl.constexpr, GRANULARITY: tl.constexpr, NATIVE_FP8: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One step of the running softmax: scores (ROWS, TILE) and the values of a tile join the sums."""
    if HAS_SOFTCAP:
        scores = softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)
    scores = tl.where(seen[None, :], scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    anchor = tl.where(new_top == float("-inf"), 0.0, new_top)
    decay = tl.exp(top - anchor)
    weights = tl.exp(scores - anchor[:, None])
    total = total * decay + tl.sum(weights, 1)
    channels = tl.arange(0, BLOCK)
    mask = seen[:, None] & (channels < WIDTH)[None, :]
    at = page * code_strides[0] + head * code_strides[1] + inside.to(tl.int64)[:, None] * code_strides[2]
    loaded = tl.load(codes + at + channels[None, :], mask=mask, other=0)
    base = page * scale_strides[0] + head * scale_strides[1]
    shift = tl.zeros_like(total)
    if KIND == 3:
        shift = tl.sum(weights * tl.load(zero + base + inside, mask=seen, other=0.0).to(tl.float32)[None, :], 1)
    if GRANULARITY == 1:
        weights *= tl.load(scale + base + inside, mask=seen, other=0.0).to(tl.float32)[None, :]
    narrow = weights.to(DTYPE)
    if KIND == 3:
        acc = tl.dot(narrow, (loaded & 15).to(DTYPE), acc * decay[:, None], input_precision="ieee") + shift[:, None]
        acc_high = tl.dot(narrow, (loaded >> 4).to(DTYPE), acc_high * decay[:, None], input_precision="ieee")
        acc_high += shift[:, None]
    else:
        values = _numbers(loaded, KIND, NATIVE_FP8, DTYPE)
        acc = tl.dot(narrow, values, acc * decay[:, None], input_precision="ieee")
    return new_top, total, acc, acc_high


@triton.jit
def _load_query(at, kept, SPLIT: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Query heads (ROWS, BLOCK), and their second halves where SPLIT."""
    channels = tl.arange(0, BLOCK)
    mask = kept[:, None] & (channels < WIDTH)[None, :]
    q = tl.load(at + channels[None, :], mask=mask, other=0.0)
    q_high = q
    if SPLIT:
        q_high = tl.load(at + WIDTH + channels[None, :], mask=mask, other=0.0)
    return q, q_high


@triton.jit
def _place(start, first, end, PAGE: tl.constexpr, TILE: tl.constexpr):
    """Positions of a tile, where they are in their page, and which are seen."""
    at = start + tl.arange(0, TILE)
    inside = start % PAGE + tl.arange(0, TILE)
    return at, inside, (at < end) & (at >= first)


@triton.jit
def _page_at(table, start, end, PAGE: tl.constexpr):
    """The page of the tile at `start`. Asked for a tile ahead, so that loads of keys need not wait for its number."""
    return tl.load(table + start // PAGE, mask=start < end, other=0).to(tl.int64)


@triton.jit
def _join_fresh(
    q, q_high, key, value, top, total, acc, acc_high, scale, softcap, HAS_SOFTCAP: tl.constexpr,
    K_SPLIT: tl.constexpr, V_SPLIT: tl.constexpr, K_WIDTH: tl.constexpr, K_BLOCK: tl.constexpr,
    V_WIDTH: tl.constexpr, V_BLOCK: tl.constexpr,
):  # fmt: skip
    """The new token's own key and value join the sums."""
    k_channels, v_channels = tl.arange(0, K_BLOCK), tl.arange(0, V_BLOCK)
    fresh = tl.load(key + k_channels, mask=k_channels < K_WIDTH, other=0.0).to(tl.float32)
    own = tl.sum(q.to(tl.float32) * fresh[None, :], 1)
    if K_SPLIT:
        fresh = tl.load(key + K_WIDTH + k_channels, mask=k_channels < K_WIDTH, other=0.0).to(tl.float32)
        own += tl.sum(q_high.to(tl.float32) * fresh[None, :], 1)
    own *= scale
    if HAS_SOFTCAP:
        own = softcap * (2 * tl.sigmoid(2 * own / softcap) - 1)
    new_top = tl.maximum(top, own)
    decay, weight = tl.exp(top - new_top), tl.exp(own - new_top)
    seen = tl.load(value + v_channels, mask=v_channels < V_WIDTH, other=0.0).to(tl.float32)
    acc = acc * decay[:, None] + weight[:, None] * seen[None, :]
    if V_SPLIT:
        seen = tl.load(value + V_WIDTH + v_channels, mask=v_channels < V_WIDTH, other=0.0).to(tl.float32)
        acc_high = acc_high * decay[:, None] + weight[:, None] * seen[None, :]
    return new_top, total * decay + weight, acc, acc_high


@triton.jit
def _over_part(
    q, q_high, first, begin, end, cached, head, sequence, tail, tail_rows, table,
    k_codes, k_scale, k_zero, v_codes, v_scale, v_zero, tail_strides, kc_strides, ks_strides, vc_strides, vs_strides,
    scale, k_factor, v_factor, softcap,
    K_KIND: tl.constexpr, K_GRANULARITY: tl.constexpr, V_KIND: tl.constexpr, V_GRANULARITY: tl.constexpr,
    NATIVE_FP8: tl.constexpr, HAS_TAIL: tl.constexpr, TAIL: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    ROWS: tl.constexpr, K_WIDTH: tl.constexpr, K_BLOCK: tl.constexpr, V_WIDTH: tl.constexpr, V_BLOCK: tl.constexpr,
    PAGE: tl.constexpr, TILE: tl.constexpr,
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
            scores * (scale * k_factor), top, total, acc, acc_high, v_codes, v_scale, v_zero, page, head, inside, seen,
            vc_strides, vs_strides, softcap, q.dtype, V_KIND, V_GRANULARITY, NATIVE_FP8, HAS_SOFTCAP, V_WIDTH, V_BLOCK,
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
                scores * scale, top, total, acc, acc_high, v_codes, v_scale, v_zero, page, head, inside, seen,
                vc_strides, vs_strides, softcap, q.dtype, V_KIND, V_GRANULARITY, NATIVE_FP8, HAS_SOFTCAP, V_WIDTH,
                V_BLOCK,
            )  # fmt: skip
    return top, total, acc * v_factor, acc_high * v_factor


@triton.jit
def _attend_kernel(
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
    """One part of one sequence for the query heads of one key head. Widths and blocks of INT4 are halves."""
    part, head, sequence = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    token = tl.load(query_starts + sequence).to(tl.int64)
    if tl.load(query_starts + sequence + 1) - token != 1:
        return
    cached = tl.load(positions + token).to(tl.int32)
    first = tl.maximum(cached - window + 1, 0) if HAS_WINDOW else 0
    begin, end, num_active = part_bounds(first, cached, part, num_parts, TILE)
    if part >= num_active:
        return
    rows = tl.arange(0, ROWS)
    kept = rows < GROUP
    q_at = query + token * query_strides[0] + (head * GROUP + rows)[:, None] * query_strides[1]
    q, q_high = _load_query(q_at, kept, K_KIND == 3, K_WIDTH, K_BLOCK)
    top, total, acc, acc_high = _over_part(
        q, q_high, first, begin, end, cached, head, sequence, tail, tail_rows, page_table + sequence * table_stride,
        k_codes, k_scale, k_zero, v_codes, v_scale, v_zero, tail_strides, kc_strides, ks_strides, vc_strides,
        vs_strides, scale, tl.load(k_fixed + head) * k_unit, tl.load(v_fixed + head) * v_unit, softcap,
        K_KIND, K_GRANULARITY, V_KIND, V_GRANULARITY, NATIVE_FP8, HAS_TAIL, TAIL, HAS_SOFTCAP, ROWS,
        K_WIDTH, K_BLOCK, V_WIDTH, V_BLOCK, PAGE, TILE,
    )  # fmt: skip
    if part == 0:
        top, total, acc, acc_high = _join_fresh(
            q, q_high, key + token * key_strides[0] + head * key_strides[1],
            value + token * value_strides[0] + head * value_strides[1], top, total, acc, acc_high, scale, softcap,
            HAS_SOFTCAP, K_KIND == 3, V_KIND == 3, K_WIDTH, K_BLOCK, V_WIDTH, V_BLOCK,
        )  # fmt: skip
    if IN_PARTS:  # noqa: SIM102 - one is known to the compiler, the other to the device
        if num_active > 1:
            number = sequence * tl.num_programs(1) + head.to(tl.int32)
            lanes = tl.arange(0, LANES)
            owners = head * GROUP + lanes
            join_parts(
                part_out, part_sums, counters + number, number * num_parts, part, num_active, rows, kept,
                top, total, acc, acc_high, out, token * out_strides[0] + owners * out_strides[1], lanes, lanes < GROUP,
                sinks, owners, HAS_SINKS, GROUP, LANES, CHUNK, V_KIND == 3, V_WIDTH, V_BLOCK, WIDTH, BLOCK,
            )  # fmt: skip
            return
    heads = head * GROUP + rows
    put_out(
        out, token * out_strides[0] + heads * out_strides[1], kept, sinks, heads, top, total, acc, acc_high,
        HAS_SINKS, V_KIND == 3, V_WIDTH, V_BLOCK,
    )  # fmt: skip


def attend(
    query: Tensor, key: Tensor, value: Tensor, views: KVViews, batch: ForwardBatch, options: AttentionOptions,
    out: Tensor,
) -> None:  # fmt: skip
    """Attention of the sequences that have exactly one new token; see `attention.attend`.

    Args:
        query: (T, Hq, D), rotated; channels contiguous.
        key: (T, Hkv, D), likewise.
        value: (T, Hkv, Dv), likewise.
        views: the layer's pages and tails; not modified.
        batch: what belongs to whom.
        options: scale, window and the like.
        out: (T, Hq, Dv), channels contiguous; the rows of those sequences are written.
    """
    layout, count = views.layout, len(batch.query_lengths)
    heads, group = layout.num_heads, query.shape[1] // layout.num_heads
    choice = configs.decode(views, count, query.shape[1], query.device)
    parts = pages.num_parts(count * heads, batch.page_table.shape[1] * layout.page_size, choice, query.device)
    memory = scratch(count * heads, parts, group, layout.value_width, query.device)
    tensors, constants = pages.arguments(query, key, value, views, batch, options, out, memory)
    lanes = power_of_two(group)
    _attend_kernel[(parts, heads, count)](
        *tensors, parts, **constants, ROWS=max(16, lanes), TILE=choice.tile,
        IN_PARTS=parts > 1, CHUNK=chunk(lanes, constants["BLOCK"]), num_warps=choice.warps, num_stages=choice.stages,
    )  # fmt: skip
