"""Quantization of keys and values to codes of 2 to 8 bits with scales and zeros, and back. Plain torch, any device.

A code's value is code * scale + zero. Scales and zeros are fp16, and codes are computed with the rounded values. Scales
are rounded up, and zeros of INT4 and INT3 down, so that the codes still cover the range of the numbers, with errors of
at most half a step. INT8 codes are signed: they have no zero, or a zero near the middle of the range. Other codes are
0..2^bits - 1, packed as drawn in `layouts`.

Values of 2 and 3 bits are rotated, after which they are nearly normally distributed. Their codes stand for numbers
around zero, at steps that suit a normal distribution: value = (code - middle) * scale, rotated back. Before the
rotation, the numbers are rounded to 16-bit integers. The sums of the rotation are then exact in float32 in any order
(of up to 512 channels), so that all kernels compute the same codes.

Shapes: `...` stands for any leading dimensions, D for channels.
Source: Liu et al. 2024, KIVI (newest tokens unquantized); Ashkboos et al. 2024, QuaRot (rotation of values); Max 1960,
Quantizing for Minimum Distortion (steps).
"""

import torch
from torch import Tensor

from quantkit.kernels.layouts import SCALE_DTYPE
from quantkit.numerics.dtype import FP8, INT2, INT3, INT8, DType
from quantkit.numerics.kv_cache import turned, turned_back, turning_block
from quantkit.numerics.scheme import CacheScheme

# fp16: half a unit in the last place of a normal number, relative; half the smallest number; the largest.
_HALF_ULP = 2.0**-11
_HALF_TINY = 2.0**-25
_LEAST = 1e-30  # counts as the largest magnitude if all values are smaller, so that nothing is divided by zero
_LARGEST = 65504.0

FINEST = 32767.0
"""Largest magnitude of the integers to which values of 2 and 3 bits are rounded before their rotation."""
STEPS = {2: 1.248, 3: 0.7345}
"""Best step between codes, keyed by bits, for normally distributed numbers whose mean magnitude is 1."""


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Pack (..., D) uint8 codes of 2, 3 or 4 bits into (..., D * bits / 8) bytes, as drawn in `layouts`."""
    if bits == 3:
        return torch.cat([pack_codes(codes & 3, 2), pack_codes(codes >> 2, 1)], dim=-1)
    packed = torch.zeros_like(codes[..., : codes.shape[-1] * bits // 8])
    for number, some in enumerate(codes.chunk(8 // bits, dim=-1)):
        packed |= some << (number * bits)
    return packed


def unpack_codes(packed: Tensor, bits: int) -> Tensor:
    """Unpack (..., D * bits / 8) bytes to (..., D) uint8 codes; the inverse of `pack_codes`."""
    if bits == 3:
        low, high = packed.tensor_split([packed.shape[-1] * 2 // 3], dim=-1)
        return unpack_codes(low, 2) | (unpack_codes(high, 1) << 2)
    return torch.cat([packed >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)], dim=-1)


def codes_of(
    values: Tensor, scheme: CacheScheme, fixed: float | Tensor = 1.0
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return codes, scale and zero of keys or values.

    Args:
        values: (..., D); for granularity "channel", (..., S, D) with all tokens of a page. Not modified.
        scheme: scheme of the keys or the values; must be quantized.
        fixed: scale of granularity "tensor" or "head"; broadcast over `values`.
    Returns:
        codes: (..., D) uint8; with fewer than 8 bits, packed.
        scale, zero: fp16, (...) per token or (..., D) per channel; None if the scheme has none.
    """
    axis = -2 if scheme.granularity == "channel" else -1
    single = values.float()
    if scheme.is_fixed:
        return _to_fp8(single / fixed), None, None
    if is_turned(scheme):
        return _turned_codes(single, scheme.dtype)
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
    assert scheme.dtype is not None
    largest = scheme.dtype.full_range
    scale = _round_up((high - zero.float()) / largest)
    codes = ((single - zero.float()) / scale.float()).round_().clamp_(0, largest).to(torch.uint8)
    return pack_codes(codes, scheme.dtype.bits), scale.squeeze(axis), zero.squeeze(axis)


def is_turned(scheme: CacheScheme) -> bool:
    """Whether a scheme rotates values before they are rounded, as it does for 2 or 3 bits with scales per token."""
    return scheme.dtype in (INT2, INT3) and scheme.granularity == "token"


def _turned_codes(values: Tensor, dtype: DType | None) -> tuple[Tensor, Tensor, None]:
    """Rotate values (..., D) float32, and return their packed codes and scales (...)."""
    assert dtype is not None
    width, block, middle = values.shape[-1], turning_block(values.shape[-1]), dtype.full_range / 2
    unit = values.abs().amax(-1, keepdim=True).clamp_min(_LEAST) / FINEST
    rotated = turned((values / unit).round())  # integers, exact
    magnitude = rotated.abs().double().sum(-1, keepdim=True).float()  # an integer too, rounded once
    step = STEPS[dtype.bits] * (magnitude / width) * (unit / block)
    scale = step.clamp(2 * _HALF_TINY, _LARGEST).to(SCALE_DTYPE)
    codes = rotated / (scale.float() * block / unit) + middle
    codes = codes.round_().clamp_(0, dtype.full_range).to(torch.uint8)
    return pack_codes(codes, dtype.bits), scale.squeeze(-1), None


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
    if is_turned(scheme):
        assert scheme.dtype is not None
        return turned_back((single - scheme.dtype.full_range / 2) * scale.float().unsqueeze(axis)).to(dtype)
    single = single * scale.float().unsqueeze(axis)
    return (single if zero is None else single.add_(zero.float().unsqueeze(axis))).to(dtype)


def numbers_of(codes: Tensor, dtype: DType | None) -> Tensor:
    """Return codes as float32 numbers, without scale and zero."""
    if dtype is FP8:
        return codes.view(FP8.storage).float()
    return (unpack_codes(codes, dtype.bits) if dtype is not None and dtype.bits < 8 else codes.view(torch.int8)).float()


def _to_fp8(values: Tensor) -> Tensor:
    """Clamp and convert to FP8; without the clamp, values out of range would become NaN."""
    return values.clamp(FP8.minimum, FP8.maximum).to(FP8.storage).view(torch.uint8)


def _round_up(scale: Tensor) -> Tensor:
    """Round a scale up to a nonzero fp16 number: the nearest that is not below it, or the next after that."""
    return (scale + scale * _HALF_ULP + _HALF_TINY).clamp_(2 * _HALF_TINY, _LARGEST).to(SCALE_DTYPE)
