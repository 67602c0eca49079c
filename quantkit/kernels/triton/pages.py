"""What the kernels that read and write pages are told about them: numbers for types, widths, strides.

Not here: where arrays lie in a page (`kernels.layouts`) and how numbers are rounded (`kernels.kv_numbers`).
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from quantkit.kernels.layouts import PagedArray
from quantkit.kernels.triton import num_processors, power_of_two
from quantkit.kernels.triton.choices import Decode
from quantkit.numerics.dtype import FP8, INT4, INT8, DType

PLAIN, E4M3, BYTE, NIBBLE = range(4)
FIXED, TOKEN, CHANNEL = range(3)
KINDS: dict[DType | None, int] = {None: PLAIN, FP8: E4M3, INT8: BYTE, INT4: NIBBLE}
GRANULARITIES = {"tensor": FIXED, "head": FIXED, "token": TOKEN, "channel": CHANNEL}

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


def unit(array: PagedArray, native_fp8: bool) -> float:
    """What decoded numbers of an array are too small by."""
    return _BY_HAND if array.scheme.dtype is FP8 and not native_fp8 else 1.0


def fixed(array: PagedArray) -> Tensor:
    """(H,) float32, what decoded numbers of each head are multiplied with; ones where there is nothing."""
    return _ones(array.codes.shape[1], array.codes.device) if array.fixed is None else array.fixed


@functools.cache
def _ones(heads: int, device: torch.device) -> Tensor:
    """Made once, so that a recorded graph finds it again."""
    return torch.ones(heads, dtype=torch.float32, device=device)


def strides(array: PagedArray) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of codes by page, head and token, and of scales by page and head."""
    return array.codes.stride()[:3], (0, 0) if array.scale is None else array.scale.stride()[:2]


def num_parts(programs: int, tokens: int, choice: Decode, device: torch.device) -> int:
    """Parts of a sequence, so that the chip is full and a part has some tiles; a power of two."""
    wanted = -(-choice.programs * num_processors(device) // programs)
    filled = power_of_two(-(-tokens // (choice.least_tiles * choice.tile)))
    return min(power_of_two(wanted), filled, choice.most_parts)
