# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
# ruff: noqa: ANN001, ANN201, ANN202
"""Splits of a sequence's cached tokens, one program each, and the merge of their partial results.

If there are too few sequences to fill the chip, each sequence is split. The program of a split stores its maximum, its
sum and its weighted values. The program that finishes last reads all of them, always in the same order, and writes the
outputs. A sequence with few tokens uses fewer splits than launched programs; the device decides this, so a captured
graph stays valid.
Shapes: ROWS of a program, D channels of a value.
Source: Dao et al. 2023, Flash-Decoding.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantkit.kernels.gpu import num_processors, power_of_two
from quantkit.kernels.gpu.choices import Tile
from quantkit.kernels.gpu.splits import counters, is_last_to_come

_LEAST_TILES = 4  # minimum number of tiles per split
_MOST_SPLITS = 64  # maximum number of splits per sequence


@triton.jit
def split_bounds(first, cached, split, num_splits, TILE: tl.constexpr):
    """Return where split number `split` of the positions first..cached begins and ends, and the number of splits.

    The end is exclusive. There is at least one split, and splits begin at tile boundaries.
    """
    from_tile = first // TILE * TILE
    tiles = tl.cdiv(tl.maximum(cached - from_tile, 0), TILE)
    each = tl.maximum(tl.cdiv(tiles, num_splits), 1)
    begin = from_tile + split * each * TILE
    return begin, tl.minimum(begin + each * TILE, cached), tl.maximum(tl.cdiv(tiles, each), 1)


@triton.jit
def _store_partials(
    partial_out, partial_sums, slot, kept, state, HALVED: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the sums of a split, each row in its slot."""
    top, total, acc, acc_high = state
    channels = tl.arange(0, BLOCK)
    full = 2 * WIDTH if HALVED else WIDTH
    tl.store(partial_sums + 2 * slot, top, mask=kept)
    tl.store(partial_sums + 2 * slot + 1, total, mask=kept)
    at = partial_out + slot.to(tl.int64)[:, None] * full + channels[None, :]
    mask = kept[:, None] & (channels < WIDTH)[None, :]
    tl.store(at, acc, mask=mask)
    if HALVED:
        tl.store(at + WIDTH, acc_high, mask=mask)


@triton.jit
def _add_partials(
    partial_out, partial_sums, first, num_active, rows, kept,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum the partial results of all splits in order, CHUNK at a time. The loads bypass the L1 cache."""
    channels = tl.arange(0, BLOCK)
    top, total = tl.full((ROWS,), float("-inf"), tl.float32), tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, BLOCK), tl.float32)
    for begin in range(0, num_active, CHUNK):
        splits = begin + tl.arange(0, CHUNK)
        slots = (first + splits)[:, None] * ROWS + rows[None, :]  # (CHUNK, ROWS)
        mask = (splits < num_active)[:, None] & kept[None, :]
        tops = tl.load(partial_sums + 2 * slots, mask=mask, other=float("-inf"), cache_modifier=".cg")
        totals = tl.load(partial_sums + 2 * slots + 1, mask=mask, other=0.0, cache_modifier=".cg")
        values = tl.load(
            partial_out + slots.to(tl.int64)[:, :, None] * WIDTH + channels[None, None, :],
            mask=mask[:, :, None] & (channels < WIDTH)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        new_top = tl.maximum(top, tl.max(tops, 0))
        # If a row does not exist or sees nothing in these splits, -inf minus -inf would be NaN.
        anchor = tl.where(new_top == float("-inf"), 0.0, new_top)
        decay, factors = tl.exp(top - anchor), tl.exp(tops - anchor[None, :])
        total = total * decay + tl.sum(totals * factors, 0)
        acc = acc * decay[:, None] + tl.sum(values * factors[:, :, None], 0)
        top = new_top
    return top, total, acc, acc


@triton.jit
def store_out(at, kept, state, HALVED: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Store sums (ROWS, BLOCK) as outputs, each row at its own pointer. HALVED: the channels are in two halves."""
    factor = (1.0 / state[1])[:, None]
    channels = tl.arange(0, BLOCK)
    mask = kept[:, None] & (channels < WIDTH)[None, :]
    target = at[:, None] + channels[None, :]
    tl.store(target, (state[2] * factor).to(at.dtype.element_ty), mask=mask)
    if HALVED:
        tl.store(target + WIDTH, (state[3] * factor).to(at.dtype.element_ty), mask=mask)


@triton.jit
def merge_splits(
    partial_out, partial_sums, counter, first, split, num_active, rows, kept, state,
    out_at, merged, real, MERGED: tl.constexpr, CHUNK: tl.constexpr, HALVED: tl.constexpr, HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store a split's sums (ROWS, HALF_BLOCK), in two halves if HALVED. The program that finishes last computes the
    outputs from all splits.
    """
    slot = (first + split) * MERGED + rows
    _store_partials(partial_out, partial_sums, slot, kept, state, HALVED, HALF, HALF_BLOCK)
    if is_last_to_come(counter, num_active):
        whole = _add_partials(
            partial_out, partial_sums, first, num_active, merged, real, MERGED, CHUNK, WIDTH, BLOCK
        )  # fmt: skip
        store_out(out_at, real, whole, False, WIDTH, BLOCK)


def chunk(rows: int, block: int) -> int:
    """Return how many splits a program merges at once, which the number of registers limits."""
    # 8192 numbers are 64 registers of each thread of four warps.
    return max(1, min(16, 8192 // (rows * block)))


def splits_of_cache(programs: int, tokens: int, tile: Tile, device: torch.device) -> int:
    """Return the number of splits per sequence that fills the chip with several tiles per split; a power of two."""
    filling = -(-tile.programs * num_processors(device) // programs)
    longest = power_of_two(-(-tokens // (_LEAST_TILES * tile.columns)))
    return min(power_of_two(filling), longest, _MOST_SPLITS)


def empty_partials(tiles: int, splits: int, rows: int, width: int, device: torch.device) -> tuple[Tensor | None, ...]:
    """Allocate memory for the partial results of splits, and counters.

    Args:
        tiles: number of tiles that are split.
        splits: splits per tile; 1 = nothing is allocated.
        rows: rows per split.
        width: channels of a value.
        device: device of the memory.
    Returns:
        partial_out, partial_sums, counters: all None without splits.
    """
    if splits == 1:
        return None, None, None
    partial_out = torch.empty(tiles, splits, rows, width, dtype=torch.float32, device=device)
    partial_sums = torch.empty(tiles, splits, rows, 2, dtype=torch.float32, device=device)
    return partial_out, partial_sums, counters(device)
