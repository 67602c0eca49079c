"""Encoders for Q4_K and Q6_K: blocks of 256 values whose float16 scales multiply small integer scales of sub-blocks.

For each sub-block, both search the scale (and minimum) with the least weighted squared error, and round it to an
integer multiple of the block's scale. Then they refine in turn the codes, the integer scales (by at most one) and the
float16 scales (by least squares); a step is kept only if it lowers the error of its block. ggml's own encoder does not
refine, and the gguf package has no encoder.
Shapes: M blocks, S sub-blocks of n values, S * n = 256.
Source: format and first search: ggml `src/ggml-quants.c` (make_qkx2_quants, make_qx_quants).
"""

import functools
import itertools

import torch
from torch import Tensor

# Blocks worked on at once: their temporaries stay in a CPU's cache.
_CHUNK = 512
_ROUNDS = 3

State = tuple[Tensor, ...]


def search_k_quant(values: Tensor, bits: int, importance: Tensor | None = None) -> Tensor:
    """Encode values as Q4_K or Q6_K.

    Q4_K: value = d * scale * code - dmin * minimum; codes 0..15, one 6-bit scale and minimum per 32 values.
    Q6_K: value = d * scale * code; codes -32..31, one 8-bit scale per 16 values.

    Args:
        values: (M, 256) float32.
        bits: 4 or 6.
        importance: (M, 256) float32 >= 0, weights of the squared errors; None = weight errors by the values' size.
    Returns:
        uint8, (M, 144) for Q4_K or (M, 210) for Q6_K.
    """
    encode, block_bytes = (_q4_k, 144) if bits == 4 else (_q6_k, 210)
    encoded = [torch.empty(0, block_bytes, dtype=torch.uint8)]
    for row in range(0, values.shape[0], _CHUNK):
        chunk = slice(row, row + _CHUNK)
        encoded.append(encode(values[chunk], None if importance is None else importance[chunk]))
    return torch.cat(encoded)


def _q4_k(values: Tensor, importance: Tensor | None) -> Tensor:
    blocks = values.view(-1, 8, 32)
    if importance is None:  # as ggml has it; with importance, of the size of a value within its block too
        weights = blocks.square().mean(-1, keepdim=True).sqrt() + blocks.abs()
    else:
        weights = _weighted(blocks, importance)
    scale, minimum = _search_affine(blocks, weights)  # (M, 8) each, >= 0
    # Rounded before the integers are chosen, so that these fit the step that is stored; 63 is the largest of 6 bits.
    step = _half(scale.amax(1, keepdim=True) / 63)
    offset = _half(minimum.amax(1, keepdim=True) / 63)
    scales = _ratio(scale, step).round_().clamp_(0, 63)
    minimums = _ratio(minimum, offset).round_().clamp_(0, 63)
    best = _improve_q4(blocks, weights, step, offset, scales, minimums)
    for _ in range(_ROUNDS):
        _, codes, step, offset, scales, minimums = best
        refit = _fit_pair(blocks, weights, codes * scales.unsqueeze(-1), minimums.unsqueeze(-1).expand_as(codes))
        best = _better(best, _improve_q4(blocks, weights, *refit, scales, minimums))
    _, codes, step, offset, scales, minimums = best
    pairs = codes.to(torch.uint8).view(-1, 4, 2, 32)
    packed = pairs[:, :, 0] | pairs[:, :, 1] << 4
    head = torch.cat([step, offset], dim=1).to(torch.float16).view(torch.uint8)
    return torch.cat([head, _pack_scales(scales.to(torch.uint8), minimums.to(torch.uint8)), packed.flatten(1)], dim=1)


def _pack_scales(scales: Tensor, minimums: Tensor) -> Tensor:
    """Pack the eight 6-bit scales and eight 6-bit minimums of a block, (M, 8) uint8 each, into twelve bytes.

    Each of the first four scales and minimums has a byte; its two highest bits hold the two highest bits of one of the
    last four. The low nibbles of the last four scales and minimums share four bytes.
    """
    low = scales[:, :4] | scales[:, 4:] >> 4 << 6
    high = minimums[:, :4] | minimums[:, 4:] >> 4 << 6
    return torch.cat([low, high, scales[:, 4:] & 15 | (minimums[:, 4:] & 15) << 4], dim=1)


def _weighted(blocks: Tensor, importance: Tensor) -> Tensor:
    """Multiply the importance of each input by the size of its weight relative to the block."""
    spread = 2 * blocks.square().mean((1, 2), keepdim=True)
    return importance.reshape(blocks.shape) * (spread + blocks.square()).sqrt()


def _search_affine(blocks: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Search the scale and minimum (a number >= 0 to subtract) of each sub-block for codes 0..15, each (M, S)."""
    # The format subtracts a minimum that is not negative, so a range cannot begin above zero.
    low, high = blocks.amin(-1, keepdim=True).clamp(max=0), blocks.amax(-1, keepdim=True)
    width = (high - low).clamp_(min=1e-30)
    codes = ((blocks - low) / (width / 15)).round_().clamp_(0, 15)
    best: State = (_error(blocks, weights, codes * (width / 15) + low), width / 15, low)
    total, total_x = weights.sum(-1, keepdim=True), (weights * blocks).sum(-1, keepdim=True)
    # ggml's trials: grids that spread the range over 14 to 16 steps, each refitted by least squares.
    for number in range(21):
        codes = ((blocks - best[2]) * ((14.0 + 0.1 * number) / width)).round_().clamp_(0, 15)
        weighted = weights * codes
        sum_l, sum_l2 = weighted.sum(-1, keepdim=True), (weighted * codes).sum(-1, keepdim=True)
        sum_xl = (weighted * blocks).sum(-1, keepdim=True)
        determinant = (total * sum_l2 - sum_l.square()).clamp_(min=1e-30)
        scale = (total * sum_xl - total_x * sum_l) / determinant
        start = (sum_l2 * total_x - sum_l * sum_xl) / determinant
        # A start above zero cannot be stored; the fit through zero takes its place.
        scale = torch.where(start > 0, sum_xl / sum_l2.clamp(min=1e-30), scale)
        start = start.clamp(max=0)
        error = _error(blocks, weights, codes * scale + start)
        # Scales are unsigned in this format.
        best = _better(best, (torch.where(scale.squeeze(-1) > 0, error, torch.inf), scale, start))
    return best[1].squeeze(-1), -best[2].squeeze(-1)


def _improve_q4(
    blocks: Tensor, weights: Tensor, step: Tensor, offset: Tensor, scales: Tensor, minimums: Tensor
) -> State:
    """Find the best codes for these float16 scales, changing integer scales and minimums by at most one.

    Returns:
        error (M,), codes (M, 8, 32), step, offset, and the chosen integer scales and minimums.
    """

    def moved(by: tuple[int, ...]) -> State:
        tried, lowered = (scales + by[0]).clamp_(0, 63), (minimums + by[1]).clamp_(0, 63)
        slope, start = (step * tried).unsqueeze(-1), (offset * lowered).unsqueeze(-1)
        codes = _ratio(blocks + start, slope).round_().clamp_(0, 15)
        return _error(blocks, weights, codes * slope - start), codes, tried, lowered

    error, codes, *integers = functools.reduce(_better, map(moved, itertools.product((0, -1, 1), repeat=2)))
    return error.sum(1), codes, step, offset, *integers


def _fit_pair(blocks: Tensor, weights: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Fit d and dmin (M, 1), exact in float16, so that d * first - dmin * second approximates the values."""
    aa, ab, bb, ax, bx = (
        (weights * left * right).sum((1, 2))
        for left, right in ((first, first), (first, second), (second, second), (first, blocks), (second, blocks))
    )
    determinant = aa * bb - ab.square()
    # Cauchy-Schwarz: 0 <= determinant <= aa * bb; near 0 the two are parallel, and d alone is fitted.
    usable = determinant > 1e-6 * aa * bb
    step = torch.where(usable, (ax * bb - bx * ab) / determinant, ax / aa.clamp(min=1e-30))
    offset = torch.where(usable, (ax * ab - bx * aa) / determinant, torch.zeros_like(step))
    return _half(step.clamp_(min=0).view(-1, 1)), _half(offset.clamp_(min=0).view(-1, 1))


def _q6_k(values: Tensor, importance: Tensor | None) -> Tensor:
    blocks = values.view(-1, 16, 16)
    weights = blocks.square() if importance is None else _weighted(blocks, importance)
    weights = weights + 1e-12  # a block of zeros has an error too
    scale = _search_symmetric(blocks, weights)  # (M, 16), signed
    extreme = scale.gather(1, scale.abs().argmax(1, keepdim=True))
    # Integer scales of 8 bits reach one further below zero than above, so the extreme one becomes -128.
    step = _half(extreme / -128)
    scales = _ratio(scale, step).round_().clamp_(-128, 127)
    best = _improve_q6(blocks, weights, step, scales)
    for _ in range(_ROUNDS):
        _, codes, step, scales = best
        grid = codes * scales.unsqueeze(-1)
        refit = (weights * grid * blocks).sum((1, 2)) / (weights * grid * grid).sum((1, 2)).clamp(min=1e-30)
        best = _better(best, _improve_q6(blocks, weights, _half(refit.view(-1, 1)), scales))
    _, codes, step, scales = best
    return pack_q6_k(codes, scales, step)


def pack_q6_k(codes: Tensor, scales: Tensor, step: Tensor) -> Tensor:
    """Pack Q6_K blocks: value = step * scale * code.

    Args:
        codes: whole numbers in -32..31, (M, 256) or (M, 16, 16).
        scales: (M, 16) whole numbers in -128..127.
        step: (M, 1), exact in float16.
    Returns:
        (M, 210) uint8.
    """
    # In each half of 128 values, four runs of 32: nibbles pair two runs apart, the high bits of all four share a byte.
    quarters = (codes + 32).to(torch.uint8).view(-1, 2, 4, 32)
    low = (quarters[:, :, :2] & 15 | (quarters[:, :, 2:] & 15) << 4).flatten(1)  # (M, 128)
    high = quarters >> 4 << torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(4, 1)
    high = (high[:, :, 0] | high[:, :, 1] | high[:, :, 2] | high[:, :, 3]).flatten(1)
    tail = step.to(torch.float16).contiguous().view(torch.uint8)
    return torch.cat([low, high, scales.to(torch.int8).view(torch.uint8), tail], dim=1)


def _search_symmetric(blocks: Tensor, weights: Tensor) -> Tensor:
    """Search the signed scale of each sub-block, (M, S): the value of largest magnitude gets a code near -32."""
    extreme = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))  # (M, S, 1)
    safe = torch.where(extreme == 0, torch.ones_like(extreme), extreme)
    best: State = (extreme.new_ones(extreme.shape[:2]), extreme.new_zeros(extreme.shape[:2]))
    for number in range(-9, 10):
        codes = (blocks * (-(32 + 0.1 * number) / safe)).round_().clamp_(-32, 31)
        weighted = weights * codes
        sum_xl, sum_l2 = (weighted * blocks).sum(-1), (weighted * codes).sum(-1).clamp_(min=1e-30)
        best = _better(best, (-sum_xl.square() / sum_l2, sum_xl / sum_l2))  # less a constant, the error
    return best[1]


def _improve_q6(blocks: Tensor, weights: Tensor, step: Tensor, scales: Tensor) -> State:
    """Find the best codes for this float16 scale, changing integer scales by at most one.

    Returns:
        error (M,), codes (M, 16, 16), step, and the chosen integer scales.
    """

    def moved(by: int) -> State:
        tried = (scales + by).clamp_(-128, 127)
        slope = (step * tried).unsqueeze(-1)
        codes = _ratio(blocks, slope).round_().clamp_(-32, 31)
        return _error(blocks, weights, codes * slope), codes, tried

    error, codes, chosen = functools.reduce(_better, map(moved, (0, -1, 1)))
    return error.sum(1), codes, step, chosen


def _error(blocks: Tensor, weights: Tensor, decoded: Tensor) -> Tensor:
    """Compute the weighted squared error per sub-block, (M, S)."""
    return (decoded - blocks).square_().mul_(weights).sum(-1)


def _better(old: State, new: State) -> State:
    """Combine two states: take each block or sub-block from the state in which its error is lower.

    The first tensor of a state is the error of each block or sub-block.
    """
    better = new[0] < old[0]
    return tuple(
        torch.where(better.view(*better.shape, *[1] * (one.ndim - better.ndim)), other, one)
        for one, other in zip(old, new, strict=True)
    )


def _ratio(values: Tensor, by: Tensor) -> Tensor:
    """Divide values by `by`; the result is 0 where `by` is 0."""
    return torch.where(by == 0, torch.zeros_like(values), values / torch.where(by == 0, torch.ones_like(by), by))


def _half(values: Tensor) -> Tensor:
    """Round values to float16 and return them as float32."""
    return values.to(torch.float16).float()
