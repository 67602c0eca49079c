"""Pack codes of 2 to 8 bits into 32-bit words and unpack them: dense, least significant bit first.

GPTQ, AWQ and compressed-tensors (since 0.18) pack their codes this way. Value i of a row occupies bits
[i * b, (i + 1) * b) of the row's bit stream. If b does not divide 32, a value may straddle two words: the first word of
3-bit codes holds ten values and two bits of the eleventh. Zeros pad the last word of a row. If b divides 8, a byte
holds whole values and torch combines them on any device; otherwise NumPy packs single bits.
Shapes: R rows, C values per row, W words.
Source: GPTQModel `nn_modules/qlinear/__init__.py` (`pack_original`; 3-bit words are unrolled);
compressed-tensors `compressors/pack_quantized/helpers.py`.
"""

import math

import numpy as np
import torch
from torch import Tensor

from quantkit.numerics.scheme import WeightScheme

# Values packed at once, which bounds the temporaries.
_BLOCK_VALUES = 1 << 22


def pack_words(values: Tensor, bits: int, offset: int = 0) -> Tensor:
    """Pack each row of values into 32-bit words.

    Args:
        values: (R, C) whole numbers in [-offset, 2**bits - offset), any integer dtype.
        bits: bits per value.
        offset: added to each value to make it non-negative.
    Returns:
        (R, ceil(C * bits / 32)) int32, contiguous.
    """
    rows, width = values.shape
    words = torch.empty(rows, math.ceil(width * bits / 32), dtype=torch.int32, device=values.device)
    step = max(1, _BLOCK_VALUES // max(1, width))
    for row in range(0, rows, step):
        some = values[row : row + step]
        packed = (_pack if 8 % bits else _pack_bytes)(some.to(torch.uint8) + offset, bits)
        words[row : row + step] = packed[:, : words.shape[1]]
    return words


def unpack_words(words: Tensor, bits: int, offset: int = 0, width: int | None = None) -> Tensor:
    """Inverse of `pack_words`.

    Args:
        words: (R, W) int32.
        bits: bits per value.
        offset: subtracted from each value.
        width: C; None = as many values as the words hold.
    Returns:
        (R, C), contiguous: int8 with an offset (signed values), else int16.
    """
    rows, width = words.shape[0], words.shape[1] * 32 // bits if width is None else width
    # Without an offset values of 8 bits reach 255, which int8 does not hold.
    values = torch.empty(rows, width, dtype=torch.int8 if offset else torch.int16, device=words.device)
    step = max(1, _BLOCK_VALUES // max(1, width))
    for row in range(0, rows, step):
        some = words[row : row + step]
        unpacked = (_unpack if 8 % bits else _unpack_bytes)(some, bits) - offset
        # The difference of bytes wraps modulo 256; read as signed numbers, it is right.
        values[row : row + step] = (unpacked.view(torch.int8) if offset else unpacked)[:, :width]
    return values


def _pack_bytes(values: Tensor, bits: int) -> Tensor:
    data = _filled(values, 32 // bits).flatten(1).contiguous()
    while bits < 8:
        pairs = data.view(torch.int16)
        data, bits = (pairs | pairs >> 8 - bits).to(torch.uint8), 2 * bits
    return data.view(torch.int32)


def _unpack_bytes(words: Tensor, bits: int) -> Tensor:
    data, held = words.contiguous().view(torch.uint8), 8
    while held > bits:
        pairs, held = data.to(torch.int16), held // 2
        data = ((pairs | pairs << 8 - held) & 0x0101 * ((1 << held) - 1)).view(torch.uint8)
    return data


def _pack(values: Tensor, bits: int) -> Tensor:
    stream = np.unpackbits(values.cpu().numpy()[..., None], axis=2, bitorder="little", count=bits)
    words = _filled(torch.from_numpy(stream.reshape(len(stream), -1)), 32).flatten(1)
    return torch.from_numpy(np.packbits(words.numpy(), axis=1, bitorder="little")).view(torch.int32)


def _unpack(words: Tensor, bits: int) -> Tensor:
    rows, width = words.shape[0], words.shape[1] * 32 // bits
    stream = np.unpackbits(words.cpu().contiguous().view(torch.uint8).numpy(), axis=1, bitorder="little")
    fields = stream[:, : width * bits].reshape(rows, width, bits)
    return torch.from_numpy(np.packbits(fields, axis=2, bitorder="little")[..., 0])


def _filled(rows: Tensor, size: int) -> Tensor:
    """Split rows into chunks of `size` and pad the last chunk with zeros: (R, P, size)."""
    filled = torch.nn.functional.pad(rows, (0, -rows.shape[1] % size))
    return filled.view(rows.shape[0], filled.shape[1] // size, size)


def packed_bytes(
    weight: WeightScheme, out_features: int, in_features: int, scale_bytes: int = 2, *, zeros: bool = True
) -> int:
    """Count the bytes of a weight's codes, scales and zero points, with codes and zero points packed in 32-bit words.

    Args:
        weight: scheme of the weight.
        out_features, in_features: shape (N, K) of the weight.
        scale_bytes: bytes of one scale.
        zeros: whether zero points are stored.
    """
    groups = 1 if weight.group_size is None else math.ceil(in_features / weight.group_size)
    words = math.ceil(in_features * weight.dtype.bits / 32) * out_features
    zero_words = zeros * math.ceil(out_features * weight.dtype.bits / 32) * groups
    return 4 * (words + zero_words) + out_features * groups * scale_bytes
