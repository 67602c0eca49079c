"""Affine quantization: turn ranges into scales, values into codes, and search the ranges with the least error.

A `WeightGrid` describes the grid that a weight is rounded to; `Ranges` hold the scales and zero points of its groups.
The arithmetic is that of compressed-tensors: a range always contains zero; symmetric scale = absmax / half_range;
asymmetric scale = (high - low) / full_range with zero_point = round(minimum - low / scale).
Shapes: N outputs, K inputs, G groups per row, g = K / G.
Source: Nagel et al. 2021, A White Paper on Neural Network Quantization, sections 2 and 3.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from quantkit.numerics import super_blocks
from quantkit.numerics.dtype import DType
from quantkit.numerics.scales import global_scale, round_scale, row_scales, storable_scale
from quantkit.numerics.scheme import WeightScheme
from quantkit.numerics.tensor import QuantizedTensor, concatenated

# Elements handled at once by the range search: small enough that its temporaries stay in a CPU's cache.
_SEARCH_CHUNK = 1 << 18
# Elements rounded at once, which bounds the float32 temporaries.
_ROUND_CHUNK = 1 << 19


class Ranges(NamedTuple):
    """Scales and zero points (N, G) of a weight's groups: float32, but with values that the stored dtype holds exactly.

    Zero points are whole numbers in the code range; None for symmetric schemes. For ggml's types, zero points need not
    be whole, and `block_scale` (N, B, 1 or 2) holds the float16 numbers of the blocks; see `QuantizedTensor`.
    """

    scale: Tensor
    zero_point: Tensor | None
    block_scale: Tensor | None = None

    def split(self, sizes: Sequence[int]) -> list["Ranges"]:
        """Return the ranges of each stacked matrix, given the number of rows of each; inverse of `join_ranges`."""
        parts = ([None] * len(sizes) if each is None else torch.split(each, list(sizes)) for each in self)
        return [Ranges(*own) for own in zip(*parts, strict=True)]

    def rows(self, rows: slice) -> "Ranges":
        """Return the ranges of the outputs in a slice."""
        zero, block = (None if each is None else each[rows] for each in (self.zero_point, self.block_scale))
        return Ranges(self.scale[rows], zero, block)


def join_ranges(parts: Sequence[Ranges]) -> Ranges:
    """Concatenate the ranges of several matrices with the same scheme along the rows."""
    scale = torch.cat([part.scale for part in parts])
    zero, block = (concatenated(each) for each in ([p.zero_point for p in parts], [p.block_scale for p in parts]))
    return Ranges(scale, zero, block)


@dataclass(frozen=True, slots=True)
class WeightGrid:
    """Number type, granularity and scale dtype of a weight's codes: what is fixed before the ranges are chosen.

    `Ranges` holds the scales and zero points of the groups. Grid and ranges define the values that a weight can have.

    Args:
        scheme: number type and granularity.
        scale_dtype: dtype in which loaders decode values. Scales are stored in it too, unless the number type fixes
            their storage.
        tensor_largest: (1,) float32 `largest_magnitude` of all weights that share a tensor scale; None = no other
            weight shares the scale. Used only by schemes with a tensor scale.
    """

    scheme: WeightScheme
    scale_dtype: torch.dtype
    tensor_largest: Tensor | None = None

    def completed(self, weight: Tensor) -> "WeightGrid":
        """Return the grid with `tensor_largest` of this weight, or unchanged if it is known or not used."""
        if self.tensor_largest is not None or not self.scheme.has_tensor_scale:
            return self
        return replace(self, tensor_largest=largest_magnitude(weight))


def range_parameters(low: Tensor, high: Tensor, grid: WeightGrid) -> Ranges:
    """Return the scales and zero points for the ranges [low, high].

    Args:
        low, high: same shape, float32, low <= 0 <= high.
        grid: the grid; needs `tensor_largest` for types with two levels of scales.
    """
    dtype = grid.scheme.dtype
    if grid.scheme.symmetric:
        return Ranges(storable_scale(torch.maximum(-low, high), dtype, grid.scale_dtype, grid.tensor_largest), None)
    # The zero point is computed from the stored scale, not the exact one: both must describe the same range.
    scale = round_scale((high - low) / dtype.full_range, grid.scale_dtype)
    # A scale rounded down to bfloat16 can move low / scale by one step, past the last code.
    return Ranges(scale, (dtype.minimum - low / scale).round_().clamp_(dtype.minimum, dtype.maximum))


def to_codes(values: Tensor, scale: Tensor, zero_point: Tensor | None, dtype: DType) -> Tensor:
    """Return the nearest code of each value, as float32; the cast to `dtype.storage` is exact.

    Args:
        values, scale, zero_point: float32, broadcastable; not modified.
        dtype: number type.
    """
    codes = values / scale
    if dtype.kind == "float":
        codes.clamp_(dtype.minimum, dtype.maximum)
        return _round_float(codes.clone(), dtype).copysign_(codes)  # minus zero has its own code
    if zero_point is not None:
        codes += zero_point
    return codes.round_().clamp_(dtype.minimum, dtype.maximum)


def _round_float(values: Tensor, dtype: DType) -> Tensor:
    """Round values, which must be in range, to a float type in place. Ties go to even, and zeros lose their sign.

    Adding and subtracting a number so large that float32's last mantissa bit equals the type's spacing rounds as the
    type does. This is several times faster than a cast.
    """
    if dtype.spacing is None:
        return values
    normal, bits = dtype.spacing
    # The exponent bits alone are the largest power of two not above |value|.
    power = (values.view(torch.int32) & 0x7F800000).view(torch.float32).clamp_min_(normal)
    power *= 1.5 * 2.0 ** (23 - bits)
    return values.add_(power).sub_(power)


def from_codes(codes: Tensor, scale: Tensor, zero_point: Tensor | None) -> Tensor:
    """Return the value of each code, (code - zero_point) * scale, in float32 with broadcasting."""
    return codes * scale if zero_point is None else (codes - zero_point) * scale


def largest_magnitude(weight: Tensor) -> Tensor:
    """Return the largest |w| as (1,) float32, from which a tensor scale is computed.

    Weights that share a tensor scale (q, k and v; gate and up) use the largest value of all of them.
    """
    low, high = weight.aminmax()  # no copy of the weight's size, as abs() would make
    return torch.maximum(-low, high).float().reshape(1)


def minmax_range(weight: Tensor, scheme: WeightScheme) -> tuple[Tensor, Tensor]:
    """Return the smallest range of each group that covers its weights and contains zero.

    Args:
        weight: (N, K); not modified.
        scheme: number type and granularity.
    Returns:
        low, high: (N, G) float32; equal in all rows of a block.
    Raises:
        SchemeError: group_size does not divide K.
    """
    groups = weight.view(weight.shape[0], -1, scheme.group_width(weight.shape[1]))  # (N, G, g)
    # Eight times as fast as aminmax(dim=-1). A range without zero would put its zero point outside the codes.
    low, high = groups.amin(-1).float().clamp_(max=0), groups.amax(-1).float().clamp_(min=0)
    return _over_rows(low, scheme, torch.amin), _over_rows(high, scheme, torch.amax)


def _over_rows(values: Tensor, scheme: WeightScheme, reduce: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Reduce (N, G) values over the rows of each block, and repeat the result in every row of the block."""
    num_rows, groups = values.shape
    rows = num_rows if scheme.block_rows is None else scheme.block_rows
    if rows == 1:
        return values
    # Zeros pad the last block and are neutral: lows are never above zero, highs and errors never below.
    padded = functional.pad(values, (0, 0, 0, -num_rows % rows))
    return reduce(padded.view(-1, rows, groups), 1).repeat_interleave(rows, dim=0)[:num_rows]


def minmax_parameters(weight: Tensor, grid: WeightGrid) -> Ranges:
    """Return the scales and zero points of the smallest ranges that cover all weights (absmax if symmetric).

    Args:
        weight: (N, K); not modified.
        grid: grid that the weight is rounded to.
    """
    if grid.scheme.dtype.block is not None:
        return _by_blocks(weight, grid.scheme.dtype, super_blocks.range_blocks)
    grid = grid.completed(weight)
    low, high = minmax_range(weight, grid.scheme)
    if grid.tensor_largest is not None and grid.scheme.block_rows is None:
        # A tensor scale covers every weight that shares it, not only this one.
        low, high = -grid.tensor_largest.expand_as(low), grid.tensor_largest.expand_as(high)
    ranges = range_parameters(low, high, grid)
    return ranges._replace(scale=on_rows(ranges.scale, grid))


def _by_blocks(weight: Tensor, dtype: DType, choose: Callable[[Tensor, DType], super_blocks.Blocks]) -> Ranges:
    """Return the ranges of a weight (N, K) in ggml's blocks; `choose` is a function of `super_blocks`."""
    assert dtype.block is not None, f"{dtype.name} has no blocks"
    return Ranges(*super_blocks.expand(choose(weight.float().view(-1, dtype.block[0]), dtype), len(weight), dtype))


def on_rows(scale: Tensor, grid: WeightGrid) -> Tensor:
    """Return scales (N, G) float32, rounded by `scales.row_scales` if the scheme says so, otherwise unchanged."""
    return row_scales(scale, grid.scale_dtype) if grid.scheme.row_scales else scale


def rescaled(ranges: Ranges, scale: Tensor, grid: WeightGrid) -> Ranges:
    """Return ranges with new scales (N, G) float32, rounded to values that the grid can store."""
    dtype = grid.scheme.dtype
    if dtype.block is None:
        return ranges._replace(scale=on_rows(round_scale(scale, grid.scale_dtype), grid))
    shape, minimum = (-1, dtype.block[0] // int(dtype.group or 1)), None
    if ranges.zero_point is not None:  # a zero point stays where it is, so the minimum grows with the scale
        minimum = ((ranges.zero_point - dtype.minimum) * scale).view(shape)
    blocks = super_blocks.nearest_blocks(scale.view(shape), minimum, dtype)
    return Ranges(*super_blocks.expand(blocks, len(scale), dtype))


def range_fractions(dtype: DType) -> tuple[float, ...]:
    """Return the fractions of a group's covering range that a search tries, 1 first.

    Integers: clipping helps more with fewer bits. With 8 bits it almost never helps; with 2 bits the best range may be
    a third of the full one. Floats: clipping helps little, but the position of the exponent steps matters. FP8's
    errors repeat when the range doubles; FP4 gains most from the choice of 4 or 6 as the largest value (27 % less
    squared error for normal weights under nvfp4, 8 % under fp8).
    """
    if dtype.scale == "e8m0":
        # Only powers of two can be stored.
        return 1.0, 0.5, 2.0
    if dtype.scale == "e4m3":
        # i = 8 would be the whole range again.
        return (1.0, *(0.6 + 0.05 * i for i in range(24) if i != 8))
    if dtype.kind == "float":
        return tuple(2 ** (i / 8) for i in range(8))
    lowest = {2: 0.30, 3: 0.40, 4: 0.55}.get(dtype.bits, 0.85)
    steps = 16 if dtype.bits <= 4 else 7
    return tuple(1.0 - (1.0 - lowest) * i / (steps - 1) for i in range(steps))


def search_parameters(
    weight: Tensor, grid: WeightGrid, *, importance: Tensor | None = None, gram: Tensor | None = None
) -> Ranges:
    """Return the scales and zero points with the least rounding error among fractions of the covering ranges.

    Symmetric integers have one more negative code than positive codes (int4: -8 to 7). So negative scales are tried
    too: then positive weights use the side with more codes. Decoders multiply by negative scales as usual.

    The error of a group is e' M e with e = value - decoded. M is the identity, diag(importance), or the group's own
    block of the input Gram matrix, which gives the error of the layer's output.

    Args:
        weight: (N, K); not modified.
        grid: grid that the weight is rounded to. If it has a single scale for the tensor, there is no search: the scale
            covers all weights.
        importance: (K,) float32 weights of the squared errors, >= 0.
        gram: (G, g, g) float32; used instead of `importance`; ignored for ggml's types.
    Source: Frantar et al. 2022 (GPTQ code, `--mse`); Lin et al. 2023, AWQ, section 3.2 (clipping).
    """
    scheme, grid = grid.scheme, grid.completed(weight)
    if scheme.block_rows is None:
        return minmax_parameters(weight, grid)
    num_rows, width = weight.shape
    if scheme.dtype.block is not None:
        weights = None if importance is None else importance.expand(weight.shape).reshape(-1, scheme.dtype.block[0])
        return _by_blocks(weight, scheme.dtype, partial(super_blocks.search_blocks, weights=weights))
    step = max(1, _SEARCH_CHUNK // width // scheme.block_rows) * scheme.block_rows  # whole blocks share their scales
    parts = [_search_rows(weight[row : row + step].float(), grid, importance, gram) for row in range(0, num_rows, step)]
    ranges = join_ranges(parts)
    return ranges._replace(scale=on_rows(ranges.scale, grid))


def _search_rows(rows: Tensor, grid: WeightGrid, importance: Tensor | None, gram: Tensor | None) -> Ranges:
    """Run `search_parameters` for a few rows (R, K)."""
    scheme = grid.scheme
    groups = rows.view(rows.shape[0], -1, scheme.group_width(rows.shape[1]))  # (R, G, g)
    weights = None if importance is None else importance.view(groups.shape[1:])  # (G, g)
    low, high = minmax_range(rows, scheme)
    fractions = torch.tensor(range_fractions(scheme.dtype), device=rows.device).view(-1, 1, 1)
    tried = range_parameters(low * fractions, high * fractions, grid)  # (F, R, G), the covering range first
    each = _group_errors(groups, tried, scheme, weights, gram)
    errors = torch.stack([_over_rows(error, scheme, torch.sum) for error in each])  # (F * signs, R, G)
    # If all errors are NaN or infinite, argmin takes the first: the covering range.
    best = errors.nan_to_num_(nan=torch.inf, posinf=torch.inf).argmin(0, keepdim=True)
    signs = torch.tensor(_signs(scheme), device=rows.device)
    number, scale = best // len(signs), signs[best % len(signs)].squeeze(0)
    scale *= tried.scale.gather(0, number).squeeze(0)
    return Ranges(scale, None if tried.zero_point is None else tried.zero_point.gather(0, number).squeeze(0))


def _signs(scheme: WeightScheme) -> tuple[float, ...]:
    """Return the signs of scales that a search tries. With 8 bits only 1, because one more code hardly helps."""
    both = scheme.symmetric and scheme.signed_scales and scheme.dtype.kind == "int" and scheme.dtype.bits < 8
    return (1.0, -1.0) if both else (1.0,)


def _group_errors(
    groups: Tensor, tried: Ranges, scheme: WeightScheme, weights: Tensor | None, gram: Tensor | None
) -> Iterator[Tensor]:
    """Yield the (R, G) rounding errors of `groups` (R, G, g) for each of F tried ranges and each sign of its scale."""
    dtype = scheme.dtype
    # A search spends its time here: each line is one pass over the numbers, in reused memory.
    nearest, error = torch.empty_like(groups), torch.empty_like(groups)
    for number, scale in enumerate(tried.scale):
        step, offset = scale.unsqueeze(-1), None if tried.zero_point is None else tried.zero_point[number].unsqueeze(-1)
        torch.div(groups, step, out=nearest)
        if dtype.kind == "int":
            (nearest if offset is None else nearest.add_(offset)).round_()
        for sign in _signs(scheme):
            # Negating the scale negates the codes; only the clamping limits differ.
            limits = (dtype.minimum, dtype.maximum) if sign > 0 else (-dtype.maximum, -dtype.minimum)
            torch.clamp(nearest, *limits, out=error)
            if dtype.kind == "float":
                _round_float(error, dtype)
            (error if offset is None else error.sub_(offset)).mul_(step).sub_(groups)
            if gram is not None:
                by_group = error.transpose(0, 1)  # (G, R, g)
                yield (torch.bmm(by_group, gram) * by_group).sum(-1).transpose(0, 1)
            else:
                error.square_()
                yield (error if weights is None else error.mul_(weights)).sum(-1)


def round_to_nearest(weight: Tensor, grid: WeightGrid, ranges: Ranges | None = None) -> QuantizedTensor:
    """Quantize a weight by rounding to nearest.

    Args:
        weight: (N, K), any float dtype; not modified.
        grid: grid that the weight is rounded to; the ranges must have been chosen for it.
        ranges: ranges of the groups; None = the smallest ranges that cover all weights.
    """
    grid = grid.completed(weight)
    ranges = ranges or minmax_parameters(weight, grid)
    scale, zero = ranges[:2]
    codes = torch.empty(weight.shape, dtype=grid.scheme.dtype.storage, device=weight.device)
    step = max(1, _ROUND_CHUNK // weight.shape[1])
    for rows in (slice(row, row + step) for row in range(0, weight.shape[0], step)):
        groups = weight[rows].reshape(-1, *scale.shape[1:], weight.shape[1] // scale.shape[1]).float()  # (R, G, g)
        offset = None if zero is None else zero[rows].unsqueeze(-1)
        rounded = to_codes(groups, scale[rows].unsqueeze(-1), offset, grid.scheme.dtype)
        codes[rows] = rounded.view(-1, weight.shape[1])
    return assemble(codes, ranges, grid)


def assemble(codes: Tensor, ranges: Ranges, grid: WeightGrid, group_index: Tensor | None = None) -> QuantizedTensor:
    """Build a quantized weight from codes and ranges, converted to the dtypes in which they are kept.

    Args:
        codes: (N, K), values that the type's storage dtype holds.
        ranges: ranges of the groups.
        grid: grid of codes and ranges; needs `tensor_largest` for types with two levels of scales.
        group_index: (K,), see `QuantizedTensor`.
    """
    dtype, (scale, zero, block) = grid.scheme.dtype, ranges
    plain, outer = dtype.scale == "float", None
    if dtype.scale == "e4m3":
        assert grid.tensor_largest is not None, f"{dtype.name} needs the tensor's largest magnitude"
        outer = global_scale(grid.tensor_largest, dtype)
    # Powers of two and two-level scales stay float32 here; formats convert them to 8 bits without rounding.
    return QuantizedTensor(
        codes=codes.to(dtype.storage),
        scale=scale.to(grid.scale_dtype) if plain else scale,
        zero_point=None if zero is None else zero if block is not None else zero.to(torch.int8),
        scheme=grid.scheme,
        group_index=group_index,
        global_scale=outer,
        value_dtype=None if plain else grid.scale_dtype,
        block_scale=block,
    )
