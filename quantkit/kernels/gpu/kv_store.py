# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
# ruff: noqa: ANN001, ANN202
"""What comes before attention, in one launch: norm and rotation of heads, and fresh keys and values into the cache.

Numbers are rounded as `reference.kv_codes` says, bit for bit. Everything per token goes straight to its page. Keys that
are quantized per channel go to the residual window of their sequence in 16 bits, and the program that stores the last
token of a page quantizes the whole page. E4M3 is rounded in integers, so that it works on every device.
Shapes: B sequences, T new tokens, Hq and Hkv heads, D channels, R that rotate, S tokens per page.

Storing before attending is right because attention of a step never reads what the step stores:

- Of the cache it reads positions before the step's first, at most up to `cached`; new tokens are read where they lie in
  `key` and `value`, unquantized. Stored are positions from `cached` on, in pages of that sequence alone: pages that
  others may read are never written. A window only makes attention read less.
- Keys per channel: pages are read up to the last complete one, `cached // S * S`, and the page that this token
  completes begins there. The others are read from the residual window, at most S - 1 back, while the slot that is
  overwritten, of a ring of S + MAX_ROLLBACK, held a position at least S + MAX_ROLLBACK back.
- Drafts that were taken back are positions from `cached` on as well. The page that is quantized anew takes its older
  keys from the residual window, which still has them: it was not written further than MAX_ROLLBACK beyond.
- The one case in which it would be wrong is left out here: several new tokens with keys per channel, whose last may
  overwrite slots of the residual window that the first still read (from S + MAX_ROLLBACK tokens on, or fewer where the
  page is open). Those keys are stored after attention, by `reference.attention.store_residuals`.
- What fills a batch up under a graph has slot -1, and nothing is stored.
"""

import triton
import triton.language as tl

from quantkit.kernels.batch import ForwardBatch
from quantkit.kernels.gpu import power_of_two
from quantkit.kernels.gpu.floats import round_even, to_e4m3
from quantkit.kernels.gpu.heads import turn_head
from quantkit.kernels.gpu.page_arguments import fixed, page_constants, page_tensors, residual_strides, strides
from quantkit.kernels.layouts import KVViews
from quantkit.kernels.types import Angles, AttentionOptions, States


@triton.jit
def _round_up(scale):
    """An fp16 scale not below the given one and never zero; see `reference.kv_codes`."""
    # By half a unit in the last place, of normal numbers and of the smallest: then rounding cannot go below.
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
    # Divided as torch divides: the compiler's own `/` may be a unit off, and then a code may be.
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
def _page_half(
    key, residual, position, channel, real, scale, zero, lanes,
    PAGE: tl.constexpr, RESIDUAL: tl.constexpr, slot_stride,
):  # fmt: skip
    """INT4 codes (PAGE, BLOCK) of some channels of a page that `position` completes; their scales are stored."""
    positions = position - (PAGE - 1) + lanes
    # The page's last key is the fresh one; the window does not have it yet.
    older = tl.load(
        residual + (positions % RESIDUAL).to(tl.int64)[:, None] * slot_stride + channel[None, :],
        mask=(lanes < PAGE - 1)[:, None] & real[None, :],
        other=0.0,
    )
    fresh = tl.load(key + channel, mask=real, other=0.0).to(residual.dtype.element_ty)
    x = tl.where((lanes == PAGE - 1)[:, None], fresh[None, :], older).to(tl.float32)
    step, origin = _int4_grid(tl.min(x, 0), tl.max(x, 0))
    tl.store(scale + channel, step, mask=real)
    tl.store(zero + channel, origin, mask=real)
    return _int4_codes(x, step.to(tl.float32)[None, :], origin.to(tl.float32)[None, :])


@triton.jit
def _store_residual(
    source, token, head, residual, residual_rows, query_starts, positions, page_table, codes, scale, zero,
    residual_strides, table_stride, code_strides, scale_strides, num_sequences,
    SEQUENCES: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """A key per channel, if it is its sequence's only new one: into the residual window; its page once that is full."""
    # With one new token each, tokens and sequences have the same numbers.
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
        own = residual + tl.load(residual_rows + sequence) * residual_strides[0] + head * residual_strides[1]
        if (position + 1) % PAGE == 0:
            page = tl.load(page_table + sequence * table_stride + position // PAGE).to(tl.int64)
            lanes = tl.arange(0, PAGE)
            base = page * scale_strides[0] + head * scale_strides[1]
            target = codes + page * code_strides[0] + head * code_strides[1]
            # Some channels at a time: a page is seldom complete, and all heads pay for registers.
            for start in range(0, WIDTH, CHANNELS):
                some = start + tl.arange(0, CHANNELS)
                low = _page_half(
                    source, own, position, some, some < WIDTH, scale + base, zero + base, lanes, PAGE, RESIDUAL,
                    residual_strides[2],
                )  # fmt: skip
                high = _page_half(
                    source + WIDTH, own + WIDTH, position, some, some < WIDTH, scale + base + WIDTH,
                    zero + base + WIDTH, lanes, PAGE, RESIDUAL, residual_strides[2],
                )  # fmt: skip
                at = lanes.to(tl.int64)[:, None] * code_strides[2] + some[None, :]
                tl.store(target + at, low | (high << 4), mask=(some < WIDTH)[None, :])
        slot = own + (position % RESIDUAL).to(tl.int64) * residual_strides[2]
        for half in tl.static_range(2):
            fresh = tl.load(source + half * WIDTH + channels, mask=real, other=0.0)
            tl.store(slot + half * WIDTH + channels, fresh.to(residual.dtype.element_ty), mask=real)


@triton.jit
def _enter_kernel(
    query, key, value, query_weight, key_weight, cos, sin, slots, residual, residual_rows, query_starts, positions,
    page_table, k_codes, k_scale, k_zero, v_codes, v_scale, v_zero,
    query_strides, key_strides, value_strides, residual_strides, table_stride,
    kc_strides, ks_strides, vc_strides, vs_strides, k_fixed, v_fixed, num_sequences, eps, offset,
    HAS_NORM: tl.constexpr, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_BLOCK: tl.constexpr, SEQUENCES: tl.constexpr,
    K_KIND: tl.constexpr, K_GRANULARITY: tl.constexpr, V_KIND: tl.constexpr, V_GRANULARITY: tl.constexpr,
    K_WIDTH: tl.constexpr, K_BLOCK: tl.constexpr, V_WIDTH: tl.constexpr, V_BLOCK: tl.constexpr,
    PAGE: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """One head of one token: HEADS of keys, as many of values, and those of queries. A slot below 0 is nowhere."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    if head >= 2 * HEADS:
        at = query + token * query_strides[0] + (head - 2 * HEADS) * query_strides[1]
        turn_head(
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
    turn_head(
        source, key_weight, cos, sin, token, eps, offset,
        HAS_NORM, HALF, HALF_BLOCK, INTERLEAVED, HEAD_DIM, HEAD_BLOCK,
    )  # fmt: skip
    tl.debug_barrier()  # the key is read again, by other threads than wrote it
    if slot >= 0:
        if K_GRANULARITY == 2:
            _store_residual(
                source, token, head, residual, residual_rows, query_starts, positions, page_table, k_codes, k_scale,
                k_zero, residual_strides, table_stride, kc_strides, ks_strides, num_sequences,
                SEQUENCES, K_WIDTH, K_BLOCK, PAGE, RESIDUAL,
            )  # fmt: skip
        else:
            _store_token(
                source, k_codes, k_scale, k_zero, page, head, inside, kc_strides, ks_strides, tl.load(k_fixed + head),
                K_KIND, K_GRANULARITY, K_WIDTH, K_BLOCK,
            )  # fmt: skip


def enter(
    states: States, views: KVViews, batch: ForwardBatch, options: AttentionOptions, angles: Angles | None
) -> States:
    """Norm and rotate, then store as `reference.attention.store` does; but see above about keys per channel.

    Args:
        states: channels contiguous; queries and keys are modified.
        views: the layer's pages and residual windows; modified.
        batch: what belongs to whom.
        options: norms, and which channels are pairs.
        angles: cosine and sine (T, R/2) float32; None = no rotation.
    Returns:
        The states.
    """
    layout, norms, (query, key, _) = views.layout, options.norms, states
    cos, sin = (None, None) if angles is None else (one.contiguous() for one in angles)
    half = 0 if cos is None else cos.shape[1]
    # Queries that are neither normed nor rotated need no programs.
    turned = query.shape[1] if half or norms is not None else 0
    alone, count = all(new == 1 for new in batch.query_lengths), len(batch.query_lengths)
    weights = (
        (None, None, 0.0, 0.0) if norms is None else (norms.query, norms.key, float(norms.eps), float(norms.offset))
    )
    _enter_kernel[len(key), 2 * layout.num_heads + turned](
        *states, *weights[:2], cos, sin, batch.slots, views.key_residual, batch.residual_rows,
        batch.query_starts, batch.positions, batch.page_table, *page_tensors(views),
        *(one.stride()[:2] for one in states), residual_strides(views),
        batch.page_table.stride(0), *strides(views), fixed(views.key), fixed(views.value), count, *weights[2:],
        HAS_NORM=norms is not None, HALF=half, HALF_BLOCK=power_of_two(half), INTERLEAVED=options.interleaved,
        HEADS=layout.num_heads, HEAD_DIM=layout.head_dim, HEAD_BLOCK=power_of_two(layout.head_dim),
        SEQUENCES=0 if alone or not layout.has_residual else power_of_two(count), **page_constants(views),
        num_warps=4 if layout.has_residual else 1,
    )  # fmt: skip
    return states
