# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
# ruff: noqa: ANN001, ANN202
"""Attention of several new tokens per sequence, of prompts and drafts: over its cached pages and, causally, each other.

One program takes some new tokens of a sequence and the query heads of one key head as the rows of its products, walks
over the cached pages as `paged_decode` does, in every KV type, and then over the fresh keys up to its own last token,
which are read unquantized where they lie. Codes become numbers in registers, so a long cached prefix needs no copy.
Few new tokens over a long prefix, such as drafts to verify, are as little work for the chip as a decode step is: then
the prefix is split (`split_kv`), and a program has no more rows than there are tokens for.
Shapes: B sequences, T new tokens, Hq and Hkv heads, D channels, S tokens per page.
Source: Dao 2023, FlashAttention-2; Kwon et al. 2023, PagedAttention.
"""

import triton
import triton.language as tl
from torch import Tensor

from quantkit.kernels.batch import ForwardBatch
from quantkit.kernels.gpu import configs, page_arguments, power_of_two
from quantkit.kernels.gpu.paged_tiles import load_query, over_cache, score_keys, softmax_step, visible
from quantkit.kernels.gpu.split_kv import merge_splits, split_bounds, store_out
from quantkit.kernels.layouts import KVViews
from quantkit.kernels.types import AttentionOptions, States


@triton.jit
def _over_fresh(
    query, own, first, cached, stop, key, key_stride, value, value_stride, state,
    scale, softcap, window, K_HALVED: tl.constexpr, V_HALVED: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, K_WIDTH: tl.constexpr, K_BLOCK: tl.constexpr, V_WIDTH: tl.constexpr,
    V_BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The fresh keys and values of the sequence, up to number `stop`, join the running softmax: each row sees those up
    to its own, in its window."""
    DTYPE: tl.constexpr = query[0].dtype
    top, total, acc, acc_high = state
    channels = tl.arange(0, V_BLOCK)
    for index in range(tl.maximum(first - cached, 0) // TILE * TILE, stop, TILE):
        fresh = index + tl.arange(0, TILE)
        real = fresh < stop
        scores = score_keys(query, key + fresh.to(tl.int64) * key_stride, real, K_HALVED, K_WIDTH, K_BLOCK) * scale
        mask = (cached + fresh)[None, :] <= own[:, None]
        if HAS_WINDOW:
            mask &= own[:, None] - (cached + fresh)[None, :] < window
        weights, decay, top, total = softmax_step(visible(scores, mask, softcap, HAS_SOFTCAP), top, total)
        narrow = weights.to(DTYPE)
        at = value + fresh.to(tl.int64)[:, None] * value_stride + channels[None, :]
        mask = real[:, None] & (channels < V_WIDTH)[None, :]
        values = tl.load(at, mask=mask, other=0.0).to(DTYPE)
        acc = tl.dot(narrow, values, acc * decay[:, None], input_precision="ieee")
        if V_HALVED:
            values = tl.load(at + V_WIDTH, mask=mask, other=0.0).to(DTYPE)
            acc_high = tl.dot(narrow, values, acc_high * decay[:, None], input_precision="ieee")
    return top, total, acc, acc_high


@triton.jit
def _prefill_kernel(
    query, key, value, residual, residual_rows, page_table, query_starts, positions, out, partial_out, partial_sums,
    counters, k_codes, k_scale, k_zero, v_codes, v_scale, v_zero,
    query_strides, key_strides, value_strides, residual_strides, out_strides, table_stride,
    kc_strides, ks_strides, vc_strides, vs_strides,
    scale, k_fixed, v_fixed, k_unit, v_unit, softcap, window, num_splits,
    K_KIND: tl.constexpr, K_GRANULARITY: tl.constexpr, V_KIND: tl.constexpr, V_GRANULARITY: tl.constexpr,
    NATIVE_FP8: tl.constexpr, HAS_RESIDUAL: tl.constexpr, RESIDUAL: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, GROUP: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr,
    K_WIDTH: tl.constexpr, K_BLOCK: tl.constexpr, V_WIDTH: tl.constexpr, V_BLOCK: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr, IS_SPLIT: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """ROWS / LANES new tokens of one sequence, GROUP query heads of one key head each."""
    TOKENS: tl.constexpr = ROWS // LANES
    head, sequence = tl.program_id(1).to(tl.int64), tl.program_id(2)
    start = tl.load(query_starts + sequence).to(tl.int64)
    count = (tl.load(query_starts + sequence + 1) - start).to(tl.int32)
    # The last tokens, which see most, are begun first.
    number, split = tl.cdiv(count, TOKENS) - 1 - tl.program_id(0) // num_splits, tl.program_id(0) % num_splits
    # Single tokens are for `paged_decode`, and the grid is as large as the longest sequence needs.
    if count < 2 or number < 0:
        return
    cached = tl.load(positions + start).to(tl.int32)
    rows = tl.arange(0, ROWS)
    token, lane = number * TOKENS + rows // LANES, rows % LANES
    kept, own = (token < count) & (lane < GROUP), cached + token
    heads = head * GROUP + lane
    q_at = query + (start + token)[:, None] * query_strides[0] + heads[:, None] * query_strides[1]
    q = load_query(q_at, kept, K_KIND == 3, K_WIDTH, K_BLOCK)
    first = tl.maximum(cached + number * TOKENS - window + 1, 0) if HAS_WINDOW else 0
    begin, end, num_active = split_bounds(first, cached, split, num_splits, TILE)
    if split >= num_active:
        return
    if HAS_RESIDUAL:
        residual += tl.load(residual_rows + sequence) * residual_strides[0]
    state = over_cache(
        q, own, first, begin, end, cached, head, residual, page_table + sequence * table_stride,
        (k_codes, k_scale, k_zero, kc_strides, ks_strides), (v_codes, v_scale, v_zero, vc_strides, vs_strides),
        residual_strides, scale, tl.load(k_fixed + head) * k_unit, tl.load(v_fixed + head) * v_unit, softcap, window,
        K_KIND, K_GRANULARITY, V_KIND, V_GRANULARITY, NATIVE_FP8, HAS_RESIDUAL, RESIDUAL, HAS_WINDOW, HAS_SOFTCAP,
        K_WIDTH, K_BLOCK, V_WIDTH, V_BLOCK, PAGE, TILE,
    )  # fmt: skip
    stop = tl.where(split == 0, tl.minimum((number + 1) * TOKENS, count), 0)
    state = _over_fresh(
        q, own, first, cached, stop, key + start * key_strides[0] + head * key_strides[1], key_strides[0],
        value + start * value_strides[0] + head * value_strides[1], value_strides[0], state, scale, softcap, window,
        K_KIND == 3, V_KIND == 3, HAS_WINDOW, HAS_SOFTCAP, K_WIDTH, K_BLOCK, V_WIDTH, V_BLOCK, TILE,
    )  # fmt: skip
    out_at = out + (start + token) * out_strides[0] + heads * out_strides[1]
    if IS_SPLIT:  # noqa: SIM102 - one is known to the compiler, the other to the device
        if num_active > 1:
            tile = (sequence * tl.num_programs(1) + head.to(tl.int32)) * (tl.num_programs(0) // num_splits) + number
            merge_splits(
                partial_out, partial_sums, counters + tile, tile * num_splits, split, num_active, rows, kept,
                state, out_at, rows, kept, ROWS, ROWS, CHUNK, V_KIND == 3, V_WIDTH, V_BLOCK, WIDTH, BLOCK,
            )  # fmt: skip
            return
    store_out(out_at, kept, state, V_KIND == 3, V_WIDTH, V_BLOCK)


def attend_chunks(states: States, views: KVViews, batch: ForwardBatch, options: AttentionOptions, out: Tensor) -> None:
    """Attention of the sequences that have more than one new token; arguments as for `paged_decode.attend_tokens`."""
    query = states[0]
    lanes, most = power_of_two(query.shape[1] // views.layout.num_heads), max(batch.query_lengths)
    choice = configs.prefill(views, query.shape[1], query.device)
    # No more than there are tokens for, so that drafts do not run as long as prompts; tensor cores take 16.
    rows = max(16, lanes, min(choice.rows, power_of_two(most) * lanes))
    programs = -(-most // (rows // lanes))
    page_arguments.attend(_prefill_kernel, choice, (rows, rows), programs, states, views, batch, options, out)
