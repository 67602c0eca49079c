# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
# ruff: noqa: ANN001, ANN202
"""Products of inputs with packed weights (integers of 2 to 8 bits, floats of 4 or 8 bits), in tiles on tensor cores.

Inputs are floats, or 8-bit codes with a scale per row. If the output tiles do not fill the chip, K is split; the
program that finishes a tile last sums its splits, always in the same order. `packed_blocks` decodes the words.
Source: Frantar et al. 2024, Marlin.
Shapes: M rows, N outputs, K inputs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantkit.kernels.gpu import capability, choices, num_processors
from quantkit.kernels.gpu.choices import autotuned
from quantkit.kernels.gpu.floats import load_scale, row_factor
from quantkit.kernels.gpu.gates import GATES, outputs_of, store_gated
from quantkit.kernels.gpu.packed_blocks import add_tile_packed, dequantize, inputs_of, load_words, load_zero
from quantkit.kernels.gpu.packing import PackedWeight
from quantkit.kernels.gpu.splits import MOST_TILES, counters, is_last_to_come, splits_of
from quantkit.kernels.types import QuantizedActivations


@triton.jit
def _add_partials(partials, num_splits, rows, outputs, mask, M, N):
    """Sum the partials of a tile in order, so that the result does not depend on which program finishes last. The loads
    bypass the L1 cache.
    """
    sums = tl.zeros(mask.shape, tl.float32)
    for split in range(num_splits):
        at = partials + (split * M + rows).to(tl.int64)[:, None] * N + outputs[None, :]
        sums += tl.load(at, mask=mask, other=0.0, cache_modifier=".cg")
    return sums


@triton.jit
def _finish(
    sums, x, scale, bias, row_scale, out, partials, counters, tile, split, rows, outputs, kept, M, N, outer,
    GROUP: tl.constexpr, SCALES: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_ROW_SCALE: tl.constexpr,
    IS_SPLIT: tl.constexpr, GATE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Apply output scales, row scales, bias and GATE, and store the outputs of a tile. If K is split, store the
    partials; the program that finishes the tile last sums them and stores the outputs.
    """
    mask = (rows < M)[:, None] & kept[None, :]
    is_last = True
    if IS_SPLIT:
        tl.store(partials + (split * M + rows).to(tl.int64)[:, None] * N + outputs[None, :], sums, mask=mask)
        is_last = is_last_to_come(counters + tile, tl.num_programs(1))
    if is_last:
        if IS_SPLIT:
            sums = _add_partials(partials, tl.num_programs(1), rows, outputs, mask, M, N)
        if GROUP == 0:
            sums *= load_scale(scale + outputs, kept, SCALES)[None, :]
        # All groups share `outer`, so each output is divided once, instead of each group.
        if SCALES == 1:
            sums = sums / outer
        if HAS_ROW_SCALE:
            sums *= tl.load(row_scale + rows, mask=rows < M, other=0.0)[:, None] * row_factor(x)
        if HAS_BIAS:
            sums += tl.load(bias + outputs, mask=kept, other=0.0).to(tl.float32)[None, :]
        if GATE is None:
            tl.store(out + rows.to(tl.int64)[:, None] * N + outputs[None, :], sums.to(out.dtype.element_ty), mask=mask)
        else:
            store_gated(sums, out, rows, rows < M, tl.program_id(0), N, BLOCK_M, BLOCK_N, GATE)


@autotuned("BLOCK_M", "N", "K", "BITS", "GROUP", "KIND", "SCALES", "IS_SPLIT", "GATE", staged=True)
@triton.jit
def _tile_kernel(
    x, words, scale, zero, bias, row_scale, out, partials, counters, M, N, K, num_words, num_blocks, blocks_per_split,
    outer,
    BITS: tl.constexpr, SPAN: tl.constexpr, GROUP: tl.constexpr, UNPACKED: tl.constexpr,
    KIND: tl.constexpr, SCALES: tl.constexpr, HAS_ZERO: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_ROW_SCALE: tl.constexpr, IS_SPLIT: tl.constexpr, IN_VALUES: tl.constexpr, GATE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_N x BLOCK_M outputs, transposed. IN_VALUES: see `add_tile_packed`."""
    outputs, kept = outputs_of(tl.program_id(0), N, BLOCK_N, GATE is not None)
    split = tl.program_id(1)
    rows = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    # In 64 bits: long prompts times wide inputs pass 2^31.
    inputs_at = x + rows.to(tl.int64) * K
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    last = tl.minimum((split + 1) * blocks_per_split, num_blocks)
    for block in tl.range(split * blocks_per_split, last, num_stages=STAGES):
        total = add_tile_packed(
            total, inputs_at, rows < M, words, scale, zero, outputs, kept, block, N, K, num_words, out.dtype.element_ty,
            BITS, KIND, SCALES, SPAN, GROUP, HAS_ZERO, UNPACKED, IN_VALUES,
        )  # fmt: skip
    sums = tl.trans(total)  # (BLOCK_M, BLOCK_N)
    tile = tl.program_id(0) + tl.program_id(2) * tl.num_programs(0)
    _finish(
        sums, x, scale, bias, row_scale, out, partials, counters, tile, split, rows, outputs, kept, M, N, outer,
        GROUP, SCALES, HAS_BIAS, HAS_ROW_SCALE, IS_SPLIT, GATE, BLOCK_M, BLOCK_N,
    )  # fmt: skip


@triton.jit
def _dequantize_weight_kernel(
    words, scale, zero, out, N, K, num_words, outer,
    BITS: tl.constexpr, SPAN: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr,
    SCALES: tl.constexpr, HAS_ZERO: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Dequantize one block of BLOCK_N rows of the weight to 16-bit numbers."""
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    block = tl.program_id(1)
    kept = outputs < N
    loaded = load_words(words, outputs, block, kept, num_words, SPAN, False, KIND)
    for piece in tl.static_range(16 // BITS):
        inputs = inputs_of(block, piece, BITS, SPAN, False)
        index = 0 if GROUP == 0 else (block * SPAN * (32 // BITS) + 2 * SPAN * piece) // GROUP
        zeros = load_zero(zero, index, outputs, kept, N, BITS, HAS_ZERO)
        value = dequantize(loaded, zeros, piece, BITS, KIND, tl.float32)
        factor = load_scale(scale + index * N + outputs, kept, SCALES)
        if SCALES == 1:
            factor = tl.div_rn(factor, outer)
        tl.store(
            out + outputs.to(tl.int64)[:, None] * K + inputs[None, :],
            (value * factor[:, None]).to(out.dtype.element_ty),
            mask=kept[:, None] & (inputs < K)[None, :],
        )


def multiply(
    x: Tensor | QuantizedActivations, weight: PackedWeight, bias: Tensor | None, activation: str | None = None
) -> Tensor:
    """Multiply x with a packed weight.

    Args:
        x: (M, K) contiguous, M at least 1; meant for few rows.
        weight: (N, K).
        bias: (N,) or None.
        activation: a key of `gates.GATES`; the first half of the outputs are the gates of the second half. None = no
            gating.
    Returns:
        (M, N), dtype of x; summed in float32, rounded once. With an activation (M, N / 2), as from `ops.gated`.
    """
    row_scale, dtype = None, x.dtype
    gate = None if activation is None else GATES[activation]
    if isinstance(x, QuantizedActivations):
        row_scale = x.scale.view(-1)
        x = x.codes[: len(x)]
    (count, width), outputs = x.shape, weight.shape[0]
    tile = choices.product_tile(count, capability(x.device))
    columns, row_tiles = -(-outputs // tile.columns), -(-count // tile.rows)
    # This limit ensures that no more tiles are split than there are counters.
    programs = min(tile.programs * num_processors(x.device), MOST_TILES)
    splits = splits_of(columns * row_tiles, weight.num_blocks, programs)
    out = torch.empty(count, outputs if gate is None else outputs // 2, dtype=dtype, device=x.device)
    partials, counted = None, None
    if splits > 1:
        partials = torch.empty(splits, count, outputs, dtype=torch.float32, device=x.device)
        counted = counters(x.device)
    _tile_kernel[columns, splits, row_tiles](
        x, weight.words, weight.scale, weight.zero, bias, row_scale, out, partials, counted, count, outputs, width,
        weight.words.shape[1], weight.num_blocks, -(-weight.num_blocks // splits), weight.outer,
        **weight.packing.constants, UNPACKED=weight.packing.unpacked, HAS_BIAS=bias is not None,
        HAS_ROW_SCALE=row_scale is not None, IS_SPLIT=splits > 1,
        IN_VALUES=weight.packing.scales_exactly(dtype), GATE=gate, BLOCK_M=tile.rows,
        BLOCK_N=tile.columns, **tile.options(staged=True),
    )  # fmt: skip
    return out


def dequantize_weight(weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """Return the weight (N, K) in this dtype, each number rounded once."""
    rows, width = weight.shape
    out = torch.empty(rows, width, dtype=dtype, device=weight.words.device)
    block = 32
    _dequantize_weight_kernel[(-(-rows // block), weight.num_blocks)](
        weight.words, weight.scale, weight.zero, out, rows, width, weight.words.shape[1], weight.outer,
        **weight.packing.constants, BLOCK_N=block, num_warps=4,
    )  # fmt: skip
    return out
