# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
# ruff: noqa: ANN001, ANN202
"""Attention of one new token per sequence over its cached pages and its own fresh key, in every KV type.

One program takes the query heads of one key head and a split of the sequence; the last of them merges the splits.
Lengths are read on the device (a new token's position is what its sequence has cached), so the launch is the same for
every step of a batch. How pages are read: `paged_tiles`.
Shapes: B sequences, T new tokens, Hq and Hkv heads, D channels, S tokens per page.
Source: Dao et al. 2023, Flash-Decoding; Kwon et al. 2023, PagedAttention.
"""

import triton
import triton.language as tl
from torch import Tensor

from quantkit.kernels.batch import ForwardBatch
from quantkit.kernels.gpu import configs, page_arguments, power_of_two
from quantkit.kernels.gpu.paged_tiles import load_query, over_cache
from quantkit.kernels.gpu.split_kv import merge_splits, split_bounds, store_out
from quantkit.kernels.layouts import KVViews
from quantkit.kernels.types import AttentionOptions, States


@triton.jit
def _join_fresh(
    query, key, value, state, scale, softcap, HAS_SOFTCAP: tl.constexpr,
    K_HALVED: tl.constexpr, V_HALVED: tl.constexpr, K_WIDTH: tl.constexpr, K_BLOCK: tl.constexpr,
    V_WIDTH: tl.constexpr, V_BLOCK: tl.constexpr,
):  # fmt: skip
    """The new token's own key and value join the sums."""
    q, q_high = query
    top, total, acc, acc_high = state
    k_channels, v_channels = tl.arange(0, K_BLOCK), tl.arange(0, V_BLOCK)
    fresh = tl.load(key + k_channels, mask=k_channels < K_WIDTH, other=0.0).to(tl.float32)
    own = tl.sum(q.to(tl.float32) * fresh[None, :], 1)
    if K_HALVED:
        fresh = tl.load(key + K_WIDTH + k_channels, mask=k_channels < K_WIDTH, other=0.0).to(tl.float32)
        own += tl.sum(q_high.to(tl.float32) * fresh[None, :], 1)
    own *= scale
    if HAS_SOFTCAP:
        own = softcap * (2 * tl.sigmoid(2 * own / softcap) - 1)
    new_top = tl.maximum(top, own)
    decay, weight = tl.exp(top - new_top), tl.exp(own - new_top)
    seen = tl.load(value + v_channels, mask=v_channels < V_WIDTH, other=0.0).to(tl.float32)
    acc = acc * decay[:, None] + weight[:, None] * seen[None, :]
    if V_HALVED:
        seen = tl.load(value + V_WIDTH + v_channels, mask=v_channels < V_WIDTH, other=0.0).to(tl.float32)
        acc_high = acc_high * decay[:, None] + weight[:, None] * seen[None, :]
    return new_top, total * decay + weight, acc, acc_high


@triton.jit
def _attend_kernel(
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
    """One split of one sequence for the query heads of one key head."""
    split, head, sequence = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    token = tl.load(query_starts + sequence).to(tl.int64)
    # Sequences with more are for `paged_prefill`, in the same step.
    if tl.load(query_starts + sequence + 1) - token != 1:
        return
    cached = tl.load(positions + token).to(tl.int32)
    first = tl.maximum(cached - window + 1, 0) if HAS_WINDOW else 0
    begin, end, num_active = split_bounds(first, cached, split, num_splits, TILE)
    # A short sequence has fewer splits than the grid, and its counter counts only those.
    if split >= num_active:
        return
    rows = tl.arange(0, ROWS)
    kept = rows < GROUP
    heads = head * GROUP + rows
    q_at = query + token * query_strides[0] + heads[:, None] * query_strides[1]
    q = load_query(q_at, kept, K_KIND == 3, K_WIDTH, K_BLOCK)
    if HAS_RESIDUAL:
        residual += tl.load(residual_rows + sequence) * residual_strides[0]
    # All rows are at one position, so the window ends where reading begins, and tiles need no mask of it.
    state = over_cache(
        q, None, first, begin, end, cached, head, residual, page_table + sequence * table_stride,
        (k_codes, k_scale, k_zero, kc_strides, ks_strides), (v_codes, v_scale, v_zero, vc_strides, vs_strides),
        residual_strides, scale, tl.load(k_fixed + head) * k_unit, tl.load(v_fixed + head) * v_unit, softcap, window,
        K_KIND, K_GRANULARITY, V_KIND, V_GRANULARITY, NATIVE_FP8, HAS_RESIDUAL, RESIDUAL, False, HAS_SOFTCAP,
        K_WIDTH, K_BLOCK, V_WIDTH, V_BLOCK, PAGE, TILE,
    )  # fmt: skip
    # One split has the fresh key, so that it counts once; there always is a first.
    if split == 0:
        state = _join_fresh(
            q, key + token * key_strides[0] + head * key_strides[1],
            value + token * value_strides[0] + head * value_strides[1], state, scale, softcap,
            HAS_SOFTCAP, K_KIND == 3, V_KIND == 3, K_WIDTH, K_BLOCK, V_WIDTH, V_BLOCK,
        )  # fmt: skip
    if IS_SPLIT:  # noqa: SIM102 - one is known to the compiler, the other to the device
        if num_active > 1:
            number = sequence * tl.num_programs(1) + head.to(tl.int32)
            lanes = tl.arange(0, LANES)
            out_at = out + token * out_strides[0] + (head * GROUP + lanes) * out_strides[1]
            merge_splits(
                partial_out, partial_sums, counters + number, number * num_splits, split, num_active, rows, kept,
                state, out_at, lanes, lanes < GROUP, GROUP, LANES, CHUNK, V_KIND == 3, V_WIDTH, V_BLOCK, WIDTH, BLOCK,
            )  # fmt: skip
            return
    store_out(out + token * out_strides[0] + heads * out_strides[1], kept, state, V_KIND == 3, V_WIDTH, V_BLOCK)


def attend_tokens(states: States, views: KVViews, batch: ForwardBatch, options: AttentionOptions, out: Tensor) -> None:
    """Attention of the sequences that have exactly one new token; see `reference.attention.attend`.

    Args:
        states: queries and keys rotated; channels contiguous.
        views: the layer's pages and residual windows; not modified.
        batch: what belongs to whom.
        options: scale, window and the like.
        out: (T, Hq, D), channels contiguous; the rows of those sequences are written.
    """
    query = states[0]
    choice = configs.decode(views, len(batch.query_lengths), query.shape[1], query.device)
    group = query.shape[1] // views.layout.num_heads
    rows = max(16, power_of_two(group)), group  # tensor cores take 16 rows, most of them empty here
    page_arguments.attend(_attend_kernel, choice, rows, 1, states, views, batch, options, out)
