"""AWQ's "gemm" layout: 4-bit asymmetric weights, eight outputs per word in an interleaved order.

    qweight  int32 (K, N / 8)     codes + 8
    qzeros   int32 (G, N / 8)     zero points + 8 (not minus 1 as in GPTQ)
    scales   float16 (G, N)

The nibble at bits 4i of word c belongs to output 8c + [0, 2, 4, 6, 1, 3, 5, 7][i]. AWQ folds its
smoothing scales into other weights and stores none. Not supported: the kernel-specific gemv and Marlin layouts.
Shapes: N outputs, K inputs, G scales per row.
Source: AutoAWQ `modules/linear/gemm.py`, `utils/packing_utils.py`, `models/_config.py`; Lin et al. 2023.
"""

import glob
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from quantkit.errors import CheckpointError, SchemeError
from quantkit.formats._packing import pack_words, packed_bytes, unpack_words
from quantkit.formats._tensors import matrix_shape, take, take_matrix
from quantkit.formats.base import HALF_DTYPES, Format, Read, Shapes, ignored_rules
from quantkit.formats.gptq import check_scale, read_group_size, write_group_size
from quantkit.numerics.dtype import INT4
from quantkit.numerics.scheme import LinearScheme, Rule, Scheme, WeightScheme
from quantkit.numerics.tensor import QuantizedTensor

_ORDER = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
_INVERSE = torch.argsort(_ORDER)
_HALF = 8


class AWQFormat(Format):
    """The AWQ format. AutoRound writes this format too, with its own `quant_method`."""

    name: ClassVar[str] = "awq"
    scale_name: ClassVar[str] = "scales"
    scale_dtypes: ClassVar[tuple[torch.dtype, ...]] = HALF_DTYPES
    package: ClassVar[str] = "gptqmodel"

    def linear_bytes(self, scheme: LinearScheme, out_features: int, in_features: int, scale_bytes: int) -> int:
        return packed_bytes(scheme.weight, out_features, in_features)

    def check(self, scheme: LinearScheme, shape: tuple[int, int]) -> None:
        super().check(scheme, shape)
        if scheme.weight.dtype != INT4:
            raise SchemeError(
                f"awq stores int4 weights, not {scheme.weight.dtype.name}; "
                "set weights.dtype=int4, or format=compressed-tensors"
            )
        if scheme.weight.symmetric:
            raise SchemeError("awq stores only weights with zero points; set weights.symmetric=false, or format=gptq")
        if shape[0] % 8:
            raise SchemeError(
                f"awq needs a multiple of 8 outputs, but this linear has {shape[0]}; "
                "add it to ignore, or set format=compressed-tensors"
            )

    def shape(self, shapes: Shapes, scheme: LinearScheme, read: Read | None = None) -> tuple[int, int] | None:
        words = matrix_shape(shapes.get("qweight"))
        return words and (words[1] * 8, words[0])

    def encode(self, weight: QuantizedTensor, scheme: LinearScheme) -> dict[str, Tensor]:
        if weight.group_index is not None:
            raise SchemeError("awq cannot store groups in activation order; set steps.gptq.act_order=weight")
        if weight.zero_point is None:
            raise SchemeError("awq needs zero points, but this weight has none; set weights.symmetric=false")
        check_scale(weight.scale)
        return {
            "qweight": _pack(weight.codes.t()),  # (K, N / 8)
            "qzeros": _pack(weight.zero_point.t()),  # (G, N / 8)
            "scales": weight.scale.t().contiguous(),  # (G, N)
        }

    def decode(self, tensors: Mapping[str, Tensor], scheme: LinearScheme) -> QuantizedTensor:
        words = take_matrix(tensors, "qweight", torch.int32)
        width, rows = words.shape[0], words.shape[1] * 8
        groups = scheme.weight.num_groups(width)
        zero = _unpack(take(tensors, "qzeros", (groups, rows // 8)).to(torch.int32))
        if scheme.weight.symmetric and bool((zero != 0).any()):
            raise CheckpointError(
                "quantization_config.zero_point is false, but 'qzeros' has values other than 8; set zero_point to true"
            )
        return QuantizedTensor(
            codes=_unpack(words),
            scale=take(tensors, "scales", (groups, rows)).t().contiguous(),
            zero_point=None if scheme.weight.symmetric else zero,
            scheme=scheme.weight,
        )

    def section(self, linears: Mapping[str, LinearScheme], ignored: Sequence[str], group_order: bool) -> dict[str, Any]:
        weights = {scheme.weight for scheme in linears.values()}
        if len(weights) > 1:
            listed = ", ".join(sorted(weight.describe() for weight in weights))
            raise SchemeError(
                f"awq supports one scheme for all linears, not {listed}; set format=gptq-v2 or use one scheme"
            )
        return {
            "quant_method": self.name,
            "bits": 4,
            "group_size": write_group_size(weights.pop()),
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": list(ignored) or None,
        }

    def owns(self, section: Mapping[str, Any]) -> bool:
        return super().owns(section) or section.get("packing_format") == "auto_round:auto_awq"

    def scheme(self, section: Mapping[str, Any]) -> Scheme:
        if str(section.get("version", "gemm")).lower() != "gemm":
            raise SchemeError(
                f"quantization_config.version {section['version']!r} is not supported; supported for AWQ: 'gemm'"
            )
        # AutoRound and old files use other keys.
        bits = section.get("bits", section.get("w_bit", 4))
        if bits != 4:
            raise SchemeError(f"quantization_config.bits {bits!r} is not supported; supported for AWQ: 4")
        weight = WeightScheme(
            dtype=INT4,
            group_size=read_group_size(section.get("group_size", section.get("q_group_size", -1))),
            symmetric=section.get("zero_point", not section.get("sym", False)) is False,
        )
        # Loaders skip modules whose names contain one of these; they never convert the output head.
        names = ("lm_head", *(rule.pattern for rule in ignored_rules(section, "modules_to_not_convert")))
        rules = tuple(Rule(pattern=f"*{glob.escape(name)}*", linear=None) for name in names)
        return Scheme(default=LinearScheme(weight=weight), rules=rules)


FORMAT = AWQFormat()


def _pack(values: Tensor) -> Tensor:
    """Pack signed int4 values (R, N) into words (R, N / 8) in AWQ's order."""
    eights = values.reshape(values.shape[0], -1, 8)  # (R, N / 8, 8)
    return pack_words(eights[..., _ORDER.to(values.device)].reshape(values.shape), 4, _HALF)


def _unpack(words: Tensor) -> Tensor:
    """Unpack and transpose words of `_pack`: (N, R) int8."""
    eights = unpack_words(words, 4, _HALF).view(words.shape[0], -1, 8)[..., _INVERSE.to(words.device)]
    return eights.reshape(words.shape[0], -1).t().contiguous()
