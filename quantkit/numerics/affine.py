"""Affine quantization: from a range to a scale, from values to codes, and the search for the range that loses least.

Arithmetic as compressed-tensors defines it: a range always contains zero; symmetric scale = absmax / half_range;
asymmetric scale = (high - low) / full_range with zero_point = round(minimum - low / scale).
Shapes: N outputs, K inputs, G groups per row, g = K / G.
Source: Nagel et al. 2021, A White Paper on Neural Network Quantization, sections 2 and 3.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from quantkit.numerics.dtype import DType
from quantkit.numerics.scales import global_scale, round_scale, storable_scale
from quantkit.numerics.scheme import WeightScheme
from quantkit.numerics.tensor import QuantizedTensor

# Elements handled at once by the range search: small enough that its temporaries stay in a CPU's cache.
_SEARCH_CHUNK = 1 << 18


def range_parameters(
    low: Tensor, high: Tensor, scheme: WeightScheme, scale_dtype: torch.dtype, tensor_largest: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Scale and zero point of the range [low, high].

    Args:
        low, high: same shape, float32, low <= 0 <= high.
        scheme: number type and symmetry.
        scale_dtype: dtype in which scales are stored, unless the type says otherwise.
        tensor_largest: see `largest_magnitude`; needed by types with scales of two levels.
    Returns:
        scale: as `low`, float32 with values that are stored exactly.
        zero_point: as `low`, float32 whole numbers in the code range; None when symmetric.
    """
    dtype = scheme.dtype
    if scheme.symmetric:
        return storable_scale(torch.maximum(-low, high), dtype, scale_dtype, tensor_largest), None
    scale = round_scale((high - low) / dtype.full_range, scale_dtype)
    zero_point = (dtype.minimum - low / scale).round_().clamp_(dtype.minimum, dtype.maximum)
    return scale, zero_point


def to_codes(values: Tensor, scale: Tensor, zero_point: Tensor | None, dtype: DType) -> Tensor:
    """Nearest code of each value, in float32 (cast to `dtype.storage` is then exact).

    Args:
        values, scale, zero_point: float32, broadcastable; not modified.
        dtype: number type.
    """
    codes = values / scale
    if dtype.spacing is not None:
        return _round_float(codes.clamp_(dtype.minimum, dtype.maximum), dtype.spacing)
    if dtype.kind == "float":
        return codes.clamp_(dtype.minimum, dtype.maximum).to(dtype.storage).float()
    if zero_point is not None:
        codes += zero_point
    return codes.round_().clamp_(dtype.minimum, dtype.maximum)


def _round_float(values: Tensor, spacing: float) -> Tensor:
    """Nearest value of a float type, ties to even; `spacing` apart below 2, twice as much from each power of two on."""
    power = (values.abs().clamp_min_(1.0).view(torch.int32) & 0x7F800000).view(torch.float32)
    step = power.mul_(spacing)
    return values.div_(step).round_().mul_(step)


def from_codes(codes: Tensor, scale: Tensor, zero_point: Tensor | None) -> Tensor:
    """Value of each code: (code - zero_point) * scale, in float32, broadcasting."""
    return codes * scale if zero_point is None else (codes - zero_point) * scale


def largest_magnitude(weight: Tensor) -> Tensor:
    """(1,) float32, the largest |w|: what a scale of the whole tensor is made from.

    Weights that share such a scale (q, k and v; gate and up) share the largest of theirs.
    """
    low, high = weight.aminmax()
    return torch.maximum(-low, high).float().reshape(1)


def minmax_range(weight: Tensor, scheme: WeightScheme) -> tuple[Tensor, Tensor]:
    """Smallest range per group that covers the weights and contains zero.

    Args:
        weight: (N, K); not modified.
        scheme: its group_size must divide K.
    Returns:
        low, high: (N, G) float32; equal in all rows of a block.
    Raises:
        SchemeError: group_size does not divide K.
    """
    groups = weight.view(weight.shape[0], -1, scheme.group_width(weight.shape[1]))  # (N, G, g)
    low, high = groups.aminmax(dim=-1)
    low, high = low.float().clamp_(max=0), high.float().clamp_(min=0)
    return _over_rows(low, scheme, torch.amin), _over_rows(high, scheme, torch.amax)


def _over_rows(values: Tensor, scheme: WeightScheme, reduce: Callable[[Tensor, int], Tensor]) -> Tensor:
    """What the rows of a block have in common, in all of them; (N, G), zeros take the place of missing rows."""
    num_rows, groups = values.shape
    rows = num_rows if scheme.block_rows is None else scheme.block_rows
    if rows == 1:
        return values
    padded = functional.pad(values, (0, 0, 0, -num_rows % rows))
    return reduce(padded.view(-1, rows, groups), 1).repeat_interleave(rows, dim=0)[:num_rows]


def minmax_parameters(
    weight: Tensor, scheme: WeightScheme, scale_dtype: torch.dtype, tensor_largest: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Scale and zero point (N, G) of the smallest covering range.

    Args:
        weight: (N, K); not modified.
        scheme: number type and granularity.
        scale_dtype: dtype in which scales are stored, unless the type says otherwise.
        tensor_largest: see `largest_magnitude`; None = of this weight alone.
    Returns:
        scale, zero_point: see `range_parameters`.
    """
    low, high = minmax_range(weight, scheme)
    if tensor_largest is None and scheme.has_tensor_scale:
        tensor_largest = largest_magnitude(weight)
    if tensor_largest is not None and scheme.block_rows is None:
        low, high = -tensor_largest.expand_as(low), tensor_largest.expand_as(high)
    return range_parameters(low, high, scheme, scale_dtype, tensor_largest)


def range_grid(dtype: DType) -> tuple[float, ...]:
    """Fractions of the covering range worth trying, the whole of it first.

    Integers: fewer bits clip more; with 8 bits clipping almost never pays, with 2 it pays down to a third of the
    range. Floats never clip much, but it matters where their steps of twice the size fall: FP8 has the same choice
    after a factor of two, FP4 profits most from its largest values being 4 or 6 (27 % less squared error for normal
    weights under nvfp4, 8 % under fp8).
    """
    if dtype.scale == "e8m0":
        return 1.0, 0.5, 2.0
    if dtype.scale == "e4m3":
        return (1.0, *(0.6 + 0.05 * i for i in range(24) if i != 8))
    if dtype.kind == "float":
        return tuple(2 ** (i / 8) for i in range(8))
    lowest = {2: 0.30, 3: 0.40, 4: 0.55}.get(dtype.bits, 0.85)
    steps = 16 if dtype.bits <= 4 else 7
    return tuple(1.0 - (1.0 - lowest) * i / (steps - 1) for i in range(steps))


def search_parameters(
    weight: Tensor,
    scheme: WeightScheme,
    scale_dtype: torch.dtype,
    *,
    importance: Tensor | None = None,
    gram: Tensor | None = None,
    tensor_largest: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Scale and zero point whose rounding error is smallest, tried over shrunken ranges.

    Symmetric integers of few bits reach further down than up (int4: -8 to 7), so a negative scale, which gives the
    longer end to the group's positive side, is tried as well. Decoders multiply by it like by any other.

    The error of a group is e' M e with e = value - decoded: M is the identity, diag(importance), or the
    group's own block of the input Gram matrix, which makes it the error of the layer's output.

    Args:
        weight: (N, K); not modified.
        scheme: number type and granularity; one scale for the tensor is the covering one.
        scale_dtype: dtype in which scales are stored, unless the type says otherwise.
        importance: (K,) float32 weights of the squared errors, >= 0.
        gram: (G, g, g) float32; takes the place of `importance`.
        tensor_largest: see `largest_magnitude`; None = of this weight alone.
    Returns:
        scale, zero_point: (N, G) float32, the latter None when symmetric.
    Source: Frantar et al. 2022 (GPTQ code, `--mse`); Lin et al. 2023, AWQ, section 3.2 (clipping).
    """
    if scheme.block_rows is None:
        return minmax_parameters(weight, scheme, scale_dtype, tensor_largest)
    if tensor_largest is None and scheme.has_tensor_scale:
        tensor_largest = largest_magnitude(weight)
    num_rows, width = weight.shape
    step = max(1, _SEARCH_CHUNK // width // scheme.block_rows) * scheme.block_rows
    parts = [
        _search_rows(weight[row : row + step].float(), scheme, scale_dtype, importance, gram, tensor_largest)
        for row in range(0, num_rows, step)
    ]
    scale = torch.cat([part[0] for part in parts])
    if scheme.symmetric:
        return scale, None
    return scale, torch.cat([part[1] for part in parts if part[1] is not None])


def _search_rows(
    rows: Tensor,
    scheme: WeightScheme,
    scale_dtype: torch.dtype,
    importance: Tensor | None,
    gram: Tensor | None,
    tensor_largest: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """`search_parameters` for a few rows (R, K)."""
    groups = rows.view(rows.shape[0], -1, scheme.group_width(rows.shape[1]))  # (R, G, g)
    weights = None if importance is None else importance.view(groups.shape[1:])  # (G, g)
    low, high = minmax_range(rows, scheme)
    best_error = torch.full_like(low, torch.inf)
    best_scale, best_zero = range_parameters(low, high, scheme, scale_dtype, tensor_largest)
    for fraction, sign in itertools.product(range_grid(scheme.dtype), _signs(scheme)):
        scale, zero = range_parameters(low * fraction, high * fraction, scheme, scale_dtype, tensor_largest)
        scale = scale * sign
        error = _over_rows(_group_error(groups, scale, zero, scheme.dtype, weights, gram), scheme, torch.sum)
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best_scale = torch.where(better, scale, best_scale)
        if zero is not None and best_zero is not None:
            best_zero = torch.where(better, zero, best_zero)
    return best_scale, best_zero


def _signs(scheme: WeightScheme) -> tuple[float, ...]:
    """Signs of a scale worth trying; with 8 bits one code more or less on a side is not worth the time."""
    return (1.0, -1.0) if scheme.symmetric and scheme.dtype.kind == "int" and scheme.dtype.bits < 8 else (1.0,)


def _group_error(
    groups: Tensor, scale: Tensor, zero: Tensor | None, dtype: DType, weights: Tensor | None, gram: Tensor | None
) -> Tensor:
    """(R, G) error of rounding `groups` (R, G, g) with these parameters."""
    step = scale.unsqueeze(-1)
    if dtype.kind == "float":
        error = to_codes(groups, step, None, dtype)
    elif zero is None:
        error = (groups / step).round_().clamp_(dtype.minimum, dtype.maximum)
    else:
        error = groups / step
        offset = zero.unsqueeze(-1)
        error.add_(offset).round_().clamp_(dtype.minimum, dtype.maximum).sub_(offset)
    error.mul_(step).sub_(groups)
    if gram is not None:
        by_group = error.transpose(0, 1)  # (G, R, g)
        return (torch.bmm(by_group, gram) * by_group).sum(-1).transpose(0, 1)
    error.square_()
    return error.sum(-1) if weights is None else error.mul_(weights).sum(-1)


def round_to_nearest(
    weight: Tensor,
    scheme: WeightScheme,
    scale: Tensor,
    zero_point: Tensor | None,
    scale_dtype: torch.dtype,
    tensor_largest: Tensor | None = None,
) -> QuantizedTensor:
    """Quantize a weight with given parameters.

    Args:
        weight: (N, K), any float dtype; not modified.
        scheme: number type and granularity.
        scale, zero_point: (N, G) float32 as returned by the functions of this module.
        scale_dtype: dtype in which the scale is kept; must hold its values exactly.
        tensor_largest: that the parameters were made with.
    """
    groups = weight.view(weight.shape[0], scale.shape[1], -1).float()  # (N, G, g)
    zero = None if zero_point is None else zero_point.unsqueeze(-1)
    codes = to_codes(groups, scale.unsqueeze(-1), zero, scheme.dtype)
    if scheme.dtype.scale == "e4m3" and tensor_largest is None:
        tensor_largest = largest_magnitude(weight)
    return make_tensor(codes.view(weight.shape), scale, zero_point, scheme, scale_dtype, tensor_largest)


def make_tensor(
    codes: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    scheme: WeightScheme,
    scale_dtype: torch.dtype,
    tensor_largest: Tensor | None,
    group_index: Tensor | None = None,
) -> QuantizedTensor:
    """A weight from its codes and parameters, each in the dtype in which it is kept.

    Args:
        codes: (N, K), values that the type's storage holds.
        scale, zero_point: (N, G) float32.
        scheme: number type and granularity.
        scale_dtype: of the scale, and of the values that loaders decode.
        tensor_largest: that the scale was made with; needed by types with scales of two levels.
        group_index: (K,), see `QuantizedTensor`.
    """
    plain = scheme.dtype.scale == "float"
    outer = None
    if scheme.dtype.scale == "e4m3":
        assert tensor_largest is not None, f"{scheme.dtype.name} needs the tensor's largest magnitude"
        outer = global_scale(tensor_largest, scheme.dtype)
    return QuantizedTensor(
        codes=codes.to(scheme.dtype.storage),
        scale=scale.to(scale_dtype) if plain else scale,
        zero_point=None if zero_point is None else zero_point.to(torch.int8),
        scheme=scheme,
        group_index=group_index,
        global_scale=outer,
        value_dtype=None if plain else scale_dtype,
    )
