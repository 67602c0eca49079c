# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
# ruff: noqa: ANN001, ANN201, ANN202
"""Decoding of packed weight blocks inside a product: words become numbers, which are multiplied by a tile of rows.

Device functions for `w4a16` and for experts. Two fields become two 16-bit numbers at once: `(word & mask) | magic`
gives the bits of 2^m + field in both halves, where m is the number of mantissa bits. One subtraction then gives
`field - zero` exactly. `floats` decodes two float fields at once. The two numbers are neighbours in K and share a
register, as tensor cores require. Scales are applied once per group, to float32 sums.
Source: Kim et al. 2022 (magic numbers); Frantar et al. 2024, Marlin (decoding in pairs).
Shapes: M rows, N outputs, K inputs.
"""

import triton
import triton.language as tl

from quantkit.kernels.gpu.floats import INTERPRETED, field_bits, load_inputs, load_scale


@triton.jit
def _halves(words, MASK: tl.constexpr, MAGIC: tl.constexpr, DTYPE: tl.constexpr):
    """Return the two halves of `(words & MASK) | MAGIC` as 16-bit numbers. This is written in assembler, because the
    compiler would compute each half separately.
    """
    if INTERPRETED:
        pairs = (words & MASK) | MAGIC
        low, high = pairs.to(tl.int16), (pairs >> 16).to(tl.int16)
    else:
        low, high = tl.inline_asm_elementwise(
            "{.reg .b32 pair; lop3.b32 pair, $2, $3, $4, 0xEA; mov.b32 {$0, $1}, pair;}",
            "=h,=h,r,r,r",
            [words, tl.full(words.shape, MASK, tl.int32), tl.full(words.shape, MAGIC, tl.int32)],
            dtype=(tl.int16, tl.int16),
            is_pure=True,
            pack=1,
        )
    return low.to(DTYPE, bitcast=True), high.to(DTYPE, bitcast=True)


@triton.jit
def _minus(number, zero):
    if INTERPRETED:
        return (number.to(tl.float32) - zero.to(tl.float32)).to(number.dtype)
    return number - zero


@triton.jit
def dequantize(words, zero, PIECE: tl.constexpr, BITS: tl.constexpr, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """Return `field - zero`, exact in DTYPE, for the fields of piece PIECE in both halves of the words.

    Words (N, W) give numbers (N, 2 W). Float fields have no zero, and their numbers lack the factor
    2^`packing.FACTOR_BITS`.
    """
    SHIFT: tl.constexpr = BITS * PIECE
    # The 7 mantissa bits of bfloat16 can hold 4-bit fields; the 10 of float16 can hold 8-bit fields.
    CARRIER: tl.constexpr = tl.bfloat16 if tl.bfloat16 == DTYPE and BITS < 8 and KIND == 0 else tl.float16
    if KIND > 0:
        low, high = _halves(field_bits(words, SHIFT, KIND), -1, 0, CARRIER)
    else:
        MAGIC: tl.constexpr = 0x43004300 if tl.bfloat16 == CARRIER else 0x64006400
        BASE: tl.constexpr = 128.0 if tl.bfloat16 == CARRIER else 1024.0
        low, high = _halves(words >> SHIFT, ((1 << BITS) - 1) * 0x10001, MAGIC, CARRIER)
        low, high = _minus(low, (zero + BASE).to(CARRIER)), _minus(high, (zero + BASE).to(CARRIER))
    number = tl.reshape(tl.join(low, high), (words.shape[0], 2 * words.shape[1]))
    return number if CARRIER == DTYPE else number.to(tl.float32).to(DTYPE)


@triton.jit
def load_zero(zero, index, outputs, kept, num_outputs, BITS: tl.constexpr, HAS_ZERO: tl.constexpr):
    """Return the zero points (N, 1) float32 of outputs in group `index`; 2 ** (BITS - 1) if none are stored."""
    if HAS_ZERO:
        value = tl.load(zero + index * num_outputs + outputs, mask=kept, other=0).to(tl.float32)
    else:
        value = tl.full(outputs.shape, 1 << (BITS - 1), tl.float32)
    return value[:, None]


@triton.jit
def inputs_of(block, PIECE: tl.constexpr, BITS: tl.constexpr, SPAN: tl.constexpr, UNPACKED: tl.constexpr):
    """Return the indices (2 SPAN,) of the inputs to multiply with the numbers of one piece of a block."""
    lanes, FIELDS = tl.arange(0, 2 * SPAN), 32 // BITS
    if UNPACKED:
        return block * SPAN * FIELDS + 2 * lanes + PIECE
    return block * SPAN * FIELDS + 2 * SPAN * PIECE + lanes


@triton.jit
def load_words(words, outputs, block, kept, num_words, SPAN: tl.constexpr, UNPACKED: tl.constexpr, KIND: tl.constexpr):
    """Load the words (N, SPAN) of a block. Unpacked integers are returned as bytes offset by 128."""
    column = block * SPAN + tl.arange(0, SPAN)
    at = words + outputs.to(tl.int64)[:, None] * num_words + column[None, :]
    if UNPACKED:
        codes = tl.load(at, mask=kept[:, None] & (column < num_words)[None, :], other=0)
        return codes if KIND > 0 else codes ^ -2139062144  # 0x80808080: signed bytes to bytes above 128
    return tl.load(at, mask=kept[:, None], other=0, eviction_policy="evict_first")


@triton.jit
def add_tile_packed(
    total, inputs_at, has_row, words, scale, zero, outputs, kept, block, N, K, num_words, OUT: tl.constexpr,
    BITS: tl.constexpr, KIND: tl.constexpr, SCALES: tl.constexpr, SPAN: tl.constexpr, GROUP: tl.constexpr,
    HAS_ZERO: tl.constexpr, UNPACKED: tl.constexpr, IN_VALUES: tl.constexpr,
):  # fmt: skip
    """Add the products of one block's words to a tile (N, M). The weight is the left factor, so that it can enter the
    product from registers. IN_VALUES: scale numbers before the product, because number times scale is exact. OUT: dtype
    to which input codes are converted.
    """
    PIECES: tl.constexpr = 16 // BITS
    PER_GROUP: tl.constexpr = GROUP > 0 and not IN_VALUES
    loaded = load_words(words, outputs, block, kept, num_words, SPAN, UNPACKED, KIND)
    partial = tl.zeros(total.shape, tl.float32) if PER_GROUP else total
    for piece in tl.static_range(PIECES):
        index = 0 if GROUP == 0 else (block * SPAN * 2 * PIECES + 2 * SPAN * piece) // GROUP
        inputs = inputs_of(block, piece, BITS, SPAN, UNPACKED)
        a = load_inputs(inputs_at[:, None] + inputs[None, :], has_row[:, None] & (inputs < K)[None, :])
        if inputs_at.dtype.element_ty.primitive_bitwidth == 8:  # codes, exact in the dtype of the outputs
            a = a.to(OUT)
        value = dequantize(loaded, load_zero(zero, index, outputs, kept, N, BITS, HAS_ZERO), piece, BITS, KIND, a.dtype)
        if IN_VALUES:
            scaled = value.to(tl.float32) * load_scale(scale + index * N + outputs, kept, SCALES)[:, None]
            value = scaled.to(a.dtype)
        partial = tl.dot(value, tl.trans(a), partial, input_precision="ieee")
        if PER_GROUP and ((piece + 1) * 2 * SPAN % GROUP == 0 or piece == PIECES - 1):
            total += partial * load_scale(scale + index * N + outputs, kept, SCALES)[:, None]
            partial = tl.zeros(total.shape, tl.float32)
    return total if PER_GROUP else partial
