# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
# ruff: noqa: ANN001, ANN202
"""Inputs times packed integers of 2 to 8 bits or floats of 4 or 8, in tiles on tensor cores, from one row on.

Inputs are floats, or codes of 8 bits with a scale per row. Where rows of outputs alone do not fill the chip, K is
split, and the program that is last to finish its split of a tile adds them all, always in the same order.
Source: Frantar et al. 2024, Marlin; how words become numbers: `packed_blocks`.
Shapes: M rows, N outputs, K inputs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantkit.kernels.gpu import capability, configs, dependent_launch, num_processors
from quantkit.kernels.gpu.choices import Cublas, default_tile
from quantkit.kernels.gpu.dependent_launch import wait_for_inputs
from quantkit.kernels.gpu.floats import load_scale, row_factor
from quantkit.kernels.gpu.gates import GATES, outputs_of, store_gated
from quantkit.kernels.gpu.packed_blocks import add_tile_packed, dequantize, inputs_of, load_words, load_zero
from quantkit.kernels.gpu.packing import PackedWeight
from quantkit.kernels.gpu.partial_argmax import as_logits, empty_partial_argmax, store_partial_argmax
from quantkit.kernels.gpu.splits import MOST_TILES, counters, is_last_to_come, splits_of
from quantkit.kernels.types import QuantizedActivations


@triton.jit
def _add_partials(partials, num_splits, rows, outputs, mask, M, N):
    """The partials of a tile in order, so that the sum does not depend on who was last. Not by way of the L1 cache."""
    sums = tl.zeros(mask.shape, tl.float32)
    for split in range(num_splits):
        at = partials + (split * M + rows).to(tl.int64)[:, None] * N + outputs[None, :]
        sums += tl.load(at, mask=mask, other=0.0, cache_modifier=".cg")
    return sums


@triton.jit
def _finish(
    sums, x, scale, bias, row_scale, out, partials, counters, tile, split, rows, outputs, kept, M, N, outer,
    head_scale, softcap, partial_argmax, GROUP: tl.constexpr, SCALES: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_ROW_SCALE: tl.constexpr, IS_SPLIT: tl.constexpr, GATE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A tile's outputs: its partials added up by the program that is last, scales of outputs and of rows, the bias.

    Where `partial_argmax` is wanted, this is the head of a model; with a GATE, its gates and what they open.
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
        # What is common to all groups is divided by once per output instead of once per group.
        if SCALES == 1:
            sums = sums / outer
        if HAS_ROW_SCALE:
            sums *= tl.load(row_scale + rows, mask=rows < M, other=0.0)[:, None] * row_factor(x)
        if HAS_BIAS:
            sums += tl.load(bias + outputs, mask=kept, other=0.0).to(tl.float32)[None, :]
        if partial_argmax is not None:
            sums = as_logits(sums, head_scale, softcap)
            store_partial_argmax(
                sums, partial_argmax, rows, outputs, mask, tl.program_id(0), M, tl.num_programs(0)
            )  # fmt: skip
        if GATE is None:
            tl.store(out + rows.to(tl.int64)[:, None] * N + outputs[None, :], sums.to(out.dtype.element_ty), mask=mask)
        else:
            store_gated(sums, out, rows, rows < M, tl.program_id(0), N, BLOCK_M, BLOCK_N, GATE)


@triton.jit
def _tile_kernel(
    x, words, scale, zero, bias, row_scale, out, partials, counters, M, N, K, num_words, num_blocks, blocks_per_split,
    outer, head_scale, softcap, partial_argmax,
    BITS: tl.constexpr, SPAN: tl.constexpr, GROUP: tl.constexpr, UNPACKED: tl.constexpr,
    KIND: tl.constexpr, SCALES: tl.constexpr, HAS_ZERO: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_ROW_SCALE: tl.constexpr, IS_SPLIT: tl.constexpr, IN_VALUES: tl.constexpr, GATE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """BLOCK_N x BLOCK_M outputs, transposed. IN_VALUES: numbers of the weight are exact with their scale."""
    outputs, kept = outputs_of(tl.program_id(0), N, BLOCK_N, GATE is not None)
    split = tl.program_id(1)
    rows = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    # In 64 bits: long prompts times wide inputs pass 2^31.
    inputs_at = x + rows.to(tl.int64) * K
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    last = tl.minimum((split + 1) * blocks_per_split, num_blocks)
    if DEPENDENT:
        first = split * blocks_per_split
        wait_for_inputs(words, tl.minimum(outputs, N - 1), first, last, num_words, SPAN, STAGES + 1)
    for block in tl.range(split * blocks_per_split, last, num_stages=STAGES):
        total = add_tile_packed(
            total, inputs_at, rows < M, words, scale, zero, outputs, kept, block, N, K, num_words, out.dtype.element_ty,
            BITS, KIND, SCALES, SPAN, GROUP, HAS_ZERO, UNPACKED, IN_VALUES,
        )  # fmt: skip
    sums = tl.trans(total)  # (BLOCK_M, BLOCK_N)
    tile = tl.program_id(0) + tl.program_id(2) * tl.num_programs(0)
    _finish(
        sums, x, scale, bias, row_scale, out, partials, counters, tile, split, rows, outputs, kept, M, N, outer,
        head_scale, softcap, partial_argmax, GROUP, SCALES, HAS_BIAS, HAS_ROW_SCALE, IS_SPLIT, GATE, BLOCK_M, BLOCK_N,
    )  # fmt: skip


@triton.jit
def _dequantize_weight_kernel(
    words, scale, zero, out, N, K, num_words, outer,
    BITS: tl.constexpr, SPAN: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr,
    SCALES: tl.constexpr, HAS_ZERO: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One block of BLOCK_N rows of the weight as 16-bit numbers."""
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


def is_best(weight: PackedWeight, count: int, device: torch.device) -> bool:
    """Whether so many rows meet the packed weight, rather than cuBLAS a dequantized one."""
    return not isinstance(configs.product(weight, count, device), Cublas)


def multiply(
    x: Tensor | QuantizedActivations, weight: PackedWeight, bias: Tensor | None, activation: str | None = None
) -> Tensor:
    """x times a packed weight.

    Args:
        x: (M, K) contiguous, M from 1 on, meant for few rows.
        weight: (N, K).
        bias: (N,) or None.
        activation: a key of `gates.GATES`: outputs are gates, then as many that they open; None = as they are.
    Returns:
        (M, N), dtype of x; float32 sums, rounded once. With an activation (M, N / 2), as `ops.gated` makes them of it.
    """
    return _multiply(x, weight, bias, x.dtype, gate=None if activation is None else GATES[activation])[0]


def multiply_head(
    x: Tensor, weight: PackedWeight, bias: Tensor | None, scale: float, softcap: float
) -> tuple[Tensor, Tensor]:
    """Logits, and the partial argmax of their tiles.

    Args:
        x, weight, bias: see `multiply`.
        scale, softcap: see `ops.head.logits`; 0.0 = no softcap.
    Returns:
        (M, N) float32; and what `partial_argmax.argmax` takes.
    """
    out, partial_argmax = _multiply(x, weight, bias, torch.float32, head=(scale, softcap))
    assert partial_argmax is not None
    return out, partial_argmax


def _multiply(
    x: Tensor | QuantizedActivations,
    weight: PackedWeight,
    bias: Tensor | None,
    dtype: torch.dtype,
    head: tuple[float, float] | None = None,
    gate: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    row_scale = None
    if isinstance(x, QuantizedActivations):
        row_scale = x.scale.view(-1)
        x = x.codes[: len(x)]
    (count, width), outputs = x.shape, weight.shape[0]
    choice = configs.product(weight, count, x.device)
    if isinstance(choice, Cublas):  # who asks for a product here has no other
        choice = default_tile(count, capability(x.device))
    columns, row_tiles = -(-outputs // choice.block_n), -(-count // choice.block_m)
    # So no more tiles are split than there are counters for.
    programs = min(choice.programs * num_processors(x.device), MOST_TILES)
    splits = splits_of(columns * row_tiles, weight.num_blocks, programs)
    out = torch.empty(count, outputs if gate is None else outputs // 2, dtype=dtype, device=x.device)
    partial_argmax = empty_partial_argmax(count, columns, x.device) if head else None
    partials, counted = None, None
    if splits > 1:
        partials = torch.empty(splits, count, outputs, dtype=torch.float32, device=x.device)
        counted = counters(x.device)
    _tile_kernel[columns, splits, row_tiles](
        x, weight.words, weight.scale, weight.zero, bias, row_scale, out, partials, counted, count, outputs, width,
        weight.words.shape[1], weight.num_blocks, -(-weight.num_blocks // splits), weight.outer, *(head or (1.0, 0.0)),
        partial_argmax, **weight.packing.constants, UNPACKED=weight.packing.unpacked, HAS_BIAS=bias is not None,
        HAS_ROW_SCALE=row_scale is not None, IS_SPLIT=splits > 1,
        IN_VALUES=weight.packing.scales_exactly(x.dtype if head else dtype), GATE=gate, BLOCK_M=choice.block_m,
        **choice.constants, **dependent_launch.options(x.device),
    )  # fmt: skip
    return out, partial_argmax


def dequantize_weight(weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """The weight (N, K) in this dtype, each number rounded once."""
    rows, width = weight.shape
    out = torch.empty(rows, width, dtype=dtype, device=weight.words.device)
    block = 32
    _dequantize_weight_kernel[(-(-rows // block), weight.num_blocks)](
        weight.words, weight.scale, weight.zero, out, rows, width, weight.words.shape[1], weight.outer,
        **weight.packing.constants, BLOCK_N=block, num_warps=4,
    )  # fmt: skip
    return out
