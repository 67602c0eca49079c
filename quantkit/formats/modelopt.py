"""Reader for NVIDIA ModelOpt checkpoints: FP8 per tensor or per channel, INT4 AWQ, NVFP4, and mixtures of these.

    FP8        weight float8_e4m3fn (N, K), weight_scale () or (N,), input_scale ()
    INT4_AWQ   weight uint8 (N / 2, K), two outputs per byte (even one in the low nibble), weight_scale (N, G)
    NVFP4      weight uint8 (N, K / 2), weight_scale float8_e4m3fn (N, K / 16), weight_scale_2 ()

Static input scales are ignored: inputs stay in 16 bits, which is at least as exact. A `pre_quant_scale` that was not
folded into another layer is refused.
Source: ModelOpt `torch/export/unified_export_hf.py`, `quant_utils.py`.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from quantkit.errors import CheckpointError, SchemeError
from quantkit.formats._tensors import matrix_shape, take, take_matrix, take_one
from quantkit.formats._unpacked import unpack_fp4, with_scales
from quantkit.formats.base import Format, Read, Shapes, ignored_rules
from quantkit.numerics.dtype import FP8, INT4, NVFP4
from quantkit.numerics.scheme import LinearScheme, Rule, Scheme, WeightScheme
from quantkit.numerics.tensor import QuantizedTensor

_ALGORITHMS = {
    **dict.fromkeys(("FP8", "FP8_PER_CHANNEL_PER_TOKEN"), WeightScheme(dtype=FP8)),
    **dict.fromkeys(("INT4_AWQ", "W4A16_AWQ"), WeightScheme(dtype=INT4, group_size=128)),
    **dict.fromkeys(("NVFP4", "W4A16_NVFP4"), WeightScheme(dtype=NVFP4, group_size=16)),
}
_MIXED = "MIXED_PRECISION"


class ModelOpt(Format):
    """The ModelOpt format. Where config.json has no `quantization_config`, quantkit uses hf_quant_config.json."""

    name: ClassVar[str] = "modelopt"
    is_written: ClassVar[bool] = False
    engines: ClassVar[tuple[str, ...]] = ("vllm",)

    def shape(self, shapes: Shapes, scheme: LinearScheme, read: Read | None = None) -> tuple[int, int] | None:
        stored = matrix_shape(shapes.get("weight"))
        # Two codes share a byte: of neighbouring outputs, or of neighbouring inputs.
        rows, columns = {INT4: (2, 1), NVFP4: (1, 2)}.get(scheme.weight.dtype, (1, 1))
        return stored and (stored[0] * rows, stored[1] * columns)

    def decode(self, tensors: Mapping[str, Tensor], scheme: LinearScheme) -> QuantizedTensor:
        if "pre_quant_scale" in tensors:
            raise SchemeError(
                "the linear has a scale for its inputs ('pre_quant_scale'), which is not supported; use a checkpoint "
                "without it"
            )
        weight = scheme.weight
        stored = take_matrix(tensors, "weight", FP8.storage if weight.dtype == FP8 else torch.uint8)
        if weight.dtype == INT4:
            return with_scales(_unpack_int4(stored), tensors, weight)
        if weight.dtype == NVFP4:
            return _decode_nvfp4(tensors, stored, weight)
        scale = take(tensors, "weight_scale", None).float().reshape(-1, 1)
        if scale.shape[0] not in (1, stored.shape[0]):
            raise CheckpointError(
                f"'weight_scale' has {scale.shape[0]} values; expected 1, or {stored.shape[0]} (one per output)"
            )
        scale = scale.expand(stored.shape[0], 1).contiguous()
        return QuantizedTensor(codes=stored, scale=scale, zero_point=None, scheme=weight)

    def scheme(self, section: Mapping[str, Any]) -> Scheme:
        inner = section.get("quantization")
        fields = {**section, **inner} if isinstance(inner, Mapping) else section
        if fields.get("quant_algo") == _MIXED:
            return Scheme(default=None, rules=_layer_rules(fields.get("quantized_layers")))
        rules = ignored_rules(fields, "exclude_modules", "ignore")
        return Scheme(default=_linear_scheme(fields, "quant_algo"), rules=rules)


FORMAT = ModelOpt()


def _linear_scheme(fields: Mapping[str, Any], where: str) -> LinearScheme:
    """Return the scheme of a whole model or of one linear; `where` names the entry in messages."""
    name = str(fields.get("quant_algo"))
    if name not in _ALGORITHMS:
        raise SchemeError(f"{where} {name!r} is not supported; supported for ModelOpt: {', '.join(_ALGORITHMS)}")
    weight, size = _ALGORITHMS[name], fields.get("group_size")
    if type(size) is int and size > 0 and weight.group_size is not None:
        weight = WeightScheme(dtype=weight.dtype, group_size=size)
    return LinearScheme(weight=weight)


def _layer_rules(layers: Any) -> tuple[Rule, ...]:
    """Return one rule per linear name, for a model with several schemes."""
    if not isinstance(layers, Mapping) or not all(isinstance(fields, Mapping) for fields in layers.values()):
        raise SchemeError(
            f"quantized_layers of a {_MIXED} model must be a JSON object that maps each linear's name to an object of "
            "settings; download the model again"
        )
    return tuple(
        Rule(pattern=str(name), linear=_linear_scheme(fields, f"quant_algo of {name}"))
        for name, fields in layers.items()
    )


def _unpack_int4(stored: Tensor) -> Tensor:
    """Unpack bytes (N / 2, K) to codes (N, K)."""
    nibbles = torch.stack([stored & 15, stored >> 4], dim=1).view(-1, stored.shape[1]).to(torch.int8)
    # Two's complement, unlike the offset codes of compressed-tensors.
    return torch.where(nibbles > 7, nibbles - 16, nibbles)


def _decode_nvfp4(tensors: Mapping[str, Tensor], stored: Tensor, scheme: WeightScheme) -> QuantizedTensor:
    codes = unpack_fp4(stored)
    local = take(tensors, "weight_scale", (codes.shape[0], scheme.num_groups(codes.shape[1])))
    # The reciprocal of compressed-tensors' global scale: decoding multiplies by it instead of dividing.
    outer = take_one(tensors, "weight_scale_2").float()
    return QuantizedTensor(codes=codes, scale=local.float() * outer, zero_point=None, scheme=scheme)
