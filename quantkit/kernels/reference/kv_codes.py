"""Quantization of keys and values to FP8, INT8 and INT4 codes with scales and zeros, and back. Plain torch, any device.

Scales and zeros are fp16, and codes are computed with the rounded values. Scales are rounded up, and zeros of INT4
down, so that they still cover the range. So an error is at most half a step for any range. A code's value is code *
scale + zero. INT8 codes are signed: they have no zero, or a zero near the middle of the range. INT4 codes are 0..15,
packed as drawn in `layouts`. Shapes: `...` stands for any leading dimensions, D for channels.
"""

import torch
from torch import Tensor

from quantkit.kernels.layouts import SCALE_DTYPE
from quantkit.numerics.dtype import FP8, INT4, INT8, DType
from quantkit.numerics.scheme import CacheScheme

# fp16: half a unit in the last place of a normal number, relative; half the smallest number; the largest.
_HALF_ULP = 2.0**-11
_HALF_TINY = 2.0**-25
_LARGEST = 65504.0


def pack_int4(codes: Tensor) -> Tensor:
    """Pack (..., D) uint8 codes 0..15 into (..., D/2) bytes: channel i low, channel i + D/2 high."""
    low, high = codes.chunk(2, dim=-1)
    return low | (high << 4)


def unpack_int4(packed: Tensor) -> Tensor:
    """Unpack (..., D/2) bytes to (..., D) uint8 codes 0..15; the inverse of `pack_int4`."""
    return torch.cat([packed & 15, packed >> 4], dim=-1)


def codes_of(
    values: Tensor, scheme: CacheScheme, fixed: float | Tensor = 1.0
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return codes, scale and zero of keys or values.

    Args:
        values: (..., D); for granularity "channel", (..., S, D) with all tokens of a page. Not modified.
        scheme: must be quantized.
        fixed: scale of granularity "tensor" or "head"; broadcast over `values`.
    Returns:
        codes: (..., D) uint8, or (..., D/2) for INT4.
        scale, zero: fp16, (...) per token or (..., D) per channel; None if the scheme has none.
    """
    axis = -2 if scheme.granularity == "channel" else -1
    single = values.float()
    if scheme.is_fixed:
        return _to_fp8(single / fixed), None, None
    if scheme.symmetric:
        limit = FP8.maximum if scheme.dtype is FP8 else INT8.maximum
        scale = _round_up(single.abs().amax(axis, keepdim=True) / limit)
        codes = single / scale.float()
        stored = _to_fp8(codes) if scheme.dtype is FP8 else codes.round_().clamp_(-limit, limit).to(torch.int8)
        return stored.view(torch.uint8), scale.squeeze(axis), None
    low, high = single.amin(axis, keepdim=True), single.amax(axis, keepdim=True)
    if scheme.dtype is INT8:
        zero = ((low + high) / 2).clamp_(-_LARGEST, _LARGEST).to(SCALE_DTYPE)
        middle = zero.float()
        scale = _round_up(torch.maximum(high - middle, middle - low) / INT8.maximum)
        numbers = ((single - middle) / scale.float()).round_().clamp_(-INT8.maximum, INT8.maximum).to(torch.int8)
        return numbers.view(torch.uint8), scale.squeeze(axis), zero.squeeze(axis)
    zero = (low - low.abs() * _HALF_ULP - _HALF_TINY).clamp_(-_LARGEST, _LARGEST).to(SCALE_DTYPE)
    scale = _round_up((high - zero.float()) / INT4.full_range)
    codes = ((single - zero.float()) / scale.float()).round_().clamp_(0, INT4.full_range).to(torch.uint8)
    return pack_int4(codes), scale.squeeze(axis), zero.squeeze(axis)


def decode_states(
    codes: Tensor,
    scale: Tensor | None,
    zero: Tensor | None,
    scheme: CacheScheme,
    dtype: torch.dtype,
    fixed: float | Tensor = 1.0,
) -> Tensor:
    """Return the values of codes; the inverse of `codes_of` up to rounding.

    Args:
        codes, scale, zero: as returned by `codes_of`.
        scheme, fixed: as passed to `codes_of`.
        dtype: dtype of the result.
    Returns:
        (..., D) values, computed in float32 and rounded once.
    """
    axis = -2 if scheme.granularity == "channel" else -1
    single = numbers_of(codes, scheme.dtype)
    if scheme.is_fixed:
        return (single * fixed).to(dtype)
    assert scale is not None
    single = single * scale.float().unsqueeze(axis)
    return (single if zero is None else single.add_(zero.float().unsqueeze(axis))).to(dtype)


def numbers_of(codes: Tensor, dtype: DType | None) -> Tensor:
    """Return codes as float32 numbers, without scale and zero."""
    if dtype is FP8:
        return codes.view(FP8.storage).float()
    return (unpack_int4(codes) if dtype is INT4 else codes.view(torch.int8)).float()


def _to_fp8(values: Tensor) -> Tensor:
    """Clamp and convert to FP8; without the clamp, values out of range would become NaN."""
    return values.clamp(FP8.minimum, FP8.maximum).to(FP8.storage).view(torch.uint8)


def _round_up(scale: Tensor) -> Tensor:
    """Return the smallest nonzero fp16 number that is not below the given scale, or the number after it."""
    return (scale + scale * _HALF_ULP + _HALF_TINY).clamp_(2 * _HALF_TINY, _LARGEST).to(SCALE_DTYPE)
