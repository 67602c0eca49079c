"""What the kernels that read and write pages are told about them: numbers for types, widths, strides.

Not here: where arrays lie in a page (`kernels.layouts`) and how numbers are rounded (`kernels.kv_numbers`).
"""

from __future__ import annotations

from quantkit.kernels.layouts import PagedArray
from quantkit.kernels.triton import power_of_two
from quantkit.numerics.dtype import FP8, INT4, INT8, DType

PLAIN, E4M3, BYTE, NIBBLE = range(4)
FIXED, TOKEN, CHANNEL = range(3)
KINDS: dict[DType | None, int] = {None: PLAIN, FP8: E4M3, INT8: BYTE, INT4: NIBBLE}
GRANULARITIES = {"tensor": FIXED, "token": TOKEN, "channel": CHANNEL}

FP8_CAPABILITY = 89
"""From which on a chip converts e4m3 itself."""

_BY_HAND = 256.0  # what e4m3 decoded by hand is too small by


def width(array: PagedArray, channels: int) -> int:
    """Elements of a stored row: half the channels where two share a byte."""
    return channels // 2 if array.scheme.dtype is INT4 else channels


def block(elements: int) -> int:
    """A tile's width: a power of two that tensor cores take."""
    return max(16, power_of_two(elements))


def granularity(array: PagedArray) -> int:
    """What shares a scale, as the kernels number it."""
    return FIXED if array.scheme.dtype is None else GRANULARITIES[array.scheme.granularity]


def factor(array: PagedArray, native_fp8: bool) -> float:
    """What all numbers of an array are multiplied with."""
    by_hand = array.scheme.dtype is FP8 and not native_fp8
    return float(array.fixed_scale) * (_BY_HAND if by_hand else 1.0)


def strides(array: PagedArray) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of codes by page, head and token, and of scales by page and head."""
    return array.codes.stride()[:3], (0, 0) if array.scale is None else array.scale.stride()[:2]
