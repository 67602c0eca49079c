"""Codes that are not packed into 32-bit words: one code per byte, or two FP4 codes per byte.

    int8, fp8   weight (N, K), weight_scale (1,) per tensor, or (ceil(N / rows), ceil(K / g)) per block
    nvfp4       weight_packed uint8 (N, K / 2), weight_scale float8_e4m3fn (N, G), weight_global_scale float32 (1,)
    mxfp4       weight_packed uint8 (N, K / 2), weight_scale uint8 (N, G), exponent + 127
    mxfp8       weight float8_e4m3fn (N, K), weight_scale uint8 (N, G)

Shapes: N outputs, K inputs, G groups of g inputs.
Source: compressed-tensors `compressors/{nvfp4,mxfp4,mxfp8}`, `quantization/lifecycle/forward.py`; OCP
Microscaling Formats (MX) 1.0.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from quantkit.errors import CheckpointError, SchemeError
from quantkit.formats._tensors import take, take_matrix, take_one
from quantkit.numerics.dtype import MXFP8
from quantkit.numerics.scheme import WeightScheme
from quantkit.numerics.tensor import QuantizedTensor

_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
_BIAS = 127


def decode_microscaling(tensors: Mapping[str, Tensor], scheme: WeightScheme) -> QuantizedTensor:
    """Decode an nvfp4, mxfp4 or mxfp8 weight; the returned scales are float32.

    Args:
        tensors: tensors of one linear, keyed by local name.
        scheme: scheme of the weight.
    Raises:
        CheckpointError: a tensor is missing or has the wrong dtype or shape.
    """
    if scheme.dtype == MXFP8:
        codes = take_matrix(tensors, "weight", torch.float8_e4m3fn)
    else:
        codes = unpack_fp4(take_matrix(tensors, "weight_packed", torch.uint8))
    stored = take(tensors, "weight_scale", (codes.shape[0], scheme.num_groups(codes.shape[1])))
    if scheme.dtype.scale == "e8m0":
        if stored.dtype != torch.uint8:
            raise CheckpointError(
                f"tensor 'weight_scale' is {stored.dtype}; expected uint8 exponents; download the checkpoint again"
            )
        return QuantizedTensor(codes=codes, scale=powers_of_two(stored), zero_point=None, scheme=scheme)
    outer = take(tensors, "weight_global_scale", (1,)).float()
    scale = stored.float() / outer
    return QuantizedTensor(codes=codes, scale=scale, zero_point=None, scheme=scheme, global_scale=outer)


def powers_of_two(exponents: Tensor) -> Tensor:
    """Decode E8M0 bytes of any shape to float32; 255 (NaN in E8M0) becomes infinity."""
    return torch.exp2(exponents.view(torch.uint8).to(torch.float64) - _BIAS).float()


def encode_microscaling(weight: QuantizedTensor) -> dict[str, Tensor]:
    """Inverse of `decode_microscaling`.

    Raises:
        SchemeError: the scales cannot be stored exactly.
    """
    name = weight.scheme.dtype.name
    is_fp8 = weight.scheme.dtype == MXFP8
    tensors = {"weight": weight.codes.contiguous()} if is_fp8 else {"weight_packed": pack_fp4(weight.codes)}
    if weight.scheme.dtype.scale == "e8m0":
        exponents = torch.log2(weight.scale.to(torch.float64)) + _BIAS
        # In E8M0, 255 means NaN.
        if not torch.equal(exponents.round(), exponents) or bool(((exponents < 0) | (exponents > 254)).any()):
            raise SchemeError(
                f"{name} stores only powers of two as scales, but this weight has other scales; quantize the original "
                f"model to {name} instead"
            )
        return {**tensors, "weight_scale": exponents.to(torch.uint8)}
    if weight.global_scale is None:
        raise SchemeError(f"{name} needs a global scale, but this weight has none; quantize the original model instead")
    local = (weight.scale * weight.global_scale).to(torch.float8_e4m3fn)
    if not torch.equal(local.float() / weight.global_scale, weight.scale):
        raise SchemeError(
            f"{name} stores 8-bit scales times a global scale, which cannot represent all scales of this weight; "
            f"quantize the original model to {name} instead"
        )
    return {**tensors, "weight_scale": local, "weight_global_scale": weight.global_scale}


def with_scales(
    codes: Tensor, tensors: Mapping[str, Tensor], scheme: WeightScheme, scale_name: str = "weight_scale"
) -> QuantizedTensor:
    """Combine codes and stored scales into a symmetric weight with one scale per tensor or per block.

    Args:
        codes: (N, K).
        tensors: tensors of the linear, keyed by local name.
        scheme: scheme of the weight; a block has `block_rows` x `group_size` weights.
        scale_name: name of the scale tensor.
    Returns:
        The weight, with a block's scales repeated for each of its rows; if g does not divide K, the last group is
        shorter.
    Raises:
        CheckpointError: the scales are missing or have the wrong shape.
    """
    rows, width = codes.shape
    # The last block of a row may be narrower. The last group of a row may not: `group_width` refuses that.
    size = scheme.group_width(width) if scheme.block_rows == 1 else scheme.group_size or width
    if scheme.block_rows is None:
        scale = take_one(tensors, scale_name).expand(rows, 1)
    else:
        scale = take(tensors, scale_name, (math.ceil(rows / scheme.block_rows), math.ceil(width / size)))
        scale = scale.repeat_interleave(min(scheme.block_rows, rows), dim=0)[:rows]
    # If the last block is narrower, groups are not a view of the row, so an index gives each input's group.
    index = None if width % size == 0 else torch.arange(width) // size
    return QuantizedTensor(codes=codes, scale=scale.contiguous(), zero_point=None, scheme=scheme, group_index=index)


def encode_unpacked(weight: QuantizedTensor) -> dict[str, Tensor]:
    """Return the codes unchanged, and the scales in the shape that `with_scales` reads."""
    rows = weight.scheme.block_rows
    # All rows of a block have the same scales, so the scales of its first row suffice.
    scale = weight.scale[:1].reshape(1) if rows is None else weight.scale[::rows].contiguous()
    return {"weight": weight.codes.contiguous(), "weight_scale": scale}


def unpack_fp4(packed: Tensor) -> Tensor:
    """Unpack bytes (N, K / 2), even inputs in the low nibble, to FP4 values: (N, K) float8_e4m3fn, which is exact."""
    return fp4_values(torch.stack([packed & 15, packed >> 4], dim=2).view(packed.shape[0], -1))


def pack_fp4(codes: Tensor) -> Tensor:
    """Inverse of `unpack_fp4`."""
    pairs = fp4_indices(codes).view(codes.shape[0], -1, 2)
    return pairs[..., 0] | pairs[..., 1] << 4


def fp4_indices(codes: Tensor) -> Tensor:
    """Convert FP4 values of any shape to uint8 nibbles: sign bit, then the index into 0, 0.5, 1, 1.5, 2, 3, 4, 6."""
    bits = codes.to(torch.float8_e4m3fn).view(torch.uint8)
    # E4M3 has two more mantissa bits, so FP4 neighbours from 1 on are 4 E4M3 codes apart; 0.5 is 8 codes below 1.
    rank = ((bits & 0x7F) >> 2).clamp_min_(12) - 12
    return rank + (bits & 0x7F == 0x30) + ((bits & 0x80) >> 4)


def fp4_values(indices: Tensor) -> Tensor:
    """Inverse of `fp4_indices`; returns float8_e4m3fn, which is exact."""
    return _E2M1.to(indices.device)[indices.long()].to(torch.float8_e4m3fn)
