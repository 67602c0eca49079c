"""FP8 with a scale per block of rows and columns, which several formats share.

Shapes: N outputs, K inputs, G groups of g inputs.
Source: compressed-tensors `quantization/lifecycle/forward.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from quantkit.formats._tensors import take, take_matrix
from quantkit.numerics.scheme import WeightScheme
from quantkit.numerics.tensor import QuantizedTensor


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
    codes, size, block_rows = take_matrix(tensors, "weight", torch.float8_e4m3fn), scheme.group_size, scheme.block_rows
    assert size is not None and block_rows is not None, f"{scheme} has no blocks"
    rows, width = codes.shape
    stored = take(tensors, scale_name, (math.ceil(rows / block_rows), math.ceil(width / size)))
    return QuantizedTensor(
        codes=codes,
        scale=stored.repeat_interleave(block_rows, dim=0)[:rows].contiguous(),
        zero_point=None,
        scheme=scheme,
        group_index=None if width % size == 0 else torch.arange(width) // size,
    )


def encode_fp8_blocks(weight: QuantizedTensor) -> dict[str, Tensor]:
    """Inverse of `decode_fp8_blocks` under the name `weight_scale`."""
    scale = weight.scale[:: weight.scheme.block_rows].contiguous()
    return {"weight": weight.codes.contiguous(), "weight_scale": scale}
