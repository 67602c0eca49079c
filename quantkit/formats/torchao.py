"""Reader for torchao checkpoints in safetensors: int8 and fp8 per row, and unpacked small integers in groups.

    _weight_qdata   (N, K), one element per code
    _weight_scale   (N, G)
    _weight_zero_point   (N, G) int8, all 0 if the mapping is symmetric

Not supported: kernel-specific layouts (tiled or packed int4), which even torchao can read only on the matching device.
Source: torchao `quantization/quant_api.py`, `prototype/safetensors`; transformers `quantizer_torchao.py`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from quantkit.errors import CheckpointError, SchemeError
from quantkit.formats._tensors import take, take_matrix
from quantkit.formats._unpacked import with_scales
from quantkit.formats.base import Format, ignored_rules
from quantkit.numerics.dtype import DTYPES, FP8, INT8
from quantkit.numerics.scheme import ActivationScheme, LinearScheme, Scheme, WeightScheme
from quantkit.numerics.tensor import QuantizedTensor

_KNOWN = "Int8WeightOnlyConfig, Int8DynamicActivationInt8WeightConfig, Float8WeightOnlyConfig, IntxWeightOnlyConfig"


class TorchAO(Format):
    """The torchao format."""

    name: ClassVar[str] = "torchao"
    is_written: ClassVar[bool] = False
    shape_name: ClassVar[str] = "_weight_qdata"
    scale_name: ClassVar[str] = "_weight_scale"
    package: ClassVar[str] = "torchao"

    def decode(self, tensors: Mapping[str, Tensor], scheme: LinearScheme) -> QuantizedTensor:
        weight = scheme.weight
        codes = take_matrix(tensors, self.shape_name, weight.dtype.storage)
        decoded = with_scales(codes, tensors, weight, self.scale_name)
        if weight.symmetric and "_weight_zero_point" not in tensors:
            return decoded
        zero = take(tensors, "_weight_zero_point", tuple(decoded.scale.shape)).to(torch.int8)
        if weight.symmetric and bool(zero.any()):
            raise CheckpointError(
                "'_weight_zero_point' has values other than 0, but config.json says that weights are symmetric; "
                "download the checkpoint again"
            )
        return replace(decoded, zero_point=None if weight.symmetric else zero)

    def scheme(self, section: Mapping[str, Any]) -> Scheme:
        kind = section.get("quant_type")
        kind = kind.get("default") if isinstance(kind, Mapping) else None
        if not isinstance(kind, Mapping) or not isinstance(kind.get("_data"), Mapping):
            raise SchemeError(f"quantization_config.quant_type {kind!r} is not supported; supported: {_KNOWN}")
        linear = _linear(str(kind.get("_type")), kind["_data"])
        return Scheme(default=linear, rules=ignored_rules(section, "modules_to_not_convert"))


FORMAT = TorchAO()


def _linear(kind: str, data: Mapping[str, Any]) -> LinearScheme:
    if kind in ("Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig"):
        activation = None if kind == "Int8WeightOnlyConfig" else ActivationScheme(dtype=INT8)
        return LinearScheme(weight=WeightScheme(dtype=INT8, group_size=_group_size(data)), activation=activation)
    if kind == "Float8WeightOnlyConfig":
        return LinearScheme(weight=WeightScheme(dtype=FP8, group_size=_group_size(data)))
    if kind == "IntxWeightOnlyConfig":
        name, packing = _value(data.get("weight_dtype")), _value(data.get("intx_packing_format"))
        if name in DTYPES and packing == "UNPACKED_TO_INT8":
            symmetric = _value(data.get("mapping_type")) == "SYMMETRIC"
            weight = WeightScheme(dtype=DTYPES[name], group_size=_group_size(data), symmetric=symmetric)
            return LinearScheme(weight=weight)
        kind = f"{kind} of {name} in {packing}"
    raise SchemeError(f"cannot decode torchao's {kind}; supported (unpacked only): {_KNOWN}")


def _group_size(data: Mapping[str, Any]) -> int | None:
    """Return the group size of a granularity; None for one scale per row."""
    granularity = data.get("granularity")
    if not isinstance(granularity, Mapping) or granularity.get("_type") not in ("PerRow", "PerAxis", "PerGroup"):
        raise SchemeError(
            f"torchao's granularity {granularity!r} is not supported; supported: PerRow, PerAxis, PerGroup"
        )
    if granularity["_type"] != "PerGroup":
        return None
    inner = granularity.get("_data")
    size = inner.get("group_size") if isinstance(inner, Mapping) else None
    if type(size) is not int:
        raise SchemeError(f"torchao's group_size is {size!r}; expected a whole number")
    return size


def _value(field: Any) -> str:
    return str(field.get("_data")) if isinstance(field, Mapping) else str(field)
