# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
# ruff: noqa: ANN001, ANN202
"""Products of the rows of up to 8 tokens with the weights of the experts that they chose.

The first pair of an expert multiplies all rows that chose it, so a weight is read once, and not at all where nobody
chose it; the programs of the other pairs end at once. The program that comes last to a tile of the second
product adds what the experts gave, always in the same order. Pairs, packed weights: see `expert_tiles`.
Shapes: T tokens, k experts of each, P = T k pairs, M rows, N outputs, K inputs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantkit.kernels.gpu import num_processors, power_of_two
from quantkit.kernels.gpu.choices import Tile
from quantkit.kernels.gpu.expert_tiles import ExpertWeights, add_tile, beginning_of, scaled_sums, shared_of
from quantkit.kernels.gpu.gates import GATES, outputs_of, store_gated
from quantkit.kernels.gpu.splits import counters, is_last_to_come, splits_of

TOKEN_LIMIT = 8
"""Tokens whose rows fit the narrowest tile of tensor cores."""

# A guess, not yet run on a GPU: few outputs, because experts are small and there is a program for each that is chosen.
_TILE = Tile(block_m=TOKEN_LIMIT, block_n=64, warps=4, stages=4, programs=4)
_CONSTANTS = {"ROWS": _TILE.block_m, **_TILE.constants}


@triton.jit
def _expert_rows_kernel(
    x, words, scale, zero, outer, chosen, weights, shared, shared_score, out, partials, counters,
    T, N, K, num_words, num_groups, num_blocks, blocks_per_split,
    BITS: tl.constexpr, KIND: tl.constexpr, SCALES: tl.constexpr, SPAN: tl.constexpr, GROUP: tl.constexpr,
    HAS_ZERO: tl.constexpr, TOP_K: tl.constexpr, PICKS: tl.constexpr, GATE: tl.constexpr, IS_LAST: tl.constexpr,
    HAS_SHARED: tl.constexpr, HAS_SCORE: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """BLOCK_N outputs of the rows of one expert; of the last product the last program to come adds the experts."""
    tile, split, pair = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    outputs, kept = outputs_of(tile, N, BLOCK_N, not IS_LAST)
    rows, picks = tl.arange(0, ROWS), tl.arange(0, PICKS)
    expert = tl.load(chosen + pair)
    pairs = rows[:, None] * TOP_K + picks[None, :]
    # Each program looks through all pairs: they are few, and sorting them would be one more launch.
    others = tl.load(chosen + pairs, mask=(rows < T)[:, None] & (picks < TOP_K)[None, :], other=-1)
    mine = tl.max(tl.where(others == expert, pairs, -1), axis=1)  # (ROWS,) each token's pair of this expert
    if tl.min(tl.where(mine < 0, T * TOP_K, mine), axis=0) == pair:  # the first pair works for the others
        row = mine if IS_LAST else rows
        inputs_at = x + tl.where(mine >= 0, row, 0).to(tl.int64) * K
        words += beginning_of(expert, N, num_words)
        if BITS < 16:
            scale += beginning_of(expert, N, num_groups)
        if HAS_ZERO:
            zero += beginning_of(expert, N, num_groups)
        total = tl.zeros((BLOCK_N, ROWS), tl.float32)
        last = tl.minimum((split + 1) * blocks_per_split, num_blocks)
        for block in tl.range(split * blocks_per_split, last, num_stages=STAGES):
            total = add_tile(
                total, inputs_at, mine >= 0, words, scale, zero, outputs, kept, block, N, K, num_words,
                out.dtype.element_ty, BITS, KIND, SCALES, SPAN, GROUP, HAS_ZERO,
            )  # fmt: skip
        sums = tl.trans(total)  # (ROWS, BLOCK_N)
        if BITS < 16:
            sums = scaled_sums(sums, scale, outer, expert, outputs, kept, GROUP, SCALES)
        if IS_LAST:
            sums *= tl.load(weights + mine, mask=mine >= 0, other=0.0)[:, None]
            at = partials + (split * T * TOP_K + mine).to(tl.int64)[:, None] * N + outputs[None, :]
            tl.store(at, sums, mask=(mine >= 0)[:, None] & kept[None, :])
        else:
            store_gated(sums, out, mine, mine >= 0, tile, N, ROWS, BLOCK_N, GATE)
    if IS_LAST:
        _add_experts(
            partials, counters + tile, shared, shared_score, out, rows, outputs, kept, T, N,
            TOP_K, HAS_SHARED, HAS_SCORE,
        )  # fmt: skip


@triton.jit
def _add_experts(
    partials, counter, shared, shared_score, out, rows, outputs, kept, T, N,
    TOP_K: tl.constexpr, HAS_SHARED: tl.constexpr, HAS_SCORE: tl.constexpr,
):  # fmt: skip
    """If all programs of a tile have come: their sums, always in the same order."""
    if is_last_to_come(counter, tl.num_programs(1) * tl.num_programs(2)):
        mask = (rows < T)[:, None] & kept[None, :]
        sums = tl.zeros(mask.shape, tl.float32)
        for pick in range(TOP_K):
            for split in range(tl.num_programs(1)):  # not by way of the L1 cache
                pair = (split * T + rows) * TOP_K + pick
                at = partials + pair.to(tl.int64)[:, None] * N + outputs[None, :]
                sums += tl.load(at, mask=mask, other=0.0, cache_modifier=".cg")
        at = rows.to(tl.int64)[:, None] * N + outputs[None, :]
        if HAS_SHARED:
            sums += shared_of(shared, shared_score, at, rows, T, mask, HAS_SCORE)
        tl.store(out + at, sums.to(out.dtype.element_ty), mask=mask)


def open_rows(x: Tensor, weight: ExpertWeights, chosen: Tensor, activation: str) -> Tensor:
    """The first product for up to `TOKEN_LIMIT` tokens: activation(gate) * up of each pair.

    Args:
        x: (T, K) contiguous.
        weight: N = 2 I, gates first.
        chosen: (T, k) int32, different for each token.
        activation: a key of `gates.GATES`.
    Returns:
        (T k, I), dtype of x.
    """
    tokens, picks = chosen.shape
    out = x.new_empty(tokens * picks, weight.shape[0] // 2)
    blocks = weight.num_blocks
    _expert_rows_kernel[-(-weight.shape[0] // _TILE.block_n), 1, tokens * picks](
        x, *weight.arguments, chosen, None, None, None, out, None, None, tokens, *weight.sizes, blocks, blocks,
        **weight.constants, TOP_K=picks, PICKS=power_of_two(picks), GATE=GATES[activation], IS_LAST=False,
        HAS_SHARED=False, HAS_SCORE=False, **_CONSTANTS,
    )  # fmt: skip
    return out


def close_rows(
    x: Tensor, weight: ExpertWeights, chosen: Tensor, weights: Tensor, shared: Tensor | None, score: Tensor | None
) -> Tensor:
    """The second product for up to `TOKEN_LIMIT` tokens, and the sum over each token's experts.

    Args:
        x: (T k, K) contiguous.
        weight: N = H.
        chosen: (T, k) int32.
        weights: (T, k) float32.
        shared: (T, N) contiguous, to be added; or None.
        score: (T, 1), weighs `shared` through a sigmoid; or None.
    Returns:
        (T, N), dtype of x.
    """
    (tokens, picks), outputs = chosen.shape, weight.shape[0]
    blocks, tiles = weight.num_blocks, -(-outputs // _TILE.block_n)
    splits = splits_of(tiles * tokens * picks, blocks, _TILE.programs * num_processors(x.device))
    out = x.new_empty(tokens, outputs)
    partials = torch.empty(splits, tokens * picks, outputs, dtype=torch.float32, device=x.device)
    _expert_rows_kernel[tiles, splits, tokens * picks](
        x, *weight.arguments, chosen, weights, shared, score, out, partials, counters(x.device),
        tokens, *weight.sizes, blocks, -(-blocks // splits), **weight.constants, TOP_K=picks, PICKS=power_of_two(picks),
        GATE=0, IS_LAST=True, HAS_SHARED=shared is not None, HAS_SCORE=score is not None, **_CONSTANTS,
    )  # fmt: skip
    return out
