"""The blocks of GGUF tensors: how values become bytes and bytes values, exactly as ggml's reference computes them.

A row of K values is K / `values` blocks behind each other. Types with one scale per 32 values are complete here; the
encoders of the K-quants, a search, are in `_gguf_kquants`.
Shapes: M blocks; a block's bytes are the last dimension.
Source: ggml `src/ggml-common.h`, `src/ggml-quants.c`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """One type of tensor.

    Args:
        number: in the file.
        name: as ggml writes it.
        values: per block.
        size: bytes per block.
        dtype: of a type that torch has; None = packed.
    """

    number: int
    name: str
    values: int
    size: int
    dtype: torch.dtype | None = None

    def num_bytes(self, shape: Sequence[int]) -> int:
        """Bytes of a tensor of this shape, whose last dimension must fill blocks."""
        return math.prod(shape) // self.values * self.size


F32 = Block(number=0, name="F32", values=1, size=4, dtype=torch.float32)
F16 = Block(number=1, name="F16", values=1, size=2, dtype=torch.float16)
Q4_0 = Block(number=2, name="Q4_0", values=32, size=18)
Q4_1 = Block(number=3, name="Q4_1", values=32, size=20)
Q5_0 = Block(number=6, name="Q5_0", values=32, size=22)
Q8_0 = Block(number=8, name="Q8_0", values=32, size=34)
Q4_K = Block(number=12, name="Q4_K", values=256, size=144)
Q6_K = Block(number=14, name="Q6_K", values=256, size=210)
BF16 = Block(number=30, name="BF16", values=1, size=2, dtype=torch.bfloat16)
MXFP4 = Block(number=39, name="MXFP4", values=32, size=17)

_OTHERS = (
    Block(number=7, name="Q5_1", values=32, size=24),
    Block(number=10, name="Q2_K", values=256, size=84),
    Block(number=11, name="Q3_K", values=256, size=110),
    Block(number=13, name="Q5_K", values=256, size=176),
    Block(number=20, name="IQ4_NL", values=32, size=18),
    Block(number=23, name="IQ4_XS", values=256, size=136),
    Block(number=24, name="I8", values=1, size=1, dtype=torch.int8),
    Block(number=25, name="I16", values=1, size=2, dtype=torch.int16),
    Block(number=26, name="I32", values=1, size=4, dtype=torch.int32),
    Block(number=27, name="I64", values=1, size=8, dtype=torch.int64),
    Block(number=28, name="F64", values=1, size=8, dtype=torch.float64),
)
BLOCKS = {block.number: block for block in (F32, F16, Q4_0, Q4_1, Q5_0, Q8_0, Q4_K, Q6_K, BF16, MXFP4, *_OTHERS)}


def from_parts(block: Block, codes: Tensor, scale: Tensor, minimum: Tensor | None = None) -> Tensor:
    """Bytes of blocks with one scale, from codes that are there already.

    Args:
        block: Q4_0 and Q5_0 (value = scale * code), Q4_1 (scale * code + minimum) or Q8_0 (scale * code).
        codes: (M, 32): -8..7 for Q4_0, 0..15 for Q4_1, -16..15 for Q5_0, -128..127 for Q8_0.
        scale: (M,), values that float16 holds.
        minimum: (M,), likewise; for Q4_1.
    Returns:
        (M, bytes) uint8.
    """
    head = [_half_bytes(scale)]
    if block == Q8_0:
        return torch.cat([*head, codes.to(torch.int8).view(torch.uint8)], dim=1)
    if minimum is not None:
        head.append(_half_bytes(minimum))
    unsigned = codes.to(torch.int16) + {"Q4_0": 8, "Q4_1": 0, "Q5_0": 16}[block.name]
    if block == Q5_0:
        bits = ((unsigned >> 4).view(-1, 4, 8) << torch.arange(8, dtype=torch.int16)).sum(-1)
        head.append(bits.to(torch.uint8))  # bit i is the fifth of value i
    return torch.cat([*head, (unsigned[:, :16] & 15 | (unsigned[:, 16:] & 15) << 4).to(torch.uint8)], dim=1)


def to_parts(block: Block, data: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Inverse of `from_parts`: codes int8 (M, 32), scale float16 (M,), minimum float16 (M,) or None."""
    scale = data[:, :2].contiguous().view(torch.float16).view(-1)
    if block == Q8_0:
        return data[:, 2:].contiguous().view(torch.int8), scale, None
    packed = data[:, -16:]
    codes = torch.cat([packed & 15, packed >> 4], dim=1).to(torch.int8)
    if block == Q4_1:
        return codes, scale, data[:, 2:4].contiguous().view(torch.float16).view(-1)
    if block == Q5_0:
        bits = data[:, 2:6].unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8) & 1  # (M, 4, 8)
        return codes + 16 * bits.view(-1, 32).to(torch.int8) - 16, scale, None
    return codes - 8, scale, None


def pack_q6_k(codes: Tensor, scale: Tensor) -> Tensor:
    """Bytes of Q6_K blocks whose sixteen 8-bit scales are all 1.

    Args:
        codes: (M, 256) whole numbers, -32..31.
        scale: (M,), values that float16 holds.
    Returns:
        (M, 210) uint8.
    """
    quarters = (codes.to(torch.int16) + 32).view(-1, 2, 4, 32)
    low = (quarters[:, :, :2] & 15 | (quarters[:, :, 2:] & 15) << 4).flatten(1)
    high = ((quarters >> 4) << 2 * torch.arange(4, dtype=torch.int16).view(4, 1)).sum(2).flatten(1)
    ones = torch.ones(len(codes), 16, dtype=torch.uint8)
    return torch.cat([low.to(torch.uint8), high.to(torch.uint8), ones, _half_bytes(scale)], dim=1)


def unpack_q6_k(data: Tensor) -> tuple[Tensor, Tensor]:
    """Codes int8 (M, 256) and scale float32 (M, 16) of Q6_K blocks (M, 210)."""
    low, high = data[:, :128].view(-1, 2, 64), data[:, 128:192].view(-1, 2, 32)
    scales, scale = data[:, 192:208].contiguous().view(torch.int8), data[:, 208:].contiguous().view(torch.float16)
    quarters = [low[..., :32] & 15, low[..., 32:] & 15, low[..., :32] >> 4, low[..., 32:] >> 4]
    codes = [quarter | (high >> 2 * i & 3) << 4 for i, quarter in enumerate(quarters)]
    return torch.stack(codes, dim=2).view(-1, 256).to(torch.int8) - 32, scale.float() * scales.float()


def pack_mxfp4(indices: Tensor, exponents: Tensor) -> Tensor:
    """Bytes of MXFP4 blocks.

    Args:
        indices: (M, 32) uint8, FP4 codes as nibbles.
        exponents: (M,) uint8, 127 more than that of the scale.
    Returns:
        (M, 17) uint8.
    """
    return torch.cat([exponents.view(-1, 1), indices[:, :16] | indices[:, 16:] << 4], dim=1)


def unpack_mxfp4(data: Tensor) -> tuple[Tensor, Tensor]:
    """Inverse of `pack_mxfp4`."""
    return torch.cat([data[:, 1:] & 15, data[:, 1:] >> 4], dim=1), data[:, 0].contiguous()


def quantize_q4_0(values: Tensor) -> Tensor:
    """ggml's rounding to Q4_0: the value of largest magnitude becomes -8. (M, 32) float32 to (M, 18)."""
    extreme = values.gather(1, values.abs().argmax(1, keepdim=True))
    scale = extreme / -8
    codes = (values * _inverse(scale) + 8.5).to(torch.int8).clamp(max=15) - 8
    return from_parts(Q4_0, codes, scale.view(-1))


def quantize_q5_0(values: Tensor) -> Tensor:
    """ggml's rounding to Q5_0: the value of largest magnitude becomes -16. (M, 32) float32 to (M, 22)."""
    extreme = values.gather(1, values.abs().argmax(1, keepdim=True))
    scale = extreme / -16
    codes = (values * _inverse(scale) + 16.5).to(torch.int8).clamp(max=31) - 16
    return from_parts(Q5_0, codes, scale.view(-1))


def quantize_q4_1(values: Tensor) -> Tensor:
    """ggml's rounding to Q4_1. (M, 32) float32 to (M, 20)."""
    low, high = values.aminmax(dim=1, keepdim=True)
    scale = (high - low) / 15
    codes = ((values - low) * _inverse(scale) + 0.5).to(torch.int8).clamp(max=15)
    return from_parts(Q4_1, codes, scale.view(-1), low.view(-1))


def quantize_q8_0(values: Tensor) -> Tensor:
    """ggml's rounding to Q8_0, halves away from zero. (M, 32) float32 to (M, 34)."""
    scale = values.abs().amax(1, keepdim=True) / 127
    scaled = values * _inverse(scale)
    codes = torch.trunc(scaled + 0.5 * scaled.sign())
    return from_parts(Q8_0, codes, scale.view(-1))


def decode(block: Block, data: Tensor, shape: Sequence[int]) -> Tensor | None:
    """Values of a tensor's bytes, float32 or its own dtype; None for a type that is not decoded here.

    Args:
        block: its type.
        data: uint8, all bytes.
        shape: of the result.
    """
    if block.dtype is not None:
        return data.view(block.dtype).view(*shape)
    if block.name not in _DECODERS:
        return None
    return _DECODERS[block.name](data.view(data.numel() // block.size, block.size)).view(*shape)


def unpack_k_scales(data: Tensor) -> tuple[Tensor, Tensor]:
    """The eight 6-bit scales and minimums of a Q4_K block: (M, 12) bytes to two (M, 8) uint8."""
    low, high, mixed = data[:, :4], data[:, 4:8], data[:, 8:]
    scales = torch.cat([low & 63, mixed & 15 | (low >> 6) << 4], dim=1)
    minimums = torch.cat([high & 63, mixed >> 4 | (high >> 6) << 4], dim=1)
    return scales, minimums


def pack_k_scales(scales: Tensor, minimums: Tensor) -> Tensor:
    """Inverse of `unpack_k_scales`."""
    low = scales[:, :4] | scales[:, 4:] >> 4 << 6
    high = minimums[:, :4] | minimums[:, 4:] >> 4 << 6
    return torch.cat([low, high, scales[:, 4:] & 15 | (minimums[:, 4:] & 15) << 4], dim=1)


def _decode_q4_k(data: Tensor) -> Tensor:
    scale, offset = (data[:, i : i + 2].contiguous().view(torch.float16).float() for i in (0, 2))  # (M, 1)
    scales, minimums = unpack_k_scales(data[:, 4:16])
    packed = data[:, 16:].view(-1, 4, 32)
    codes = torch.stack([packed & 15, packed >> 4], dim=2).view(-1, 8, 32).float()
    return (scale * scales).unsqueeze(-1) * codes - (offset * minimums).unsqueeze(-1)


def _decode_q6_k(data: Tensor) -> Tensor:
    codes, scales = unpack_q6_k(data)
    return scales.unsqueeze(-1) * codes.view(-1, 16, 16).float()


def _decode_mxfp4(data: Tensor) -> Tensor:
    indices, exponents = unpack_mxfp4(data)
    return _E2M1[indices.long()] * torch.exp2(exponents.double() - 127).float().unsqueeze(-1)


def _decode_simple(block: Block) -> Callable[[Tensor], Tensor]:
    def values(data: Tensor) -> Tensor:
        codes, scale, minimum = to_parts(block, data)
        result = codes.float() * scale.float().unsqueeze(-1)
        return result if minimum is None else result + minimum.float().unsqueeze(-1)

    return values


_DECODERS: dict[str, Callable[[Tensor], Tensor]] = {
    **{block.name: _decode_simple(block) for block in (Q4_0, Q4_1, Q5_0, Q8_0)},
    "Q4_K": _decode_q4_k,
    "Q6_K": _decode_q6_k,
    "MXFP4": _decode_mxfp4,
}


def _half_bytes(values: Tensor) -> Tensor:
    """(M,) as float16, (M, 2) uint8."""
    return values.to(torch.float16).view(-1, 1).contiguous().view(torch.uint8)


def _inverse(scale: Tensor) -> Tensor:
    """1 / scale, and 0 where the scale is 0."""
    return torch.where(scale == 0, torch.zeros_like(scale), 1 / scale)
