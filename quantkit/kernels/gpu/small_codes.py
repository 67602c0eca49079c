# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
# ruff: noqa: ANN001, ANN201, ANN202
"""Codes of 2 and 3 bits: load codes, store rotated values, and rotate sums of rotated values back.

`kernels.layouts` shows how codes share bytes, and `reference.kv_codes` defines the rotation and the rounding.
"""

import triton
import triton.language as tl

from quantkit.kernels.gpu.floats import round_even


@triton.jit
def load_small(at, channels, mask, KIND: tl.constexpr, WIDTH: tl.constexpr):
    """Load the codes of channels; `at` points to the first bytes of their tokens."""
    QUARTER: tl.constexpr = WIDTH // 4
    EIGHTH: tl.constexpr = WIDTH // 8
    codes = tl.load(at + channels % QUARTER, mask=mask, other=0)
    codes = (codes >> (channels // QUARTER * 2).to(tl.uint8)) & 3
    if KIND != 6:
        upper = tl.load(at + QUARTER + channels % EIGHTH, mask=mask, other=0)
        codes |= ((upper >> (channels // EIGHTH).to(tl.uint8)) & 1) << 2
    return codes


@triton.jit
def _signs(rows, columns, WIDTH: tl.constexpr):
    """Return whether the rotation of values multiplies these channels by -1, and whether by 0 instead; see `turned`."""
    SIZE: tl.constexpr = WIDTH & -WIDTH
    common = rows & columns & (SIZE - 1)
    common ^= common >> 8
    common ^= common >> 4
    common ^= common >> 2
    common ^= common >> 1
    return (common & 1) == 1, (rows // SIZE != columns // SIZE) | (rows >= WIDTH) | (columns >= WIDTH)


@triton.jit
def _changes_sign(channels):
    pairs = channels & (channels >> 1) & 0x5555
    pairs ^= pairs >> 8
    pairs ^= pairs >> 4
    pairs ^= pairs >> 2
    return (pairs & 1) == 1


@triton.jit
def turn_back(acc, total, DTYPE: tl.constexpr, WIDTH: tl.constexpr):
    """Rotate sums of rotated values (ROWS, BLOCK) back; `total` is the sum of the weights of each row. Two products
    with signs keep the accuracy of float32.
    """
    channels = tl.arange(0, acc.shape[1])
    negative, none = _signs(channels[:, None], channels[None, :], WIDTH)
    signs = tl.where(none, 0.0, tl.where(negative, -1.0, 1.0)).to(DTYPE)
    # Divided by the weights, because sums of many tokens may be too large for float16.
    weight = tl.where(total > 0, total, 1.0)[:, None]
    acc /= weight
    large = acc.to(DTYPE)
    small = (acc - large.to(tl.float32)).to(DTYPE)
    back = tl.dot(small, signs, tl.dot(large, signs, input_precision="ieee"), input_precision="ieee") * weight
    return tl.where(_changes_sign(channels)[None, :], -back, back)


@triton.jit
def _turned_some(numbers, channels, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Return some channels of rotated integers."""
    negative, none = _signs(channels[:, None], tl.arange(0, BLOCK)[None, :], WIDTH)
    numbers = numbers[None, :]
    return tl.sum(tl.where(none, 0.0, tl.where(negative, -numbers, numbers)), 1)


@triton.jit
def store_turned(source, target, scale, KIND: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Store one token's rotated values in 2 or 3 bits; see `reference.kv_codes`. Sums of integers are exact."""
    LARGEST: tl.constexpr = 7.0 if KIND == 5 else 3.0
    STEP: tl.constexpr = 0.7345 if KIND == 5 else 1.248
    SIZE: tl.constexpr = WIDTH & -WIDTH
    channels = tl.arange(0, BLOCK)
    x = tl.load(source + channels, mask=channels < WIDTH, other=0.0).to(tl.float32)
    unit = tl.div_rn(tl.maximum(tl.max(tl.abs(x), 0), 1e-30), 32767.0)
    numbers = round_even(tl.div_rn(x, unit))
    numbers = tl.where(_changes_sign(channels), -numbers, numbers)
    some = tl.arange(0, 16)
    magnitude = tl.zeros((16,), tl.int32)
    for first in range(0, WIDTH, 16):
        magnitude += tl.abs(_turned_some(numbers, first + some, WIDTH, BLOCK)).to(tl.int32)
    mean = tl.div_rn(tl.sum(magnitude, 0).to(tl.float32), WIDTH * 1.0)
    step = STEP * mean * tl.div_rn(unit, SIZE * 1.0)
    step = tl.minimum(tl.maximum(step, 5.960464477539063e-08), 65504.0).to(tl.float16)
    tl.store(scale, step)
    divisor = tl.div_rn(step.to(tl.float32) * SIZE, unit)
    # Bytes hold the codes of channels that are this far apart.
    APART: tl.constexpr = WIDTH // 8 if KIND == 5 else WIDTH // 4
    for first in range(0, APART, 16):
        inside = first + some
        upper = tl.zeros((16,), tl.uint8)
        for half in tl.static_range(2 if KIND == 5 else 1):
            lower = tl.zeros((16,), tl.uint8)
            for quarter in tl.static_range(4):
                # Where their number is not a multiple of 16, some channels are computed twice, and stored once.
                turned = _turned_some(numbers, quarter * (WIDTH // 4) + half * APART + inside, WIDTH, BLOCK)
                code = round_even(tl.div_rn(turned, divisor) + LARGEST / 2)
                code = tl.minimum(tl.maximum(code, 0.0), LARGEST).to(tl.uint8)
                lower |= (code & 3) << (2 * quarter)
                upper |= (code >> 2) << (2 * quarter + half)
            tl.store(target + half * APART + inside, lower, mask=inside < APART)
        if KIND == 5:
            tl.store(target + WIDTH // 4 + inside, upper, mask=inside < APART)
