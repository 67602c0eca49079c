"""Our codes as GGUF blocks, where the scheme allows it without rounding anything again.

    symmetric int2, int3, int4    Q4_0   scale repeated in each block of 32, code + 8
    symmetric int5                Q5_0
    symmetric int6                Q6_K   one scale for each 256 inputs, so groups of 256 or whole rows
    symmetric int8                Q8_0
    asymmetric int4               Q4_1   minimum = -(zero point + 8) * scale, where float16 holds it exactly
    asymmetric int2, int3         Q4_0   code - zero point, which fits
    asymmetric int4 otherwise     Q5_0   likewise
    mxfp4                         MXFP4  the same numbers in another order

GGUF is one file, not a folder of tensors per layer. While a model is quantized its layers therefore lie in a folder of
the compressed-tensors format, with scales that float16 holds; `quantkit.compress.convert` makes the file of it.
Shapes: N outputs, K inputs, G scales per row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from quantkit.errors import CheckpointError, SchemeError
from quantkit.formats import _gguf_blocks as blocks
from quantkit.formats._gguf_blocks import MXFP4, Q4_0, Q4_1, Q5_0, Q6_K, Q8_0, Block, decode, from_parts, to_parts
from quantkit.formats._microscaling import encode_microscaling, fp4_indices, fp4_values
from quantkit.formats._tensors import check_groups, refuse_activations
from quantkit.formats.compressed_tensors import FORMAT as STAGE
from quantkit.numerics.scheme import LinearScheme, Scheme, WeightScheme
from quantkit.numerics.tensor import QuantizedTensor

_BLOCK = 32
_SYMMETRIC = {"int8": Q8_0, "int6": Q6_K, "int5": Q5_0, "mxfp4": MXFP4}
_NARROW = ("int2", "int3", "int4")


@dataclass(frozen=True)
class GGUF:
    """The format itself; see `quantkit.formats.base.Format`. Tensors and config are those of the folder in between."""

    keeps_codes: ClassVar[bool] = True
    holds_group_index: ClassVar[bool] = False
    scale_dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float16, torch.bfloat16)

    def check(self, scheme: LinearScheme, shape: tuple[int, int]) -> None:
        """Refuse what no block holds exactly.

        Args:
            scheme: of one linear.
            shape: (N, K) of its weight.
        Raises:
            SchemeError: says which recipe field to change.
        """
        weight = scheme.weight
        refuse_activations(scheme, "gguf")
        known = weight.dtype.name in _NARROW or (weight.symmetric and weight.dtype.name in _SYMMETRIC)
        if not known or weight.block_rows != 1:
            raise SchemeError(
                f"gguf holds int2, int3 and int4, symmetric int5, int6 and int8, and mxfp4, not {weight.describe()}; "
                "set weights.dtype=int4, or weights.dtype=int8 with weights.symmetric=true"
            )
        check_groups(scheme, shape)
        values = symmetric_block(weight).values if weight.symmetric else _BLOCK
        if shape[1] % values or weight.group_width(shape[1]) % values:
            sizes = "32, 64, 128 or channel" if values == _BLOCK else "256 or channel, or weights.dtype to int5 or int8"
            raise SchemeError(
                f"gguf has a scale per {values} inputs, {weight.describe()} of {shape[1]} inputs does not fit; "
                f"set weights.group_size to {sizes}, or add this linear to ignore"
            )
        STAGE.check(scheme, shape)

    def shape(self, shapes: Mapping[str, tuple[int, ...]], scheme: LinearScheme) -> tuple[int, int] | None:
        """That of the folder in between."""
        return STAGE.shape(shapes, scheme)

    def encode(self, weight: QuantizedTensor, scheme: LinearScheme) -> dict[str, Tensor]:
        """That of the folder in between."""
        encode_blocks(weight)  # so that a scale that does not fit is found at the first layer, not at the end
        return STAGE.encode(weight, scheme)

    def decode(self, tensors: Mapping[str, Tensor], scheme: LinearScheme) -> QuantizedTensor:
        """That of the folder in between."""
        return STAGE.decode(tensors, scheme)

    def config(
        self, linears: Mapping[str, LinearScheme], ignored: Sequence[str], *, group_order: bool = False
    ) -> dict[str, Any]:
        """That of the folder in between."""
        return STAGE.config(linears, ignored)

    def recognise(self, config: Mapping[str, Any]) -> Scheme | None:
        """That of the folder in between."""
        return STAGE.recognise(config)


FORMAT = GGUF()


def encode_blocks(weight: QuantizedTensor) -> tuple[Block, Tensor]:
    """The same values as GGUF blocks, exactly.

    Args:
        weight: (N, K) of a scheme that `GGUF.check` passes.
    Returns:
        block: the type chosen.
        data: (N, bytes per row) uint8.
    Raises:
        SchemeError: a scale that float16 does not hold, or groups in another order.
    """
    if weight.group_index is not None:
        raise SchemeError(
            "its groups are in activation order, which gguf cannot store; set steps.gptq.act_order=weight"
        )
    rows, width = weight.shape
    if weight.scheme.dtype.name == MXFP4.name.lower():
        exponents = encode_microscaling(weight)["weight_scale"].view(-1)
        return MXFP4, blocks.pack_mxfp4(fp4_indices(weight.codes).view(-1, _BLOCK), exponents).view(rows, -1)
    half = _exact_half(weight.scale)
    if weight.zero_point is None:
        block = symmetric_block(weight.scheme)
        scale = half.repeat_interleave(width // half.shape[1] // block.values, dim=1).view(-1)
        codes = weight.codes.view(-1, block.values)
        data = blocks.pack_q6_k(codes, scale) if block == Q6_K else from_parts(block, codes, scale)
        return block, data.view(rows, -1)
    scale = half.repeat_interleave(width // half.shape[1] // _BLOCK, dim=1).view(-1)
    codes = weight.codes.view(-1, _BLOCK)
    zero = weight.zero_point.repeat_interleave(width // weight.scale.shape[1] // _BLOCK, dim=1).view(-1)
    minimum = -(zero.float() + 8) * scale.float()
    if weight.scheme.dtype.bits == 4 and torch.equal(minimum.half().float(), minimum):
        return Q4_1, from_parts(Q4_1, codes + 8, scale, minimum).view(rows, -1)
    block = Q5_0 if weight.scheme.dtype.bits == 4 else Q4_0
    return block, from_parts(block, codes - zero.view(-1, 1), scale).view(rows, -1)


def symmetric_block(weight: WeightScheme) -> Block:
    """The type of block that holds a symmetric scheme which `GGUF.check` passes."""
    return _SYMMETRIC.get(weight.dtype.name, Q4_0)


def decode_blocks(block: Block, data: Tensor, scheme: WeightScheme, shape: tuple[int, int]) -> QuantizedTensor:
    """Inverse of `encode_blocks` for symmetric schemes and for Q4_1; the rest keeps values but not zero points.

    Args:
        block: type of the data.
        data: uint8, all bytes of the tensor.
        scheme: whose groups the blocks were made of.
        shape: (N, K).
    Raises:
        CheckpointError: blocks of one group have different scales, or the type does not keep codes of this scheme.
    """
    if block != (symmetric_block(scheme) if scheme.symmetric else Q4_1):
        raise CheckpointError(f"{block.name} does not keep the codes of {scheme.describe()}")
    rows, width = shape
    flat, minimum = data.view(-1, block.size), None
    if block == MXFP4:
        indices, exponents = blocks.unpack_mxfp4(flat)
        scale = torch.exp2(exponents.double() - 127).float().view(rows, -1)
        return QuantizedTensor(codes=fp4_values(indices).view(shape), scale=scale, zero_point=None, scheme=scheme)
    if block == Q6_K:
        codes, scale = blocks.unpack_q6_k(flat)
    else:
        codes, scale, minimum = to_parts(block, flat)
    groups = scheme.num_groups(width)
    scales = scale.view(rows, groups, -1)
    if not torch.equal(scales, scales[:, :, :1].expand_as(scales)):
        raise CheckpointError(f"blocks of one group have different scales, so they are not {scheme.describe()}")
    zero = None
    if minimum is not None:
        zero = (-minimum.float() / scale.float()).round_().view(rows, groups, -1)[:, :, 0].to(torch.int8) - 8
        codes = codes - 8
    return QuantizedTensor(
        codes=codes.view(shape), scale=scales[:, :, 0].to(torch.float16), zero_point=zero, scheme=scheme
    )


def decode_values(block: Block, data: Tensor, shape: Sequence[int]) -> Tensor:
    """Values of a tensor of a GGUF file.

    Raises:
        CheckpointError: a type that cannot be decoded.
    """
    values = decode(block, data, shape)
    if values is None:
        raise CheckpointError(f"GGUF type {block.name} cannot be decoded")
    return values


def _exact_half(scale: Tensor) -> Tensor:
    half = scale.to(torch.float16)
    if not torch.equal(half.to(torch.float64), scale.to(torch.float64)) or not bool(torch.isfinite(half).all()):
        raise SchemeError(
            "a scale does not fit float16, in which gguf stores scales, without rounding; quantize with --format gguf"
        )
    return half
