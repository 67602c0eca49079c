"""Numbers in blocks that several formats share: FP8 with a scale per block of rows and columns, FP4 in pairs.

Shapes: N outputs, K inputs, G groups of g inputs.
Source: compressed-tensors `compressors/nvfp4/helpers.py`, `quantization/lifecycle/forward.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from quantkit.errors import CheckpointError
from quantkit.formats._tensors import take
from quantkit.numerics.scheme import WeightScheme
from quantkit.numerics.tensor import QuantizedTensor

_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def decode_fp8_blocks(tensors: Mapping[str, Tensor], scheme: WeightScheme, scale_name: str) -> QuantizedTensor:
    """A weight with one scale per block of `block_rows` x `group_size`.

    Args:
        tensors: of one linear, by local name.
        scheme: of its weight.
        scale_name: of the scales' tensor.
    Returns:
        Every row has its own copy of its block's scales; where K is no multiple of g, the last group is shorter.
    Raises:
        CheckpointError: a tensor is missing or has the wrong dtype or shape.
    """
    codes, size = take(tensors, "weight", None), scheme.group_size
    if codes.ndim != 2 or codes.dtype != torch.float8_e4m3fn or size is None:
        raise CheckpointError(f"tensor 'weight' is {codes.dtype} {tuple(codes.shape)}, not a matrix of FP8 codes")
    rows, width = codes.shape
    stored = take(tensors, scale_name, (math.ceil(rows / scheme.block_rows), math.ceil(width / size)))
    return QuantizedTensor(
        codes=codes,
        scale=stored.repeat_interleave(scheme.block_rows, dim=0)[:rows].contiguous(),
        zero_point=None,
        scheme=scheme,
        group_index=None if width % size == 0 else torch.arange(width) // size,
    )


def encode_fp8_blocks(weight: QuantizedTensor) -> dict[str, Tensor]:
    """Inverse of `decode_fp8_blocks` under the name `weight_scale`."""
    scale = weight.scale[:: weight.scheme.block_rows].contiguous()
    return {"weight": weight.codes.contiguous(), "weight_scale": scale}


def unpack_fp4(packed: Tensor) -> Tensor:
    """FP4 codes of bytes (N, K / 2), even inputs in the low nibble: (N, K) float8_e4m3fn, which holds them exactly."""
    pairs = torch.stack([packed & 15, packed >> 4], dim=2).view(packed.shape[0], -1)
    return _E2M1[pairs.long()].to(torch.float8_e4m3fn)


def pack_fp4(codes: Tensor) -> Tensor:
    """Inverse of `unpack_fp4`."""
    values = codes.float()
    index = torch.searchsorted(_E2M1[:8], values.abs()) + 8 * torch.signbit(values)
    pairs = index.to(torch.uint8).view(codes.shape[0], -1, 2)
    return pairs[..., 0] | pairs[..., 1] << 4
