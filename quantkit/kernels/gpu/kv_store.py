# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
# ruff: noqa: ANN001, ANN201, ANN202
"""What comes before attention, in one launch: norm and rotation of heads, and fresh keys and values into the cache.

Numbers are rounded as `kv_numbers` says, bit for bit. Everything per token goes straight to its page. Keys that are
quantized per channel go to the sequence's tail in 16 bits, and the program that stores the last token of a page rounds
the whole page. E4M3 is rounded in integers, so that it works on every device.
Shapes: B sequences, T new tokens, Hq and Hkv heads, D channels of a key, Dv of a value, R that rotate, S tokens per
page.

Storing before attending is right because attention of a step never reads what the step stores:

- Of the cache it reads positions before the step's first, at most up to `cached`; new tokens are read where they lie in
  `key` and `value`, unquantized. Stored are positions from `cached` on, in pages of that sequence alone: pages that
  others may read are never written. A window only makes attention read less.
- Keys per channel: pages are read up to the last complete one, `cached // S * S`, and the page that this token
  completes begins there. The others are read from the tail, at most S - 1 back, while the slot that is overwritten, of
  a ring of S + MAX_ROLLBACK, held a position at least S + MAX_ROLLBACK back.
- Drafts that were taken back are positions from `cached` on as well. The page that is rounded anew takes its older keys
  from the tail, which still has them: it was not written further than MAX_ROLLBACK beyond.
- The one case in which it would be wrong is left out here: several new tokens with keys per channel, whose last may
  overwrite tail slots that the first still look at (from S + MAX_ROLLBACK tokens on, or fewer where the page is open).
  Those keys are stored after attention, by `attention.store_tails`.
- What fills a batch up under a graph has slot -1, and nothing is stored.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quantkit.kernels.attention import AttentionOptions
from quantkit.kernels.batch import ForwardBatch
from quantkit.kernels.gpu import power_of_two
from quantkit.kernels.gpu.pages import KINDS, block, fixed, granularity, strides, width
from quantkit.kernels.layouts import KVViews


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
def _turn(
    at, weight, cos, sin, token, eps, offset,
    HAS_NORM: tl.constexpr, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Norm the channels of one head of one token, round, and rotate the first 2 HALF; in place."""
    factor = 1.0
    if HAS_NORM:
        channels = tl.arange(0, BLOCK)
        real = channels < WIDTH
        x = tl.load(at + channels, mask=real, other=0.0).to(tl.float32)
        factor = tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps)
        tl.debug_barrier()  # every thread has read before one writes
        if 2 * HALF < WIDTH:
            scale = tl.load(weight + channels, mask=real, other=0.0).to(tl.float32) + offset
            tl.store(at + channels, (x * factor * scale).to(at.dtype.element_ty), mask=real & (channels >= 2 * HALF))
    if HALF > 0:
        pairs = tl.arange(0, HALF_BLOCK)
        kept = pairs < HALF
        one, other = pairs, HALF + pairs
        if INTERLEAVED:
            one, other = 2 * pairs, 2 * pairs + 1
        c = tl.load(cos + token * HALF + pairs, mask=kept, other=0.0)
        s = tl.load(sin + token * HALF + pairs, mask=kept, other=0.0)
        a = tl.load(at + one, mask=kept, other=0.0).to(tl.float32)
        b = tl.load(at + other, mask=kept, other=0.0).to(tl.float32)
        if HAS_NORM:
            scale = tl.load(weight + one, mask=kept, other=0.0).to(tl.float32) + offset
            a = (a * factor * scale).to(at.dtype.element_ty).to(tl.float32)
            scale = tl.load(weight + other, mask=kept, other=0.0).to(tl.float32) + offset
            b = (b * factor * scale).to(at.dtype.element_ty).to(tl.float32)
        tl.store(at + one, (a * c - b * s).to(at.dtype.element_ty), mask=kept)
        tl.store(at + other, (b * c + a * s).to(at.dtype.element_ty), mask=kept)


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
def _store_tail(
    source, token, head, tail, tail_rows, query_starts, positions, page_table, codes, scale, zero,
    tail_strides, table_stride, code_strides, scale_strides, num_sequences,
    SEQUENCES: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """A key per channel, if it is its sequence's only new one: into the tail, and its page once that is complete."""
    sequence = token.to(tl.int32)
    if SEQUENCES > 0:
        numbers = tl.arange(0, SEQUENCES)
        starts = tl.load(query_starts + numbers, mask=numbers < num_sequences, other=2147483647)
        sequence = tl.sum((starts <= token).to(tl.int32), 0) - 1
    CHANNELS: tl.constexpr = BLOCK if BLOCK < 16 else 16
    if tl.load(query_starts + sequence + 1) - tl.load(query_starts + sequence) == 1:
        position = tl.load(positions + token).to(tl.int32)
        channels = tl.arange(0, BLOCK)
        real = channels < WIDTH
        own = tail + tl.load(tail_rows + sequence) * tail_strides[0] + head * tail_strides[1]
        if (position + 1) % PAGE == 0:
            page = tl.load(page_table + sequence * table_stride + position // PAGE).to(tl.int64)
            lanes = tl.arange(0, PAGE)
            base = page * scale_strides[0] + head * scale_strides[1]
            target = codes + page * code_strides[0] + head * code_strides[1]
            # Some channels at a time: a page is seldom complete, and all heads pay for registers.
            for start in range(0, WIDTH, CHANNELS):
                some = start + tl.arange(0, CHANNELS)
                low = _page_half(
                    source, own, position, some, some < WIDTH, scale + base, zero + base, lanes, PAGE, TAIL,
                    tail_strides[2],
                )  # fmt: skip
                high = _page_half(
                    source + WIDTH, own + WIDTH, position, some, some < WIDTH, scale + base + WIDTH,
                    zero + base + WIDTH, lanes, PAGE, TAIL, tail_strides[2],
                )  # fmt: skip
                at = lanes.to(tl.int64)[:, None] * code_strides[2] + some[None, :]
                tl.store(target + at, low | (high << 4), mask=(some < WIDTH)[None, :])
        slot = own + (position % TAIL).to(tl.int64) * tail_strides[2]
        for half in tl.static_range(2):
            fresh = tl.load(source + half * WIDTH + channels, mask=real, other=0.0)
            tl.store(slot + half * WIDTH + channels, fresh.to(tail.dtype.element_ty), mask=real)


@triton.jit
def _enter_kernel(
    query, key, value, query_weight, key_weight, cos, sin, slots, tail, tail_rows, query_starts, positions, page_table,
    k_codes, k_scale, k_zero, v_codes, v_scale, v_zero, query_strides, key_strides, value_strides, tail_strides,
    table_stride, kc_strides, ks_strides, vc_strides, vs_strides, k_fixed, v_fixed, num_sequences, eps, offset,
    HAS_NORM: tl.constexpr, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_BLOCK: tl.constexpr, SEQUENCES: tl.constexpr,
    K_KIND: tl.constexpr, K_GRANULARITY: tl.constexpr, V_KIND: tl.constexpr, V_GRANULARITY: tl.constexpr,
    K_WIDTH: tl.constexpr, K_BLOCK: tl.constexpr, V_WIDTH: tl.constexpr, V_BLOCK: tl.constexpr,
    PAGE: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """One head of one token: HEADS of keys, as many of values, and those of queries. A slot below 0 is nowhere."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    if head >= 2 * HEADS:
        at = query + token * query_strides[0] + (head - 2 * HEADS) * query_strides[1]
        _turn(
            at, query_weight, cos, sin, token, eps, offset,
            HAS_NORM, HALF, HALF_BLOCK, INTERLEAVED, HEAD_DIM, HEAD_BLOCK,
        )  # fmt: skip
        return
    slot = tl.load(slots + token)
    page, inside = slot // PAGE, slot % PAGE
    if head >= HEADS:
        if slot >= 0:
            source = value + token * value_strides[0] + (head - HEADS) * value_strides[1]
            _store_token(
                source, v_codes, v_scale, v_zero, page, head - HEADS, inside, vc_strides, vs_strides,
                tl.load(v_fixed + head - HEADS), V_KIND, V_GRANULARITY, V_WIDTH, V_BLOCK,
            )  # fmt: skip
        return
    source = key + token * key_strides[0] + head * key_strides[1]
    _turn(
        source, key_weight, cos, sin, token, eps, offset,
        HAS_NORM, HALF, HALF_BLOCK, INTERLEAVED, HEAD_DIM, HEAD_BLOCK,
    )  # fmt: skip
    tl.debug_barrier()  # the key is read again, by other threads than wrote it
    if slot >= 0:
        if K_GRANULARITY == 2:
            _store_tail(
                source, token, head, tail, tail_rows, query_starts, positions, page_table, k_codes, k_scale, k_zero,
                tail_strides, table_stride, kc_strides, ks_strides, num_sequences,
                SEQUENCES, K_WIDTH, K_BLOCK, PAGE, TAIL,
            )  # fmt: skip
        else:
            _store_token(
                source, k_codes, k_scale, k_zero, page, head, inside, kc_strides, ks_strides, tl.load(k_fixed + head),
                K_KIND, K_GRANULARITY, K_WIDTH, K_BLOCK,
            )  # fmt: skip


def enter(
    query: Tensor, key: Tensor, value: Tensor, views: KVViews, batch: ForwardBatch, options: AttentionOptions,
    angles: tuple[Tensor, Tensor] | None,
) -> None:  # fmt: skip
    """Norm and rotate, then store as `attention.store` does; but see above about keys per channel.

    Args:
        query: (T, Hq, D); channels contiguous; modified.
        key: (T, Hkv, D), likewise.
        value: (T, Hkv, Dv); channels contiguous.
        views: the layer's pages and tails; modified.
        batch: what belongs to whom.
        options: norms, and which channels are pairs.
        angles: cosine and sine (T, R/2) float32; None = no rotation.
    """
    layout, tail, norms = views.layout, views.key_tail, options.norms
    cos, sin = (None, None) if angles is None else (states.contiguous() for states in angles)
    half = 0 if cos is None else cos.shape[1]
    turned = query.shape[1] if half or norms is not None else 0
    alone, count = all(new == 1 for new in batch.query_lengths), len(batch.query_lengths)
    k_width, v_width = width(views.key, layout.head_dim), width(views.value, layout.value_width)
    _enter_kernel[(len(key), 2 * layout.num_heads + turned)](
        query, key, value, None if norms is None else norms.query, None if norms is None else norms.key, cos, sin,
        batch.slots, tail, batch.tail_rows, batch.query_starts, batch.positions, batch.page_table,
        views.key.codes, views.key.scale, views.key.zero, views.value.codes, views.value.scale, views.value.zero,
        query.stride()[:2], key.stride()[:2], value.stride()[:2], (0, 0, 0) if tail is None else tail.stride()[:3],
        batch.page_table.stride(0), *strides(views.key), *strides(views.value), fixed(views.key), fixed(views.value),
        count, 0.0 if norms is None else float(norms.eps), 0.0 if norms is None else float(norms.offset),
        HAS_NORM=norms is not None, HALF=half, HALF_BLOCK=power_of_two(half), INTERLEAVED=options.interleaved,
        HEADS=layout.num_heads, HEAD_DIM=layout.head_dim, HEAD_BLOCK=power_of_two(layout.head_dim),
        SEQUENCES=0 if alone or tail is None else power_of_two(count),
        K_KIND=KINDS[views.key.scheme.dtype], K_GRANULARITY=granularity(views.key),
        V_KIND=KINDS[views.value.scheme.dtype], V_GRANULARITY=granularity(views.value),
        K_WIDTH=k_width, K_BLOCK=block(k_width), V_WIDTH=v_width, V_BLOCK=block(v_width),
        PAGE=layout.page_size, TAIL=max(1, layout.tail_tokens), num_warps=1 if tail is None else 4,
    )  # fmt: skip
