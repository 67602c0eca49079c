# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
# ruff: noqa: ANN001, ANN201, ANN202
"""Inputs times packed integers of 2, 4 or 8 bits or floats of 4 or 8: a product per row up to 4, tiles up to 64.

Integers become numbers without a conversion: `(word & mask) | magic` are the bits of the float 2^(23-s) + field, where
s is the field's place, so one subtraction leaves field - zero, exactly; `floats` does the same for floats. Inputs are
floats, or codes of 8 bits with a scale per row. Scales are applied once per group, to sums in
float32. Where rows of outputs alone do not fill the chip, K is split, and the program that is last to finish its part
of a tile adds them all, always in the same order. The weight is the left operand of the tile product, so that it can
go to it from registers.
Source: Kim et al. 2022 (magic numbers), Frantar et al. 2024, Marlin.
Shapes: M rows, N outputs, K inputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantkit.kernels.gpu import capability, configs, num_processors, power_of_two
from quantkit.kernels.gpu.choices import ROW_LIMIT, Rows, Vendor, default_tile
from quantkit.kernels.gpu.floats import field_bits, half_number, load_inputs, load_scale, row_factor
from quantkit.kernels.gpu.layout import PackedWeight
from quantkit.kernels.gpu.partial_argmax import as_logits, make_maxima, put_maxima
from quantkit.kernels.gpu.split_kv import MOST_TILES, counters

_PARTS = 64


@triton.jit
def _decode(words, zero, FIELD: tl.constexpr, BITS: tl.constexpr, KIND: tl.constexpr = 0):
    """field - zero of each word, float32; floats have no zero and are too small by `floats.FACTOR_BITS`."""
    HALF: tl.constexpr = 16 // BITS
    SHIFT: tl.constexpr = BITS * (FIELD % HALF)
    if KIND > 0:
        found = half_number(field_bits(words, SHIFT, KIND) >> (16 * (FIELD // HALF)))
    else:
        MASK: tl.constexpr = ((1 << BITS) - 1) << SHIFT
        MAGIC: tl.constexpr = 0x4B000000 - (SHIFT << 23)
        BASE: tl.constexpr = float(2 ** (23 - SHIFT))
        if FIELD >= HALF:
            words = words >> 16
        bits = (words & MASK) | MAGIC
        found = bits.to(tl.float32, bitcast=True) - (BASE + zero)
    return found


@triton.jit
def _zeros_of(zero, index, outputs, kept, num_outputs, OFFSET: tl.constexpr, HAS_ZERO: tl.constexpr):
    if HAS_ZERO:
        found = tl.load(zero + index * num_outputs + outputs, mask=kept, other=0).to(tl.float32)
    else:
        found = tl.full(outputs.shape, OFFSET, tl.float32)
    return found[:, None]


@triton.jit
def _inputs_of(block, field, lanes, SPAN: tl.constexpr, FIELDS: tl.constexpr, NATURAL: tl.constexpr):
    """Which inputs field `field` of a block's words is multiplied with."""
    if NATURAL:
        return (block * SPAN + lanes) * FIELDS + field
    return block * SPAN * FIELDS + field * SPAN + lanes


@triton.jit
def _load_words(
    words, outputs, block, lanes, kept, num_words, SPAN: tl.constexpr, NATURAL: tl.constexpr, KIND: tl.constexpr = 0
):
    column = block * SPAN + lanes
    at = words + outputs.to(tl.int64)[:, None] * num_words + column[None, :]
    if NATURAL:
        found = tl.load(at, mask=kept[:, None] & (column < num_words)[None, :], other=0)
        return found if KIND > 0 else found ^ -2139062144  # 0x80808080: signed bytes to bytes above 128
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
    found = tl.sum(sums[0], axis=1)[None, :]
    if ROWS > 1:
        found = tl.where(rows[:, None] == 0, found, tl.sum(sums[1], axis=1)[None, :])
    if ROWS > 2:
        found = tl.where(rows[:, None] == 2, tl.sum(sums[2], axis=1)[None, :], found)
        found = tl.where(rows[:, None] == 3, tl.sum(sums[3], axis=1)[None, :], found)
    return found


@triton.jit
def _rows_kernel(
    x, words, scale, zero, bias, row_scale, out, parts, counters, M, N, K, num_words, num_blocks, blocks_per_part,
    outer, head_scale, softcap, maxima,
    BITS: tl.constexpr, SPAN: tl.constexpr, GROUP: tl.constexpr, OFFSET: tl.constexpr, NATURAL: tl.constexpr,
    KIND: tl.constexpr, SCALES: tl.constexpr, HAS_ZERO: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_ROW_SCALE: tl.constexpr, IN_PARTS: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """ROWS x BLOCK_N outputs; sums stay with their thread over all of K and are added up once, at the end."""
    FIELDS: tl.constexpr = 32 // BITS
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    part = tl.program_id(1)
    kept = outputs < N
    lanes = tl.arange(0, SPAN)
    rows = tl.arange(0, ROWS)
    # In place of a row that there is not, the last one: nothing of it is stored.
    inputs_at = (x, x + tl.minimum(1, M - 1) * K, x + tl.minimum(2, M - 1) * K, x + tl.minimum(3, M - 1) * K)
    total = no_sums(BLOCK_N, SPAN)
    last = tl.minimum((part + 1) * blocks_per_part, num_blocks)
    # Said here, because Triton puts loads under way ahead of time only for products of tiles.
    for block in tl.range(part * blocks_per_part, last, num_stages=STAGES):
        loaded = _load_words(words, outputs, block, lanes, kept, num_words, SPAN, NATURAL, KIND)
        first = block * SPAN * FIELDS
        partial = no_sums(BLOCK_N, SPAN)
        for field in tl.static_range(FIELDS):
            index = 0 if GROUP == 0 else (first + field * SPAN) // GROUP
            inputs = _inputs_of(block, field, lanes, SPAN, FIELDS, NATURAL)
            value = _decode(loaded, _zeros_of(zero, index, outputs, kept, N, OFFSET, HAS_ZERO), field, BITS, KIND)
            partial = add_rows(partial, value, inputs_at, inputs, K, ROWS)
            if GROUP > 0 and ((field + 1) * SPAN % GROUP == 0 or field == FIELDS - 1):
                total = add_scaled(total, partial, load_scale(scale + index * N + outputs, kept, SCALES)[:, None], ROWS)
                partial = no_sums(BLOCK_N, SPAN)
        if GROUP == 0:
            total = add_scaled(total, partial, 1.0, ROWS)
    sums = sum_rows(total, rows, ROWS)
    _finish(
        sums, x, scale, bias, row_scale, out, parts, counters, tl.program_id(0), part, rows, outputs, M, N, outer,
        head_scale, softcap, maxima, GROUP, SCALES, HAS_BIAS, HAS_ROW_SCALE, IN_PARTS,
    )  # fmt: skip


@triton.jit
def _put_part(sums, parts, counter, part, rows, outputs, mask, M, N):
    """Store a part of a tile; whether all its parts are there now. The counter is left at zero for the next launch."""
    tl.store(parts + (part * M + rows).to(tl.int64)[:, None] * N + outputs[None, :], sums, mask=mask)
    tl.debug_barrier()  # every thread's numbers before the one that counts
    is_last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == tl.num_programs(1) - 1
    if is_last:
        tl.store(counter, 0)
    return is_last


@triton.jit
def _add_parts(parts, num_parts, rows, outputs, mask, M, N):
    """The parts of a tile in order, so that the sum does not depend on who was last. Not by way of the L1 cache."""
    sums = tl.zeros(mask.shape, tl.float32)
    for part in range(num_parts):
        at = parts + (part * M + rows).to(tl.int64)[:, None] * N + outputs[None, :]
        sums += tl.load(at, mask=mask, other=0.0, cache_modifier=".cg")
    return sums


@triton.jit
def _finish(
    sums, x, scale, bias, row_scale, out, parts, counters, tile, part, rows, outputs, M, N, outer,
    head_scale, softcap, maxima, GROUP: tl.constexpr, SCALES: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_ROW_SCALE: tl.constexpr, IN_PARTS: tl.constexpr,
):  # fmt: skip
    """A tile's outputs: its parts added up by the program that is last, scales of outputs and of rows, the bias.

    Where `maxima` are wanted, this is the head of a model.
    """
    kept = outputs < N
    mask = (rows < M)[:, None] & kept[None, :]
    is_last = True
    if IN_PARTS:
        is_last = _put_part(sums, parts, counters + tile, part, rows, outputs, mask, M, N)
    if is_last:
        if IN_PARTS:
            sums = _add_parts(parts, tl.num_programs(1), rows, outputs, mask, M, N)
        if GROUP == 0:
            sums *= load_scale(scale + outputs, kept, SCALES)[None, :]
        if SCALES == 1:
            sums = sums / outer
        if HAS_ROW_SCALE:
            sums *= tl.load(row_scale + rows, mask=rows < M, other=0.0)[:, None] * row_factor(x)
        if HAS_BIAS:
            sums += tl.load(bias + outputs, mask=kept, other=0.0).to(tl.float32)[None, :]
        if maxima is not None:
            sums = as_logits(sums, head_scale, softcap)
            put_maxima(sums, maxima, rows, outputs, mask, tl.program_id(0), M, tl.num_programs(0))
        tl.store(out + rows.to(tl.int64)[:, None] * N + outputs[None, :], sums.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _tile_kernel(
    x, words, scale, zero, bias, row_scale, out, parts, counters, M, N, K, num_words, num_blocks, blocks_per_part,
    outer, head_scale, softcap, maxima,
    BITS: tl.constexpr, SPAN: tl.constexpr, GROUP: tl.constexpr, OFFSET: tl.constexpr, NATURAL: tl.constexpr,
    KIND: tl.constexpr, SCALES: tl.constexpr, HAS_ZERO: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_ROW_SCALE: tl.constexpr, IN_PARTS: tl.constexpr, IN_VALUES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """BLOCK_N x BLOCK_M outputs, transposed: weight on the left. IN_VALUES: its numbers are exact with their scale."""
    FIELDS: tl.constexpr = 32 // BITS
    PER_GROUP: tl.constexpr = GROUP > 0 and not IN_VALUES
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    part = tl.program_id(1)
    rows = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    kept = outputs < N
    lanes = tl.arange(0, SPAN)
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    begin, last = part * blocks_per_part, tl.minimum((part + 1) * blocks_per_part, num_blocks)
    coming = _load_words(words, outputs, begin, lanes, kept, num_words, SPAN, NATURAL, KIND)
    for block in range(begin, last):
        # Asked for a block ahead, by hand: Triton does so for inner loops only.
        loaded, there = coming, kept & (tl.zeros_like(outputs) + block + 1 < last)
        coming = _load_words(words, outputs, block + 1, lanes, there, num_words, SPAN, NATURAL, KIND)
        first = block * SPAN * FIELDS
        partial = tl.zeros((BLOCK_N, BLOCK_M), tl.float32) if PER_GROUP else total
        for half in range(2):  # a loop, so that only half of the fields are in registers at once
            for field in tl.static_range(FIELDS // 2):
                number = half * (FIELDS // 2) + field
                index = 0 if GROUP == 0 else (first + number * SPAN) // GROUP
                inputs = _inputs_of(block, number, lanes, SPAN, FIELDS, NATURAL)
                at = x + rows.to(tl.int64)[:, None] * K + inputs[None, :]
                a = load_inputs(at, (rows < M)[:, None] & (inputs < K)[None, :])
                if x.dtype.element_ty.primitive_bitwidth == 8:  # codes, exact in the dtype of the outputs
                    a = a.to(out.dtype.element_ty)
                value = _decode(loaded, _zeros_of(zero, index, outputs, kept, N, OFFSET, HAS_ZERO), field, BITS, KIND)
                if IN_VALUES:
                    value *= load_scale(scale + index * N + outputs, kept, SCALES)[:, None]
                partial = tl.dot(value.to(a.dtype), tl.trans(a), partial, input_precision="ieee")
                if PER_GROUP and ((field + 1) * SPAN % GROUP == 0 or field == FIELDS // 2 - 1):
                    total += partial * load_scale(scale + index * N + outputs, kept, SCALES)[:, None]
                    partial = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            loaded = loaded >> 16
        if not PER_GROUP:
            total = partial
    sums = tl.trans(total)  # (BLOCK_M, BLOCK_N)
    _finish(
        sums, x, scale, bias, row_scale, out, parts, counters, tl.program_id(0) + tl.program_id(2) * tl.num_programs(0),
        part, rows, outputs, M, N, outer, head_scale, softcap, maxima, GROUP, SCALES, HAS_BIAS, HAS_ROW_SCALE, IN_PARTS,
    )  # fmt: skip


@triton.jit
def _decode_kernel(
    words, scale, zero, out, N, K, num_words, outer,
    BITS: tl.constexpr, SPAN: tl.constexpr, GROUP: tl.constexpr, OFFSET: tl.constexpr, KIND: tl.constexpr,
    SCALES: tl.constexpr, HAS_ZERO: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One block of BLOCK_N rows of the weight as 16-bit numbers."""
    FIELDS: tl.constexpr = 32 // BITS
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    block = tl.program_id(1)
    kept = outputs < N
    lanes = tl.arange(0, SPAN)
    loaded = _load_words(words, outputs, block, lanes, kept, num_words, SPAN, False)
    for field in tl.static_range(FIELDS):
        inputs = block * SPAN * FIELDS + field * SPAN + lanes
        index = 0 if GROUP == 0 else (block * SPAN * FIELDS + field * SPAN) // GROUP
        value = _decode(loaded, _zeros_of(zero, index, outputs, kept, N, OFFSET, HAS_ZERO), field, BITS, KIND)
        factor = load_scale(scale + index * N + outputs, kept, SCALES)
        if SCALES == 1:
            factor = tl.div_rn(factor, outer)
        tl.store(
            out + outputs.to(tl.int64)[:, None] * K + inputs[None, :],
            (value * factor[:, None]).to(out.dtype.element_ty),
            mask=kept[:, None] & (inputs < K)[None, :],
        )


def multiply(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None,
    row_scale: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """x times a packed weight.

    Args:
        x: (M, K) contiguous, M from 1 on, meant for few rows: floats, or codes of `row_scale`, int8 or e4m3 in uint8.
        weight: (N, K).
        bias: (N,) or None.
        row_scale: (M,) float32 that outputs are multiplied with, or None.
        dtype: of the result, where x are codes.
    Returns:
        (M, N), dtype of x unless given; float32 sums, rounded once.
    """
    return _multiply(x, weight, bias, row_scale, dtype or x.dtype, None)[0]


def multiply_head(
    x: Tensor, weight: PackedWeight, bias: Tensor | None, scale: float, softcap: float
) -> tuple[Tensor, Tensor]:
    """Logits, and the maxima of their tiles.

    Args:
        x, weight, bias: see `multiply`.
        scale, softcap: see `kernels.head.logits`; 0.0 = no softcap.
    Returns:
        (M, N) float32; and what `maxima.find_first` takes.
    """
    out, found = _multiply(x, weight, bias, None, x.dtype, (scale, softcap))
    assert found is not None
    return out, found


def _multiply(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None,
    row_scale: Tensor | None,
    dtype: torch.dtype,
    head: tuple[float, float] | None,
) -> tuple[Tensor, Tensor | None]:
    (count, width), outputs = x.shape, weight.shape[0]
    choice = configs.product(weight, count, x.device)
    # Who asks for a product here has no other, and rows on their own are few.
    if isinstance(choice, Vendor) or (isinstance(choice, Rows) and count > ROW_LIMIT):
        choice = default_tile(count, capability(x.device))
    block_n = choice.block_n
    row_tiles = 1 if isinstance(choice, Rows) else -(-count // choice.block_m)
    tiles = -(-outputs // block_n) * row_tiles
    parts = num_parts(tiles, weight.num_blocks, min(choice.programs * num_processors(x.device), MOST_TILES))
    out = torch.empty(count, outputs, dtype=torch.float32 if head else dtype, device=x.device)
    found = make_maxima(count, -(-outputs // block_n), x.device) if head else None
    partial, counted = None, None
    if parts > 1:
        partial = torch.empty(parts, count, outputs, dtype=torch.float32, device=x.device)
        counted = counters(x.device)
    shared = {
        **weight.constants,
        "NATURAL": weight.natural,
        "BLOCK_N": block_n,
        "IN_PARTS": parts > 1,
        "HAS_BIAS": bias is not None,
        "HAS_ROW_SCALE": row_scale is not None,
    }
    blocks = (weight.words.shape[1], weight.num_blocks, -(-weight.num_blocks // parts))
    tensors = (x, weight.words, weight.scale, weight.zero, bias, row_scale, out, partial, counted)
    given = (*tensors, count, outputs, width, *blocks, weight.outer, *(head or (1.0, 0.0)), found)
    grid, options = (-(-outputs // block_n), parts), {"num_warps": choice.warps, "num_stages": choice.stages}
    if isinstance(choice, Rows):
        _rows_kernel[grid](*given, ROWS=power_of_two(count), STAGES=choice.stages, **options, **shared)
    else:
        in_values = weight.scales_exactly(dtype)
        _tile_kernel[(*grid, row_tiles)](*given, BLOCK_M=choice.block_m, IN_VALUES=in_values, **options, **shared)
    return out, found


def num_parts(tiles: int, blocks: int, programs: int) -> int:
    """In how many parts K is cut, so that about this many programs run; a power of two, none of them empty."""
    wanted = max(1, min(programs // max(tiles, 1), blocks, _PARTS))
    parts = 1 << (wanted.bit_length() - 1)
    return -(-blocks // -(-blocks // parts))


def decode(weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """The weight (N, K) in this dtype, each number rounded once."""
    rows, width = weight.shape
    out = torch.empty(rows, width, dtype=dtype, device=weight.words.device)
    block = 32
    _decode_kernel[(-(-rows // block), weight.num_blocks)](
        weight.words, weight.scale, weight.zero, out, rows, width, weight.words.shape[1], weight.outer,
        **weight.constants, BLOCK_N=block, num_warps=4,
    )  # fmt: skip
    return out
