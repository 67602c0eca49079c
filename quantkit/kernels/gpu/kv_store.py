# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
# ruff: noqa: ANN001, ANN201, ANN202
"""Storage of new keys and values in the cache: normalize, rotate and store heads in one launch before attention.

Rounding matches `reference.kv_codes` bit for bit. E4M3 is rounded with integer operations, so that it works on every
device. `page_store` stores keys that are quantized per channel, and the values that wait with them, after attention.
Shapes: B sequences, T new tokens, Hq and Hkv heads, D channels of which R rotate, S tokens per page.

Storing before attention is safe, because attention reads only earlier positions from the cache and takes new tokens
from `key` and `value`. Shared pages are never written. A later step overwrites rejected drafts, because it
stores all positions from its first new token on. Padding tokens of a captured batch have slot -1 and are not stored.
"""

import triton
import triton.language as tl

from quantkit.kernels.gpu import power_of_two
from quantkit.kernels.gpu.floats import round_even, to_e4m3
from quantkit.kernels.gpu.paged_tiles import fixed, page_constants, page_tensors, strides
from quantkit.kernels.gpu.small_codes import store_turned
from quantkit.kernels.layouts import KVViews
from quantkit.kernels.types import Angles, AttentionOptions, ForwardBatch, States


@triton.jit
def _round_up(scale):
    """Return a nonzero fp16 scale that is not below the given one; see `reference.kv_codes`."""
    # Raised by half a unit in the last place of normal numbers, and of the smallest: rounding cannot go below `scale`.
    raised = scale + scale * 0.00048828125 + 2.9802322387695312e-08
    return tl.minimum(tl.maximum(raised, 5.960464477539063e-08), 65504.0).to(tl.float16)


@triton.jit
def unsigned_grid(low, high, LARGEST: tl.constexpr):
    """Return the fp16 scale and zero of codes 0..LARGEST for numbers between two bounds."""
    zero = low - tl.abs(low) * 0.00048828125 - 2.9802322387695312e-08
    zero = tl.minimum(tl.maximum(zero, -65504.0), 65504.0).to(tl.float16)
    return _round_up(tl.div_rn(high - zero.to(tl.float32), LARGEST)), zero


@triton.jit
def unsigned_codes(x, scale, zero, LARGEST: tl.constexpr):
    """Return codes 0..LARGEST."""
    # Divided as torch divides: the compiler's own `/` may be off by a unit in the last place, and then so may a code.
    code = round_even(tl.div_rn(x - zero, scale))
    return tl.minimum(tl.maximum(code, 0.0), LARGEST).to(tl.uint8)


@triton.jit
def int8_grid(low, high):
    """Return the fp16 scale and zero of signed INT8 codes for numbers between two bounds."""
    zero = tl.minimum(tl.maximum((low + high) * 0.5, -65504.0), 65504.0).to(tl.float16)
    middle = zero.to(tl.float32)
    return _round_up(tl.div_rn(tl.maximum(high - middle, middle - low), 127.0)), zero


@triton.jit
def int8_codes(x, scale, zero):
    """Return signed codes, as bytes."""
    code = round_even(tl.div_rn(x - zero, scale))
    return tl.minimum(tl.maximum(code, -127.0), 127.0).to(tl.int8).to(tl.uint8, bitcast=True)


@triton.jit
def store_token(
    source, codes, scale, zero, page, head, inside, code_strides, scale_strides, fixed_scale,
    KIND: tl.constexpr, GRANULARITY: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the key or the value of one token in one head."""
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
    elif KIND > 4:
        store_turned(source, codes + page * code_strides[0] + head * code_strides[1] + inside * code_strides[2],
                      scale + at_scale, KIND, WIDTH, BLOCK)  # fmt: skip
    elif KIND == 3:
        other = tl.load(source + WIDTH + channels, mask=real, other=0.0).to(tl.float32)
        low = tl.min(tl.where(real, tl.minimum(x, other), float("inf")), 0)
        high = tl.max(tl.where(real, tl.maximum(x, other), float("-inf")), 0)
        step, origin = unsigned_grid(low, high, 15.0)
        lows = unsigned_codes(x, step.to(tl.float32), origin.to(tl.float32), 15.0)
        highs = unsigned_codes(other, step.to(tl.float32), origin.to(tl.float32), 15.0)
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
def _turn_head(
    at, weight, cos, sin, token, eps, offset,
    HAS_NORM: tl.constexpr, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Norm the channels of one head of one token, round them, and rotate the first 2 * HALF channels, in place."""
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
def _enter_kernel(
    query, key, value, query_weight, key_weight, cos, sin, slots,
    k_codes, k_scale, k_zero, v_codes, v_scale, v_zero, query_strides, key_strides, value_strides,
    kc_strides, ks_strides, vc_strides, vs_strides, k_fixed, v_fixed, eps, offset,
    HAS_NORM: tl.constexpr, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_BLOCK: tl.constexpr,
    K_KIND: tl.constexpr, K_GRANULARITY: tl.constexpr, V_KIND: tl.constexpr, V_GRANULARITY: tl.constexpr,
    K_WIDTH: tl.constexpr, K_BLOCK: tl.constexpr, V_WIDTH: tl.constexpr, V_BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
):  # fmt: skip
    """Process one head of one token: norm, rotate and store a key, store a value, or norm and rotate a query. Programs
    0..HEADS are for keys, HEADS..2 HEADS for values, and the others for queries. A token with a slot below 0 is not
    stored.
    """
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    if head >= 2 * HEADS:
        at = query + token * query_strides[0] + (head - 2 * HEADS) * query_strides[1]
        _turn_head(
            at, query_weight, cos, sin, token, eps, offset,
            HAS_NORM, HALF, HALF_BLOCK, INTERLEAVED, HEAD_DIM, HEAD_BLOCK,
        )  # fmt: skip
        return
    slot = tl.load(slots + token)
    page, inside = slot // PAGE, slot % PAGE
    if head >= HEADS:
        if (K_GRANULARITY != 2 or V_GRANULARITY != 1) and slot >= 0:  # others wait for their page to be complete
            source = value + token * value_strides[0] + (head - HEADS) * value_strides[1]
            store_token(
                source, v_codes, v_scale, v_zero, page, head - HEADS, inside, vc_strides, vs_strides,
                tl.load(v_fixed + head - HEADS), V_KIND, V_GRANULARITY, V_WIDTH, V_BLOCK,
            )  # fmt: skip
        return
    source = key + token * key_strides[0] + head * key_strides[1]
    _turn_head(
        source, key_weight, cos, sin, token, eps, offset,
        HAS_NORM, HALF, HALF_BLOCK, INTERLEAVED, HEAD_DIM, HEAD_BLOCK,
    )  # fmt: skip
    if K_GRANULARITY != 2:  # keys with scales per channel are stored after attention
        tl.debug_barrier()  # threads other than those that wrote the key read it again
        if slot >= 0:
            store_token(
                source, k_codes, k_scale, k_zero, page, head, inside, kc_strides, ks_strides, tl.load(k_fixed + head),
                K_KIND, K_GRANULARITY, K_WIDTH, K_BLOCK,
            )  # fmt: skip


def enter(
    states: States, views: KVViews, batch: ForwardBatch, options: AttentionOptions, angles: Angles | None
) -> States:
    """Normalize and rotate queries and keys, then store keys and values, except those that `page_store` stores.

    The stored bytes equal those that `reference.attention.store` writes.

    Args:
        states: queries, keys and values with contiguous channels; queries and keys are modified.
        views: pages and residual windows of the layer; modified.
        batch: the batch of the step.
        options: norms, and which channels rotate as pairs.
        angles: cosine and sine (T, R/2) float32; None = no rotation.
    Returns:
        The states.
    """
    layout, norms, (query, key, _) = views.layout, options.norms, states
    cos, sin = (None, None) if angles is None else (one.contiguous() for one in angles)
    half = 0 if cos is None else cos.shape[1]
    # Queries that are neither normalized nor rotated need no programs.
    turned = query.shape[1] if half or norms is not None else 0
    weights = (
        (None, None, 0.0, 0.0) if norms is None else (norms.query, norms.key, float(norms.eps), float(norms.offset))
    )
    constants = page_constants(views)
    constants.pop("RESIDUAL")
    _enter_kernel[len(key), 2 * layout.num_heads + turned](
        *states, *weights[:2], cos, sin, batch.slots, *page_tensors(views),
        *(one.stride()[:2] for one in states), *strides(views), fixed(views.key), fixed(views.value), *weights[2:],
        HAS_NORM=norms is not None, HALF=half, HALF_BLOCK=power_of_two(half), INTERLEAVED=options.interleaved,
        HEADS=layout.num_heads, HEAD_DIM=layout.head_dim, HEAD_BLOCK=power_of_two(layout.head_dim),
        **constants, num_warps=1,
    )  # fmt: skip
    return states
