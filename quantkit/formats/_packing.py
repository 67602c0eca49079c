"""Unsigned codes of 2, 3, 4 or 8 bits to 32-bit words and back, densely and least significant bit first.

Value i of a row occupies bits [i * b, (i + 1) * b) of that row's stream; a value may straddle two words, which happens
with 3 bits only: ten values and two bits of the eleventh in the first word, and so on. Pure tensor arithmetic, on any
device. Shapes: R rows, C values per row, W = C * b / 32 words.
Source: GPTQModel `nn_modules/qlinear/__init__.py` (`pack_original`), which writes 3-bit words by hand.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Values packed at once, which bounds the int64 temporaries.
_BLOCK_VALUES = 1 << 22
_WORD = 1 << 32


def pack_words(values: Tensor, bits: int) -> Tensor:
    """Pack along the last dimension.

    Args:
        values: (R, C) whole numbers in [0, 2**bits), any integer dtype; C * bits must be a multiple of 32.
        bits: of one value.
    Returns:
        (R, C * bits / 32) int32, contiguous.
    """
    rows, width = values.shape
    assert width * bits % 32 == 0, f"{width} values of {bits} bits do not fill words"
    words = torch.empty(rows, width * bits // 32, dtype=torch.int32, device=values.device)
    step = max(1, _BLOCK_VALUES // max(1, width))
    for row in range(0, rows, step):
        words[row : row + step] = _pack(values[row : row + step], bits)
    return words


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """Inverse of `pack_words`.

    Args:
        words: (R, W) int32; W * 32 must be a multiple of `bits`.
        bits: of one value.
    Returns:
        (R, W * 32 / bits) int16, contiguous.
    """
    rows, width = words.shape[0], words.shape[1] * 32 // bits
    values = torch.empty(rows, width, dtype=torch.int16, device=words.device)
    step = max(1, _BLOCK_VALUES // max(1, width))
    for row in range(0, rows, step):
        values[row : row + step] = _unpack(words[row : row + step], bits)
    return values


def _period(bits: int) -> tuple[int, int]:
    """Values and words of the shortest run that begins and ends at a word's border: (8, 1), or (32, 3) for 3 bits."""
    values = 32 // math.gcd(32, bits)
    return values, values * bits // 32


def _pack(values: Tensor, bits: int) -> Tensor:
    per, count = _period(bits)
    runs = values.to(torch.int64).view(values.shape[0], -1, per)  # (R, P, per)
    words = torch.zeros(*runs.shape[:2], count, dtype=torch.int64, device=values.device)
    for index in range(per):
        word, offset = divmod(index * bits, 32)
        words[..., word] |= runs[..., index] << offset & _WORD - 1
        if offset + bits > 32:
            words[..., word + 1] |= runs[..., index] >> 32 - offset
    words = torch.where(words >= _WORD >> 1, words - _WORD, words)
    return words.to(torch.int32).view(values.shape[0], -1)


def _unpack(words: Tensor, bits: int) -> Tensor:
    per, count = _period(bits)
    runs = (words.to(torch.int64) & _WORD - 1).view(words.shape[0], -1, count)  # (R, P, count)
    values = torch.empty(*runs.shape[:2], per, dtype=torch.int16, device=words.device)
    for index in range(per):
        word, offset = divmod(index * bits, 32)
        value = runs[..., word] >> offset
        if offset + bits > 32:
            value = value | runs[..., word + 1] << 32 - offset
        values[..., index] = (value & (1 << bits) - 1).to(torch.int16)
    return values.view(words.shape[0], -1)
