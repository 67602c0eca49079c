"""Round scales to storable values: in a float dtype, as 8-bit floats under a global scale, or as powers of two.

Shapes: N outputs, G groups per row. Two levels (nvfp4): scale = e4m3 / global_scale, with global_scale = 448 * 6 /
largest magnitude of the tensor. Powers of two (mxfp4, mxfp8): exponent = exponent of the largest magnitude - exponent
of the type's largest value, plus one if the first two mantissa bits of the magnitude are set. compressed-tensors rounds
in this way; OCP MX does not specify the rounding.
Source: OCP Microscaling Formats (MX) 1.0, section 6.3; compressed-tensors `quantization/utils/{helpers,mxfp_utils}.py`.

`with_two_levels` converts MXFP4 to NVFP4 without loss: the codes stay, and each group of 32 becomes two of 16. E4M3
holds 18 consecutive powers of two, the lowest three as subnormals. A tensor whose scales span more has no exact NVFP4
form.
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
_E4M3_FLOOR = 0.125  # compressed-tensors replaces a scale that rounds to zero by this
_E4M3_TINY = 2.0**-9
_LEAST_ROW_SCALE = 1 / (_E4M3_MAXIMUM * 512)  # smallest scale per row of the kernels in `row_scales`
_EXPONENTS = (-127, 127)
# Adding a quarter of the power of two carries a mantissa from 1.75 on to the next power.
_CARRY, _EXPONENT_BITS = 1 << 21, 0x7F800000


def round_scale(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Round a scale to a stored dtype, and replace zeros.

    Args:
        scale: any shape, float32.
        dtype: stored dtype.
    Returns:
        float32 tensor with values that `dtype` holds exactly; zeros become the dtype's epsilon.
    """
    stored = scale.to(dtype).float()
    # Otherwise groups of zeros, and scales that underflow in float16, would cause divisions by zero.
    return torch.where(stored != 0, stored, torch.finfo(dtype).eps)


def global_scale(largest: Tensor, dtype: DType) -> Tensor:
    """Return the global scale of a tensor, which maps the largest magnitude to largest local scale * largest code.

    Args:
        largest: one element, float32, the tensor's largest magnitude.
        dtype: number type of the codes.
    Returns:
        (1,) float32; 1 if `largest` is zero.
    """
    tiny = torch.finfo(torch.float32).tiny
    value = _E4M3_MAXIMUM * dtype.maximum / largest.float().clamp_min(tiny)
    # A tensor of zeros may have any scale but infinity: 0 * infinity is NaN.
    return torch.where(torch.isfinite(value), value, torch.ones_like(value)).reshape(1)


def storable_scale(largest: Tensor, dtype: DType, scale_dtype: torch.dtype, tensor_largest: Tensor | None) -> Tensor:
    """Return, for each group, the storable scale nearest to the one that maps its largest magnitude to the largest
    code.

    Args:
        largest: (N, G) float32, >= 0, largest magnitude of each group.
        dtype: number type of the codes, symmetric.
        scale_dtype: dtype in which scales are stored, unless the number type fixes it.
        tensor_largest: one element, the largest magnitude of everything that shares the global scale; only for types
            that have a global scale.
    Returns:
        (N, G) float32, > 0.
    """
    if dtype.scale == "e8m0":
        return power_of_two_scale(largest, dtype)
    scale = largest / dtype.half_range
    if dtype.scale == "float":
        return round_scale(scale, scale_dtype)
    assert tensor_largest is not None, f"{dtype.name} needs the tensor's largest magnitude"
    return two_level_scale(scale, global_scale(tensor_largest, dtype))


def two_level_scale(scale: Tensor, outer: Tensor) -> Tensor:
    """Round each scale to the nearest value that can be stored: an 8-bit float divided by the global scale.

    The 8-bit float is at most 448. If it rounds to 0, it becomes 0.125.

    Args:
        scale: any shape, float32.
        outer: one element, the `global_scale`.
    """
    # Activations above the calibrated maximum would need more than 448. Not every version of torch clamps such values.
    local = (scale * outer).clamp_max(_E4M3_MAXIMUM).to(torch.float8_e4m3fn).float()
    return torch.where(local == 0, _E4M3_FLOOR, local) / outer


def row_scales(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Round scales so that kernels which store them as e4m3 with one float32 scale per row lose nothing.

    Such a kernel (vLLM's W4A8) divides the scales of a row by their largest magnitude / 448, and stores an eighth of
    the quotients to leave room for codes times scales. So this function rounds the largest scale of a row to 448 * s,
    where s has 4 significant bits, and the other scales to e * 8 * s, where e is an e4m3 number. These products have at
    most 8 significant bits, which bfloat16 holds.

    Args:
        scale: (N, G) float32, of either sign, never zero.
        dtype: dtype in which scales are stored.
    Returns:
        (N, G) float32 with values that `dtype` holds exactly.
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
    """Return the power of two that scales these magnitudes into the range of a type's codes.

    Args:
        largest: any shape, float32, >= 0.
        dtype: number type of the codes.
    Returns:
        float32, between 2**-127 and 2**127; NaN for magnitudes that are not finite.
    """
    carried = (largest.contiguous().view(torch.int32) + _CARRY & _EXPONENT_BITS).view(torch.float32)
    # Minus the exponent of the largest code: 2 for E2M1, 8 for E4M3.
    exponent = torch.floor(torch.log2(carried)) - math.floor(math.log2(dtype.maximum))
    scale = torch.exp2(exponent.clamp(*_EXPONENTS).double()).float()
    return torch.where(torch.isfinite(largest), scale, torch.nan)


# Lowest and highest exponent of the powers of two in E4M3.
_LOWEST, _HIGHEST = -9, 8
_FROM = WeightScheme(dtype=MXFP4, group_size=32)
_TO = WeightScheme(dtype=NVFP4, group_size=16)


def has_two_levels(scheme: WeightScheme, asked: WeightScheme) -> bool:
    """Whether `with_two_levels` converts codes of `scheme` to the scheme `asked`."""
    return (scheme, asked) == (_FROM, _TO)


def with_two_levels(weights: Sequence[QuantizedTensor]) -> list[QuantizedTensor] | None:
    """Convert MXFP4 weights to NVFP4 with equal values and one global scale; None if E4M3 cannot hold their scales.

    Args:
        weights: weights that share the global scale, such as linears that engines fuse.
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
        # A group of zeros may have any scale.
        scale = torch.exp2(torch.where(own, exponent, highest)).float().repeat_interleave(2, dim=1)
        two = replace(weight, scheme=_TO, scale=scale, global_scale=outer, value_dtype=weight.values_dtype)
        made.append(two)
    return made
