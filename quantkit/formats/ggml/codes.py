"""Decode the blocks of GGUF files, written by quantkit or other tools, to codes and scales for quantkit's kernels.

The scales of a super-block's sub-blocks are expanded to float32, which is exact. Types with minimums (value = scale *
code - minimum) get the zero point minimum / scale, which is not rounded. So their values may differ from ggml's in the
last bits of float32; `blocks.dequantize_blocks` returns ggml's own values. IQ and TQ types are not read as codes.
Shapes: N outputs, M blocks, G groups per row.
Source: ggml `src/ggml-common.h`; the gguf package, `quants.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from gguf import GGMLQuantizationType as Block
from torch import Tensor

from quantkit.errors import CheckpointError
from quantkit.formats._unpacked import decode_microscaling
from quantkit.formats.ggml.blocks import num_bytes
from quantkit.formats.ggml.k_quants import BITS, NIBBLES, PAIRS
from quantkit.numerics.dtype import find_dtype
from quantkit.numerics.scheme import LinearScheme, WeightScheme
from quantkit.numerics.tensor import QuantizedTensor

# Number type, values per scale, and whether there are minimums, keyed by ggml's name of the type.
_TYPES = {
    "Q4_0": ("int4", 32, False),
    "Q4_1": ("int4", 32, True),
    "Q5_0": ("int5", 32, False),
    "Q5_1": ("int5", 32, True),
    "Q8_0": ("int8", 32, False),
    "Q2_K": ("int2", 16, True),
    "Q3_K": ("int3", 16, False),
    "Q4_K": ("int4", 32, True),
    "Q5_K": ("int5", 32, True),
    "Q6_K": ("int6", 16, False),
    "MXFP4": ("mxfp4", 32, False),
}
SCHEMES = {
    name: LinearScheme(weight=WeightScheme(dtype=find_dtype(dtype), group_size=group, symmetric=not minimums))
    for name, (dtype, group, minimums) in _TYPES.items()
}
"""Scheme of each type that is read as codes, keyed by ggml's name of the type."""
LOCAL_NAMES = {f"weight_{name.lower()}": name for name in SCHEMES}
"""ggml's name of each type, keyed by the local name of the tensor that holds its blocks (N, bytes of a row)."""

Parts = tuple[Tensor, Tensor, Tensor | None]


def decode_codes(tensors: Mapping[str, Tensor]) -> QuantizedTensor:
    """Decode the blocks of one linear to codes.

    Args:
        tensors: the blocks (N, bytes of a row) uint8, under one of `LOCAL_NAMES`.
    Raises:
        CheckpointError: a scale or a minimum is not finite.
    """
    local = next(name for name in tensors if name in LOCAL_NAMES)
    name, rows = LOCAL_NAMES[local], tensors[local].shape[0]
    scheme, block = SCHEMES[name].weight, Block[name]
    blocks = tensors[local].reshape(-1, num_bytes(block, (_values(block),)))
    if block == Block.MXFP4:
        low, high = blocks[:, 1:] & 15, blocks[:, 1:] >> 4
        nibbles = torch.cat([low, high], dim=1).view(rows, -1, 2)  # ggml's bytes pair values i and i + 16
        packed = {"weight_packed": nibbles[..., 0] | nibbles[..., 1] << 4, "weight_scale": blocks[:, 0].view(rows, -1)}
        return decode_microscaling(packed, scheme)
    unsigned, scale, minimum = _READ[block](blocks)
    if not bool(torch.isfinite(scale).all()) or (minimum is not None and not bool(torch.isfinite(minimum).all())):
        raise CheckpointError(f"a scale or minimum of the {name} blocks is not finite; download the file again")
    codes, zero, half = unsigned.reshape(rows, -1).to(torch.int8), None, -int(scheme.dtype.minimum)
    if block != Block.Q8_0:
        codes -= half
    if minimum is not None:
        # A group of equal values has a scale of 0. Scale = |minimum| and a zero point of one step give the same values.
        flat = scale == 0
        scale = torch.where(flat, minimum.abs(), scale)
        zero = torch.where(scale == 0, torch.zeros_like(scale), minimum / scale).view(rows, -1) - half
        if bool(flat.any()):
            codes.view(scale.numel(), -1)[flat.flatten()] = -half
    return QuantizedTensor(
        codes=codes, scale=scale.reshape(rows, -1), zero_point=zero, scheme=scheme, value_dtype=torch.float32
    )


def width_of(local: str, row_bytes: int) -> int:
    """Return the number of inputs of a row of blocks that has `row_bytes` bytes."""
    block = Block[LOCAL_NAMES[local]]
    return row_bytes // num_bytes(block, (_values(block),)) * _values(block)


def _values(block: Block) -> int:
    return 256 if block.name.endswith("_K") else 32


def _half(data: Tensor) -> Tensor:
    """Read bytes (M, 2n) as float16 numbers, and return these as float32 (M, n)."""
    return data.contiguous().view(torch.float16).float()


def _fields(data: Tensor, run: int, shifts: Sequence[int]) -> Tensor:
    """Unpack the bit fields of bytes, run by run: first the lowest field of all bytes of the run, then the next field.

    Returns:
        (M, n) uint8.
    """
    runs = data.reshape(len(data), -1, 1, run)
    bits = shifts[1] - shifts[0]
    fields = runs >> torch.tensor(shifts, dtype=torch.uint8).view(1, 1, -1, 1) & (1 << bits) - 1
    return fields.view(len(data), -1)


def _simple(offset: int, *, minimum: bool = False, fifth: bool = False) -> Callable[[Tensor], Parts]:
    """Return a function that reads blocks of 32 values. Such a block holds a scale, optionally a minimum and the fifth
    bits of codes, and at byte `offset` the low four bits of codes.
    """

    def read(blocks: Tensor) -> Parts:
        codes = _fields(blocks[:, offset:], 16, NIBBLES)
        if fifth:
            codes = codes | _fields(blocks[:, offset - 4 : offset], 1, BITS) << 4
        scale = _half(blocks[:, :2])
        return (codes, scale, -_half(blocks[:, 2:4])) if minimum else (codes, scale.half(), None)

    return read


def _q8_0(blocks: Tensor) -> Parts:
    return blocks[:, 2:].contiguous().view(torch.int8), _half(blocks[:, :2]).half(), None


def _q2_k(blocks: Tensor) -> Parts:
    scales, heads = blocks[:, :16], _half(blocks[:, 80:84])
    return _fields(blocks[:, 16:80], 32, PAIRS), heads[:, :1] * (scales & 15), heads[:, 1:] * (scales >> 4)


def _q3_k(blocks: Tensor) -> Parts:
    high = _fields(blocks[:, :32], 32, BITS)
    scales = _fields(blocks[:, 96:104], 8, NIBBLES) | _fields(blocks[:, 104:108], 4, PAIRS) << 4
    return _fields(blocks[:, 32:96], 32, PAIRS) | high << 2, _half(blocks[:, 108:]) * (scales.float() - 32), None


def _q4_k(blocks: Tensor) -> Parts:
    """Read scales and minimums from twelve bytes as `k_quants._six_bits` packs them, and codes from nibbles."""
    heads, low, high, rest = _half(blocks[:, :4]), blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat([low & 63, rest & 15 | low >> 6 << 4], dim=1)
    minimums = torch.cat([high & 63, rest >> 4 | high >> 6 << 4], dim=1)
    return _fields(blocks[:, -128:], 32, NIBBLES), heads[:, :1] * scales, heads[:, 1:] * minimums


def _q5_k(blocks: Tensor) -> Parts:
    codes, scale, minimum = _q4_k(blocks)
    return codes | _fields(blocks[:, 16:48], 32, BITS) << 4, scale, minimum


def _q6_k(blocks: Tensor) -> Parts:
    codes = _fields(blocks[:, :128], 64, NIBBLES) | _fields(blocks[:, 128:192], 32, PAIRS) << 4
    return codes, _half(blocks[:, 208:]) * blocks[:, 192:208].contiguous().view(torch.int8), None


_READ = {
    Block.Q4_0: _simple(2),
    Block.Q4_1: _simple(4, minimum=True),
    Block.Q5_0: _simple(6, fifth=True),
    Block.Q5_1: _simple(8, minimum=True, fifth=True),
    Block.Q8_0: _q8_0,
    Block.Q2_K: _q2_k,
    Block.Q3_K: _q3_k,
    Block.Q4_K: _q4_k,
    Block.Q5_K: _q5_k,
    Block.Q6_K: _q6_k,
}
