"""Affine quantization: from a range to a scale, from values to codes, and the search for the range that loses least.

Arithmetic as compressed-tensors defines it: a range always contains zero; symmetric scale = absmax / half_range;
asymmetric scale = (high - low) / full_range with zero_point = round(minimum - low / scale).
Shapes: N outputs, K inputs, G groups per row, g = K / G.
Source: Nagel et al. 2021, A White Paper on Neural Network Quantization, sections 2 and 3.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from quantkit.numerics.dtype import DType
from quantkit.numerics.scheme import ActivationScheme, WeightScheme
from quantkit.numerics.tensor import QuantizedTensor

# Elements handled at once by the range search: small enough that its temporaries stay in a CPU's cache.
_SEARCH_CHUNK = 1 << 18


def round_scale(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The scale as it will read back from disk, never zero.

    Args:
        scale: any shape, float32, >= 0.
        dtype: what is stored.
    Returns:
        float32 tensor whose values `dtype` holds exactly; where it would be zero it is the dtype's epsilon.
    """
    stored = scale.to(dtype).float()
    return torch.where(stored > 0, stored, torch.finfo(dtype).eps)


def range_parameters(
    low: Tensor, high: Tensor, scheme: WeightScheme, scale_dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Scale and zero point of the range [low, high].

    Args:
        low, high: same shape, float32, low <= 0 <= high.
        scheme: number type and symmetry.
        scale_dtype: dtype in which scales are stored.
    Returns:
        scale: as `low`, float32 with values of `scale_dtype`.
        zero_point: as `low`, float32 whole numbers in the code range; None when symmetric.
    """
    dtype = scheme.dtype
    if scheme.symmetric:
        return round_scale(torch.maximum(-low, high) / dtype.half_range, scale_dtype), None
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
    if dtype.kind == "float":
        return codes.clamp_(dtype.minimum, dtype.maximum).to(dtype.storage).float()
    if zero_point is not None:
        codes += zero_point
    return codes.round_().clamp_(dtype.minimum, dtype.maximum)


def from_codes(codes: Tensor, scale: Tensor, zero_point: Tensor | None) -> Tensor:
    """Value of each code: (code - zero_point) * scale, in float32, broadcasting."""
    return codes * scale if zero_point is None else (codes - zero_point) * scale


def minmax_range(weight: Tensor, scheme: WeightScheme) -> tuple[Tensor, Tensor]:
    """Smallest range per group that covers the weights and contains zero.

    Args:
        weight: (N, K); not modified.
        scheme: its group_size must divide K.
    Returns:
        low, high: (N, G) float32.
    Raises:
        SchemeError: group_size does not divide K.
    """
    groups = weight.view(weight.shape[0], -1, scheme.group_width(weight.shape[1]))  # (N, G, g)
    low, high = groups.aminmax(dim=-1)
    return low.float().clamp_(max=0), high.float().clamp_(min=0)


def minmax_parameters(weight: Tensor, scheme: WeightScheme, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Scale and zero point (N, G) of the smallest covering range; see `range_parameters`."""
    return range_parameters(*minmax_range(weight, scheme), scheme, scale_dtype)


def shrink_grid(dtype: DType) -> tuple[float, ...]:
    """Fractions of the covering range worth trying: fewer bits clip more.

    With 8 bits clipping almost never pays, with 2 it pays down to a third of the range.
    """
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
) -> tuple[Tensor, Tensor | None]:
    """Scale and zero point whose rounding error is smallest, tried over shrunken ranges.

    The error of a group is e' M e with e = value - decoded: M is the identity, diag(importance), or the
    group's own block of the input Gram matrix, which makes it the error of the layer's output.

    Args:
        weight: (N, K); not modified.
        scheme: number type and granularity; float types are returned with their covering range.
        scale_dtype: dtype in which scales are stored.
        importance: (K,) float32 weights of the squared errors, >= 0.
        gram: (G, g, g) float32; takes the place of `importance`.
    Returns:
        scale, zero_point: (N, G) float32, the latter None when symmetric.
    Source: Frantar et al. 2022 (GPTQ code, `--mse`); Lin et al. 2023, AWQ, section 3.2 (clipping).
    """
    if scheme.dtype.kind == "float":
        return minmax_parameters(weight, scheme, scale_dtype)
    num_rows, width = weight.shape
    step = max(1, _SEARCH_CHUNK // width)
    parts = [
        _search_rows(weight[row : row + step].float(), scheme, scale_dtype, importance, gram)
        for row in range(0, num_rows, step)
    ]
    scale = torch.cat([part[0] for part in parts])
    if scheme.symmetric:
        return scale, None
    return scale, torch.cat([part[1] for part in parts if part[1] is not None])


def _search_rows(
    rows: Tensor, scheme: WeightScheme, scale_dtype: torch.dtype, importance: Tensor | None, gram: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """`search_parameters` for a few rows (R, K)."""
    groups = rows.view(rows.shape[0], -1, scheme.group_width(rows.shape[1]))  # (R, G, g)
    weights = None if importance is None else importance.view(groups.shape[1:])  # (G, g)
    low, high = minmax_range(rows, scheme)
    best_error = torch.full_like(low, torch.inf)
    best_scale, best_zero = range_parameters(low, high, scheme, scale_dtype)
    for fraction in shrink_grid(scheme.dtype):
        scale, zero = range_parameters(low * fraction, high * fraction, scheme, scale_dtype)
        error = _group_error(groups, scale, zero, scheme.dtype, weights, gram)
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best_scale = torch.where(better, scale, best_scale)
        if zero is not None and best_zero is not None:
            best_zero = torch.where(better, zero, best_zero)
    return best_scale, best_zero


def _group_error(
    groups: Tensor, scale: Tensor, zero: Tensor | None, dtype: DType, weights: Tensor | None, gram: Tensor | None
) -> Tensor:
    """(R, G) error of rounding `groups` (R, G, g) with these parameters."""
    step = scale.unsqueeze(-1)
    error = groups / step
    if zero is None:
        error.round_().clamp_(dtype.minimum, dtype.maximum)
    else:
        offset = zero.unsqueeze(-1)
        error.add_(offset).round_().clamp_(dtype.minimum, dtype.maximum).sub_(offset)
    error.mul_(step).sub_(groups)
    if gram is not None:
        by_group = error.transpose(0, 1)  # (G, R, g)
        return (torch.bmm(by_group, gram) * by_group).sum(-1).transpose(0, 1)
    error.square_()
    return error.sum(-1) if weights is None else error.mul_(weights).sum(-1)


def round_to_nearest(
    weight: Tensor, scheme: WeightScheme, scale: Tensor, zero_point: Tensor | None, scale_dtype: torch.dtype
) -> QuantizedTensor:
    """Quantize a weight with given parameters.

    Args:
        weight: (N, K), any float dtype; not modified.
        scheme: number type and granularity.
        scale, zero_point: (N, G) float32 as returned by the functions of this module.
        scale_dtype: dtype in which the scale is kept; must hold its values exactly.
    """
    groups = weight.view(weight.shape[0], scale.shape[1], -1).float()  # (N, G, g)
    zero = None if zero_point is None else zero_point.unsqueeze(-1)
    codes = to_codes(groups, scale.unsqueeze(-1), zero, scheme.dtype)
    return QuantizedTensor(
        codes=codes.to(scheme.dtype.storage).view(weight.shape),
        scale=scale.to(scale_dtype),
        zero_point=None if zero_point is None else zero_point.to(torch.int8),
        scheme=scheme,
    )


def fake_quantize_tokens(values: Tensor, scheme: ActivationScheme) -> Tensor:
    """What a linear sees when its input is quantized at run time, one symmetric scale per token, or per group of it.

    Args:
        values: (..., K); not modified.
        scheme: number type.
    Returns:
        Same shape and dtype.
    """
    dtype = scheme.dtype
    if scheme.group_size is not None and values.shape[-1] % scheme.group_size == 0:
        groups = values.reshape(*values.shape[:-1], -1, scheme.group_size)
        return fake_quantize_tokens(groups, replace(scheme, group_size=None)).flatten(-2)
    single = values.float()
    scale = single.abs().amax(dim=-1, keepdim=True) / dtype.half_range
    scale = torch.where(scale > 0, scale, torch.finfo(torch.float32).eps)
    return (to_codes(single, scale, None, dtype) * scale).to(values.dtype)
