# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
# ruff: noqa: ANN001, ANN202
"""Fresh keys that are quantized per channel, of sequences with several new tokens: a layer's in one launch.

A program quantizes a page that its sequence completes. Only the page that was open has older keys, which its program
reads from the residual window before it puts the newest keys there; the other programs read fresh keys alone. So
nothing is read after it has been overwritten, however many tokens there are. This comes after attention, which reads
the window as it was; single tokens are stored by `kv_store`. What is computed: `reference.attention.store_residuals`.
Shapes: B sequences, T new tokens, H heads, D channels, S tokens per page.
"""

import triton
import triton.language as tl
from torch import Tensor

from quantkit.kernels.batch import ForwardBatch
from quantkit.kernels.gpu.kv_store import _int4_codes, _int4_grid
from quantkit.kernels.gpu.page_arguments import page_constants, page_tensors, residual_strides, strides
from quantkit.kernels.layouts import KVViews


@triton.jit
def _half_of_page(
    fresh, window, positions, cached, channel, real, scale, zero, token_stride, slot_stride, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """INT4 codes (PAGE, CHANNELS) of some channels of a page; their scales are stored."""
    is_old = (positions < cached)[:, None]
    slots, tokens = (positions % RESIDUAL).to(tl.int64), (positions - cached).to(tl.int64)
    older = tl.load(window + slots[:, None] * slot_stride + channel[None, :], mask=is_old & real[None, :], other=0.0)
    at = fresh + tokens[:, None] * token_stride + channel[None, :]
    newer = tl.load(at, mask=(is_old == 0) & real[None, :], other=0.0).to(window.dtype.element_ty)
    x = tl.where(is_old, older, newer).to(tl.float32)
    step, origin = _int4_grid(tl.min(x, 0), tl.max(x, 0))
    tl.store(scale + channel, step, mask=real)
    tl.store(zero + channel, origin, mask=real)
    return _int4_codes(x, step.to(tl.float32)[None, :], origin.to(tl.float32)[None, :])


@triton.jit
def _store_chunk_kernel(
    key, residual, residual_rows, query_starts, positions, page_table, codes, scale, zero,
    key_strides, residual_strides, table_stride, code_strides, scale_strides,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """One page of a sequence, of one head. WIDTH: half the channels, which share bytes with the others."""
    number, head, sequence = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    start = tl.load(query_starts + sequence)
    count = tl.load(query_starts + sequence + 1) - start
    if count < 2:
        return
    cached = tl.load(positions + start).to(tl.int32)
    fresh = key + start.to(tl.int64) * key_strides[0] + head * key_strides[1]
    window = residual + tl.load(residual_rows + sequence) * residual_strides[0] + head * residual_strides[1]
    index = cached // PAGE + number
    if (index + 1) * PAGE <= cached + count:
        page = tl.load(page_table + sequence * table_stride + index).to(tl.int64)
        lanes = tl.arange(0, PAGE)
        base = page * scale_strides[0] + head * scale_strides[1]
        target = codes + page * code_strides[0] + head * code_strides[1]
        # Some at a time, because all tokens of a page are in registers, for both halves of the bytes.
        CHANNELS: tl.constexpr = 16
        for first in range(0, WIDTH, CHANNELS):
            some = first + tl.arange(0, CHANNELS)
            low = _half_of_page(
                fresh, window, index * PAGE + lanes, cached, some, some < WIDTH, scale + base, zero + base,
                key_strides[0], residual_strides[2], RESIDUAL,
            )  # fmt: skip
            high = _half_of_page(
                fresh + WIDTH, window + WIDTH, index * PAGE + lanes, cached, some, some < WIDTH, scale + base + WIDTH,
                zero + base + WIDTH, key_strides[0], residual_strides[2], RESIDUAL,
            )  # fmt: skip
            at = lanes.to(tl.int64)[:, None] * code_strides[2] + some[None, :]
            tl.store(target + at, low | (high << 4), mask=(some < WIDTH)[None, :])
    if number == 0:
        tl.debug_barrier()  # every thread has read the window before one writes there
        channels = tl.arange(0, BLOCK)
        # Earlier tokens would lose their slots to later ones of this step.
        for first in range(tl.maximum(count - RESIDUAL, 0), count, 16):
            tokens = first + tl.arange(0, 16)
            mask = (tokens < count)[:, None] & (channels < WIDTH)[None, :]
            slots = ((cached + tokens) % RESIDUAL).to(tl.int64)[:, None] * residual_strides[2]
            at = fresh + tokens.to(tl.int64)[:, None] * key_strides[0]
            for half in tl.static_range(2):
                newest = tl.load(at + half * WIDTH + channels[None, :], mask=mask, other=0.0)
                here = window + slots + half * WIDTH + channels[None, :]
                tl.store(here, newest.to(residual.dtype.element_ty), mask=mask)


def store_chunks(key: Tensor, views: KVViews, batch: ForwardBatch) -> Tensor:
    """`reference.attention.store_residuals` of the sequences with more than one new token.

    Args:
        key: (T, H, D), rotated, channels contiguous.
        views: the layer's pages and residual windows; modified.
        batch: what belongs to whom.
    Returns:
        The keys.
    """
    layout, constants = views.layout, page_constants(views)
    size, lengths = layout.page_size, zip(batch.context_lengths, batch.query_lengths, strict=True)
    # One at least, whose program stores the newest keys where no page becomes complete.
    pages = max(max(length // size - (length - new) // size, 1) for length, new in lengths)
    _store_chunk_kernel[pages, layout.num_heads, len(batch.query_lengths)](
        key, views.key_residual, batch.residual_rows, batch.query_starts, batch.positions, batch.page_table,
        *page_tensors(views)[:3], key.stride()[:2], residual_strides(views), batch.page_table.stride(0),
        *strides(views)[:2], WIDTH=constants["K_WIDTH"], BLOCK=constants["K_BLOCK"], PAGE=size,
        RESIDUAL=constants["RESIDUAL"], num_warps=4,
    )  # fmt: skip
    return key
