"""Search the scales and minimums of ggml's blocks: a float16 number of the block times a small integer of each group.

    q2_k  16 groups of 16   scale 0..15      minimum 0..15
    q3_k  16 groups of 16   scale -32..31
    q4_k   8 groups of 32   scale 0..63      minimum 0..63
    q5_k   8 groups of 32   scale 0..63      minimum 0..63
    q6_k  16 groups of 16   scale -128..127
    q4_1, q5_1  one group of 32, whose scale and minimum are the block's

For each group, the search finds the scale (and minimum) with the least weighted squared error, and rounds it to a whole
multiple of the block's scale (minimum). Then it refines in turn the whole numbers (by at most one) and the float16
numbers (by least squares); a step is kept only if it lowers the error of its block. ggml's own search does not refine.
No group has the whole number 0 as its scale, because 1 or -1 is never worse: the group's codes can all be 0.
Shapes: N outputs, K inputs, G groups of n inputs, M blocks of S groups, B blocks per row.
Source: format and first search: ggml `src/ggml-quants.c` (make_qkx2_quants, make_qx_quants).
"""

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from quantkit.numerics.dtype import DType
from quantkit.numerics.tensor import concatenated

# Values worked on at once: their temporaries stay in a CPU's cache.
_CHUNK = 1 << 17
_ROUNDS = 3
# A minimum below this fraction of its scale becomes 0, because a float32 zero point could not represent it precisely.
_LEAST_MINIMUM = 1e-3
# Replaces a block scale of 0, which occurs if all values are 0 or each equals its group's minimum.
_LEAST_SCALE = 2.0**-24

State = tuple[Tensor, ...]


class Blocks(NamedTuple):
    """Scales and minimums of M blocks.

    Args:
        step: (M, 1) scale of each block, exact in float16.
        offset: (M, 1) the number that multiplies the minimums, exact in float16 and >= 0; None without minimums.
        scales: (M, S) whole numbers, none 0.
        minimums: (M, S) whole numbers >= 0; None without minimums.
    """

    step: Tensor
    offset: Tensor | None
    scales: Tensor
    minimums: Tensor | None


def search_blocks(values: Tensor, dtype: DType, weights: Tensor | None = None) -> Blocks:
    """Search scales and minimums of blocks that minimize the weighted squared error of rounding to nearest.

    Args:
        values: (M, values of a block) float32; not modified.
        dtype: a type of ggml.
        weights: weights >= 0 of the squared errors, in the shape of `values`; None = all 1.
    """
    assert dtype.block is not None, f"{dtype.name} has no blocks"
    search = _search_affine_blocks if dtype.has_minimums else _search_symmetric_blocks
    step, parts = max(1, _CHUNK // dtype.block[0]), []
    for row in range(0, len(values), step):
        groups = values[row : row + step].view(-1, _groups(dtype), int(dtype.group or 0))
        own = torch.ones_like(groups) if weights is None else weights[row : row + step].reshape(groups.shape)
        parts.append(search(groups, own, dtype))
    return _join(parts)


def nearest_blocks(scale: Tensor, minimum: Tensor | None, dtype: DType) -> Blocks:
    """Round scales and minimums to values that blocks can store.

    Args:
        scale: (M, S) float32.
        minimum: (M, S) float32, the number to subtract; below 0 it becomes 0. None without minimums.
        dtype: a type of ggml.
    """
    low, high = dtype.levels
    if minimum is None:
        extreme = scale.gather(1, scale.abs().argmax(1, keepdim=True))
        # Whole numbers reach one further below zero than above, so the scale of largest magnitude gets the lowest.
        step = _whole_step(scale, [extreme / (low * part) for part in _PARTS], dtype)
        return _completed(step, None, _multiples(scale, step, dtype), None)
    minimum = minimum.clamp(min=0)
    step = _whole_step(scale, [scale.amax(1, keepdim=True) / (high * part) for part in _PARTS], dtype)
    offset = _whole_step(minimum, [minimum.amax(1, keepdim=True) / (high * part) for part in _PARTS], dtype)
    return _completed(step, offset, _multiples(scale, step, dtype), _multiples(minimum, offset, dtype))


def range_blocks(values: Tensor, dtype: DType) -> Blocks:
    """Return, without a search, scales and minimums of blocks so that their ranges cover all values.

    Args:
        values: (M, values of a block).
        dtype: number type of the blocks.
    """
    groups = values.view(len(values), _groups(dtype), -1)
    low, high = groups.amin(-1).clamp_(max=0), groups.amax(-1).clamp_(min=0)
    if dtype.has_minimums:
        return nearest_blocks((high - low) / dtype.full_range, -low, dtype)
    return nearest_blocks(torch.maximum(-low, high) / dtype.half_range, None, dtype)


def expand(blocks: Blocks, rows: int, dtype: DType) -> tuple[Tensor, Tensor | None, Tensor]:
    """Convert blocks to the scales and zero points of their groups.

    Args:
        blocks: blocks of all rows, row by row.
        rows: N.
        dtype: a type of ggml.
    Returns:
        Scales (N, G); zero points (N, G), or None; `step` and, if there is one, `offset` of each block (N, B, 1 or 2).
        All are float32.
    """
    scale = blocks.step * blocks.scales  # exact: 11 bits times 8
    if blocks.offset is None or blocks.minimums is None:
        return scale.view(rows, -1), None, blocks.step.view(rows, -1, 1)
    zero = zero_points(scale, blocks.offset * blocks.minimums, dtype)
    return scale.view(rows, -1), zero.view(rows, -1), torch.cat([blocks.step, blocks.offset], 1).view(rows, -1, 2)


def zero_points(scale: Tensor, minimum: Tensor, dtype: DType) -> Tensor:
    """Return the unrounded zero points for which (code - zero point) * scale is -minimum at the lowest code."""
    return minimum / scale + dtype.minimum


def collect(scale: Tensor, zero_point: Tensor | None, block_scale: Tensor, dtype: DType) -> Blocks:
    """Return the blocks of a weight: the inverse of `expand`."""
    step = block_scale[..., :1].reshape(-1, 1)
    scales = scale.reshape(len(step), -1)
    whole = (scales / step).round_()
    if zero_point is None:
        return Blocks(step, None, whole, None)
    offset = block_scale[..., 1:].reshape(-1, 1)
    minimum = (zero_point.reshape(scales.shape) - dtype.minimum) * scales
    return Blocks(step, offset, whole, _ratio(minimum, offset).round_())


# The largest scale of a block becomes one of these fractions of the largest whole number.
_PARTS = (1.0, 0.97, 0.94, 0.91, 0.88, 0.85, 0.82)


def _groups(dtype: DType) -> int:
    assert dtype.block is not None and dtype.group is not None, f"{dtype.name} has no blocks"
    return dtype.block[0] // dtype.group


def _whole_step(scale: Tensor, tried: Sequence[Tensor], dtype: DType) -> Tensor:
    """Return for each block the tried step whose whole multiples approximate the scales best, (M, 1)."""
    best: State | None = None
    for step in map(_half, tried if dtype.levels != (1, 1) else tried[:1]):
        error = (_multiples(scale, step, dtype) * step - scale).square_().sum(1)
        best = (error, step) if best is None else _better(best, (error, step))
    assert best is not None
    return best[1]


def _multiples(scale: Tensor, step: Tensor, dtype: DType) -> Tensor:
    low, high = dtype.levels
    if dtype.levels == (1, 1):
        return torch.ones_like(scale)
    return _ratio(scale, step).round_().clamp_(low, high)


def _completed(step: Tensor, offset: Tensor | None, scales: Tensor, minimums: Tensor | None) -> Blocks:
    """Return blocks whose numbers are safe to convert to float32 zero points (minimum / scale).

    Scales of 0 are replaced, because they cannot be divisors. Minimums that could not be recovered from a zero point,
    because they are too small, become 0.
    """
    step = torch.where(step == 0, _LEAST_SCALE, step)
    scales = torch.where(scales == 0, 1.0, scales)
    if offset is None or minimums is None:
        return Blocks(step, None, scales, None)
    tiny = offset * minimums < _LEAST_MINIMUM * step * scales
    # A block with one group stores no whole number for its minimum, so its offset is cleared.
    offset = torch.where(tiny.all(1, keepdim=True), 0.0, offset)
    return Blocks(step, offset, scales, torch.where(tiny, 0.0, minimums))


def _join(parts: Sequence[Blocks]) -> Blocks:
    step, offset, scales, minimums = map(concatenated, zip(*parts, strict=True))
    assert step is not None and scales is not None
    return Blocks(step, offset, scales, minimums)


def _search_affine_blocks(groups: Tensor, weights: Tensor, dtype: DType) -> Blocks:
    scale, minimum = _search_affine(groups, weights, dtype)  # (M, S) each, >= 0
    # Rounded before the whole numbers are chosen, so that these fit the step that is stored.
    high = dtype.levels[1]
    step, offset = (_half(each.amax(1, keepdim=True) / high) for each in (scale, minimum))
    start = _completed(step, offset, _multiples(scale, step, dtype), _multiples(minimum, offset, dtype))
    best = _improve_affine(groups, weights, start, dtype)
    for _ in range(_ROUNDS):
        _, codes, *numbers = best
        blocks = Blocks(*numbers)
        assert blocks.minimums is not None
        grid = codes * blocks.scales.unsqueeze(-1)
        refit = _fit_pair(groups, weights, grid, blocks.minimums.unsqueeze(-1).expand_as(codes))
        best = _better(best, _improve_affine(groups, weights, Blocks(*refit, *blocks[2:]), dtype))
    return _completed(*best[2:])


def _search_affine(groups: Tensor, weights: Tensor, dtype: DType) -> tuple[Tensor, Tensor]:
    """Search the scale and the minimum (a number >= 0 to subtract) of each group, both (M, S); codes start at 0."""
    last = dtype.full_range
    # The format subtracts a minimum that is not negative, so a range cannot begin above zero.
    low, high = groups.amin(-1, keepdim=True).clamp(max=0), groups.amax(-1, keepdim=True)
    width = (high - low).clamp_(min=1e-30)
    codes = ((groups - low) / (width / last)).round_().clamp_(0, last)
    best: State = (_error(groups, weights, codes * (width / last) + low), width / last, low)
    total, total_x = weights.sum(-1, keepdim=True), (weights * groups).sum(-1, keepdim=True)
    # ggml's trials: grids that spread the range over more or fewer steps, each refitted by least squares.
    for number in range(21):
        codes = ((groups - best[2]) * ((last - 1.0 + 0.1 * number) / width)).round_().clamp_(0, last)
        weighted = weights * codes
        sum_l, sum_l2 = weighted.sum(-1, keepdim=True), (weighted * codes).sum(-1, keepdim=True)
        sum_xl = (weighted * groups).sum(-1, keepdim=True)
        determinant = (total * sum_l2 - sum_l.square()).clamp_(min=1e-30)
        scale = (total * sum_xl - total_x * sum_l) / determinant
        start = (sum_l2 * total_x - sum_l * sum_xl) / determinant
        # A range cannot begin above zero, so a fit through zero replaces a fit that does.
        scale = torch.where(start > 0, sum_xl / sum_l2.clamp(min=1e-30), scale)
        start = start.clamp(max=0)
        error = _error(groups, weights, codes * scale + start)
        # Scales are unsigned in this format.
        best = _better(best, (torch.where(scale.squeeze(-1) > 0, error, torch.inf), scale, start))
    return best[1].squeeze(-1), -best[2].squeeze(-1)


def _improve_affine(groups: Tensor, weights: Tensor, start: Blocks, dtype: DType) -> State:
    """Find the best codes for the float16 numbers of `start`. The whole numbers of scales and minimums may change by
    one.

    Returns:
        error (M,), codes (M, S, n), and the fields of `Blocks`.
    """
    step, offset, scales, minimums = start
    assert offset is not None and minimums is not None
    low, high = max(dtype.levels[0], 1), dtype.levels[1]
    by: Sequence[tuple[int, ...]] = [(0, 0)] if low == high else list(itertools.product((0, -1, 1), repeat=2))

    def moved(by: tuple[int, ...]) -> State:
        tried = (scales + by[0]).clamp_(low, high)
        lowered = minimums if low == high else (minimums + by[1]).clamp_(0, high)
        slope, shift = (step * tried).unsqueeze(-1), (offset * lowered).unsqueeze(-1)
        codes = _ratio(groups + shift, slope).round_().clamp_(0, dtype.full_range)
        return _error(groups, weights, codes * slope - shift), codes, tried, lowered

    error, codes, *integers = functools.reduce(_better, map(moved, by))
    return error.sum(1), codes, step, offset, *integers


def _fit_pair(groups: Tensor, weights: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Fit d and dmin (M, 1), exact in float16, so that d * first - dmin * second approximates the values."""
    aa, ab, bb, ax, bx = (
        (weights * left * right).sum((1, 2))
        for left, right in ((first, first), (first, second), (second, second), (first, groups), (second, groups))
    )
    determinant = aa * bb - ab.square()
    # Cauchy-Schwarz: 0 <= determinant <= aa * bb; near 0 the two are parallel, and d alone is fitted.
    usable = determinant > 1e-6 * aa * bb
    step = torch.where(usable, (ax * bb - bx * ab) / determinant, ax / aa.clamp(min=1e-30))
    offset = torch.where(usable, (ax * ab - bx * aa) / determinant, torch.zeros_like(step))
    return _half(step.clamp_(min=0).view(-1, 1)), _half(offset.clamp_(min=0).view(-1, 1))


def _search_symmetric_blocks(groups: Tensor, weights: Tensor, dtype: DType) -> Blocks:
    weights = weights + 1e-12  # a weight may be 0, but every value must count
    scale = _search_symmetric(groups, weights, dtype)  # (M, S), signed
    extreme = scale.gather(1, scale.abs().argmax(1, keepdim=True))
    # Whole numbers reach one further below zero than above, so the scale of largest magnitude gets the lowest.
    step = _half(extreme / dtype.levels[0])
    best = _improve_symmetric(
        groups, weights, step, _completed(step, None, _multiples(scale, step, dtype), None).scales, dtype
    )
    for _ in range(_ROUNDS):
        _, codes, step, scales = best
        grid = codes * scales.unsqueeze(-1)
        refit = (weights * grid * groups).sum((1, 2)) / (weights * grid * grid).sum((1, 2)).clamp(min=1e-30)
        best = _better(best, _improve_symmetric(groups, weights, _half(refit.view(-1, 1)), scales, dtype))
    return _completed(best[2], None, best[3], None)


def _search_symmetric(groups: Tensor, weights: Tensor, dtype: DType) -> Tensor:
    """Search the signed scale of each group, (M, S): the value of largest magnitude gets a code near the lowest."""
    extreme = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))  # (M, S, 1)
    safe = torch.where(extreme == 0, torch.ones_like(extreme), extreme)
    best: State = (extreme.new_ones(extreme.shape[:2]), extreme.new_zeros(extreme.shape[:2]))
    for number in range(-9, 10):
        codes = (groups * ((dtype.minimum - 0.1 * number) / safe)).round_().clamp_(dtype.minimum, dtype.maximum)
        weighted = weights * codes
        sum_xl, sum_l2 = (weighted * groups).sum(-1), (weighted * codes).sum(-1).clamp_(min=1e-30)
        best = _better(best, (-sum_xl.square() / sum_l2, sum_xl / sum_l2))  # the error minus a constant
    return best[1]


def _improve_symmetric(groups: Tensor, weights: Tensor, step: Tensor, scales: Tensor, dtype: DType) -> State:
    """Find the best codes for this float16 scale; the whole numbers of the groups may change by one.

    Returns:
        error (M,), codes (M, S, n), step, and the chosen scales.
    """

    def moved(by: int) -> State:
        tried = (scales + by).clamp_(*dtype.levels)
        tried = torch.where(tried == 0, scales, tried)
        slope = (step * tried).unsqueeze(-1)
        codes = _ratio(groups, slope).round_().clamp_(dtype.minimum, dtype.maximum)
        return _error(groups, weights, codes * slope), codes, tried

    error, codes, chosen = functools.reduce(_better, map(moved, (0, -1, 1)))
    return error.sum(1), codes, step, chosen


def _error(groups: Tensor, weights: Tensor, decoded: Tensor) -> Tensor:
    """Compute the weighted squared error per group, (M, S)."""
    return (decoded - groups).square_().mul_(weights).sum(-1)


def _better(old: State, new: State) -> State:
    """Combine two states: take each block or group from the state in which its error is lower.

    The first tensor of a state is the error of each block or group.
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
