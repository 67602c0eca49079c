# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
# ruff: noqa: ANN001, ANN201, ANN202, SIM300
"""Tiles of cached pages inside attention: key scores, and values in a running softmax, in every KV type.

Products use the codes as small integers. Scales per token multiply scores and probabilities; scales per channel
multiply the query (INT4) or the keys (INT8, INT3), once per tile. INT4 needs two half products, one for the low and one
for the high nibbles: queries and sums are then split into two halves of their channels (HALVED), and widths and blocks
refer to one half. Codes of 2 and 3 bits are loaded as one number per channel. Three arguments are tuples: `query` is
(low half, high half); `pages` is (codes, scales, zeros, strides of codes, strides of scales); `state`, of the softmax,
is (largest score, sum of weights, weighted values of the low half, of the high half).
Shapes: ROWS of queries, TILE tokens of a page; layouts: `kernels.layouts`.
Source: Dao et al. 2023, Flash-Decoding; Kwon et al. 2023, PagedAttention.

The Python functions convert a page's layout to kernel arguments: type numbers, widths, strides. `kernels.layouts`
defines where arrays lie in a page, and `reference.kv_codes` how numbers are rounded.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantkit.kernels.gpu import power_of_two
from quantkit.kernels.gpu.floats import INTERPRETED, half_of_e4m3
from quantkit.kernels.gpu.small_codes import load_small, turn_back
from quantkit.kernels.layouts import KVViews, PagedArray
from quantkit.kernels.reference.kv_codes import is_turned
from quantkit.numerics.dtype import FP8, INT2, INT3, INT4, INT8, DType

# The numbers that stand for KV types and granularities in the kernels. Scales per tensor or head are fixed; others are
# stored.
_KINDS: dict[DType | None, int] = {None: 0, FP8: 1, INT8: 2, INT4: 3, INT3: 4}
_TURNED_KINDS: dict[DType | None, int] = {INT3: 5, INT2: 6}  # values, which are rotated
_GRANULARITIES = {"tensor": 0, "head": 0, "token": 1, "channel": 2}


def residual_strides(views: KVViews) -> tuple[int, ...]:
    """Return the strides of the residual windows, the same for keys and values, along rows, heads and slots."""
    return (0, 0, 0) if views.key_residual is None else views.key_residual.stride()[:3]


def page_constants(views: KVViews) -> dict[str, int]:
    """Return the compile-time constants of kernels that read or write pages."""
    constants = {"PAGE": views.layout.page_size, "RESIDUAL": max(1, views.layout.residual_tokens)}
    for side, array in (("K", views.key), ("V", views.value)):
        # Elements of a stored row: half the channels if two share a byte.
        width = views.layout.head_dim // 2 if array.scheme.dtype is INT4 else views.layout.head_dim
        constants[f"{side}_KIND"] = (_TURNED_KINDS if is_turned(array.scheme) else _KINDS)[array.scheme.dtype]
        constants[f"{side}_GRANULARITY"] = 0 if array.scheme.dtype is None else _GRANULARITIES[array.scheme.granularity]
        constants[f"{side}_WIDTH"] = width
        constants[f"{side}_BLOCK"] = max(16, power_of_two(width))  # the minimum for tensor cores
    return constants


def page_tensors(views: KVViews) -> tuple[Tensor | None, ...]:
    """Return codes, scales and zeros of keys, then of values."""
    return tuple(one for array in (views.key, views.value) for one in (array.codes, array.scale, array.zero))


def fixed(array: PagedArray) -> Tensor:
    """Return the fixed scale of each head, (H,) float32, by which kernels multiply decoded numbers; all ones if the
    scheme has no fixed scales.
    """
    return _ones(array.codes.shape[1], array.codes.device) if array.fixed is None else array.fixed


@functools.cache
def _ones(heads: int, device: torch.device) -> Tensor:
    """Return (heads,) ones. They are cached, so that their address in a captured graph stays valid."""
    return torch.ones(heads, dtype=torch.float32, device=device)


def strides(views: KVViews) -> tuple[tuple[int, ...], ...]:
    """Return strides of codes (pages, heads, tokens) and of scales (pages, heads), for keys, then for values."""
    return tuple(
        of
        for array in (views.key, views.value)
        for of in (array.codes.stride()[:3], (0, 0) if array.scale is None else array.scale.stride()[:2])
    )


@triton.jit
def _numbers(codes, KIND: tl.constexpr, NATIVE_FP8: tl.constexpr, DTYPE: tl.constexpr):
    """Convert codes to numbers. e4m3 codes that are converted by moving bits are 256 times too small."""
    if KIND == 1 and NATIVE_FP8:
        numbers = codes.to(tl.float8e4nv, bitcast=True).to(DTYPE)
    elif KIND == 1:
        numbers = half_of_e4m3(codes.to(tl.uint16)).to(DTYPE)
    elif KIND == 2:
        numbers = codes.to(tl.int8, bitcast=True).to(DTYPE)
    elif KIND > 4:  # codes of rotated values have zero in their middle
        numbers = codes.to(DTYPE) - (3.5 if KIND == 5 else 1.5)
    else:
        numbers = codes.to(DTYPE)
    return numbers


@triton.jit
def _nibbles(codes, DTYPE: tl.constexpr):
    """Return the low and the high nibbles of bytes as exact 16-bit numbers; see `packed_blocks`."""
    if INTERPRETED or (DTYPE != tl.bfloat16 and DTYPE != tl.float16):
        low, high = (codes & 15).to(DTYPE), (codes >> 4).to(DTYPE)
    else:
        MAGIC: tl.constexpr = 0x43004300 if DTYPE == tl.bfloat16 else 0x64006400
        BASE: tl.constexpr = 128.0 if DTYPE == tl.bfloat16 else 1024.0
        magic = tl.full(codes.shape, MAGIC, tl.int32)
        low, high = tl.inline_asm_elementwise(
            """{
            .reg .b32 one, two;
            prmt.b32 one, $4, 0, 0x4140;
            prmt.b32 two, $4, 0, 0x4342;
            lop3.b32 $0, one, 0x000F000F, $5, 0xEA;
            lop3.b32 $1, two, 0x000F000F, $5, 0xEA;
            shr.u32 one, one, 4;
            shr.u32 two, two, 4;
            lop3.b32 $2, one, 0x000F000F, $5, 0xEA;
            lop3.b32 $3, two, 0x000F000F, $5, 0xEA;
            }""",
            "=r,=r,=r,=r,r,r,r,r,r",
            [codes, magic],
            dtype=(tl.int16, tl.int16),
            is_pure=True,
            pack=4,
        )
        base = tl.full(codes.shape, BASE, DTYPE)
        low, high = low.to(DTYPE, bitcast=True) - base, high.to(DTYPE, bitcast=True) - base
    return low, high


@triton.jit
def _score(q, k, total):
    return tl.dot(q, tl.trans(k), total, input_precision="ieee")


@triton.jit
def score_keys(query, at, seen, HALVED: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Return the products (ROWS, TILE) of queries with unquantized keys, whose first channels are at the
    pointers `at`.
    """
    q, q_high = query
    channels = tl.arange(0, BLOCK)
    mask = seen[:, None] & (channels < WIDTH)[None, :]
    at = at[:, None] + channels[None, :]
    scores = tl.zeros((q.shape[0], seen.shape[0]), tl.float32)
    scores = _score(q, tl.load(at, mask=mask, other=0.0).to(q.dtype), scores)
    if HALVED:
        scores = _score(q_high, tl.load(at + WIDTH, mask=mask, other=0.0).to(q.dtype), scores)
    return scores


@triton.jit
def _load_codes(pages, page, head, inside, seen, KIND: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Load the codes (TILE, BLOCK) of a tile, and return the offset of its page's scales."""
    channels = tl.arange(0, BLOCK)
    mask = seen[:, None] & (channels < WIDTH)[None, :]
    at = page * pages[3][0] + head * pages[3][1] + inside.to(tl.int64)[:, None] * pages[3][2]
    if KIND < 4:
        codes = tl.load(pages[0] + at + channels[None, :], mask=mask, other=0)
    else:
        codes = load_small(pages[0] + at, channels[None, :], mask, KIND, WIDTH)
    return codes, page * pages[4][0] + head * pages[4][1]


@triton.jit
def _load_row(at, mask):
    """Load scales or zeros as (1, n) float32."""
    return tl.load(at, mask=mask, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _token_factors(pages, page, head, inside, seen, KIND: tl.constexpr, GRANULARITY: tl.constexpr):
    """Load the scales and zeros of a tile's tokens, (1, TILE). They are loaded before the products, because the
    compiler does not prefetch such narrow loads and would wait for each one.
    """
    scale, zero = seen, seen  # placeholders, which are not used
    at = page * pages[4][0] + head * pages[4][1] + inside
    if GRANULARITY == 1:
        scale = _load_row(pages[1] + at, seen)
        if KIND == 3:
            zero = _load_row(pages[2] + at, seen)
    return scale, zero


@triton.jit
def _score_tile(
    query, pages, factors, page, head, inside, seen,
    KIND: tl.constexpr, GRANULARITY: tl.constexpr, NATIVE_FP8: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the products (ROWS, TILE) of queries with the keys of a tile, without the fixed scale."""
    q, q_high = query
    scale, zero = pages[1], pages[2]
    loaded, base = _load_codes(pages, page, head, inside, seen, KIND, WIDTH, BLOCK)
    empty = tl.zeros((q.shape[0], inside.shape[0]), tl.float32)
    if KIND != 3 and GRANULARITY != 2:
        scores = _score(q, _numbers(loaded, KIND, NATIVE_FP8, q.dtype), empty)
        if GRANULARITY == 1:
            scores *= factors[0]
    elif KIND != 3:
        real = tl.arange(0, BLOCK) < WIDTH
        at = base + tl.arange(0, BLOCK)
        shift = tl.sum(q.to(tl.float32) * _load_row(zero + at, real), 1)
        # Unlike below, scales join the keys: of wide heads, the registers cannot hold the query twice.
        keys = _numbers(loaded, KIND, NATIVE_FP8, tl.float32) * _load_row(scale + at, real)
        scores = _score(q, keys.to(q.dtype), empty) + shift[:, None]
    elif GRANULARITY == 1:
        # q . (code * scale + zero) is (q . code) * scale + sum(q) * zero, so zeros need no product.
        total = tl.sum(q.to(tl.float32), 1) + tl.sum(q_high.to(tl.float32), 1)
        low_codes, high_codes = _nibbles(loaded, q.dtype)
        scores = _score(q_high, high_codes, _score(q, low_codes, empty))
        scores = scores * factors[0] + total[:, None] * factors[1]
    else:
        # Scales of channels are the same for all tokens of the page, so they join the query, which is smaller.
        channels = tl.arange(0, BLOCK)
        real = channels < WIDTH
        low_at, high_at = base + channels, base + WIDTH + channels
        shift = tl.sum(q.to(tl.float32) * _load_row(zero + low_at, real), 1)
        shift += tl.sum(q_high.to(tl.float32) * _load_row(zero + high_at, real), 1)
        low = (q.to(tl.float32) * _load_row(scale + low_at, real)).to(q.dtype)
        high = (q_high.to(tl.float32) * _load_row(scale + high_at, real)).to(q.dtype)
        low_codes, high_codes = _nibbles(loaded, q.dtype)
        scores = _score(high, high_codes, _score(low, low_codes, empty)) + shift[:, None]
    return scores


@triton.jit
def visible(scores, mask, softcap, HAS_SOFTCAP: tl.constexpr):
    """Apply the softcap to scores, and set a score to -inf where a row does not see the key."""
    if HAS_SOFTCAP:
        scores = softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)
    return tl.where(mask, scores, float("-inf"))


@triton.jit
def softmax_step(scores, top, total):
    """Return the weights of visible scores, the factor on earlier sums, the new largest score, and the new sum."""
    new_top = tl.maximum(top, tl.max(scores, 1))
    # If a row has seen no key yet, -inf minus -inf would be NaN.
    anchor = tl.where(new_top == float("-inf"), 0.0, new_top)
    decay = tl.exp(top - anchor)
    weights = tl.exp(scores - anchor[:, None])
    return weights, decay, new_top, total * decay + tl.sum(weights, 1)


@triton.jit
def _weigh_tile(
    scores, state, pages, factors, page, head, inside, seen, DTYPE: tl.constexpr,
    KIND: tl.constexpr, GRANULARITY: tl.constexpr, NATIVE_FP8: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update the running softmax with the visible scores (ROWS, TILE) and the values of one tile."""
    top, total, acc, acc_high = state
    weights, decay, top, total = softmax_step(scores, top, total)
    loaded, _ = _load_codes(pages, page, head, inside, seen, KIND, WIDTH, BLOCK)
    # The zero of a token adds the same to all its channels: one sum, of weights not yet multiplied by scales.
    shift = tl.zeros_like(total)
    if KIND == 3:
        shift = tl.sum(weights * factors[1], 1)
    if GRANULARITY == 1:
        weights *= factors[0]
    narrow = weights.to(DTYPE)
    if KIND == 3:
        low, high = _nibbles(loaded, DTYPE)
        acc = tl.dot(narrow, low, acc * decay[:, None], input_precision="ieee") + shift[:, None]
        acc_high = tl.dot(narrow, high, acc_high * decay[:, None], input_precision="ieee")
        acc_high += shift[:, None]
    else:
        values = _numbers(loaded, KIND, NATIVE_FP8, DTYPE)
        acc = tl.dot(narrow, values, acc * decay[:, None], input_precision="ieee")
    return top, total, acc, acc_high


@triton.jit
def weigh_plain(scores, state, at, seen, DTYPE: tl.constexpr, HALVED: tl.constexpr, WIDTH: tl.constexpr):
    """Update the running softmax with visible scores (ROWS, TILE) and unquantized values, whose first channels are at
    the pointers `at`.
    """
    top, total, acc, acc_high = state
    weights, decay, top, total = softmax_step(scores, top, total)
    narrow, channels = weights.to(DTYPE), tl.arange(0, acc.shape[1])
    mask = seen[:, None] & (channels < WIDTH)[None, :]
    at = at[:, None] + channels[None, :]
    values = tl.load(at, mask=mask, other=0.0).to(DTYPE)
    acc = tl.dot(narrow, values, acc * decay[:, None], input_precision="ieee")
    if HALVED:
        values = tl.load(at + WIDTH, mask=mask, other=0.0).to(DTYPE)
        acc_high = tl.dot(narrow, values, acc_high * decay[:, None], input_precision="ieee")
    return top, total, acc, acc_high


@triton.jit
def load_query(at, kept, HALVED: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Load the query heads (ROWS, BLOCK); with HALVED, also the second halves of their channels."""
    channels = tl.arange(0, BLOCK)
    mask = kept[:, None] & (channels < WIDTH)[None, :]
    q = tl.load(at + channels[None, :], mask=mask, other=0.0)
    q_high = q
    if HALVED:
        q_high = tl.load(at + WIDTH + channels[None, :], mask=mask, other=0.0)
    return q, q_high


@triton.jit
def _tile_at(start, first, end, own, window, PAGE: tl.constexpr, TILE: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """Return the positions of a tile, the matching offsets in the page, a mask of the positions to read, and a mask of
    those that each row sees.
    """
    at = start + tl.arange(0, TILE)
    inside = start % PAGE + tl.arange(0, TILE)
    # Tiles begin at multiples of their size, the first of them perhaps before the window.
    read = (at < end) & (at >= first)
    mask = read[None, :]
    if HAS_WINDOW:
        mask &= own[:, None] - at[None, :] < window
    return at, inside, read, mask


@triton.jit
def _page_at(table, start, end, PAGE: tl.constexpr):
    """Return the page of the tile at `start`. The caller asks one tile ahead, so that loading keys need not wait for
    the page number.
    """
    return tl.load(table + start // PAGE, mask=start < end, other=0).to(tl.int64)


@triton.jit
def over_cache(
    query, own, first, begin, end, cached, head, residuals, table, key_pages, value_pages, residual_strides,
    scale, k_factor, v_factor, softcap, window,
    K_KIND: tl.constexpr, K_GRANULARITY: tl.constexpr, V_KIND: tl.constexpr, V_GRANULARITY: tl.constexpr,
    NATIVE_FP8: tl.constexpr, HAS_RESIDUAL: tl.constexpr, RESIDUAL: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, K_WIDTH: tl.constexpr, K_BLOCK: tl.constexpr,
    V_WIDTH: tl.constexpr, V_BLOCK: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Run the softmax over cached positions begin..end: first over pages, then over the residual windows, which hold
    keys, and values that are quantized per token, until their page is complete.

    `own` holds the position of each row and is used if HAS_WINDOW. `residuals` is (windows of keys, of values, offset
    of the sequence's row).
    """
    ROWS: tl.constexpr = query[0].shape[0]
    VALUES_WAIT: tl.constexpr = HAS_RESIDUAL and V_GRANULARITY == 1
    # Without halves, nothing is added to the second sum, and the compiler removes it.
    acc = tl.zeros((ROWS, V_BLOCK), tl.float32)
    state = tl.full((ROWS,), float("-inf"), tl.float32), tl.zeros((ROWS,), tl.float32), acc, acc
    # Keys with scales per channel are in pages once the pages are complete; before, they are in the residual window.
    whole = cached // PAGE * PAGE if HAS_RESIDUAL else cached
    coming = _page_at(table, begin, tl.minimum(end, whole), PAGE)
    for start in range(begin, tl.minimum(end, whole), TILE):
        page = coming
        coming = _page_at(table, start + TILE, tl.minimum(end, whole), PAGE)
        at, inside, read, mask = _tile_at(start, first, end, own, window, PAGE, TILE, HAS_WINDOW)
        key_factors = _token_factors(key_pages, page, head, inside, read, K_KIND, K_GRANULARITY)
        value_factors = _token_factors(value_pages, page, head, inside, read, V_KIND, V_GRANULARITY)
        scores = _score_tile(
            query, key_pages, key_factors, page, head, inside, read, K_KIND, K_GRANULARITY, NATIVE_FP8, K_WIDTH, K_BLOCK
        )  # fmt: skip
        state = _weigh_tile(
            visible(scores * (scale * k_factor), mask, softcap, HAS_SOFTCAP), state, value_pages, value_factors, page,
            head, inside, read, query[0].dtype, V_KIND, V_GRANULARITY, NATIVE_FP8, V_WIDTH, V_BLOCK,
        )  # fmt: skip
    if V_KIND > 4:
        state = state[0], state[1], turn_back(state[2], state[1], query[0].dtype, V_WIDTH), state[3]
    if VALUES_WAIT:  # those of the window have no factor
        state = state[0], state[1], state[2] * v_factor, state[3] * v_factor
    if HAS_RESIDUAL:
        coming = _page_at(table, tl.maximum(begin, whole), end, PAGE)
        for start in range(tl.maximum(begin, whole), end, TILE):
            page = coming
            coming = _page_at(table, start + TILE, end, PAGE)
            at, inside, read, mask = _tile_at(start, first, end, own, window, PAGE, TILE, HAS_WINDOW)
            slot = residuals[2] + head * residual_strides[1] + (at % RESIDUAL).to(tl.int64) * residual_strides[2]
            scores = score_keys(query, residuals[0] + slot, read, K_KIND == 3, K_WIDTH, K_BLOCK)
            scores = visible(scores * scale, mask, softcap, HAS_SOFTCAP)
            if VALUES_WAIT:
                state = weigh_plain(scores, state, residuals[1] + slot, read, query[0].dtype, V_KIND == 3, V_WIDTH)
            else:
                state = _weigh_tile(
                    scores, state, value_pages, _token_factors(value_pages, page, head, inside, read, V_KIND, 0), page,
                    head, inside, read, query[0].dtype, V_KIND, V_GRANULARITY, NATIVE_FP8, V_WIDTH, V_BLOCK,
                )  # fmt: skip
    top, total, acc, acc_high = state
    if not VALUES_WAIT:
        acc, acc_high = acc * v_factor, acc_high * v_factor
    return top, total, acc, acc_high
