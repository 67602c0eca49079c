# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
# ruff: noqa: ANN001, ANN202
"""Storage of pages that are quantized when they are complete, in one launch after attention.

Keys with scales per channel stay in the sequence's residual window, in 16 bits, until their page is complete. So do the
layer's values if they have scales per token. Attention must read the windows before this step updates them, so these
keys and values are stored in a launch after attention. Each page that a sequence completes is quantized by one program.
Only the page that was open has older tokens. Its program reads them from the window before it writes the newest tokens
to the window. The other programs read only new tokens. So for any number of new tokens, no token is read after it has
been overwritten.

Rounding matches `reference.kv_codes` bit for bit.
"""

import triton
import triton.language as tl
from torch import Tensor

from quantkit.kernels.gpu.kv_store import int8_codes, int8_grid, store_token, unsigned_codes, unsigned_grid
from quantkit.kernels.gpu.paged_tiles import page_constants, page_tensors, residual_strides, strides
from quantkit.kernels.layouts import KVViews
from quantkit.kernels.types import ForwardBatch


@triton.jit
def _channels_of_page(
    fresh, window, positions, cached, channel, real, scale, zero, token_stride, slot_stride,
    KIND: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Return the codes (PAGE, CHANNELS) of some channels of a page, and store their scales and zeros."""
    is_old = (positions < cached)[:, None]
    slots, tokens = (positions % RESIDUAL).to(tl.int64), (positions - cached).to(tl.int64)
    older = tl.load(window + slots[:, None] * slot_stride + channel[None, :], mask=is_old & real[None, :], other=0.0)
    at = fresh + tokens[:, None] * token_stride + channel[None, :]
    newer = tl.load(at, mask=(is_old == 0) & real[None, :], other=0.0).to(window.dtype.element_ty)
    x = tl.where(is_old, older, newer).to(tl.float32)
    low, high = tl.min(x, 0), tl.max(x, 0)
    if KIND >= 3:
        LARGEST: tl.constexpr = 15.0 if KIND == 3 else 7.0
        step, origin = unsigned_grid(low, high, LARGEST)
        chosen = unsigned_codes(x, step.to(tl.float32)[None, :], origin.to(tl.float32)[None, :], LARGEST)
    else:
        step, origin = int8_grid(low, high)
        chosen = int8_codes(x, step.to(tl.float32)[None, :], origin.to(tl.float32)[None, :])
    tl.store(scale + channel, step, mask=real)
    tl.store(zero + channel, origin, mask=real)
    return chosen


@triton.jit
def _store_channels(
    fresh, window, positions, cached, scale, zero, target, token_stride, slot_stride, code_stride,
    KIND: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Store a page of keys in INT8, or in INT4, where channel i shares a byte with channel i + WIDTH."""
    lanes = tl.arange(0, PAGE).to(tl.int64)[:, None] * code_stride
    # Some channels at a time, because registers hold all tokens of a page, for INT4 of both halves of the bytes.
    CHANNELS: tl.constexpr = 16
    for first in range(0, WIDTH, CHANNELS):
        some = first + tl.arange(0, CHANNELS)
        stored = _channels_of_page(
            fresh, window, positions, cached, some, some < WIDTH, scale, zero, token_stride, slot_stride,
            KIND, RESIDUAL,
        )  # fmt: skip
        if KIND == 3:
            high = _channels_of_page(
                fresh + WIDTH, window + WIDTH, positions, cached, some, some < WIDTH, scale + WIDTH, zero + WIDTH,
                token_stride, slot_stride, KIND, RESIDUAL,
            )  # fmt: skip
            stored = stored | (high << 4)
        tl.store(target + lanes + some[None, :], stored, mask=(some < WIDTH)[None, :])


@triton.jit
def _store_channels_int3(
    fresh, window, positions, cached, scale, zero, target, token_stride, slot_stride, code_stride,
    WIDTH: tl.constexpr, PAGE: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Store a page of keys in 3 bits: a byte of upper bits and two of lower bits hold the codes of eight channels."""
    APART: tl.constexpr = WIDTH // 8
    lanes = tl.arange(0, PAGE).to(tl.int64)[:, None] * code_stride
    for first in range(0, APART, 16):
        inside = first + tl.arange(0, 16)
        real = inside < APART
        upper = tl.zeros((PAGE, 16), tl.uint8)
        for half in tl.static_range(2):
            lower = tl.zeros((PAGE, 16), tl.uint8)
            for quarter in tl.static_range(4):
                codes = _channels_of_page(
                    fresh, window, positions, cached, quarter * (WIDTH // 4) + half * APART + inside, real, scale, zero,
                    token_stride, slot_stride, 4, RESIDUAL,
                )  # fmt: skip
                lower |= (codes & 3) << (2 * quarter)
                upper |= (codes >> 2) << (2 * quarter + half)
            tl.store(target + lanes + (half * APART + inside)[None, :], lower, mask=real[None, :])
        tl.store(target + lanes + (2 * APART + inside)[None, :], upper, mask=real[None, :])


@triton.jit
def _store_page(
    fresh, window, table, number, count, cached, head, codes, scale, zero,
    token_stride, slot_stride, code_strides, scale_strides,
    KIND: tl.constexpr, GRANULARITY: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr,
    RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Quantize and store one page of one sequence in one head, if `count` new tokens complete it. The program of the
    first page also stores the newest tokens in the residual window. With INT4, WIDTH is half the number of channels:
    channel i shares a byte with channel i + WIDTH.
    """
    index = cached // PAGE + number
    if (index + 1) * PAGE <= cached + count:
        page = tl.load(table + index).to(tl.int64)
        base = page * scale_strides[0] + head * scale_strides[1]
        target = codes + page * code_strides[0] + head * code_strides[1]
        if GRANULARITY == 1:
            for inside in range(PAGE):
                at = index * PAGE + inside
                if at < cached:
                    store_token(
                        window + (at % RESIDUAL).to(tl.int64) * slot_stride, codes, scale, zero, page, head,
                        inside, code_strides, scale_strides, 1.0, KIND, 1, WIDTH, BLOCK,
                    )  # fmt: skip
                else:
                    store_token(
                        fresh + (at - cached).to(tl.int64) * token_stride, codes, scale, zero, page, head,
                        inside, code_strides, scale_strides, 1.0, KIND, 1, WIDTH, BLOCK,
                    )  # fmt: skip
        elif KIND == 4:
            _store_channels_int3(
                fresh, window, index * PAGE + tl.arange(0, PAGE), cached, scale + base, zero + base, target,
                token_stride, slot_stride, code_strides[2], WIDTH, PAGE, RESIDUAL,
            )  # fmt: skip
        else:
            _store_channels(
                fresh, window, index * PAGE + tl.arange(0, PAGE), cached, scale + base, zero + base, target,
                token_stride, slot_stride, code_strides[2], KIND, WIDTH, PAGE, RESIDUAL,
            )  # fmt: skip
    if number == 0:
        tl.debug_barrier()  # every thread has read the window before one writes there
        channels = tl.arange(0, BLOCK)
        # Skips tokens whose slots later tokens of this step would overwrite.
        for first in range(tl.maximum(count - RESIDUAL, 0), count, 16):
            tokens = first + tl.arange(0, 16)
            mask = (tokens < count)[:, None] & (channels < WIDTH)[None, :]
            slots = ((cached + tokens) % RESIDUAL).to(tl.int64)[:, None] * slot_stride
            at = fresh + tokens.to(tl.int64)[:, None] * token_stride
            for half in tl.static_range(2 if KIND == 3 else 1):
                newest = tl.load(at + half * WIDTH + channels[None, :], mask=mask, other=0.0)
                here = window + slots + half * WIDTH + channels[None, :]
                tl.store(here, newest.to(window.dtype.element_ty), mask=mask)


@triton.jit
def _store_pages_kernel(
    key, value, key_residual, value_residual, residual_rows, query_starts, positions, page_table,
    k_codes, k_scale, k_zero, v_codes, v_scale, v_zero, key_strides, value_strides, residual_strides, table_stride,
    kc_strides, ks_strides, vc_strides, vs_strides, HEADS: tl.constexpr,
    K_KIND: tl.constexpr, K_GRANULARITY: tl.constexpr, V_KIND: tl.constexpr, V_GRANULARITY: tl.constexpr,
    K_WIDTH: tl.constexpr, K_BLOCK: tl.constexpr, V_WIDTH: tl.constexpr, V_BLOCK: tl.constexpr, PAGE: tl.constexpr,
    RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Process one page of one sequence in one head: of keys in programs 0..HEADS, of values in the others."""
    number, head, sequence = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    start = tl.load(query_starts + sequence).to(tl.int64)
    count = (tl.load(query_starts + sequence + 1) - start).to(tl.int32)
    if count < 1:
        return
    cached = tl.load(positions + start).to(tl.int32)
    table, row = page_table + sequence * table_stride, tl.load(residual_rows + sequence) * residual_strides[0]
    if head < HEADS:
        _store_page(
            key + start * key_strides[0] + head * key_strides[1], key_residual + row + head * residual_strides[1],
            table, number, count, cached, head, k_codes, k_scale, k_zero, key_strides[0], residual_strides[2],
            kc_strides, ks_strides, K_KIND, K_GRANULARITY, K_WIDTH, K_BLOCK, PAGE, RESIDUAL,
        )  # fmt: skip
    elif V_GRANULARITY == 1:
        head -= HEADS
        _store_page(
            value + start * value_strides[0] + head * value_strides[1],
            value_residual + row + head * residual_strides[1],
            table, number, count, cached, head, v_codes, v_scale, v_zero, value_strides[0], residual_strides[2],
            vc_strides, vs_strides, V_KIND, 1, V_WIDTH, V_BLOCK, PAGE, RESIDUAL,
        )  # fmt: skip


def store_waiting(key: Tensor, value: Tensor, views: KVViews, batch: ForwardBatch) -> Tensor:
    """Store keys and values that have residual windows, as `reference.attention.store_residuals` does.

    Args:
        key, value: (T, H, D), channels contiguous; keys are rotated.
        views: pages and residual windows of the layer; modified.
        batch: the batch of the step.
    Returns:
        The keys.
    """
    layout, constants = views.layout, page_constants(views)
    size, lengths = layout.page_size, zip(batch.context_lengths, batch.query_lengths, strict=True)
    # At least one page, because its program stores the newest tokens even if no page becomes complete.
    pages = max(max(length // size - (length - new) // size, 1) for length, new in lengths)
    _store_pages_kernel[pages, layout.num_heads * len(views.residuals), len(batch.query_lengths)](
        key, value, views.key_residual, views.value_residual, batch.residual_rows, batch.query_starts,
        batch.positions, batch.page_table, *page_tensors(views), key.stride()[:2], value.stride()[:2],
        residual_strides(views), batch.page_table.stride(0), *strides(views), HEADS=layout.num_heads, **constants,
        num_warps=4,
    )  # fmt: skip
    return key
