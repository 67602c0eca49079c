# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
# ruff: noqa: ANN001, ANN201, ANN202
"""A sequence's cached tokens in parts, each for a program of its own, and what the parts found as one.

Where sequences alone do not fill the chip, each is cut. A part's program stores its maximum, its sum and its weighted
values; the one that is last to come reads them all, always in the same order, and writes the outputs. A sequence with
few tokens has fewer parts than programs were launched, which is decided on the device, so that a graph need not know.
Shapes: ROWS of a program, Dv channels of a value.
Source: Dao et al. 2023, Flash-Decoding.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_TILES = 1 << 14
"""Programs whose parts can be counted; more than that fill any chip without parts."""


@triton.jit
def part_bounds(first, cached, part, num_parts, TILE: tl.constexpr):
    """Positions of a part of first..cached, and how many parts there are, one at least; parts begin at tiles."""
    from_tile = first // TILE * TILE
    tiles = tl.cdiv(tl.maximum(cached - from_tile, 0), TILE)
    each = tl.maximum(tl.cdiv(tiles, num_parts), 1)
    begin = from_tile + part * each * TILE
    return begin, tl.minimum(begin + each * TILE, cached), tl.maximum(tl.cdiv(tiles, each), 1)


@triton.jit
def _put_part(
    part_out, part_sums, counter, first, part, num_active, rows, kept, top, total, acc, acc_high,
    SLOTS: tl.constexpr, SPLIT: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store a part's sums; whether all parts are there now. The counter is left at zero for the next launch."""
    slot = (first + part) * SLOTS + rows
    channels = tl.arange(0, BLOCK)
    full = 2 * WIDTH if SPLIT else WIDTH
    tl.store(part_sums + 2 * slot, top, mask=kept)
    tl.store(part_sums + 2 * slot + 1, total, mask=kept)
    at = part_out + slot.to(tl.int64)[:, None] * full + channels[None, :]
    mask = kept[:, None] & (channels < WIDTH)[None, :]
    tl.store(at, acc, mask=mask)
    if SPLIT:
        tl.store(at + WIDTH, acc_high, mask=mask)
    tl.debug_barrier()  # every thread's numbers before the one that counts
    is_last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == num_active - 1
    if is_last:
        tl.store(counter, 0)
    return is_last


@triton.jit
def _add_parts(
    part_out, part_sums, first, num_active, rows, kept,
    SLOTS: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sums of all parts, CHUNK at a time, in order. Not by way of the L1 cache."""
    channels = tl.arange(0, BLOCK)
    top, total = tl.full((ROWS,), float("-inf"), tl.float32), tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, BLOCK), tl.float32)
    for begin in range(0, num_active, CHUNK):
        parts = begin + tl.arange(0, CHUNK)
        slots = (first + parts)[:, None] * SLOTS + rows[None, :]  # (CHUNK, ROWS)
        mask = (parts < num_active)[:, None] & kept[None, :]
        tops = tl.load(part_sums + 2 * slots, mask=mask, other=float("-inf"), cache_modifier=".cg")
        totals = tl.load(part_sums + 2 * slots + 1, mask=mask, other=0.0, cache_modifier=".cg")
        values = tl.load(
            part_out + slots.to(tl.int64)[:, :, None] * WIDTH + channels[None, None, :],
            mask=mask[:, :, None] & (channels < WIDTH)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        new_top = tl.maximum(top, tl.max(tops, 0))
        anchor = tl.where(new_top == float("-inf"), 0.0, new_top)
        decay, factors = tl.exp(top - anchor), tl.exp(tops - anchor[None, :])
        total = total * decay + tl.sum(totals * factors, 0)
        acc = acc * decay[:, None] + tl.sum(values * factors[:, :, None], 0)
        top = new_top
    return top, total, acc


@triton.jit
def _join_sinks(sinks, heads, kept, top, total, HAS_SINKS: tl.constexpr):
    """What sums are multiplied with to become outputs; sinks take part in the softmax and have no value."""
    decay = tl.full(top.shape, 1.0, tl.float32)
    if HAS_SINKS:
        sink = tl.load(sinks + heads, mask=kept, other=0.0).to(tl.float32)
        new_top = tl.maximum(top, sink)
        decay = tl.exp(top - new_top)
        total = total * decay + tl.exp(sink - new_top)
    return decay / total


@triton.jit
def put_out(
    out, at, kept, sinks, heads, top, total, acc, acc_high,
    HAS_SINKS: tl.constexpr, SPLIT: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sums (ROWS, BLOCK) as outputs, each row at its own place. SPLIT: they come in halves."""
    factor = _join_sinks(sinks, heads, kept, top, total, HAS_SINKS)[:, None]
    channels = tl.arange(0, BLOCK)
    mask = kept[:, None] & (channels < WIDTH)[None, :]
    target = out + at[:, None] + channels[None, :]
    tl.store(target, (acc * factor).to(out.dtype.element_ty), mask=mask)
    if SPLIT:
        tl.store(target + WIDTH, (acc_high * factor).to(out.dtype.element_ty), mask=mask)


@triton.jit
def join_parts(
    part_out, part_sums, counter, first, part, num_active, rows, kept, top, total, acc, acc_high,
    out, at, lanes, real, sinks, heads, HAS_SINKS: tl.constexpr, SLOTS: tl.constexpr, LANES: tl.constexpr,
    CHUNK: tl.constexpr, SPLIT: tl.constexpr, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Store a part's sums (ROWS, HALF_BLOCK), in halves where SPLIT; who is last makes LANES outputs of all parts."""
    is_last = _put_part(
        part_out, part_sums, counter, first, part, num_active, rows, kept, top, total, acc, acc_high,
        SLOTS, SPLIT, HALF, HALF_BLOCK,
    )  # fmt: skip
    if is_last:
        highest, weight, sums = _add_parts(
            part_out, part_sums, first, num_active, lanes, real, SLOTS, LANES, CHUNK, WIDTH, BLOCK
        )
        put_out(out, at, real, sinks, heads, highest, weight, sums, sums, HAS_SINKS, False, WIDTH, BLOCK)


def chunk(rows: int, block: int) -> int:
    """Parts that are added at once: what the registers hold."""
    return max(1, min(16, 8192 // (rows * block)))


def scratch(tiles: int, parts: int, rows: int, width: int, device: torch.device) -> tuple[Tensor | None, ...]:
    """Memory for what parts found, and counters.

    Args:
        tiles: programs that are cut.
        parts: of each; with one there is nothing to keep.
        rows: of each.
        width: channels of a value.
        device: where.
    Returns:
        part_out, part_sums, counters: or None, all of them.
    """
    if parts == 1:
        return None, None, None
    part_out = torch.empty(tiles, parts, rows, width, dtype=torch.float32, device=device)
    part_sums = torch.empty(tiles, parts, rows, 2, dtype=torch.float32, device=device)
    return part_out, part_sums, counters(device)


@functools.lru_cache(maxsize=8)
def counters(device: torch.device) -> Tensor:
    """How many parts of each tile are there; all zero between launches, which follow one another on a stream.

    Args:
        device: where.
    Returns:
        (MOST_TILES,) int32, the same for all kernels that cut what they do in parts.
    """
    return torch.zeros(MOST_TILES, dtype=torch.int32, device=device)
