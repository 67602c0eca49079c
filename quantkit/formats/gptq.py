"""GPTQ version 1, which every GPTQ loader reads: symmetric weights, zero points stored minus 1.

    qweight  int32 (K * b / 32, N)   codes + 2**(b - 1), packed along K
    qzeros   int32 (G, N * b / 32)   zero points, packed along N: z - 1 in version 1, z in version 2 (`gptq_v2`)
    scales   float16 (G, N)
    g_idx    int32 (K,)              group of each input; k // g unless groups are in activation order

GPTQModel rounds the number of words up if N * b or K * b is not a multiple of 32.

Codes are stored in the original order of the inputs, regardless of the order of the groups. Version 1 would store a
zero point of 0 as -1, which does not fit, so quantkit writes asymmetric weights in version 2. It also reads asymmetric
weights in version 1, which other tools write, and files without `g_idx`.

config.json has one scheme for all linears, and `dynamic` for exceptions: {"-:regex": {}} ignores modules,
{"+:regex": {"bits": 8}} changes fields. The regular expressions match from the start of a module's name. AutoRound
has its own `quant_method` for the same layout and names exceptions in `extra_config`.
Shapes: N outputs, K inputs, G scales per row, b bits.
Source: GPTQModel `nn_modules/qlinear/__init__.py`, `utils/model.py`, `quantization/config.py`; AutoRound
`export/export_to_autoround`; vLLM `gptq_marlin.py`; Frantar et al. 2022.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from quantkit.errors import CheckpointError, SchemeError
from quantkit.formats._packing import pack_words, packed_bytes, unpack_words
from quantkit.formats._tensors import matrix_shape, take, take_matrix
from quantkit.formats.base import HALF_DTYPES, Format, Read, Shapes
from quantkit.numerics.dtype import DTYPES
from quantkit.numerics.name_patterns import is_exact
from quantkit.numerics.scheme import LinearScheme, Rule, Scheme, WeightScheme
from quantkit.numerics.tensor import QuantizedTensor

_BITS = (2, 3, 4, 8)
_HEAD = "lm_head"
_AUTOROUND = ("auto-round", "intel/auto-round")  # its `quant_method`, whatever the layout
_PACKINGS = {"auto_round:auto_gptq": "gptq", "auto_round:gptqmodel": "gptq_v2", "auto_round": "gptq_v2"}


class GPTQFormat(Format):
    """GPTQ version 1; see the module's docstring for the layout."""

    name: ClassVar[str] = "gptq"
    # The name of the version in config.json, and the number that is subtracted from each zero point to store it.
    version: ClassVar[str] = "gptq"
    zero_offset: ClassVar[int] = 1
    holds_group_index: ClassVar[bool] = True
    scale_name: ClassVar[str] = "scales"
    order_name: ClassVar[str] = "g_idx"
    holds_transposed: ClassVar[bool] = True
    scale_dtypes: ClassVar[tuple[torch.dtype, ...]] = HALF_DTYPES
    package: ClassVar[str] = "gptqmodel"

    def linear_bytes(self, scheme: LinearScheme, out_features: int, in_features: int, scale_bytes: int) -> int:
        # Files carry g_idx, an int32 group number for each input.
        return packed_bytes(scheme.weight, out_features, in_features) + 4 * in_features

    def check(self, scheme: LinearScheme, shape: tuple[int, int]) -> None:
        super().check(scheme, shape)
        weight = scheme.weight
        if weight.dtype.kind != "int" or weight.dtype.bits not in _BITS or weight.block_rows != 1:
            raise SchemeError(
                f"{self.name} stores integers of 2, 3, 4 or 8 bits, not {weight.describe()}; set weights.dtype to one "
                "of int2, int3, int4, int8, or set format=compressed-tensors"
            )
        for what, size in (("outputs", shape[0]), ("inputs", shape[1])):
            if size % 32:
                raise SchemeError(
                    f"{self.name} loaders need a multiple of 32 {what}, but this linear has {size}; "
                    "add it to ignore, or set format=compressed-tensors"
                )
        if self.zero_offset and not weight.symmetric:
            raise SchemeError(
                f"{self.name} stores zero points minus 1, so a zero point of 0 does not fit; "
                "set format=gptq-v2, or weights.symmetric=true"
            )

    def shape(self, shapes: Shapes, scheme: LinearScheme, read: Read | None = None) -> tuple[int, int] | None:
        words = matrix_shape(shapes.get("qweight"))
        return words and (words[1], _num_inputs(words[0], scheme.weight.dtype.bits, shapes.get("g_idx")))

    def encode(self, weight: QuantizedTensor, scheme: LinearScheme) -> dict[str, Tensor]:
        bits, half = weight.scheme.dtype.bits, -int(weight.scheme.dtype.minimum)
        check_scale(weight.scale)
        rows, width = weight.shape
        # 8-bit zero points plus 128 reach 255, beyond int8.
        zero = torch.full((rows, weight.scale.shape[1]), half, dtype=torch.int16)
        if weight.zero_point is not None:
            zero = weight.zero_point.to(torch.int16) + half
        stored = zero.to(weight.codes.device) - self.zero_offset
        if bool((stored < 0).any()) or bool((stored >= 1 << bits).any()):
            raise SchemeError(
                f"format {self.name} stores zero points minus {self.zero_offset}, and zero points of {int(zero.min())} "
                f"to {int(zero.max())} minus {self.zero_offset} do not fit into {bits} bits; use format gptq-v2"
            )
        group = weight.group_index
        if group is None:
            group = torch.arange(width) // (width // weight.scale.shape[1])
        return {
            "qweight": pack_words(weight.codes, bits, half).t().contiguous(),  # (K * b / 32, N)
            "qzeros": pack_words(stored.t(), bits),  # (G, N * b / 32)
            "scales": weight.scale.t().contiguous(),  # (G, N)
            "g_idx": group.to(torch.int32),
        }

    def decode(self, tensors: Mapping[str, Tensor], scheme: LinearScheme) -> QuantizedTensor:
        bits, half = scheme.weight.dtype.bits, -int(scheme.weight.dtype.minimum)
        words = take_matrix(tensors, "qweight", torch.int32)
        if words.shape[0] * 32 % bits:
            raise CheckpointError(
                f"tensor 'qweight' has {words.shape[0]} rows of 32-bit words, which do not hold a whole number of "
                f"{bits}-bit codes; download the checkpoint again"
            )
        index = tensors.get("g_idx")
        width, rows = _num_inputs(words.shape[0], bits, None if index is None else index.shape), words.shape[1]
        groups = scheme.weight.num_groups(width)
        packed = take(tensors, "qzeros", (groups, math.ceil(rows * bits / 32)))
        zero = _unpack_zeros(packed, bits, self.zero_offset)[:, :rows].t() - half  # (N, G)
        return QuantizedTensor(
            codes=unpack_words(words.t(), bits, half, width),  # (N, K)
            scale=take(tensors, "scales", (groups, rows)).t().contiguous(),
            zero_point=_zero_point(zero, scheme.weight),
            scheme=scheme.weight,
            group_index=_group_index(tensors, width, groups),
        )

    def section(self, linears: Mapping[str, LinearScheme], ignored: Sequence[str], group_order: bool) -> dict[str, Any]:
        # The most common scheme is the default, so that `dynamic` stays short.
        common = Counter(linears.values()).most_common(1)[0][0].weight
        dynamic: dict[str, Any] = {f"-:{_exactly(name)}": {} for name in ignored if not _is_head(name)}
        for name, scheme in linears.items():
            if scheme.weight != common:
                dynamic[f"+:{_exactly(name)}"] = _numbers(scheme.weight)
        section = {
            "quant_method": "gptq",
            # Readers differ in the key under which they look for the version.
            "checkpoint_format": self.version,
            "format": self.version,
            **_numbers(common),
            "desc_act": group_order,
            "lm_head": any(_is_head(name) for name in linears),
            "pack_dtype": "int32",
            "meta": {"quantizer": ["quantkit"]},
        }
        return {**section, "dynamic": dynamic} if dynamic else section

    def owns(self, section: Mapping[str, Any]) -> bool:
        method = section.get("quant_method")
        if method in _AUTOROUND:
            return _PACKINGS.get(str(section.get("packing_format", ""))) == self.version
        if method != "gptq":
            return False
        version = section.get("checkpoint_format") or section.get("format") or "gptq"
        if version not in _PACKINGS.values():
            raise SchemeError(
                f"quantization_config.checkpoint_format {version!r} is not supported; supported: 'gptq', 'gptq_v2'"
            )
        return bool(version == self.version)

    def scheme(self, section: Mapping[str, Any]) -> Scheme:
        default = _weight(section, {})
        # The head is quantized only where the section says so.
        rules = [] if section.get(_HEAD) else [Rule(pattern=f"re:(.*\\.)?{_HEAD}", linear=None)]
        dynamic = section.get("dynamic") or {}
        if not isinstance(dynamic, Mapping):
            raise SchemeError(
                "quantization_config.dynamic must be a JSON object whose keys are regular expressions, "
                f"not a {type(dynamic).__name__}"
            )
        # GPTQModel takes the first expression that matches, a Scheme the last.
        for expression, changes in reversed(list(dynamic.items())):
            rules.append(_rule(expression, changes, section))
        # AutoRound lists each module with other settings; 16 bits mean that the module is not quantized.
        extra = section.get("extra_config") or {}
        for name, changes in extra.items() if isinstance(extra, Mapping) else ():
            bits = changes.get("bits") if isinstance(changes, Mapping) else None
            ignored = type(bits) is int and bits >= 16
            rules.append(Rule(pattern=name, linear=None if ignored else LinearScheme(weight=_weight(section, changes))))
        return Scheme(default=LinearScheme(weight=default), rules=tuple(rules))


FORMAT = GPTQFormat()


def check_scale(scale: Tensor) -> None:
    """Refuse float32 scales, which loaders of GPTQ and AWQ files would round to 16 bits.

    Raises:
        SchemeError: the scales are float32.
    """
    if scale.dtype not in HALF_DTYPES:
        raise SchemeError(
            f"scales are {scale.dtype}, but GPTQ and AWQ loaders would round them to 16 bits; quantize the original "
            "model to gptq-v2 or awq, or use format compressed-tensors"
        )


def read_group_size(value: Any) -> int | None:
    """Parse a group size in the convention of GPTQ and AWQ; None = one scale per channel, stored as -1.

    Raises:
        SchemeError: the value is neither -1 nor a positive whole number.
    """
    if type(value) is not int or value == 0 or value < -1:
        raise SchemeError(
            f"quantization_config.group_size is {value!r}; expected a positive whole number, "
            "or -1 for one scale per channel"
        )
    return None if value == -1 else value


def write_group_size(weight: WeightScheme) -> int:
    """Inverse of `read_group_size`."""
    return -1 if weight.group_size is None else weight.group_size


def _numbers(weight: WeightScheme) -> dict[str, Any]:
    return {"bits": weight.dtype.bits, "group_size": write_group_size(weight), "sym": weight.symmetric}


def _weight(section: Mapping[str, Any], changes: Any) -> WeightScheme:
    fields = {**section, **changes} if isinstance(changes, Mapping) else section
    bits, symmetric = fields.get("bits"), fields.get("sym", True)
    if type(bits) is not int or bits not in _BITS:
        raise SchemeError(
            f"quantization_config.bits {bits!r} is not supported; supported: {', '.join(map(str, _BITS))}"
        )
    if type(symmetric) is not bool:
        raise SchemeError(f"quantization_config.sym is {symmetric!r}; expected true or false")
    return WeightScheme(
        dtype=DTYPES[f"int{bits}"], group_size=read_group_size(fields.get("group_size", -1)), symmetric=symmetric
    )


def _rule(expression: Any, changes: Any, section: Mapping[str, Any]) -> Rule:
    sign, _, pattern = expression.partition(":")
    if sign not in ("+", "-"):
        sign, pattern = "+", expression
    name = re.sub(r"\\(.)", r"\1", pattern[1:-1])
    # A plain name, as quantkit writes it, stays a name, because expressions are limited in number.
    full = name if is_exact(name) and pattern == _exactly(name) else f"re:(?:{pattern}).*"
    return Rule(pattern=full, linear=None if sign == "-" else LinearScheme(weight=_weight(section, changes)))


def _exactly(name: str) -> str:
    """Return an expression for one module, or for all modules below it if the name ends with a dot."""
    return f"^{re.escape(name)}" + ("" if name.endswith(".") else "$")


def _is_head(name: str) -> bool:
    return name.rpartition(".")[2] == _HEAD


def _num_inputs(words: int, bits: int, index: tuple[int, ...] | None) -> int:
    """Return K: the length of g_idx if that fits the number of words; otherwise, how many inputs the words hold."""
    if index is not None and len(index) == 1 and math.ceil(index[0] * bits / 32) == words:
        return index[0]
    return words * 32 // bits


def _unpack_zeros(packed: Tensor, bits: int, offset: int) -> Tensor:
    """Unpack zero points (G, N) to 0 .. 2**bits - 1 and add back the offset that was subtracted before storing.

    A zero point of 0 wraps around when the offset is subtracted. If fields fill a word exactly, GPTQModel subtracts
    from whole words, so the wrap borrows from the next field; otherwise each field wraps by itself.
    """
    if offset and 32 % bits == 0:
        ones = sum(offset << at for at in range(0, 32, bits))
        return unpack_words((packed.to(torch.int64) + ones).to(torch.int32), bits)
    return (unpack_words(packed.to(torch.int32), bits) + offset) % (1 << bits)


def _zero_point(zero: Tensor, scheme: WeightScheme) -> Tensor | None:
    """Return zero points (N, G) in the code range; None for a symmetric scheme, which requires that all are 0."""
    if scheme.symmetric:
        if bool((zero != 0).any()):
            raise CheckpointError(
                "config.json says that weights are symmetric, but 'qzeros' has zero points other than "
                f"{-int(scheme.dtype.minimum)}; set quantization_config.sym to false, or download the checkpoint again"
            )
        return None
    return zero.to(torch.int8).contiguous()


def _group_index(tensors: Mapping[str, Tensor], width: int, groups: int) -> Tensor | None:
    """Return the group of each input (K,); None if groups are in input order."""
    if "g_idx" not in tensors:
        return None
    index = take(tensors, "g_idx", (width,)).to(torch.int64)
    if width and not 0 <= int(index.min()) <= int(index.max()) < groups:
        raise CheckpointError(
            f"'g_idx' has group numbers {int(index.min())} to {int(index.max())}, but the weight has {groups} groups; "
            "download the checkpoint again"
        )
    # Files store the index even if groups are in order; without it, groups dequantize as views.
    in_order = torch.equal(index, torch.arange(width, device=index.device) // max(1, width // groups))
    return None if in_order else index
