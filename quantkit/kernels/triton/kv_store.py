# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
# ruff: noqa: ANN001, ANN201, ANN202
"""Fresh keys and values into the cache: rounded as `kv_numbers` says, bit for bit, in one launch.

Everything per token goes straight to its page. Keys that are quantized per channel go to the sequence's tail in 16
bits, and the program that stores the last token of a page rounds the whole page. E4M3 is rounded in integers, so that
it works on every device.
Shapes: B sequences, T new tokens, H heads, D channels, S tokens per page.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quantkit.kernels.batch import ForwardBatch
from quantkit.kernels.layouts import KVViews
from quantkit.kernels.triton.pages import KINDS, block, fixed, granularity, strides, width


@triton.jit
def round_even(x):
    """To the nearest integer, halves to even; for magnitudes below 2^22."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def to_e4m3(x):
    """Codes (uint8) of float32 numbers, clamped to 448, halves to even; NaN stays NaN."""
    x = tl.where(x > 448.0, 448.0, tl.where(x < -448.0, -448.0, x))
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    small = (tl.abs(x) * 512.0 + 8388608.0).to(tl.int32, bitcast=True) - 0x4B000000
    code = tl.where(magnitude < 0x3C800000, small, normal)
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _round_up(scale):
    """An fp16 scale not below the given one and never zero; see `kv_numbers`."""
    raised = scale + scale * 0.00048828125 + 2.9802322387695312e-08
    return tl.minimum(tl.maximum(raised, 5.960464477539063e-08), 65504.0).to(tl.float16)


@triton.jit
def _int4_grid(low, high):
    """Scale and zero, fp16, of numbers between two bounds."""
    zero = low - tl.abs(low) * 0.00048828125 - 2.9802322387695312e-08
    zero = tl.minimum(tl.maximum(zero, -65504.0), 65504.0).to(tl.float16)
    return _round_up(tl.div_rn(high - zero.to(tl.float32), 15.0)), zero


@triton.jit
def _int4_codes(x, scale, zero):
    code = round_even(tl.div_rn(x - zero, scale))
    return tl.minimum(tl.maximum(code, 0.0), 15.0).to(tl.uint8)


@triton.jit
def _store_token(
    source, codes, scale, zero, page, head, inside, code_strides, scale_strides, fixed_scale,
    KIND: tl.constexpr, GRANULARITY: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One token's keys or values of one head."""
    channels = tl.arange(0, BLOCK)
    real = channels < WIDTH
    loaded = tl.load(source + channels, mask=real, other=0.0)
    target = codes + page * code_strides[0] + head * code_strides[1] + inside * code_strides[2] + channels
    at_scale = page * scale_strides[0] + head * scale_strides[1] + inside
    x = loaded.to(tl.float32)
    if KIND == 0:
        tl.store(target, x.to(codes.dtype.element_ty), mask=real)
    elif GRANULARITY == 0:
        tl.store(target, to_e4m3(tl.div_rn(x, fixed_scale)), mask=real)
    elif KIND == 3:
        other = tl.load(source + WIDTH + channels, mask=real, other=0.0).to(tl.float32)
        low = tl.min(tl.where(real, tl.minimum(x, other), float("inf")), 0)
        high = tl.max(tl.where(real, tl.maximum(x, other), float("-inf")), 0)
        step, origin = _int4_grid(low, high)
        lows = _int4_codes(x, step.to(tl.float32), origin.to(tl.float32))
        highs = _int4_codes(other, step.to(tl.float32), origin.to(tl.float32))
        tl.store(target, lows | (highs << 4), mask=real)
        tl.store(scale + at_scale, step)
        tl.store(zero + at_scale, origin)
    else:
        LIMIT: tl.constexpr = 448.0 if KIND == 1 else 127.0
        step = _round_up(tl.div_rn(tl.max(tl.abs(x), 0), LIMIT))
        scaled = tl.div_rn(x, step.to(tl.float32))
        if KIND == 1:
            tl.store(target, to_e4m3(scaled), mask=real)
        else:
            rounded = tl.minimum(tl.maximum(round_even(scaled), -LIMIT), LIMIT)
            tl.store(target, rounded.to(tl.int8).to(tl.uint8, bitcast=True), mask=real)
        tl.store(scale + at_scale, step)


@triton.jit
def _store_kernel(
    key, value, slots, k_codes, k_scale, k_zero, v_codes, v_scale, v_zero, key_strides, value_strides,
    kc_strides, ks_strides, vc_strides, vs_strides, k_fixed, v_fixed,
    K_KIND: tl.constexpr, K_GRANULARITY: tl.constexpr, V_KIND: tl.constexpr, V_GRANULARITY: tl.constexpr,
    K_WIDTH: tl.constexpr, K_BLOCK: tl.constexpr, V_WIDTH: tl.constexpr, V_BLOCK: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """One token and head; keys only where they are not quantized per channel. A slot below 0 is nowhere."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    page, inside = slot // PAGE, slot % PAGE
    if K_GRANULARITY != 2:
        _store_token(
            key + token * key_strides[0] + head * key_strides[1], k_codes, k_scale, k_zero, page, head, inside,
            kc_strides, ks_strides, tl.load(k_fixed + head), K_KIND, K_GRANULARITY, K_WIDTH, K_BLOCK,
        )  # fmt: skip
    _store_token(
        value + token * value_strides[0] + head * value_strides[1], v_codes, v_scale, v_zero, page, head, inside,
        vc_strides, vs_strides, tl.load(v_fixed + head), V_KIND, V_GRANULARITY, V_WIDTH, V_BLOCK,
    )  # fmt: skip


@triton.jit
def _page_half(
    key, tail, position, channel, real, scale, zero, lanes,
    PAGE: tl.constexpr, TAIL: tl.constexpr, slot_stride,
):  # fmt: skip
    """INT4 codes (PAGE, BLOCK) of some channels of a page that `position` completes; their scales are stored."""
    places = position - (PAGE - 1) + lanes
    older = tl.load(
        tail + (places % TAIL).to(tl.int64)[:, None] * slot_stride + channel[None, :],
        mask=(lanes < PAGE - 1)[:, None] & real[None, :],
        other=0.0,
    )
    fresh = tl.load(key + channel, mask=real, other=0.0).to(tail.dtype.element_ty)
    x = tl.where((lanes == PAGE - 1)[:, None], fresh[None, :], older).to(tl.float32)
    step, origin = _int4_grid(tl.min(x, 0), tl.max(x, 0))
    tl.store(scale + channel, step, mask=real)
    tl.store(zero + channel, origin, mask=real)
    return _int4_codes(x, step.to(tl.float32)[None, :], origin.to(tl.float32)[None, :])


@triton.jit
def _tail_kernel(
    key, tail, tail_rows, query_starts, positions, page_table, codes, scale, zero,
    key_strides, tail_strides, table_stride, code_strides, scale_strides,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """Keys per channel of a sequence with one new token: into its tail, and its page once that is complete."""
    sequence, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    token = tl.load(query_starts + sequence).to(tl.int64)
    if tl.load(query_starts + sequence + 1) - token != 1:
        return
    position = tl.load(positions + token).to(tl.int32)
    channels = tl.arange(0, BLOCK)
    real = channels < WIDTH
    own = tail + tl.load(tail_rows + sequence) * tail_strides[0] + head * tail_strides[1]
    source = key + token * key_strides[0] + head * key_strides[1]
    if (position + 1) % PAGE == 0:
        page = tl.load(page_table + sequence * table_stride + position // PAGE).to(tl.int64)
        lanes = tl.arange(0, PAGE)
        base = page * scale_strides[0] + head * scale_strides[1]
        target = codes + page * code_strides[0] + head * code_strides[1]
        low = _page_half(
            source, own, position, channels, real, scale + base, zero + base, lanes, PAGE, TAIL, tail_strides[2]
        )
        high = _page_half(
            source, own, position, channels + WIDTH, real, scale + base, zero + base, lanes, PAGE, TAIL,
            tail_strides[2],
        )  # fmt: skip
        at = lanes.to(tl.int64)[:, None] * code_strides[2] + channels[None, :]
        tl.store(target + at, low | (high << 4), mask=real[None, :])
    slot = own + (position % TAIL).to(tl.int64) * tail_strides[2]
    for half in tl.static_range(2):
        fresh = tl.load(source + half * WIDTH + channels, mask=real, other=0.0)
        tl.store(slot + half * WIDTH + channels, fresh.to(tail.dtype.element_ty), mask=real)


def store(key: Tensor, value: Tensor, views: KVViews, batch: ForwardBatch) -> None:
    """Values, and keys that are rounded per token or not at all, of all new tokens; see `attention.store`.

    Args:
        key: (T, Hkv, D), rotated; channels contiguous.
        value: (T, Hkv, Dv), likewise.
        views: the layer's pages; modified.
        batch: slots of the new tokens.
    """
    layout = views.layout
    k_width, v_width = width(views.key, layout.head_dim), width(views.value, layout.value_width)
    _store_kernel[(len(key), layout.num_heads)](
        key, value, batch.slots,
        views.key.codes, views.key.scale, views.key.zero, views.value.codes, views.value.scale, views.value.zero,
        key.stride()[:2], value.stride()[:2], *strides(views.key), *strides(views.value),
        fixed(views.key), fixed(views.value),
        K_KIND=KINDS[views.key.scheme.dtype], K_GRANULARITY=granularity(views.key),
        V_KIND=KINDS[views.value.scheme.dtype], V_GRANULARITY=granularity(views.value),
        K_WIDTH=k_width, K_BLOCK=block(k_width), V_WIDTH=v_width, V_BLOCK=block(v_width),
        PAGE=layout.page_size, num_warps=1,
    )  # fmt: skip


def store_tail(key: Tensor, views: KVViews, batch: ForwardBatch) -> None:
    """Keys that are rounded per channel, of sequences with exactly one new token.

    Args:
        key: (T, Hkv, D), rotated; channels contiguous.
        views: the layer's pages and tails; modified.
        batch: what belongs to whom.
    """
    layout, tail = views.layout, views.key_tail
    assert tail is not None
    half = layout.head_dim // 2
    _tail_kernel[(len(batch.query_lengths), layout.num_heads)](
        key, tail, batch.tail_rows, batch.query_starts, batch.positions, batch.page_table,
        views.key.codes, views.key.scale, views.key.zero,
        key.stride()[:2], tail.stride()[:3], batch.page_table.stride(0), *strides(views.key),
        WIDTH=half, BLOCK=block(half), PAGE=layout.page_size, TAIL=layout.tail_tokens, num_warps=4,
    )  # fmt: skip
