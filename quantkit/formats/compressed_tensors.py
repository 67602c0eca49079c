"""The compressed-tensors format, which transformers and vLLM load. The scheme determines one of six layouts:

    pack-quantized    integer weights          weight_packed, weight_scale, weight_shape, weight_zero_point
    int-quantized     int8 or int4 weights and int8 inputs  weight (int8), weight_scale
    float-quantized   fp8 weights (and inputs) weight (float8_e4m3fn), weight_scale; per tensor, channel or block
    nvfp4-pack-...    fp4 weights (and inputs) weight_packed (uint8), weight_scale (e4m3), weight_global_scale
    mxfp4-pack-...    fp4 weights (and inputs) weight_packed (uint8), weight_scale (uint8, exponents)
    mxfp8-quantized   fp8 weights (and inputs) weight (float8_e4m3fn), weight_scale (uint8, exponents)

A calibrated scale of inputs is stored as input_scale (1,), or for nvfp4 as input_global_scale (1,). The configuration
classes are the library's own. This module chooses the layout, checks schemes and packs codes. It packs like GPTQ, but
along the other dimension; tests compare its bytes with those of the library.
Not handled: mxfp6, asymmetric activations, sparsity, activation-ordered groups.
Shapes: N outputs, K inputs, G scales per row.
Source: compressed-tensors 0.12 to 0.20, `compressors/` and `quantization/quant_{args,scheme,config}.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from quantkit.errors import CheckpointError, SchemeError
from quantkit.formats._compressed_tensors_config import cache_only_config as cache_only_config
from quantkit.formats._compressed_tensors_config import compressed_tensors_section, read_compressed_tensors_section
from quantkit.formats._compressed_tensors_config import fp8_cache_args as fp8_cache_args
from quantkit.formats._compressed_tensors_layout import PACKED, check_compressed_model, find_layout
from quantkit.formats._packing import pack_words, packed_bytes, unpack_words
from quantkit.formats._tensors import matrix_shape, take, take_matrix
from quantkit.formats._unpacked import decode_microscaling, encode_microscaling, encode_unpacked, with_scales
from quantkit.formats.base import Format, Read, Shapes
from quantkit.numerics.dtype import DType
from quantkit.numerics.scheme import ActivationScheme, LinearScheme, Scheme, WeightScheme
from quantkit.numerics.tensor import QuantizedTensor

if TYPE_CHECKING:
    from quantkit.models.family import Family


class CompressedTensorsFormat(Format):
    """The compressed-tensors format."""

    name: ClassVar[str] = "compressed-tensors"
    holds_activations: ClassVar[bool] = True
    holds_cache_scales: ClassVar[bool] = True
    order_name: ClassVar[str] = "weight_g_idx"
    decode_key: ClassVar[str] = "dequantize"
    package: ClassVar[str] = "compressed-tensors"

    def check(self, scheme: LinearScheme, shape: tuple[int, int]) -> None:
        find_layout(scheme)
        super().check(scheme, shape)
        _check_blocks(scheme, shape)

    def check_model(self, family: Family, layers: Sequence[Mapping[str, LinearScheme]]) -> tuple[str, ...]:
        return (*super().check_model(family, layers), *check_compressed_model(family, layers))

    def shape(self, shapes: Shapes, scheme: LinearScheme, read: Read | None = None) -> tuple[int, int] | None:
        if "weight_packed" not in shapes:
            return matrix_shape(shapes.get("weight"))
        if read is not None and scheme.weight.group_size is None and "weight_shape" in shapes:
            rows, width = take({"weight_shape": read("weight_shape")}, "weight_shape", (2,)).tolist()
            return rows, width
        groups, words = matrix_shape(shapes.get("weight_scale")), matrix_shape(shapes["weight_packed"])
        if groups is None or words is None:
            return None
        size = scheme.weight.group_size
        if scheme.weight.dtype.kind == "float":
            return words[0], words[1] * 2
        # The last word may be padded. If there are groups, their number gives the exact number of inputs.
        return words[0], words[1] * 32 // scheme.weight.dtype.bits if size is None else groups[1] * size

    def linear_bytes(self, scheme: LinearScheme, out_features: int, in_features: int, scale_bytes: int) -> int:
        weight = scheme.weight
        if _is_packed(scheme):
            return packed_bytes(weight, out_features, in_features, scale_bytes, zeros=not weight.symmetric)
        groups = 1 if weight.group_size is None else math.ceil(in_features / weight.group_size)
        size = scale_bytes if weight.dtype.scale == "float" else 1
        # Global scales of weights and of inputs are float32; an integer takes a byte, however few bits it uses.
        outer = 4 * (weight.dtype.scale == "e4m3") * (2 if _has_input_scale(scheme) else 1)
        codes = out_features * in_features * (8 if weight.dtype.kind == "int" else weight.dtype.bits) // 8
        return codes + weight.num_scale_rows(out_features) * groups * size + outer

    def beside_bytes(self, scheme: LinearScheme, scale_bytes: int) -> int:
        # The shape of a packed weight is two int64.
        inputs = _has_input_scale(scheme) and scheme.weight.dtype.scale != "e4m3"
        return 16 * _is_packed(scheme) + scale_bytes * inputs

    def encode(self, weight: QuantizedTensor, scheme: LinearScheme) -> dict[str, Tensor]:
        assert weight.scheme == scheme.weight, f"{weight.scheme} is not {scheme.weight}"
        # A weight whose last block is narrower has an index too; shapes imply it, so no file needs it.
        if weight.group_index is not None and scheme.weight.block_rows == 1:
            raise SchemeError(
                "compressed-tensors no longer supports groups in activation order; set steps.gptq.act_order=weight, or "
                "write with --format dense"
            )
        tensors = _encode_weight(weight, packed=_is_packed(scheme))
        if scheme.activation is None or not _has_input_scale(scheme):
            return tensors
        if weight.input_scale is None:
            raise SchemeError(
                f"{scheme.activation.describe()} activations need a calibrated scale, but this linear has none; set "
                "activations.dynamic=true"
            )
        return {**tensors, _input_name(scheme.activation): weight.input_scale.contiguous()}

    def decode(self, tensors: Mapping[str, Tensor], scheme: LinearScheme) -> QuantizedTensor:
        find_layout(scheme)
        if "weight_g_idx" in tensors:
            raise SchemeError(
                "the linear has groups in activation order (weight_g_idx), which compressed-tensors no longer "
                "supports; quantize the original model again"
            )
        weight = _decode_weight(tensors, scheme.weight)
        if scheme.activation is None or not _has_input_scale(scheme):
            return weight
        return replace(weight, input_scale=_input_scale(tensors, _input_name(scheme.activation)))

    def section(self, linears: Mapping[str, LinearScheme], ignored: Sequence[str], group_order: bool) -> dict[str, Any]:
        return compressed_tensors_section(linears, ignored)

    def scheme(self, section: Mapping[str, Any]) -> Scheme:
        # The scheme of the KV cache is ignored here: it does not change how weights are read.
        return read_compressed_tensors_section(section)


FORMAT = CompressedTensorsFormat()


def _check_blocks(scheme: LinearScheme, shape: tuple[int, int]) -> None:
    """Refuse shapes that blocks or groups do not divide, and activation groups that do not match weight blocks."""
    weight, activation = scheme.weight, scheme.activation
    if weight.block_rows is not None and shape[0] % weight.block_rows:
        raise SchemeError(
            f"weights.group_size: blocks of {weight.block_rows} outputs do not divide the {shape[0]} outputs of this "
            "linear, so engines cannot fuse it with others; add it to ignore, or set weights.group_size to channel"
        )
    if activation is not None and activation.group_size is not None and shape[1] % activation.group_size:
        raise SchemeError(
            f"activations.group_size {activation.group_size} does not divide the {shape[1]} inputs of this linear; add "
            "this linear to ignore"
        )
    in_blocks = weight.group_size is not None and weight.block_rows != 1
    if in_blocks and activation is not None and activation.group_size != weight.group_size:
        raise SchemeError(
            f"engines need activation groups as large as weight blocks ({weight.group_size} inputs); "
            f"set activations.group_size to {weight.group_size}"
        )


def _is_packed(scheme: LinearScheme) -> bool:
    """Whether codes are packed into 32-bit words; codes with one scale per tensor are not."""
    return find_layout(scheme) == PACKED and scheme.weight.block_rows is not None


def _has_input_scale(scheme: LinearScheme) -> bool:
    return scheme.activation is not None and scheme.activation.is_calibrated


def _input_name(activation: ActivationScheme) -> str:
    """Return the name of the tensor that holds the calibrated scale of the inputs."""
    return "input_global_scale" if activation.dtype.scale == "e4m3" else "input_scale"


def _input_scale(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    scale = take(tensors, name, None).reshape(-1)
    if scale.numel() != 1 or not bool(torch.isfinite(scale.float()).all()) or not bool((scale.float() > 0).all()):
        raise CheckpointError(f"tensor {name!r} is {scale.tolist()[:3]}; expected one positive number")
    return scale


def _encode_weight(weight: QuantizedTensor, *, packed: bool) -> dict[str, Tensor]:
    scheme = weight.scheme
    if scheme.dtype.scale != "float":
        return encode_microscaling(weight)
    if not packed:
        return encode_unpacked(weight)
    tensors = {
        "weight_packed": pack_words(weight.codes, scheme.dtype.bits, _half(scheme.dtype)),  # (N, ceil(K * bits / 32))
        "weight_scale": weight.scale.contiguous(),
        "weight_shape": torch.tensor(weight.shape, dtype=torch.int64),
    }
    if weight.zero_point is not None:
        words = pack_words(weight.zero_point.t(), scheme.dtype.bits, _half(scheme.dtype))
        tensors["weight_zero_point"] = words.t().contiguous()  # (ceil(N * bits / 32), G)
    return tensors


def _decode_weight(tensors: Mapping[str, Tensor], scheme: WeightScheme) -> QuantizedTensor:
    if scheme.dtype.scale != "float":
        return decode_microscaling(tensors, scheme)
    packed = "weight_packed" in tensors
    codes = _packed_codes(tensors, scheme) if packed else take_matrix(tensors, "weight", scheme.dtype.storage)
    weight = with_scales(codes, tensors, scheme)
    if scheme.symmetric:
        return weight
    if packed:
        return replace(weight, zero_point=_packed_zero_point(tensors, scheme.dtype, weight.scale.shape))
    return replace(weight, zero_point=take(tensors, "weight_zero_point", tuple(weight.scale.shape)).to(torch.int8))


def _packed_zero_point(tensors: Mapping[str, Tensor], dtype: DType, shape: tuple[int, ...]) -> Tensor:
    """Unpack zero points (N, G), which are packed along N."""
    packed = take(tensors, "weight_zero_point", (math.ceil(shape[0] * dtype.bits / 32), shape[1]))
    return unpack_words(packed.t(), dtype.bits, _half(dtype), shape[0]).t().contiguous()


def _packed_codes(tensors: Mapping[str, Tensor], scheme: WeightScheme) -> Tensor:
    """Unpack codes (N, K) from `weight_packed` and `weight_shape`."""
    rows, width = take(tensors, "weight_shape", (2,)).tolist()
    packed = take(tensors, "weight_packed", (rows, math.ceil(width * scheme.dtype.bits / 32)))
    return unpack_words(packed, scheme.dtype.bits, _half(scheme.dtype), width)


def _half(dtype: DType) -> int:
    """Return the number that is added to codes so that none is negative."""
    return -int(dtype.minimum)
