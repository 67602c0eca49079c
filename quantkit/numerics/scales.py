"""Scales as they will read back from disk: in a float dtype, as 8-bit floats under a common one, or as powers of two.

Shapes: N outputs, G groups per row. Two levels (nvfp4): scale = e4m3 / global_scale, with global_scale = 448 * 6 / the
tensor's largest magnitude. Powers of two (mxfp4, mxfp8): the largest magnitude's own, less that of the type's largest
value; one up where the magnitude's first two mantissa bits are set, as compressed-tensors does and OCP MX leaves open.
Source: OCP Microscaling Formats (MX) 1.0, section 6.3; compressed-tensors `quantization/utils/{helpers,mxfp_utils}.py`.

`with_two_levels` turns MXFP4 into NVFP4 without a loss: the same codes, and each group of 32 becomes two of 16. Under a
power of two as the tensor's scale, 18 powers of two in a row are 8-bit floats, the lowest three of them subnormal; a
tensor whose scales span more has no exact form.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from quantkit.numerics.dtype import MXFP4, NVFP4, DType
from quantkit.numerics.scheme import WeightScheme
from quantkit.numerics.tensor import QuantizedTensor

_E4M3_MAXIMUM = 448.0
_E4M3_FLOOR = 0.125  # what compressed-tensors puts in place of a scale that rounds to zero
_E4M3_TINY = 2.0**-9
_LEAST_ROW_SCALE = 1 / (_E4M3_MAXIMUM * 512)  # what such kernels divide rows of tiny scales by
_EXPONENTS = (-127, 127)
# A mantissa from 1.75 on is carried to the next power of two by adding a quarter of it.
_CARRY, _EXPONENT_BITS = 1 << 21, 0x7F800000


def round_scale(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The scale as it will read back from disk, never zero.

    Args:
        scale: any shape, float32.
        dtype: what is stored.
    Returns:
        float32 tensor whose values `dtype` holds exactly; where it would be zero it is the dtype's epsilon.
    """
    stored = scale.to(dtype).float()
    # Groups of zeros, and scales that underflow in float16, would otherwise divide by zero.
    return torch.where(stored != 0, stored, torch.finfo(dtype).eps)


def global_scale(largest: Tensor, dtype: DType) -> Tensor:
    """The upper of two levels of scales, which maps the largest magnitude to the largest scale times the largest code.

    Args:
        largest: one element, float32, the tensor's largest magnitude.
        dtype: of the codes.
    Returns:
        (1,) float32; 1 when `largest` is zero.
    """
    tiny = torch.finfo(torch.float32).tiny
    value = _E4M3_MAXIMUM * dtype.maximum / largest.float().clamp_min(tiny)
    # Of a tensor of zeros any scale will do but an infinite one, which makes NaN of 0 times infinity.
    return torch.where(torch.isfinite(value), value, torch.ones_like(value)).reshape(1)


def storable_scale(largest: Tensor, dtype: DType, scale_dtype: torch.dtype, tensor_largest: Tensor | None) -> Tensor:
    """The scale that maps the largest magnitudes to the largest code, as near as it can be stored.

    Args:
        largest: (N, G) float32, >= 0, of each group.
        dtype: of the codes, symmetric.
        scale_dtype: in which scales are stored, unless the type says otherwise.
        tensor_largest: one element, the largest magnitude of all that shares a global scale; only for such types.
    Returns:
        As `largest`, float32, > 0.
    """
    if dtype.scale == "e8m0":
        return power_of_two_scale(largest, dtype)
    scale = largest / dtype.half_range
    if dtype.scale == "float":
        return round_scale(scale, scale_dtype)
    assert tensor_largest is not None, f"{dtype.name} needs the tensor's largest magnitude"
    return two_level_scale(scale, global_scale(tensor_largest, dtype))


def two_level_scale(scale: Tensor, outer: Tensor) -> Tensor:
    """The nearest scale that an 8-bit float under a common one stands for.

    Args:
        scale: any shape, float32.
        outer: one element, see `global_scale`.
    """
    # Larger activations than calibration has seen ask for more than 448, where not every version of torch saturates.
    local = (scale * outer).clamp_max(_E4M3_MAXIMUM).to(torch.float8_e4m3fn).float()
    return torch.where(local == 0, _E4M3_FLOOR, local) / outer


def row_scales(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The nearest scales that stay what they are where a kernel keeps them as e4m3 under one float32 number per row.

    Such a kernel (vLLM's W4A8) divides a row by its largest magnitude over 448 and keeps an eighth of the quotients,
    with room for codes times scales. So the largest is 448 times a number of 4 significant bits, and the others are
    e4m3 multiples of eight times that number: products of 8 bits, which bfloat16 holds.

    Args:
        scale: (N, G) float32, of either sign, never zero.
        dtype: in which scales are stored.
    Returns:
        as `scale`, values that `dtype` holds.
    Source: vLLM 0.32 `layers/quantization/utils/quant_utils.py` (convert_bf16_scales_to_fp8), `input_quant_fp8.py`.
    """
    largest = scale.abs().amax(-1, keepdim=True)
    mantissa, exponent = torch.frexp(largest / _E4M3_MAXIMUM)
    outer = torch.ldexp((mantissa * 16).round() / 16, exponent).clamp_min(_LEAST_ROW_SCALE)
    top = _E4M3_MAXIMUM / 8
    local = (scale.abs() / (8 * outer)).clamp_max(top).to(torch.float8_e4m3fn).float().clamp_min(_E4M3_TINY)
    local = torch.where((scale.abs() == largest) & (outer > _LEAST_ROW_SCALE), top, local)
    return (local * 8 * outer).copysign(scale).to(dtype).float()


def power_of_two_scale(largest: Tensor, dtype: DType) -> Tensor:
    """The power of two that takes these magnitudes into the range of a type's codes.

    Args:
        largest: any shape, float32, >= 0.
        dtype: of the codes.
    Returns:
        float32, between 2**-127 and 2**127; NaN for what is not finite.
    """
    carried = (largest.contiguous().view(torch.int32) + _CARRY & _EXPONENT_BITS).view(torch.float32)
    # Less the exponent of the largest code: 2 for E2M1, 8 for E4M3.
    exponent = torch.floor(torch.log2(carried)) - math.floor(math.log2(dtype.maximum))
    scale = torch.exp2(exponent.clamp(*_EXPONENTS).double()).float()
    return torch.where(torch.isfinite(largest), scale, torch.nan)


# Exponents of the powers of two among 8-bit floats (E4M3).
_LOWEST, _HIGHEST = -9, 8
_FROM = WeightScheme(dtype=MXFP4, group_size=32)
_TO = WeightScheme(dtype=NVFP4, group_size=16)


def has_two_levels(scheme: WeightScheme, asked: WeightScheme) -> bool:
    """Whether codes of one scheme can be those of another one, as far as schemes can tell."""
    return (scheme, asked) == (_FROM, _TO)


def with_two_levels(weights: Sequence[QuantizedTensor]) -> list[QuantizedTensor] | None:
    """Weights in MXFP4 as NVFP4 of the same values, all under one number; None where their scales span too much.

    Args:
        weights: that share the number, as linears that engines fuse do.
    """
    used = [weight.codes.float().view(*weight.scale.shape, 32).ne(0).any(-1) for weight in weights]  # (N, G)
    exponents = [torch.log2(weight.scale.double()) for weight in weights]
    counted = torch.cat([exponent[own] for exponent, own in zip(exponents, used, strict=True)])
    highest = counted.amax() if counted.numel() else torch.zeros((), dtype=torch.float64)
    if counted.numel() and bool(counted.amin() < highest - (_HIGHEST - _LOWEST)):
        return None
    outer = torch.exp2(_HIGHEST - highest).float().reshape(1)
    if not torch.isfinite(outer).all() or not bool((outer > 0).all()):
        return None
    made = []
    for weight, exponent, own in zip(weights, exponents, used, strict=True):
        # Groups of zeros may have any scale.
        scale = torch.exp2(torch.where(own, exponent, highest)).float().repeat_interleave(2, dim=1)
        two = replace(weight, scheme=_TO, scale=scale, global_scale=outer, value_dtype=weight.values_dtype)
        made.append(two)
    return made
