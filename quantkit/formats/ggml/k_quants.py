"""Pack ggml's blocks: Q2_K to Q6_K, whose groups have whole-number scales, and simple blocks, which are one group.

`numerics.super_blocks` describes these scales and minimums, and searches them. Fields are in the order of the file: d
and dmin are the float16 factors of a block's scales and minimums; in simple blocks, d is the scale.

    Q2_K  16 bytes of a 4-bit scale and minimum, 64 of codes, d, dmin
    Q3_K  32 bytes of high bits, 64 of low bits, 12 of 6-bit scales + 32, d
    Q4_K  d, dmin, 12 bytes of 6-bit scales and minimums, 128 of codes
    Q5_K  d, dmin, 12 bytes of 6-bit scales and minimums, 32 of high bits, 128 of low bits
    Q6_K  128 bytes of low bits, 64 of high bits, 16 of scales, d
    Q4_0  d, 16 bytes of codes
    Q4_1  d, minimum, 16 bytes of codes
    Q5_0  d, 4 bytes of high bits, 16 of low bits
    Q5_1  d, minimum, 4 bytes of high bits, 16 of low bits
    Q8_0  d, 32 bytes of codes in two's complement

Shapes: M blocks of S groups.
Source: ggml `src/ggml-common.h`, `src/ggml-quants.c`.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from quantkit.numerics.affine import to_codes
from quantkit.numerics.dtype import DType
from quantkit.numerics.super_blocks import Blocks, expand, search_blocks

# Rows of blocks rounded at once, which bounds the float32 temporaries.
_CHUNK = 1 << 12


def round_to_k_blocks(values: Tensor, dtype: DType, importance: Tensor | None = None) -> Tensor:
    """Round values to blocks, with the scales that have the least weighted squared error.

    Args:
        values: (M, values of a block) float32.
        dtype: a type of ggml.
        importance: weights of the squared errors, >= 0, shaped like `values`. As in ggml, they are multiplied by a
            factor that grows with each value's size within its block. None = weights depend only on sizes of values.
    Returns:
        (M, bytes of a block) uint8.
    """
    assert dtype.block is not None and dtype.group is not None, f"{dtype.name} has no blocks"
    encoded = [torch.empty(0, dtype.block[1], dtype=torch.uint8)]
    for row in range(0, len(values), _CHUNK):
        own = values[row : row + _CHUNK]
        blocks = search_blocks(
            own, dtype, size_weights(own, dtype, None if importance is None else importance[row : row + _CHUNK])
        )
        scale, zero, _ = expand(blocks, len(own), dtype)
        groups = own.view(len(own), -1, dtype.group)
        codes = to_codes(groups, scale.unsqueeze(-1), None if zero is None else zero.unsqueeze(-1), dtype)
        encoded.append(pack_blocks(codes.view(own.shape), blocks, dtype))
    return torch.cat(encoded)


def size_weights(values: Tensor, dtype: DType, importance: Tensor | None) -> Tensor:
    """Return ggml's weights of the squared errors of values (M, values of a block); larger values weigh more."""
    if importance is not None:  # multiplied by a factor for the size of a value within its block
        return importance * (2 * values.square().mean(1, keepdim=True) + values.square()).sqrt()
    if not dtype.has_minimums:
        return values.square()
    groups = values.view(len(values), -1, int(dtype.group or 0))
    return (groups.square().mean(-1, keepdim=True).sqrt() + groups.abs()).view(values.shape)


def pack_blocks(codes: Tensor, blocks: Blocks, dtype: DType) -> Tensor:
    """Pack signed codes (M, values of a block), scales and minimums into blocks (M, bytes of a block) uint8."""
    return pack_fields(dtype.name, codes.to(torch.int16) - int(dtype.minimum), blocks)


def pack_fields(name: str, codes: Tensor, blocks: Blocks) -> Tensor:
    """Pack unsigned codes (M, values of a block), scales and minimums into blocks (M, bytes of a block) uint8.

    `name` is a type from the table in the module's docstring, in lower case. Types without sub-blocks ignore
    `blocks.scales`: their scale is `blocks.step`.
    """
    unsigned = codes.view(torch.uint8) if codes.dtype == torch.int8 else codes.to(torch.uint8)
    return torch.cat([part.to(torch.uint8) for part in _PACK[name](unsigned, blocks)], dim=1)


def _fields(values: Tensor, run: int, shifts: Sequence[int]) -> Tensor:
    """Pack small numbers (M, n) into bytes (M, n / len(shifts)), in runs of `run` bytes. The first `run` numbers fill
    the lowest field of all bytes of the run, the next `run` numbers the field above, and so on.
    """
    fields = values.reshape(len(values), -1, len(shifts), run)
    moved = fields << torch.tensor(shifts, dtype=torch.uint8, device=values.device).view(1, 1, -1, 1)
    return moved.sum(2, dtype=torch.uint8).view(len(values), -1)


NIBBLES, PAIRS, BITS = (0, 4), (0, 2, 4, 6), tuple(range(8))
"""Bit positions of the fields that share a byte: two fields of four bits, four of two bits, or eight of one bit."""


def _half(*values: Tensor | None) -> Tensor:
    """Return the float16 bytes of values (M, 1) side by side."""
    present = [value for value in values if value is not None]
    return torch.cat(present, dim=1).to(torch.float16).contiguous().view(torch.uint8)


def _q2_k(codes: Tensor, blocks: Blocks) -> list[Tensor]:
    step, offset, scales, minimums = blocks
    assert minimums is not None
    return [scales.to(torch.uint8) | minimums.to(torch.uint8) << 4, _fields(codes, 32, PAIRS), _half(step, offset)]


def _q3_k(codes: Tensor, blocks: Blocks) -> list[Tensor]:
    scales = (blocks.scales + 32).to(torch.uint8)
    packed = [_fields(scales & 15, 8, NIBBLES), _fields(scales >> 4, 4, PAIRS)]
    return [_fields(codes >> 2, 32, BITS), _fields(codes & 3, 32, PAIRS), *packed, _half(blocks.step)]


def _six_bits(blocks: Blocks) -> list[Tensor]:
    """Return the bytes of a block's two float16 numbers, and of its eight 6-bit scales and eight 6-bit minimums.

    Scales and minimums take twelve bytes. Each of the first four scales and minimums has a byte; its two highest bits
    hold the two highest bits of one of the last four. The low nibbles of the last four scales and minimums share four
    bytes.
    """
    step, offset, scales, minimums = blocks
    assert minimums is not None
    scales, minimums = scales.to(torch.uint8), minimums.to(torch.uint8)
    low = scales[:, :4] | scales[:, 4:] >> 4 << 6
    high = minimums[:, :4] | minimums[:, 4:] >> 4 << 6
    return [_half(step, offset), low, high, scales[:, 4:] & 15 | (minimums[:, 4:] & 15) << 4]


def _q4_k(codes: Tensor, blocks: Blocks) -> list[Tensor]:
    return [*_six_bits(blocks), _fields(codes, 32, NIBBLES)]


def _q5_k(codes: Tensor, blocks: Blocks) -> list[Tensor]:
    return [*_six_bits(blocks), _fields(codes >> 4, 32, BITS), _fields(codes & 15, 32, NIBBLES)]


def _q6_k(codes: Tensor, blocks: Blocks) -> list[Tensor]:
    low, high = _fields(codes & 15, 64, NIBBLES), _fields(codes >> 4, 32, PAIRS)
    return [low, high, blocks.scales.to(torch.int8).view(torch.uint8), _half(blocks.step)]


def _free(blocks: Blocks) -> Tensor:
    """Return the bytes of scale and minimum of Q4_1 or Q5_1; these types add the minimum, K types subtract it."""
    assert blocks.offset is not None and blocks.minimums is not None
    return _half(blocks.step, -blocks.offset * blocks.minimums)


def _q4_1(codes: Tensor, blocks: Blocks) -> list[Tensor]:
    return [_free(blocks), _fields(codes, 16, NIBBLES)]


def _q5_1(codes: Tensor, blocks: Blocks) -> list[Tensor]:
    return [_free(blocks), _fields(codes >> 4, 1, BITS), _fields(codes & 15, 16, NIBBLES)]


def _q4_0(codes: Tensor, blocks: Blocks) -> list[Tensor]:
    return [_half(blocks.step), _fields(codes, 16, NIBBLES)]


def _q5_0(codes: Tensor, blocks: Blocks) -> list[Tensor]:
    return [_half(blocks.step), _fields(codes >> 4, 1, BITS), _fields(codes & 15, 16, NIBBLES)]


def _q8_0(codes: Tensor, blocks: Blocks) -> list[Tensor]:
    return [_half(blocks.step), codes]


_PACK: dict[str, Callable[[Tensor, Blocks], list[Tensor]]] = {
    "q4_0": _q4_0,
    "q5_0": _q5_0,
    "q8_0": _q8_0,
    "q2_k": _q2_k,
    "q3_k": _q3_k,
    "q4_k": _q4_k,
    "q5_k": _q5_k,
    "q6_k": _q6_k,
    "q4_1": _q4_1,
    "q5_1": _q5_1,
}
