# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
# ruff: noqa: ANN001, ANN201
"""Blocks of packed weights inside a product: words become numbers, and these meet rows one by one, or tiles of rows.

Device functions for `w4a16` and for experts. Integers become numbers without a conversion: `(word & mask) | magic` are
the bits of the float 2^(23-s) + field, where s is the field's shift, so one subtraction leaves field - zero, exactly;
`floats` does the same for floats. Scales are applied once per group, to sums in float32.
Source: Kim et al. 2022 (magic numbers).
Shapes: M rows, N outputs, K inputs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quantkit.kernels.gpu.floats import field_bits, half_number, load_inputs, load_scale


@triton.jit
def dequantize(words, zero, FIELD: tl.constexpr, BITS: tl.constexpr, KIND: tl.constexpr):
    """field - zero of each word, float32; floats have no zero and are too small by `floats.FACTOR_BITS`."""
    HALF: tl.constexpr = 16 // BITS
    SHIFT: tl.constexpr = BITS * (FIELD % HALF)
    if KIND > 0:
        number = half_number(field_bits(words, SHIFT, KIND) >> (16 * (FIELD // HALF)))
    else:
        MASK: tl.constexpr = ((1 << BITS) - 1) << SHIFT
        MAGIC: tl.constexpr = 0x4B000000 - (SHIFT << 23)
        BASE: tl.constexpr = float(2 ** (23 - SHIFT))
        if FIELD >= HALF:
            words = words >> 16
        bits = (words & MASK) | MAGIC
        number = bits.to(tl.float32, bitcast=True) - (BASE + zero)
    return number


@triton.jit
def load_zero(zero, index, outputs, kept, num_outputs, BITS: tl.constexpr, HAS_ZERO: tl.constexpr):
    """What is subtracted from the fields of outputs in group `index`, (N, 1) float32."""
    if HAS_ZERO:
        value = tl.load(zero + index * num_outputs + outputs, mask=kept, other=0).to(tl.float32)
    else:
        value = tl.full(outputs.shape, 1 << (BITS - 1), tl.float32)
    return value[:, None]


@triton.jit
def inputs_of(block, field, lanes, SPAN: tl.constexpr, FIELDS: tl.constexpr, UNPACKED: tl.constexpr):
    """Which inputs field `field` of a block's words is multiplied with."""
    if UNPACKED:
        return (block * SPAN + lanes) * FIELDS + field
    return block * SPAN * FIELDS + field * SPAN + lanes


@triton.jit
def load_words(
    words, outputs, block, lanes, kept, num_words, SPAN: tl.constexpr, UNPACKED: tl.constexpr, KIND: tl.constexpr
):
    """Words (N, SPAN) of a block; of codes as they are, integers come as bytes above 128."""
    column = block * SPAN + lanes
    at = words + outputs.to(tl.int64)[:, None] * num_words + column[None, :]
    if UNPACKED:
        codes = tl.load(at, mask=kept[:, None] & (column < num_words)[None, :], other=0)
        return codes if KIND > 0 else codes ^ -2139062144  # 0x80808080: signed bytes to bytes above 128
    return tl.load(at, mask=kept[:, None], other=0, eviction_policy="evict_first")


@triton.jit
def no_sums(BLOCK_N: tl.constexpr, SPAN: tl.constexpr):
    """Sums of up to 4 rows, (BLOCK_N, SPAN) each. Of two dimensions, as the weight is: with the rows as a third one
    Triton would move every decoded number to another thread."""
    zeros = tl.zeros((BLOCK_N, SPAN), tl.float32)
    return zeros, zeros, zeros, zeros


@triton.jit
def add_rows(sums, value, inputs_at, inputs, K, ROWS: tl.constexpr):
    """Add the products of a piece of the weight with the same inputs of each row."""
    one, two, three, four = sums[0], sums[1], sums[2], sums[3]
    real = inputs < K
    one += value * load_inputs(inputs_at[0] + inputs, real).to(tl.float32)[None, :]
    if ROWS > 1:
        two += value * load_inputs(inputs_at[1] + inputs, real).to(tl.float32)[None, :]
    if ROWS > 2:
        three += value * load_inputs(inputs_at[2] + inputs, real).to(tl.float32)[None, :]
        four += value * load_inputs(inputs_at[3] + inputs, real).to(tl.float32)[None, :]
    return one, two, three, four


@triton.jit
def add_scaled(total, sums, factor, ROWS: tl.constexpr):
    """Sums times a factor join others."""
    one, two, three, four = total[0], total[1], total[2], total[3]
    one += sums[0] * factor
    if ROWS > 1:
        two += sums[1] * factor
    if ROWS > 2:
        three += sums[2] * factor
        four += sums[3] * factor
    return one, two, three, four


@triton.jit
def sum_rows(sums, rows, ROWS: tl.constexpr):
    """(ROWS, BLOCK_N): what the threads have of each output, added up."""
    total = tl.sum(sums[0], axis=1)[None, :]
    if ROWS > 1:
        total = tl.where(rows[:, None] == 0, total, tl.sum(sums[1], axis=1)[None, :])
    if ROWS > 2:
        total = tl.where(rows[:, None] == 2, tl.sum(sums[2], axis=1)[None, :], total)
        total = tl.where(rows[:, None] == 3, tl.sum(sums[3], axis=1)[None, :], total)
    return total


@triton.jit
def add_rows_packed(
    total, inputs_at, words, scale, zero, outputs, kept, block, N, K, num_words,
    BITS: tl.constexpr, KIND: tl.constexpr, SCALES: tl.constexpr, SPAN: tl.constexpr, GROUP: tl.constexpr,
    HAS_ZERO: tl.constexpr, UNPACKED: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Add the products of one block to sums that stay with their thread, see `no_sums`."""
    FIELDS: tl.constexpr = 32 // BITS
    lanes = tl.arange(0, SPAN)
    loaded = load_words(words, outputs, block, lanes, kept, num_words, SPAN, UNPACKED, KIND)
    first = block * SPAN * FIELDS
    partial = no_sums(BLOCK_N, SPAN)
    for field in tl.static_range(FIELDS):
        index = 0 if GROUP == 0 else (first + field * SPAN) // GROUP
        inputs = inputs_of(block, field, lanes, SPAN, FIELDS, UNPACKED)
        value = dequantize(loaded, load_zero(zero, index, outputs, kept, N, BITS, HAS_ZERO), field, BITS, KIND)
        partial = add_rows(partial, value, inputs_at, inputs, K, ROWS)
        if GROUP > 0 and ((field + 1) * SPAN % GROUP == 0 or field == FIELDS - 1):
            total = add_scaled(total, partial, load_scale(scale + index * N + outputs, kept, SCALES)[:, None], ROWS)
            partial = no_sums(BLOCK_N, SPAN)
    if GROUP == 0:
        total = add_scaled(total, partial, 1.0, ROWS)
    return total


@triton.jit
def add_tile_packed(
    total, loaded, inputs_at, has_row, scale, zero, outputs, kept, block, N, K, OUT: tl.constexpr,
    BITS: tl.constexpr, KIND: tl.constexpr, SCALES: tl.constexpr, SPAN: tl.constexpr, GROUP: tl.constexpr,
    HAS_ZERO: tl.constexpr, UNPACKED: tl.constexpr, IN_VALUES: tl.constexpr,
):  # fmt: skip
    """Add the products of one block's words to a tile (N, M); the weight on the left, so that it can go to the product
    from registers. IN_VALUES: numbers are exact with their scale. OUT: what codes of inputs become."""
    FIELDS: tl.constexpr = 32 // BITS
    PER_GROUP: tl.constexpr = GROUP > 0 and not IN_VALUES
    lanes = tl.arange(0, SPAN)
    first = block * SPAN * FIELDS
    partial = tl.zeros(total.shape, tl.float32) if PER_GROUP else total
    for half in range(2):  # a loop, so that only half of the fields are in registers at once
        for field in tl.static_range(FIELDS // 2):
            number = half * (FIELDS // 2) + field
            index = 0 if GROUP == 0 else (first + number * SPAN) // GROUP
            inputs = inputs_of(block, number, lanes, SPAN, FIELDS, UNPACKED)
            a = load_inputs(inputs_at[:, None] + inputs[None, :], has_row[:, None] & (inputs < K)[None, :])
            if inputs_at.dtype.element_ty.primitive_bitwidth == 8:  # codes, exact in the dtype of the outputs
                a = a.to(OUT)
            value = dequantize(loaded, load_zero(zero, index, outputs, kept, N, BITS, HAS_ZERO), field, BITS, KIND)
            if IN_VALUES:
                value *= load_scale(scale + index * N + outputs, kept, SCALES)[:, None]
            partial = tl.dot(value.to(a.dtype), tl.trans(a), partial, input_precision="ieee")
            if PER_GROUP and ((field + 1) * SPAN % GROUP == 0 or field == FIELDS // 2 - 1):
                total += partial * load_scale(scale + index * N + outputs, kept, SCALES)[:, None]
                partial = tl.zeros(total.shape, tl.float32)
        loaded = loaded >> 16
    return total if PER_GROUP else partial
