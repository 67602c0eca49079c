"""Weights of 2 to 8 bits in the layout of `w4a16`: packed once, when a model is loaded. Plain torch, any device.

A row consists of blocks of `span` 32-bit words. A block holds pieces of 2 * span inputs. With b bits per field, piece
p occupies bits p * b to (p + 1) * b in both halves of each word of the block. Word j holds inputs 2 j and 2 j + 1 of
each piece:

    span 32, b = 4        word 0                     word 1      ...   word 31
                       low half    high half
    bits 0-3           k = 0       k = 1            2, 3        ...   62, 63
    bits 4-7           k = 64      k = 65           66, 67      ...
    bits 8-11          k = 128     k = 129          ...
    bits 12-15         k = 192     k = 193          ...               254, 255

So a thread's 16-byte load is four neighbouring words, a piece reads one contiguous run of the input, one mask extracts
two neighbouring numbers, and a group consists of whole pieces. Rows are stored one after another; scales and zeros are
(G, N), so that the outputs of a tile read neighbouring values. Fields hold code + 2^(bits-1), or the bits of a float.
INT3 uses fields of 4 bits, INT5 and INT6 fields of 8. Scales are stored in 8 bits if that is exact.
Shapes: N outputs, K inputs, W words of a row, G scales per row, g = K / G.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from quantkit.kernels.types import nbytes
from quantkit.numerics.dtype import DType
from quantkit.numerics.tensor import QuantizedTensor

INTEGER, E4M3, E2M1 = 0, 1, 2
"""Kinds of fields: integers, e4m3 codes, e2m1 codes."""

NUMBERS, E4M3_BYTES, EXPONENT_BYTES = 0, 1, 2
"""Storage types of scales: floats, e4m3 bytes under a common scale, or exponent bytes. Bytes are uint8."""

FACTOR_BITS = {INTEGER: 0, E4M3: 8, E2M1: 14}
"""Base-2 logarithm of the factor by which decoded numbers are too small, keyed by kind of field; scales include this
factor.
"""

_FIELD_BITS = {"int2": 2, "int3": 4, "int4": 4, "int5": 8, "int6": 8, "int8": 8}
_FIELD_BITS |= {"fp8": 8, "mxfp8": 8, "nvfp4": 4, "mxfp4": 4}
_MANTISSA_AND_SIGN, _INFINITY = -0x7F800001, 0x7F800000
_LARGEST_SCALE = 2.0**100  # for float types, whose scales are raised by FACTOR_BITS
_SPANS = (32, 16, 8)
_ROWS_AT_ONCE = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class Packing:
    """Storage format of a weight; weights with the same format and shape share a kernel.

    Args:
        bits: bits of a field; 16 = the weight is not quantized.
        span: words per block.
        group: g; 0 = one scale per output.
        has_zero: whether fields have zero points; otherwise half their range is subtracted.
        unpacked: whether the weight is stored as plain bytes in input order, int8 or e4m3.
        kind: INTEGER, E4M3 or E2M1; scales of float fields include the factor 2**FACTOR_BITS.
        scales: storage type of the scales.
    """

    bits: int
    span: int
    group: int
    has_zero: bool = False
    unpacked: bool = False
    kind: int = INTEGER
    scales: int = NUMBERS

    @property
    def constants(self) -> dict[str, int | bool]:
        """Constants that kernels are compiled for."""
        return {
            "BITS": self.bits,
            "SPAN": self.span,
            "GROUP": self.group,
            "KIND": self.kind,
            "SCALES": self.scales,
            "HAS_ZERO": self.has_zero,
        }

    def scales_exactly(self, dtype: torch.dtype) -> bool:
        """Whether a number times its scale, without the outer scale, is exact in this dtype."""
        return self.scales == E4M3_BYTES or (self.scales == EXPONENT_BYTES and dtype != torch.float16)


PLAIN = Packing(bits=16, span=64, group=0)
"""Storage of unquantized 16-bit weights. A block has no more inputs than a program has threads, so each thread loads
only the inputs that it needs.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedWeight:
    """A weight in kernel layout, or the same weight of all E experts of a layer; arrays then have a first dimension E.

    Args:
        words: (N, W) int32; if unpacked, (N, K) int8 codes viewed as int32; for `PLAIN`, (N, K) in 16 bits.
        scale: (G, N), 16-bit or 32-bit floats, or bytes of type `Packing.scales`; None = the weight is unquantized.
        zero: (G, N) uint8 to subtract from fields, or None.
        shape: (N, K).
        packing: storage format.
        outer: number by which E4M3_BYTES scales must be divided; for experts, one each, (E,) float32.
    """

    words: Tensor
    scale: Tensor | None
    zero: Tensor | None
    shape: tuple[int, int]
    packing: Packing
    outer: float | Tensor = 1.0

    @property
    def num_blocks(self) -> int:
        """Number of blocks in a row."""
        return -(-self.words.shape[-1] // self.packing.span)

    @property
    def num_bytes(self) -> int:
        """Bytes that a product with one input row reads."""
        return nbytes(*self.tensors)

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """Words, scales and zeros, in the order of the kernels' arguments."""
        return self.words, self.scale, self.zero

    def each(self, change: Callable[[Tensor], Tensor]) -> "PackedWeight":
        """Return the weight with `change` applied to each tensor that is not None."""
        words, scale, zero = (None if one is None else change(one) for one in self.tensors)
        assert words is not None, "every weight has words"
        return replace(self, words=words, scale=scale, zero=zero)


def find_span(weight: QuantizedTensor) -> int | None:
    """Return the largest number of words per block that fits the groups with the least padding; None if the kernels do
    not support the weight.
    """
    if weight.scheme.dtype.name not in _FIELD_BITS or weight.group_index is not None:
        return None
    if weight.scheme.dtype.kind == "float" and not _all(~(weight.scale.float().abs() > _LARGEST_SCALE)):
        return None
    width, groups = weight.shape[1], weight.scale.shape[1]
    fields = 32 // _FIELD_BITS[weight.scheme.dtype.name]
    fitting = [span for span in _SPANS if groups == 1 or _fit(width // groups, span, fields)]
    padded = {span: -(-width // (fields * span)) * fields * span for span in fitting}
    # Kernels read the padding too. If padding exceeds a quarter of the inputs, other kernels are better.
    if not padded or min(padded.values()) > 1.25 * width:
        return None
    return min(fitting, key=lambda span: (padded[span], -span))


def _fit(group: int, span: int, fields: int) -> bool:
    """Whether a group consists of whole pieces, and the group size is a multiple or a divisor of the block size."""
    block = span * fields
    return group % (2 * span) == 0 and (block % group == 0 or group % block == 0)


def pack(weight: QuantizedTensor, device: torch.device) -> PackedWeight:
    """Pack a weight.

    Args:
        weight: a weight for which `find_span` finds a span.
        device: target device.
    """
    span = find_span(weight)
    assert span is not None
    bits, kind = _FIELD_BITS[weight.scheme.dtype.name], _kind(weight.scheme.dtype)
    (rows, width), groups = weight.shape, weight.scale.shape[1]
    group = 0 if groups == 1 else width // groups
    block = span * (32 // bits)
    padding = -width % block
    words = torch.empty(rows, (width + padding) * bits // 32, dtype=torch.int32, device=device)
    # Some rows at a time, because fields are 32 bits wide until they are packed.
    for start in range(0, rows, _ROWS_AT_ONCE):
        fields = _fields(weight.codes[start : start + _ROWS_AT_ONCE].to(device), bits, kind)
        words[start : start + _ROWS_AT_ONCE] = _words(functional.pad(fields, (0, padding)), bits, span)
    # Number of groups that consist of padding; kernels read them like all others.
    spare = 0 if group == 0 else -(-(width + padding) // group) - groups
    zero = None
    if weight.zero_point is not None:
        shifted = (weight.zero_point.to(torch.int16) + (1 << (bits - 1))).to(torch.uint8)
        zero = functional.pad(shifted.to(device).t(), (0, 0, 0, spare)).contiguous()
    (scale, scales), outer = _stored_scale(weight, kind), weight.global_scale
    return PackedWeight(
        words=words,
        scale=functional.pad(scale.to(device).t(), (0, 0, 0, spare)).contiguous(),
        zero=zero,
        shape=(rows, width),
        packing=Packing(bits=bits, span=span, group=group, has_zero=zero is not None, kind=kind, scales=scales),
        outer=1.0 if outer is None or outer.is_meta or scales != E4M3_BYTES else outer.item(),
    )


def _kind(dtype: DType) -> int:
    if dtype.kind == "int":
        return INTEGER
    return E4M3 if dtype.bits == 8 else E2M1


def _fields(codes: Tensor, bits: int, kind: int) -> Tensor:
    """Convert (R, K) codes of `numerics` to int32 fields."""
    if kind == INTEGER:
        return codes.to(torch.int32) + (1 << (bits - 1))
    if kind == E4M3:
        return codes.view(torch.uint8).to(torch.int32)
    # Codes are e2m1 values stored as e4m3: the exponent field is 6 higher, with two more mantissa bits; 0.5 is normal.
    byte = codes.view(torch.uint8).to(torch.int32)
    return torch.where(byte & 0x7F == 0x30, 1, ((byte & 0x7F) - 0x30 >> 2).clamp_min(0)) | byte >> 7 << 3


def _stored_scale(weight: QuantizedTensor, kind: int) -> tuple[Tensor, int]:
    """Return scales (N, G) and their storage type: bytes if exact, else floats. Groups with NaN codes get NaN."""
    scale, stored, outer = weight.scale, weight.scheme.dtype.scale, weight.global_scale
    if kind == INTEGER:
        return (scale if scale.dtype.itemsize == 2 else scale.float()), NUMBERS
    if kind == E4M3:
        # The kernels decode NaN codes as 480, see `floats`; a scale of NaN makes them NaN again.
        broken = (weight.codes.view(torch.uint8) & 0x7F == 0x7F).reshape(*scale.shape, -1).any(-1).to(scale.device)
        scale = torch.where(broken, torch.nan, scale)
    single = scale.float()
    if stored == "e4m3" and outer is not None:
        local = (single * outer.to(single.device)).to(torch.float8_e4m3fn)
        if _all(local.float() / outer.to(single.device) == single):
            return local.view(torch.uint8), E4M3_BYTES
    raised = single * 2.0 ** FACTOR_BITS[kind]
    if stored == "e8m0":
        bits = raised.view(torch.int32)
        if _all((bits & _MANTISSA_AND_SIGN == 0) & (bits > 0) & (bits < _INFINITY)):
            return (bits >> 23).to(torch.uint8), EXPONENT_BYTES
    narrow = raised.to(scale.dtype)
    return (narrow if _all(narrow.float() == raised) else raised), NUMBERS


def _all(condition: Tensor) -> bool:
    """Whether the condition holds for all elements; True for meta tensors."""
    return condition.is_meta or bool(condition.all())


def _words(fields: Tensor, bits: int, span: int) -> Tensor:
    """Pack (R, K) fields into (R, W) words."""
    pieces = fields.view(len(fields), -1, 16 // bits, span, 2)
    halves = pieces[:, :, 0].clone()
    for index in range(1, 16 // bits):
        halves |= pieces[:, :, index] << (bits * index)
    return (halves[..., 0] | halves[..., 1] << 16).view(len(fields), -1)


def unpacked(weight: QuantizedTensor) -> PackedWeight:
    """Wrap INT8 or FP8 codes without copying, for a weight that cuBLAS also multiplies.

    Args:
        weight: a weight on its device, with one scale per output and no zeros; codes contiguous, K a multiple of 4.
    """
    kind = _kind(weight.scheme.dtype)
    scale, _ = _stored_scale(weight, kind)
    return PackedWeight(
        words=weight.codes.view(torch.int32),
        scale=scale.float().t().contiguous(),
        zero=None,
        shape=weight.shape,
        packing=Packing(bits=8, span=_SPANS[0], group=0, unpacked=True, kind=kind),
    )
