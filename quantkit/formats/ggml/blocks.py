"""Blocks of GGUF tensors: store codes as blocks without loss, round float values to blocks, and decode blocks.

The gguf package provides types, sizes, ggml's own rounding and all dequantizing. On CPUs it rounds two to three times
as fast as torch and gives the same bytes. The package cannot convert codes to blocks, so this module does. Nor can the
package encode K-quants: `numerics.super_blocks` searches their scales and minimums, and `k_quants` packs them.
Shapes: N outputs, K inputs, M blocks; the last dimension holds the bytes of a block.
Source: ggml `src/ggml-common.h`, `src/ggml-quants.c`.
"""

import math
from collections.abc import Sequence

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Block
from torch import Tensor

from quantkit.errors import CheckpointError, SchemeError
from quantkit.formats._unpacked import encode_microscaling, fp4_indices
from quantkit.formats.ggml.k_quants import pack_blocks, pack_fields, round_to_k_blocks
from quantkit.numerics.dtype import GGML_TYPES
from quantkit.numerics.super_blocks import Blocks, collect
from quantkit.numerics.tensor import QuantizedTensor

PLAIN = {Block.F64: torch.float64, Block.F32: torch.float32, Block.F16: torch.float16, Block.BF16: torch.bfloat16}
PLAIN |= {Block.I64: torch.int64, Block.I32: torch.int32, Block.I16: torch.int16, Block.I8: torch.int8}
# Numbers to add to codes to get the unsigned numbers of a block; Q8_0 stores two's complement.
_OFFSETS = {Block.Q4_0: 8, Block.Q4_1: 0, Block.Q5_0: 16, Block.Q6_K: 32, Block.Q8_0: 0}


def block_values(block: Block) -> int:
    """Return the number of values per block."""
    return int(gguf.GGML_QUANT_SIZES[block][0])


def num_bytes(block: Block, shape: Sequence[int]) -> int:
    """Count the bytes of a tensor of this shape; its last dimension must be a multiple of the block's values."""
    values, size = gguf.GGML_QUANT_SIZES[block]
    return int(math.prod(shape) // values * size)


def round_to_blocks(values: Tensor, block: Block, importance: Tensor | None = None) -> Tensor:
    """Round rows of values to blocks of a type, by ggml's rounding or, for K-quants, by quantkit's own search.

    Args:
        values: (..., K), any float dtype; K must be a multiple of the block's values.
        block: F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, or Q2_K to Q6_K.
        importance: (K,) weight of each input's squared error, used only for K-quants.
    Returns:
        uint8 bytes in file order, in any shape.
    """
    if block in PLAIN:
        return values.to(PLAIN[block]).contiguous().view(-1).view(torch.uint8)
    single = values.float().contiguous()
    if block.name.endswith("_K"):
        weights = None if importance is None else importance.float().expand_as(single).reshape(-1, 256)
        return round_to_k_blocks(single.view(-1, 256), GGML_TYPES[block.name.lower()], weights)
    return torch.from_numpy(gguf.quantize(single.numpy(), block))


def dequantize_blocks(block: Block, data: Tensor, shape: Sequence[int]) -> Tensor:
    """Decode a tensor of a GGUF file to float32, or to its own dtype if it is unquantized.

    Args:
        block: type of the tensor.
        data: all bytes of the tensor, uint8.
        shape: shape of the result.
    Raises:
        CheckpointError: blocks of this type cannot be decoded.
    """
    if block in PLAIN:
        return data.view(PLAIN[block]).view(*shape)
    if not data.numel():
        return torch.empty(*shape)  # the package cannot reshape an empty array
    try:
        # Scales in a damaged file may be NaN, about which numpy would warn.
        with np.errstate(all="ignore"):
            values = gguf.dequantize(data.reshape(-1, gguf.GGML_QUANT_SIZES[block][1]).numpy(), block)
    except NotImplementedError:
        raise CheckpointError(
            f"a tensor of the file has the GGUF type {block.name}, which is not supported; use a file of another type, "
            "such as Q4_K_M or Q8_0"
        ) from None
    return torch.from_numpy(values).view(*shape)


def encode_blocks(weight: QuantizedTensor, symmetric_block: str) -> tuple[Block, Tensor]:
    """Convert a quantized weight to GGUF blocks that decode to exactly the same values.

    Args:
        weight: (N, K), with a scheme that `GGUFFormat.check` accepts.
        symmetric_block: name of the block type to use if there are no zero points.
    Returns:
        block: type of the blocks.
        data: (N, bytes per row) uint8.
    Raises:
        SchemeError: a scale is not a float16 number, or groups are in activation order.
    """
    if weight.group_index is not None:
        raise SchemeError(
            "the groups of this weight are in activation order, which a GGUF file cannot store; set "
            "steps.gptq.act_order=weight"
        )
    block, rows, dtype = Block[symmetric_block], weight.shape[0], weight.scheme.dtype
    if dtype.block is not None:
        assert weight.block_scale is not None, f"{dtype.name} without the scales of its blocks"
        own = collect(weight.scale, weight.zero_point, weight.block_scale, dtype)
        return block, pack_blocks(weight.codes.reshape(-1, dtype.block[0]), own, dtype).view(rows, -1)
    if block == Block.MXFP4:
        exponents = encode_microscaling(weight)["weight_scale"].view(-1, 1)
        indices = fp4_indices(weight.codes).view(-1, 32)
        # ggml pairs value i with value i + 16 in a byte, where compressed-tensors pairs neighbours.
        return block, torch.cat([exponents, indices[:, :16] | indices[:, 16:] << 4], dim=1).view(rows, -1)
    scale, minimum = _per_block(_exact_half(weight.scale), weight, block), None
    codes = weight.codes.view(-1, block_values(block))  # int8, which holds all sums below
    if weight.zero_point is not None:
        zero = _per_block(weight.zero_point, weight, block)
        # Q4_1 counts from 0: scale * (code - zero) = scale * (code + 8) - scale * (zero + 8).
        lowest = -(zero.float() + 8) * scale.float()
        if weight.scheme.dtype.bits == 4 and torch.equal(lowest.half().float(), lowest):
            block, codes, minimum = Block.Q4_1, codes + 8, -lowest
        else:
            # The difference of two 4-bit numbers has five bits, that of 2-bit or 3-bit numbers at most four.
            block, codes = Block.Q5_0 if weight.scheme.dtype.bits == 4 else block, codes - zero
    # A group fills whole blocks, so its scale is the block's and the integer scales of sub-blocks are all 1.
    ones = torch.ones(len(codes), 16 if block == Block.Q6_K else 1, dtype=torch.int8, device=codes.device)
    packed = pack_fields(block.name.lower(), codes + _OFFSETS[block], Blocks(scale, minimum, ones, ones))
    return block, packed.view(rows, -1)


def _per_block(parameters: Tensor, weight: QuantizedTensor, block: Block) -> Tensor:
    """Repeat scales or zero points (N, G) for every block of a group: (M, 1)."""
    repeats = weight.shape[1] // parameters.shape[1] // block_values(block)
    return parameters.repeat_interleave(repeats, dim=1).view(-1, 1)


def _exact_half(scale: Tensor) -> Tensor:
    """Convert scales to float16, in which GGUF blocks store them.

    Raises:
        SchemeError: a scale is not a float16 number.
    """
    half = scale.to(torch.float16)
    # Compared in float64, which holds every value of both types.
    lost = (half.to(torch.float64) != scale.to(torch.float64)) | ~torch.isfinite(half)
    if bool(lost.any()):
        value = float(scale[lost][0])
        raise SchemeError(
            f"scale {value:.9g} of this weight is not a float16 number, and GGUF files store scales in float16. "
            "Quantize the original model with --format gguf instead of converting; if you did, ignore this linear"
        )
    return half
