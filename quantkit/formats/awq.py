"""AWQ's "gemm" layout: 4-bit asymmetric weights, eight outputs to a word in an interleaved order.

    qweight  int32 (K, N / 8)     codes + 8
    qzeros   int32 (G, N / 8)     zero points + 8, no off-by-one
    scales   float16 (G, N)

The nibble at bits 4i of word c belongs to output 8c + [0, 2, 4, 6, 1, 3, 5, 7][i]. AWQ's smoothing leaves no tensor: it
is folded into other weights. Not here: the gemv and Marlin variants, which are layouts of one kernel.
Shapes: N outputs, K inputs, G scales per row.
Source: AutoAWQ `modules/linear/gemm.py`, `utils/packing_utils.py`, `models/_config.py`; Lin et al. 2023.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from quantkit.errors import CheckpointError, SchemeError
from quantkit.formats._gptq_config import read_group_size
from quantkit.formats._gptq_layout import SCALE_DTYPES, check_scale
from quantkit.formats._packing import pack_words, unpack_words
from quantkit.formats._tensors import check_groups, matrix_shape, refuse_activations, take
from quantkit.numerics.dtype import INT4
from quantkit.numerics.scheme import LinearScheme, Rule, Scheme, WeightScheme
from quantkit.numerics.tensor import QuantizedTensor

_ORDER = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
_INVERSE = torch.argsort(_ORDER)
_HALF = 8


@dataclass(frozen=True)
class AWQ:
    """The format itself; see `quantkit.formats.base.Format`."""

    keeps_codes: ClassVar[bool] = True
    holds_group_index: ClassVar[bool] = False
    scale_dtypes: ClassVar[tuple[torch.dtype, ...]] = SCALE_DTYPES

    def check(self, scheme: LinearScheme, shape: tuple[int, int]) -> None:
        """Refuse what is not asymmetric int4, and outputs that do not fill words.

        Args:
            scheme: of one linear.
            shape: (N, K) of its weight.
        Raises:
            SchemeError: says which recipe field to change.
        """
        refuse_activations(scheme, "awq")
        if scheme.weight.dtype != INT4:
            raise SchemeError(
                f"awq stores int4 weights, not {scheme.weight.dtype.name}; "
                "set weights.dtype=int4, or format=compressed-tensors"
            )
        if scheme.weight.symmetric:
            raise SchemeError("awq stores zero points; set weights.symmetric=false, or format=gptq")
        check_groups(scheme, shape)
        if shape[0] % 8:
            raise SchemeError(
                f"awq packs outputs in eights, this linear has {shape[0]}; "
                "add it to ignore, or set format=compressed-tensors"
            )

    def shape(self, shapes: Mapping[str, tuple[int, ...]], scheme: LinearScheme) -> tuple[int, int] | None:
        """(N, K) of a linear from the shapes of its tensors."""
        words = matrix_shape(shapes.get("qweight"))
        return words and (words[1] * 8, words[0])

    def encode(self, weight: QuantizedTensor, scheme: LinearScheme) -> dict[str, Tensor]:
        """Tensors to write in place of `weight`.

        Args:
            weight: (N, K) int4 with zero points.
            scheme: of its linear.
        Raises:
            SchemeError: activation-ordered groups, or scales that loaders would round.
        """
        if weight.group_index is not None or weight.zero_point is None:
            raise SchemeError("awq needs zero points and groups in order; set steps.gptq.act_order=weight")
        check_scale(weight.scale)
        return {
            "qweight": _pack(weight.codes.t()),  # (K, N / 8)
            "qzeros": _pack(weight.zero_point.t()),  # (G, N / 8)
            "scales": weight.scale.t().contiguous(),  # (G, N)
        }

    def decode(self, tensors: Mapping[str, Tensor], scheme: LinearScheme) -> QuantizedTensor:
        """Exactly what `encode` was given; also reads what other tools wrote.

        Args:
            tensors: of one linear, by local name.
            scheme: of the linear; when it is symmetric all zero points must be 0.
        Raises:
            CheckpointError: a tensor is missing, has the wrong shape, or contradicts the scheme.
        """
        words = take(tensors, "qweight", None)
        if words.ndim != 2 or words.dtype != torch.int32:
            raise CheckpointError(
                f"tensor 'qweight' is {words.dtype} {tuple(words.shape)}, not a matrix of int32 words"
            )
        width, rows = words.shape[0], words.shape[1] * 8
        groups = scheme.weight.num_groups(width)
        zero: Tensor | None = _unpack(take(tensors, "qzeros", (groups, rows // 8)).to(torch.int32))
        if scheme.weight.symmetric:
            if zero is not None and bool((zero != 0).any()):
                raise CheckpointError(
                    "config.json says zero_point is false, but 'qzeros' has others than 8; set it to true"
                )
            zero = None
        return QuantizedTensor(
            codes=_unpack(words),
            scale=take(tensors, "scales", (groups, rows)).t().contiguous(),
            zero_point=zero,
            scheme=scheme.weight,
        )

    def config(
        self, linears: Mapping[str, LinearScheme], ignored: Sequence[str], *, group_order: bool = False
    ) -> dict[str, Any]:
        """The `quantization_config` entry of config.json; nothing when no linear is quantized.

        Args:
            linears: scheme of each quantized linear by full module name.
            ignored: full names of linears that are not quantized, the output head included.
            group_order: ignored: groups are always in order.
        Raises:
            SchemeError: linears have different schemes, which this format cannot say.
        """
        if not linears:
            return {}
        if len(set(linears.values())) > 1:
            found = ", ".join(sorted({scheme.weight.describe() for scheme in linears.values()}))
            raise SchemeError(f"awq has one scheme for all linears, not {found}; set format=gptq-v2 or make them equal")
        group_size = next(iter(linears.values())).weight.group_size
        section = {
            "quant_method": "awq",
            "bits": 4,
            "group_size": -1 if group_size is None else group_size,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": list(ignored) or None,
        }
        return {"quantization_config": section}

    def recognise(self, config: Mapping[str, Any]) -> Scheme | None:
        """The scheme of a config.json in this format, AutoRound's name for it included; None when it is in another.

        Args:
            config: contents of config.json.
        Raises:
            SchemeError: it is AWQ, but of a kind that cannot be decoded.
        """
        section = config.get("quantization_config")
        if not isinstance(section, Mapping):
            return None
        if section.get("quant_method") in ("auto-round", "intel/auto-round"):
            if section.get("packing_format") != "auto_round:auto_awq":
                return None
            return _scheme(section, symmetric=bool(section.get("sym", False)))
        if section.get("quant_method") != "awq":
            return None
        if str(section.get("version", "gemm")).lower() != "gemm":
            raise SchemeError(
                f"quantization_config.version is {section['version']!r}; of AWQ only 'gemm' can be decoded"
            )
        return _scheme(section, symmetric=section.get("zero_point") is False)


FORMAT = AWQ()


def _scheme(section: Mapping[str, Any], *, symmetric: bool) -> Scheme:
    bits = section.get("bits", section.get("w_bit", 4))
    if bits != 4:
        raise SchemeError(f"quantization_config.bits is {bits!r}; of AWQ only 4 bits can be decoded")
    group_size = read_group_size(
        section.get("group_size", section.get("q_group_size", -1)), "quantization_config.group_size"
    )
    weight = WeightScheme(dtype=INT4, group_size=group_size, symmetric=symmetric)
    # Loaders look for these as parts of a module's name; the output head is never converted.
    names = section.get("modules_to_not_convert") or ()
    if not isinstance(names, list | tuple):
        raise SchemeError(f"quantization_config.modules_to_not_convert is {names!r}; expected a list of names")
    rules = [Rule(pattern=f"*{_literal(str(name))}*", linear=None) for name in ("lm_head", *names)]
    return Scheme(default=LinearScheme(weight=weight), rules=tuple(rules))


def _literal(name: str) -> str:
    """A name as a shell-style pattern that means just it."""
    return "".join(f"[{char}]" if char in "*?[" else char for char in name)


def _pack(values: Tensor) -> Tensor:
    """Signed int4 values (R, N) to words (R, N / 8) in AWQ's order."""
    unsigned = (values.to(torch.int16) + _HALF).reshape(values.shape[0], -1, 8)  # (R, N / 8, 8)
    return pack_words(unsigned[..., _ORDER.to(values.device)].reshape(values.shape), 4)


def _unpack(words: Tensor) -> Tensor:
    """Inverse of `_pack`, transposed: (N, R) int8."""
    values = unpack_words(words, 4).view(words.shape[0], -1, 8)[..., _INVERSE.to(words.device)]
    return (values.reshape(words.shape[0], -1).t() - _HALF).to(torch.int8).contiguous()
