# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
# ruff: noqa: ANN001, ANN202, RET505  only one branch on a constant is compiled
"""Products of tokens with the weights of their chosen experts, without asking the host how many rows each expert has.

A pair is a token and one of its experts; pair p belongs to token p / k. A product has one row per pair. Pairs are
sorted by expert, and each program handles up to BLOCK_M rows of one expert. The number of programs depends only on the
numbers of pairs and experts; programs without rows end at once. The first product gathers its rows by token and
computes activation(gate) * up; in a tile, each gate column is next to its up column. The second product scales its rows
by the router weights. Weights are packed as in `packing`, or unquantized in 16 bits.
Source: see `w4a16`; Gale et al. 2022, MegaBlocks.
Shapes: T tokens, k experts per token, P = T k pairs, E experts, M rows, N outputs, K inputs.
"""

import triton
import triton.language as tl
from torch import Tensor

from quantkit.kernels.gpu import capability, power_of_two
from quantkit.kernels.gpu.choices import MOST_TILE_ROWS, Tile, autotuned, product_tile
from quantkit.kernels.gpu.floats import load_scale
from quantkit.kernels.gpu.gates import GATES, outputs_of, store_gated
from quantkit.kernels.gpu.packed_blocks import add_tile_packed
from quantkit.kernels.gpu.packing import PackedWeight

# For unquantized weights. These tiles are guesses; packed weights use the tiles of `choices`.
_DENSE_TILES = (
    Tile(rows=16, columns=64, warps=4, stages=4),
    Tile(rows=32, columns=64, warps=4, stages=4),
    Tile(rows=64, columns=128, warps=8, stages=3),
    Tile(rows=128, columns=128, warps=8, stages=3),
)
# This many blocks of rows go through all outputs before the next blocks start, so what they read stays in the L2 cache.
_BLOCKS_AT_ONCE = 8


@triton.jit
def _scaled_sums(sums, scale, outer, expert, outputs, kept, GROUP: tl.constexpr, SCALES: tl.constexpr):
    """Multiply one expert's sums (M, N) by the scales that were not applied block by block."""
    if GROUP == 0:
        sums *= load_scale(scale + outputs, kept, SCALES)[None, :]
    if SCALES == 1:  # `packing.E4M3_BYTES`
        sums = sums / tl.load(outer + expert)
    return sums


@triton.jit
def _block_of(starts, block, E, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return the expert of a block, the position in `order` where the block starts, and the position where the expert's
    pairs end. The end is 0 if there is no such block.
    """
    experts = tl.arange(0, EXPERTS)
    begin = tl.load(starts + experts, mask=experts < E, other=0)
    count = tl.load(starts + experts + 1, mask=experts < E, other=0) - begin
    blocks = (count + BLOCK_M - 1) // BLOCK_M
    ends = tl.cumsum(blocks, 0)
    is_own = (block < ends) & (block >= ends - blocks)
    expert = tl.sum(tl.where(is_own, experts, 0), 0)
    first = tl.sum(tl.where(is_own, begin + (block - ends + blocks) * BLOCK_M, 0), 0)
    return expert, first, tl.sum(tl.where(is_own, begin + count, 0), 0)


@triton.jit
def _beginning_of(expert, rows, columns):
    """Return the offset of one expert's (rows, columns) matrix in an array that holds all experts."""
    return expert.to(tl.int64) * rows * columns


@triton.jit
def _add_tile(
    total, inputs_at, has_row, words, scale, zero, outputs, kept, block, N, K, num_words, OUT: tl.constexpr,
    BITS: tl.constexpr, KIND: tl.constexpr, SCALES: tl.constexpr, SPAN: tl.constexpr, GROUP: tl.constexpr,
    HAS_ZERO: tl.constexpr,
):  # fmt: skip
    """Call `add_tile_packed`, or do the same for 16-bit weights."""
    if BITS < 16:
        return add_tile_packed(
            total, inputs_at, has_row, words, scale, zero, outputs, kept, block, N, K, num_words, OUT,
            BITS, KIND, SCALES, SPAN, GROUP, HAS_ZERO, False, False,
        )  # fmt: skip
    else:
        inputs = block * SPAN + tl.arange(0, SPAN)
        at = words + outputs.to(tl.int64)[:, None] * K + inputs[None, :]
        value = tl.load(at, mask=kept[:, None] & (inputs < K)[None, :], other=0.0)
        a = tl.load(inputs_at[:, None] + inputs[None, :], mask=has_row[:, None] & (inputs < K)[None, :], other=0.0)
        # The weight on the left as in `add_tile_packed`, so that what follows is the same for both.
        return tl.dot(value, tl.trans(a), total, input_precision="ieee")


@autotuned("BLOCK_M", "E", "N", "K", "BITS", "GROUP", "KIND", "SCALES", "IS_LAST", staged=True)
@triton.jit
def _expert_tile_kernel(
    x, words, scale, zero, outer, order, starts, weights, out, E, N, K, num_words, num_groups, num_blocks, num_tiles,
    BITS: tl.constexpr, KIND: tl.constexpr, SCALES: tl.constexpr, SPAN: tl.constexpr, GROUP: tl.constexpr,
    HAS_ZERO: tl.constexpr, TOP_K: tl.constexpr, GATE: tl.constexpr, IS_LAST: tl.constexpr, EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_N outputs of BLOCK_M rows of one expert."""
    number = tl.program_id(0)
    block_of_rows = number // (AT_ONCE * num_tiles) * AT_ONCE + number % AT_ONCE
    tile = number % (AT_ONCE * num_tiles) // AT_ONCE
    # Each program searches for its own block, because a list of blocks would need another launch.
    expert, first, end = _block_of(starts, block_of_rows, E, EXPERTS, BLOCK_M)
    if end == 0:
        return
    outputs, kept = outputs_of(tile, N, BLOCK_N, not IS_LAST)
    sorted_at = first + tl.arange(0, BLOCK_M)
    has_row = sorted_at < end
    pairs = tl.load(order + sorted_at, mask=has_row, other=0)
    inputs_at = x + (pairs if IS_LAST else pairs // TOP_K).to(tl.int64) * K
    words += _beginning_of(expert, N, num_words)
    if BITS < 16:
        scale += _beginning_of(expert, N, num_groups)
    if HAS_ZERO:
        zero += _beginning_of(expert, N, num_groups)
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for block in tl.range(0, num_blocks, num_stages=STAGES):
        total = _add_tile(
            total, inputs_at, has_row, words, scale, zero, outputs, kept, block, N, K, num_words, out.dtype.element_ty,
            BITS, KIND, SCALES, SPAN, GROUP, HAS_ZERO,
        )  # fmt: skip
    sums = tl.trans(total)  # (BLOCK_M, BLOCK_N)
    if BITS < 16:
        sums = _scaled_sums(sums, scale, outer, expert, outputs, kept, GROUP, SCALES)
    if IS_LAST:
        sums *= tl.load(weights + pairs, mask=has_row, other=0.0)[:, None]
        at = out + pairs.to(tl.int64)[:, None] * N + outputs[None, :]
        tl.store(at, sums.to(out.dtype.element_ty), mask=has_row[:, None] & kept[None, :])
    else:
        store_gated(sums, out, pairs, has_row, tile, N, BLOCK_M, BLOCK_N, GATE)


def multiply_tiles(
    x: Tensor,
    weight: PackedWeight,
    order: Tensor,
    starts: Tensor,
    num_chosen: int,
    *,
    activation: str | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """Compute the first product (gate and up) or the second (down) of a layer's experts, for many tokens.

    Args:
        x: (T, K) with an activation, else (P, K); contiguous.
        weight: weights of all experts; with an activation N = 2 I, gates first; otherwise N = H.
        order: (P,) int32, pairs sorted by expert.
        starts: (E + 1,) int32, where each expert's pairs begin.
        num_chosen: k.
        activation: a key of `gates.GATES` for the first product; None = the second product.
        weights: (T, k) float32, factors on the rows of the second product.
    Returns:
        (P, I) or (P, N), one row per pair, dtype of x.
    """
    num_experts, outputs = weight.words.shape[0], weight.shape[0]
    tile = _tile(-(-len(order) // num_experts), weight)
    block_m = tile.rows
    # The last block of each expert may not be full.
    blocks = min(len(order) // block_m + min(num_experts, len(order)), len(order))
    at_once, tiles = min(_BLOCKS_AT_ONCE, blocks), -(-outputs // tile.columns)
    out = x.new_empty(len(order), outputs if activation is None else outputs // 2)
    _expert_tile_kernel[(-(-blocks // at_once) * at_once * tiles,)](
        x, *weight.tensors, None if weight.scale is None else weight.outer, order, starts, weights, out, num_experts,
        *weight.shape, weight.words.shape[2], 0 if weight.scale is None else weight.scale.shape[1], weight.num_blocks,
        tiles,
        **weight.packing.constants, TOP_K=num_chosen, GATE=GATES.get(activation or "", 0), IS_LAST=activation is None,
        EXPERTS=power_of_two(num_experts), BLOCK_M=block_m, BLOCK_N=tile.columns, AT_ONCE=at_once,
        **tile.options(staged=True),
    )  # fmt: skip
    return out


def _tile(rows: int, weight: PackedWeight) -> Tile:
    """Return the smallest tile that holds `rows`, the average number of rows per expert; else the largest tile."""
    if weight.scale is not None:
        chip = capability(weight.words.device)
        # Before Hopper, 64 gathered rows need more registers than there are.
        return product_tile(min(rows, 32 if 0 < chip < 90 else MOST_TILE_ROWS), chip)
    return next((tile for tile in _DENSE_TILES if rows <= tile.rows), _DENSE_TILES[-1])
