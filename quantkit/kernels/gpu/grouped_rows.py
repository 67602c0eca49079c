# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
# ruff: noqa: ANN001, ANN202
"""Products of the rows of up to 4 tokens with the weights of the experts that they chose.

The first pair of an expert multiplies all rows that chose it, one by one, so a weight is read once, and not at all
where nobody chose it; the programs of the other pairs end at once. The program that comes last to a tile of the second
product adds what the experts gave, always in the same order. Pairs, packed weights: see `grouped`.
Shapes: T tokens, k experts of each, P = T k pairs, M rows, N outputs, K inputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantkit.kernels.gpu import num_processors, power_of_two
from quantkit.kernels.gpu.floats import load_scale
from quantkit.kernels.gpu.grouped import ExpertWeights, open_gate, outputs_of, scaled_sums, shared_of
from quantkit.kernels.gpu.norms import _GATES
from quantkit.kernels.gpu.split_kv import counters
from quantkit.kernels.gpu.w4a16 import (
    _decode,
    _load_words,
    _zeros_of,
    add_rows,
    add_scaled,
    no_sums,
    num_parts,
    sum_rows,
)

TOKEN_LIMIT = 4
"""Tokens up to which each row is multiplied on its own."""

_WORDS = 1024  # of a program at once
_DENSE_SPAN = 64  # fewer inputs than threads: each loads those that it needs


@triton.jit
def _add_rows_packed(
    total, inputs_at, words, scale, zero, outputs, kept, block, N, K, num_words,
    BITS: tl.constexpr, FIELD: tl.constexpr, SCALES: tl.constexpr, SPAN: tl.constexpr, GROUP: tl.constexpr,
    HAS_ZERO: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Add the products of one block to sums that stay with their thread, see `w4a16.no_sums`."""
    FIELDS: tl.constexpr = 32 // BITS
    OFFSET: tl.constexpr = 1 << (BITS - 1)
    lanes = tl.arange(0, SPAN)
    loaded = _load_words(words, outputs, block, lanes, kept, num_words, SPAN, False, FIELD)
    first = block * SPAN * FIELDS
    partial = no_sums(BLOCK_N, SPAN)
    for field in tl.static_range(FIELDS):
        index = 0 if GROUP == 0 else (first + field * SPAN) // GROUP
        inputs = first + field * SPAN + lanes
        value = _decode(loaded, _zeros_of(zero, index, outputs, kept, N, OFFSET, HAS_ZERO), field, BITS, FIELD)
        partial = add_rows(partial, value, inputs_at, inputs, K, ROWS)
        if GROUP > 0 and ((field + 1) * SPAN % GROUP == 0 or field == FIELDS - 1):
            total = add_scaled(total, partial, load_scale(scale + index * N + outputs, kept, SCALES)[:, None], ROWS)
            partial = no_sums(BLOCK_N, SPAN)
    if GROUP == 0:
        total = add_scaled(total, partial, 1.0, ROWS)
    return total


@triton.jit
def _add_rows_dense(total, inputs_at, words, outputs, kept, block, K, SPAN: tl.constexpr, ROWS: tl.constexpr):
    """The same for weights in 16 bits."""
    inputs = block * SPAN + tl.arange(0, SPAN)
    at = words + outputs.to(tl.int64)[:, None] * K + inputs[None, :]
    value = tl.load(at, mask=kept[:, None] & (inputs < K)[None, :], other=0.0, eviction_policy="evict_first")
    return add_rows(total, value.to(tl.float32), inputs_at, inputs, K, ROWS)


@triton.jit
def _row_at(x, mine, rows, T, K, row: tl.constexpr, IS_LAST: tl.constexpr):
    """Where the inputs of a token are, or of its pair; where there is none, those of some other, not to be stored."""
    token, pair = tl.minimum(row, T - 1), tl.maximum(tl.max(tl.where(rows == row, mine, -1), axis=0), 0)
    return x + (pair if IS_LAST else token).to(tl.int64) * K


@triton.jit
def _expert_rows_kernel(
    x, words, scale, zero, outer, chosen, weights, shared, shared_score, out, parts, counters,
    T, N, K, num_words, num_groups, num_blocks, blocks_per_part,
    BITS: tl.constexpr, FIELD: tl.constexpr, SCALES: tl.constexpr, SPAN: tl.constexpr, GROUP: tl.constexpr,
    HAS_ZERO: tl.constexpr, TOP_K: tl.constexpr, PICKS: tl.constexpr, KIND: tl.constexpr, IS_LAST: tl.constexpr,
    HAS_SHARED: tl.constexpr, HAS_SCORE: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """BLOCK_N outputs of the rows of one expert; of the last product the last program to come adds the experts."""
    tile, part, pair = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    outputs, kept = outputs_of(tile, N, BLOCK_N, not IS_LAST)
    rows, picks = tl.arange(0, ROWS), tl.arange(0, PICKS)
    expert = tl.load(chosen + pair)
    pairs = rows[:, None] * TOP_K + picks[None, :]
    others = tl.load(chosen + pairs, mask=(rows < T)[:, None] & (picks < TOP_K)[None, :], other=-1)
    mine = tl.max(tl.where(others == expert, pairs, -1), axis=1)  # (ROWS,) each token's pair of this expert
    if tl.min(tl.where(mine < 0, T * TOP_K, mine), axis=0) == pair:  # the first pair works for the others
        inputs_at = (
            _row_at(x, mine, rows, T, K, 0, IS_LAST), _row_at(x, mine, rows, T, K, 1, IS_LAST),
            _row_at(x, mine, rows, T, K, 2, IS_LAST), _row_at(x, mine, rows, T, K, 3, IS_LAST),
        )  # fmt: skip
        words += expert.to(tl.int64) * N * num_words
        if BITS < 16:
            scale += expert.to(tl.int64) * num_groups * N
        if HAS_ZERO:
            zero += expert.to(tl.int64) * num_groups * N
        total = no_sums(BLOCK_N, SPAN)
        last = tl.minimum((part + 1) * blocks_per_part, num_blocks)
        for block in tl.range(part * blocks_per_part, last, num_stages=3):  # two blocks on their way
            if BITS < 16:
                total = _add_rows_packed(
                    total, inputs_at, words, scale, zero, outputs, kept, block, N, K, num_words,
                    BITS, FIELD, SCALES, SPAN, GROUP, HAS_ZERO, ROWS, BLOCK_N,
                )  # fmt: skip
            else:
                total = _add_rows_dense(total, inputs_at, words, outputs, kept, block, K, SPAN, ROWS)
        sums = sum_rows(total, rows, ROWS)
        if BITS < 16:
            sums = scaled_sums(sums, scale, outer, expert, outputs, kept, GROUP, SCALES)
        if IS_LAST:
            sums *= tl.load(weights + mine, mask=mine >= 0, other=0.0)[:, None]
            at = parts + (part * T * TOP_K + mine).to(tl.int64)[:, None] * N + outputs[None, :]
            tl.store(at, sums, mask=(mine >= 0)[:, None] & kept[None, :])
        else:
            opened = open_gate(sums, ROWS, BLOCK_N, KIND, out.dtype.element_ty)
            columns = tile * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
            at = out + mine.to(tl.int64)[:, None] * (N // 2) + columns[None, :]
            tl.store(at, opened.to(out.dtype.element_ty), mask=(mine >= 0)[:, None] & (columns < N // 2)[None, :])
    if IS_LAST:
        _add_experts(
            parts, counters + tile, shared, shared_score, out, rows, outputs, kept, T, N, TOP_K, HAS_SHARED, HAS_SCORE
        )


@triton.jit
def _add_experts(
    parts, counter, shared, shared_score, out, rows, outputs, kept, T, N,
    TOP_K: tl.constexpr, HAS_SHARED: tl.constexpr, HAS_SCORE: tl.constexpr,
):  # fmt: skip
    """If all programs of a tile have come: their sums, always in the same order. The counter is left at zero."""
    tl.debug_barrier()  # every thread's numbers before the one that counts
    num = tl.num_programs(1) * tl.num_programs(2)
    if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == num - 1:
        tl.store(counter, 0)
        mask = (rows < T)[:, None] & kept[None, :]
        sums = tl.zeros(mask.shape, tl.float32)
        for pick in range(TOP_K):
            for part in range(tl.num_programs(1)):  # not by way of the L1 cache
                pair = (part * T + rows) * TOP_K + pick
                at = parts + pair.to(tl.int64)[:, None] * N + outputs[None, :]
                sums += tl.load(at, mask=mask, other=0.0, cache_modifier=".cg")
        at = rows.to(tl.int64)[:, None] * N + outputs[None, :]
        if HAS_SHARED:
            sums += shared_of(shared, shared_score, at, rows, T, mask, HAS_SCORE)
        tl.store(out + at, sums.to(out.dtype.element_ty), mask=mask)


def _blocks(weight: ExpertWeights, tokens: int) -> tuple[int, int, int]:
    """Words of a block, blocks of a row, and outputs of a program; loads of 16 bytes, sums that the registers hold."""
    span = weight.span if weight.scale is not None else _DENSE_SPAN
    outputs = (_WORDS if weight.scale is not None or tokens > 2 else 2 * _WORDS) // span
    return span, -(-weight.words.shape[2] // span), outputs


def open_rows(x: Tensor, weight: ExpertWeights, chosen: Tensor, activation: str) -> Tensor:
    """The first product for up to `TOKEN_LIMIT` tokens: activation(gate) * up of each pair.

    Args:
        x: (T, K) contiguous.
        weight: N = 2 I, gates first.
        chosen: (T, k) int32, different for each token.
        activation: a key of `norms._GATES`.
    Returns:
        (T k, I), dtype of x.
    """
    tokens, picks = chosen.shape
    out = x.new_empty(tokens * picks, weight.shape[0] // 2)
    span, blocks, block_n = _blocks(weight, tokens)
    grid = (-(-weight.shape[0] // block_n), 1, tokens * picks)
    _expert_rows_kernel[grid](
        x, weight.words, weight.scale, weight.zero, weight.outer, chosen, None, None, None, out, None, None,
        tokens, *weight.sizes, blocks, blocks, **weight.constants, SPAN=span,
        TOP_K=picks, PICKS=power_of_two(picks), KIND=_GATES[activation], IS_LAST=False, HAS_SHARED=False,
        HAS_SCORE=False, ROWS=power_of_two(tokens), BLOCK_N=block_n, num_warps=4,
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
    span, blocks, block_n = _blocks(weight, tokens)
    tiles = -(-outputs // block_n)
    cut = num_parts(tiles * tokens * picks, blocks, 8 * num_processors(x.device))
    out = x.new_empty(tokens, outputs)
    partial = torch.empty(cut, tokens * picks, outputs, dtype=torch.float32, device=x.device)
    _expert_rows_kernel[(tiles, cut, tokens * picks)](
        x, weight.words, weight.scale, weight.zero, weight.outer, chosen, weights, shared, score, out,
        partial, counters(x.device), tokens, *weight.sizes, blocks, -(-blocks // cut), **weight.constants, SPAN=span,
        TOP_K=picks, PICKS=power_of_two(picks), KIND=0, IS_LAST=True, HAS_SHARED=shared is not None,
        HAS_SCORE=score is not None, ROWS=power_of_two(tokens), BLOCK_N=block_n, num_warps=4,
    )  # fmt: skip
    return out
