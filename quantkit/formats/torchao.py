"""Checkpoints of torchao in safetensors, for reading: int8 and fp8 per row, and unpacked small integers in groups.

    _weight_qdata   (N, K), one element per code
    _weight_scale   (N, G)
    _weight_zero_point   (N, G) int8, all 0 where the mapping is symmetric

Not here: layouts of one kernel (tiled or packed int4), which torchao itself reads on its device only.
Source: torchao `quantization/quant_api.py`, `prototype/safetensors`; transformers `quantizer_torchao.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from quantkit.errors import CheckpointError, SchemeError
from quantkit.formats._read_only import ReadOnly
from quantkit.formats._tensors import matrix_shape, take
from quantkit.numerics.dtype import DTYPES, FP8, INT8
from quantkit.numerics.scheme import ActivationScheme, LinearScheme, Rule, Scheme, WeightScheme
from quantkit.numerics.tensor import QuantizedTensor

_KNOWN = "Int8WeightOnlyConfig, Int8DynamicActivationInt8WeightConfig, Float8WeightOnlyConfig, IntxWeightOnlyConfig"


@dataclass(frozen=True)
class TorchAO(ReadOnly):
    """The format itself; see `quantkit.formats.base.Format`."""

    name: ClassVar[str] = "torchao"

    def shape(self, shapes: Mapping[str, tuple[int, ...]], scheme: LinearScheme) -> tuple[int, int] | None:
        """(N, K) of a linear from the shapes of its tensors."""
        return matrix_shape(shapes.get("_weight_qdata"))

    def decode(self, tensors: Mapping[str, Tensor], scheme: LinearScheme) -> QuantizedTensor:
        """Codes, scales and zero points of one linear.

        Args:
            tensors: of one linear, by local name.
            scheme: of the linear.
        Raises:
            CheckpointError: a tensor is missing or contradicts the scheme.
        """
        weight, codes = scheme.weight, take(tensors, "_weight_qdata", None)
        if codes.ndim != 2 or codes.dtype != weight.dtype.storage:
            raise CheckpointError(
                f"tensor '_weight_qdata' is {codes.dtype} {tuple(codes.shape)}, not a matrix of "
                f"{weight.dtype.storage} codes, although config.json says {weight.describe()}"
            )
        shape = (codes.shape[0], weight.num_groups(codes.shape[1]))
        zero = take(tensors, "_weight_zero_point", shape).to(torch.int8) if "_weight_zero_point" in tensors else None
        if weight.symmetric and zero is not None and bool(zero.any()):
            raise CheckpointError("'_weight_zero_point' is not 0, although config.json says the mapping is symmetric")
        if not weight.symmetric and zero is None:
            raise CheckpointError("quantized linear has no tensor '_weight_zero_point', although it is asymmetric")
        scale = take(tensors, "_weight_scale", shape)
        return QuantizedTensor(codes=codes, scale=scale, zero_point=None if weight.symmetric else zero, scheme=weight)

    def recognise(self, config: Mapping[str, Any]) -> Scheme | None:
        """The scheme of a config.json of torchao; None when it is of another method.

        Args:
            config: contents of config.json.
        Raises:
            SchemeError: a kind that cannot be decoded.
        """
        section = config.get("quantization_config")
        if not isinstance(section, Mapping) or section.get("quant_method") != "torchao":
            return None
        kind = section.get("quant_type")
        kind = kind.get("default") if isinstance(kind, Mapping) else None
        if not isinstance(kind, Mapping) or not isinstance(kind.get("_data"), Mapping):
            raise SchemeError(f"quantization_config.quant_type is {kind!r}; can be decoded: {_KNOWN}")
        linear = _linear(str(kind.get("_type")), kind["_data"])
        names = section.get("modules_to_not_convert") or []
        if not isinstance(names, list):
            raise SchemeError(f"quantization_config.modules_to_not_convert is {names!r}; expected a list of names")
        return Scheme(default=linear, rules=tuple(Rule(pattern=str(name), linear=None) for name in names))


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
    raise SchemeError(f"torchao's {kind} cannot be decoded; can be: {_KNOWN} (unpacked)")


def _group_size(data: Mapping[str, Any]) -> int | None:
    """The group size of a granularity; None for one scale per row."""
    found = data.get("granularity")
    if not isinstance(found, Mapping) or found.get("_type") not in ("PerRow", "PerAxis", "PerGroup"):
        raise SchemeError(f"torchao's granularity {found!r} cannot be decoded; can be: PerRow, PerAxis, PerGroup")
    if found["_type"] != "PerGroup":
        return None
    inner = found.get("_data")
    size = inner.get("group_size") if isinstance(inner, Mapping) else None
    if type(size) is not int:
        raise SchemeError(f"torchao's group_size is {size!r}; expected a whole number")
    return size


def _value(field: Any) -> str:
    return str(field.get("_data")) if isinstance(field, Mapping) else str(field)
