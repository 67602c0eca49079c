# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
# ruff: noqa: ANN001, ANN202
"""Attention over cached pages and new keys, in every KV type, for one or several new tokens per sequence.

One program handles some new tokens of a sequence, the query heads of one key head, and one split of the cached tokens.
The program that finishes last merges the splits. Lengths are read on the device (the position of a sequence's first new
token is its cached length), so every step of a batch has the same launch. `paged_tiles` reads the pages.
Shapes: B sequences, T new tokens, Hq and Hkv heads, D channels, S tokens per page.
Source: Dao et al. 2023, Flash-Decoding; Kwon et al. 2023, PagedAttention.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from quantkit.kernels.gpu import capability, choices, power_of_two
from quantkit.kernels.gpu.choices import autotuned
from quantkit.kernels.gpu.paged_tiles import (
    fixed,
    load_query,
    over_cache,
    page_constants,
    page_tensors,
    residual_strides,
    score_keys,
    strides,
    visible,
    weigh_plain,
)
from quantkit.kernels.gpu.split_kv import chunk, empty_partials, merge_splits, split_bounds, splits_of_cache, store_out
from quantkit.kernels.layouts import KVViews
from quantkit.kernels.types import AttentionOptions, ForwardBatch, States
from quantkit.numerics.dtype import FP8

FP8_CAPABILITY = 90
"""Lowest compute capability (times ten) on which the kernels use the chip's own e4m3 conversion. Ada (89) has one
too, but triton 3.6 emits a Hopper instruction for it.
"""

_BY_HAND = 256.0  # factor by which e4m3 codes decoded by moving bits are too small


@triton.jit
def _over_fresh(
    query, own, first, cached, stop, key, key_stride, value, value_stride, state,
    scale, softcap, window, K_HALVED: tl.constexpr, V_HALVED: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, K_WIDTH: tl.constexpr, K_BLOCK: tl.constexpr, V_WIDTH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Update the running softmax with the first `stop` new keys and values of the sequence. Each row sees the keys up
    to its own position, within its window.
    """
    for index in range(tl.maximum(first - cached, 0) // TILE * TILE, stop, TILE):
        fresh = index + tl.arange(0, TILE)
        real = fresh < stop
        scores = score_keys(query, key + fresh.to(tl.int64) * key_stride, real, K_HALVED, K_WIDTH, K_BLOCK) * scale
        mask = (cached + fresh)[None, :] <= own[:, None]
        if HAS_WINDOW:
            mask &= own[:, None] - (cached + fresh)[None, :] < window
        scores, at = visible(scores, mask, softcap, HAS_SOFTCAP), value + fresh.to(tl.int64) * value_stride
        state = weigh_plain(scores, state, at, real, query[0].dtype, V_HALVED, V_WIDTH)
    return state


@triton.jit
def _store(
    out, out_strides, partial_out, partial_sums, counters, state, own_rows, head, sequence, num_splits, num_active,
    TOKENS: tl.constexpr, GROUP: tl.constexpr, LANES: tl.constexpr, IS_SPLIT: tl.constexpr, MERGED: tl.constexpr,
    CHUNK: tl.constexpr, HALVED: tl.constexpr, V_WIDTH: tl.constexpr, V_BLOCK: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Store a program's outputs. If the cache is split, the program that finishes last merges the first MERGED rows of
    all splits.
    """
    rows, kept, start, count, number, split = own_rows
    out += start * out_strides[0] + head * GROUP * out_strides[1]
    token, lane = number * TOKENS + rows // LANES, rows % LANES
    at = out + token * out_strides[0] + lane * out_strides[1]
    if IS_SPLIT:
        if num_active > 1:
            tile = (sequence * tl.num_programs(1) + head.to(tl.int32)) * (tl.num_programs(0) // num_splits) + number
            merged = tl.arange(0, MERGED)
            their_token, their_lane = number * TOKENS + merged // LANES, merged % LANES
            real = (their_token < count) & (their_lane < GROUP)
            merge_splits(
                partial_out, partial_sums, counters + tile, tile * num_splits, split, num_active, rows, kept, state,
                out + their_token * out_strides[0] + their_lane * out_strides[1], merged, real,
                MERGED, CHUNK, HALVED, V_WIDTH, V_BLOCK, WIDTH, BLOCK,
            )  # fmt: skip
        else:
            store_out(at, kept, state, HALVED, V_WIDTH, V_BLOCK)
    else:
        store_out(at, kept, state, HALVED, V_WIDTH, V_BLOCK)


@autotuned("ROWS", "TILE", "GROUP", "K_KIND", "V_KIND", "K_WIDTH", "IS_SPLIT", "SINGLE", staged=False)
@triton.jit
def _attend_kernel(
    query, key, value, key_residual, value_residual, residual_rows, page_table, query_starts, positions, out,
    partial_out, partial_sums, counters, k_codes, k_scale, k_zero, v_codes, v_scale, v_zero,
    query_strides, key_strides, value_strides, residual_strides, out_strides, table_stride,
    kc_strides, ks_strides, vc_strides, vs_strides,
    scale, k_fixed, v_fixed, k_unit, v_unit, softcap, window, num_splits,
    K_KIND: tl.constexpr, K_GRANULARITY: tl.constexpr, V_KIND: tl.constexpr, V_GRANULARITY: tl.constexpr,
    NATIVE_FP8: tl.constexpr, HAS_RESIDUAL: tl.constexpr, RESIDUAL: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, GROUP: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr,
    K_WIDTH: tl.constexpr, K_BLOCK: tl.constexpr, V_WIDTH: tl.constexpr, V_BLOCK: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr, IS_SPLIT: tl.constexpr,
    CHUNK: tl.constexpr, MERGED: tl.constexpr, SINGLE: tl.constexpr,
):  # fmt: skip
    """Attend with ROWS / LANES new tokens of one sequence, each with the GROUP query heads of one key head.

    SINGLE: handle only sequences with one new token, otherwise only sequences with more. The program that finishes last
    merges MERGED rows.
    """
    TOKENS: tl.constexpr = ROWS // LANES
    head, sequence = tl.program_id(1).to(tl.int64), tl.program_id(2)
    start = tl.load(query_starts + sequence).to(tl.int64)
    count = (tl.load(query_starts + sequence + 1) - start).to(tl.int32)
    # Programs for the last tokens, which see most keys, start first.
    number, split = tl.cdiv(count, TOKENS) - 1 - tl.program_id(0) // num_splits, tl.program_id(0) % num_splits
    # Other sequences belong to another launch, and the grid is as large as the longest sequence needs.
    if (count != 1 if SINGLE else count < 2) or number < 0:
        return
    cached = tl.load(positions + start).to(tl.int32)
    rows = tl.arange(0, ROWS)
    token, lane, heads = number * TOKENS + rows // LANES, rows % LANES, head * GROUP + rows % LANES
    kept, own = (token < count) & (lane < GROUP), cached + token
    q_at = query + (start + token)[:, None] * query_strides[0] + heads[:, None] * query_strides[1]
    q = load_query(q_at, kept, K_KIND == 3, K_WIDTH, K_BLOCK)
    first = tl.maximum(cached + number * TOKENS - window + 1, 0) if HAS_WINDOW else 0
    begin, end, num_active = split_bounds(first, cached, split, num_splits, TILE)
    if split >= num_active:
        return
    row = tl.load(residual_rows + sequence) * residual_strides[0] if HAS_RESIDUAL else 0
    state = over_cache(
        q, own, first, begin, end, cached, head, (key_residual, value_residual, row),
        page_table + sequence * table_stride,
        (k_codes, k_scale, k_zero, kc_strides, ks_strides), (v_codes, v_scale, v_zero, vc_strides, vs_strides),
        residual_strides, scale, tl.load(k_fixed + head) * k_unit, tl.load(v_fixed + head) * v_unit, softcap, window,
        K_KIND, K_GRANULARITY, V_KIND, V_GRANULARITY, NATIVE_FP8, HAS_RESIDUAL, RESIDUAL, HAS_WINDOW, HAS_SOFTCAP,
        K_WIDTH, K_BLOCK, V_WIDTH, V_BLOCK, PAGE, TILE,
    )  # fmt: skip
    stop = tl.where(split == 0, tl.minimum((number + 1) * TOKENS, count), 0)
    state = _over_fresh(
        q, own, first, cached, stop, key + start * key_strides[0] + head * key_strides[1], key_strides[0],
        value + start * value_strides[0] + head * value_strides[1], value_strides[0], state, scale, softcap, window,
        K_KIND == 3, V_KIND == 3, HAS_WINDOW, HAS_SOFTCAP, K_WIDTH, K_BLOCK, V_WIDTH, 16 if SINGLE else TILE,
    )  # fmt: skip
    _store(
        out, out_strides, partial_out, partial_sums, counters, state, (rows, kept, start, count, number, split), head,
        sequence, num_splits, num_active, TOKENS, GROUP, LANES, IS_SPLIT, MERGED, CHUNK, V_KIND == 3,
        V_WIDTH, V_BLOCK, WIDTH, BLOCK,
    )  # fmt: skip


def attend(
    states: States, views: KVViews, batch: ForwardBatch, options: AttentionOptions, out: Tensor, *, single: bool
) -> None:
    """Compute attention for the sequences with one new token, or for those with several; see `reference.attention`.

    Args:
        states: queries, keys and values with contiguous channels; queries and keys are rotated.
        views: pages and residual windows of the layer; not modified.
        batch: the batch of the step.
        options: scale, window and further options.
        out: (T, Hq, D), channels contiguous; receives the outputs of these sequences.
        single: True = sequences with one new token; False = sequences with several.
    """
    layout, query, count = views.layout, states[0], len(batch.query_lengths)
    lanes, most = power_of_two(query.shape[1] // layout.num_heads), 1 if single else max(batch.query_lengths)
    kinds = [array.scheme.dtype for array in (views.key, views.value)]
    shape, chip = (layout.head_dim, layout.page_size), capability(query.device)
    packed = any(kind is not None and kind.bits < 8 for kind in kinds)
    tile = choices.page_tile(*shape, chip, single=single, quantized=layout.scheme.is_quantized, packed=packed)
    # No more rows than the tokens need, so that drafts take less time than prompts; tensor cores need at least 16.
    rows = max(16, lanes, min(tile.rows, power_of_two(most) * lanes))
    merged, programs = lanes if single else rows, -(-most // (rows // lanes))
    # Splits follow the capacity of the page table, because the lengths of a captured graph are not known here.
    tiles, tokens = programs * layout.num_heads * count, batch.page_table.shape[1] * layout.page_size
    splits = splits_of_cache(tiles, tokens, choices.page_tile(*shape, chip, single=True), query.device)
    constants = _constants(states, views, options)
    fp8_unit = 1.0 if constants["NATIVE_FP8"] else _BY_HAND
    _attend_kernel[programs * splits, layout.num_heads, count](
        *states, views.key_residual, views.value_residual, batch.residual_rows, batch.page_table, batch.query_starts,
        batch.positions, out,
        *empty_partials(tiles, splits, merged, layout.head_dim, query.device), *page_tensors(views),
        *(one.stride()[:2] for one in states), residual_strides(views), out.stride()[:2], batch.page_table.stride(0),
        *strides(views), float(options.scale), fixed(views.key), fixed(views.value),
        *(fp8_unit if kind is FP8 else 1.0 for kind in kinds),
        float(options.softcap or 1.0), int(options.window or 0), splits,
        **constants, ROWS=rows, TILE=tile.columns, IS_SPLIT=splits > 1, CHUNK=chunk(merged, constants["BLOCK"]),
        MERGED=merged, SINGLE=single, **tile.options(staged=False),
    )  # fmt: skip


def _constants(states: States, views: KVViews, options: AttentionOptions) -> dict[str, Any]:
    """Return the kernel's compile-time constants, except tile sizes."""
    layout, query = views.layout, states[0]
    group = query.shape[1] // layout.num_heads
    return {
        **page_constants(views),
        "NATIVE_FP8": capability(query.device) >= FP8_CAPABILITY,
        "HAS_RESIDUAL": views.key_residual is not None,
        "HAS_WINDOW": options.window is not None,
        "HAS_SOFTCAP": options.softcap is not None,
        "GROUP": group,
        "LANES": power_of_two(group),
        "WIDTH": layout.head_dim,
        "BLOCK": power_of_two(layout.head_dim),
    }
