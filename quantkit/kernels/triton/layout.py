"""Integer weights laid out for `w4a16`: packed once, when a model is loaded. Plain torch, any device.

A row is cut into blocks; one block is `span` words of 32 bits, and field i of word j is input `base + span * i + j`:

    span 64, 4 bits       word 0      word 1      ...   word 63
    bits 0-3              k = 0       k = 1       ...   k = 63
    bits 4-7              k = 64      k = 65      ...   k = 127
    ...
    bits 28-31            k = 448     k = 449     ...   k = 511

So a thread's 16-byte load is four neighbouring words, field i of all words needs one contiguous piece of the input,
and inputs that share a scale are whole fields. Rows lie one after another; scales and zeros are (G, N), so that the
outputs of a tile read neighbours. Fields hold code + 2^(bits-1); INT3 lies in fields of 4 bits.
Shapes: N outputs, K inputs, W words of a row, G scales per row, g = K / G.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from quantkit.numerics.tensor import QuantizedTensor

_FIELD_BITS = {"int2": 2, "int3": 4, "int4": 4, "int8": 8}
_SPANS = (64, 32, 16)
_ROWS_AT_ONCE = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedWeight:
    """A weight that the kernels read.

    Args:
        words: (N, W) int32; or (N, K) int8 codes viewed so, if `natural`.
        scale: (G, N), 16 bits or float32.
        zero: (G, N) uint8 to subtract from fields; None = `offset` for all.
        shape: (N, K).
        bits: of a field.
        span: words of a block.
        group: g; 0 = one scale per output.
        natural: fields are signed and neighbours in memory are neighbours in K.
    """

    words: Tensor
    scale: Tensor
    zero: Tensor | None
    shape: tuple[int, int]
    bits: int
    span: int
    group: int
    natural: bool = False

    @property
    def num_blocks(self) -> int:
        """Blocks of a row."""
        return -(-self.words.shape[1] // self.span)

    @property
    def offset(self) -> int:
        """What is subtracted from a field where there are no zeros."""
        return 1 << (self.bits - 1)

    @property
    def num_bytes(self) -> int:
        """Bytes that a product with one row of inputs reads."""
        return self.words.nbytes + self.scale.nbytes + (0 if self.zero is None else self.zero.nbytes)


def find_span(weight: QuantizedTensor) -> int | None:
    """Words of a block that waste least and fit the groups, the largest of several; None = cannot be packed."""
    if weight.scheme.dtype.name not in _FIELD_BITS or weight.group_index is not None:
        return None
    width, groups = weight.shape[1], weight.scale.shape[1]
    fields = 32 // _FIELD_BITS[weight.scheme.dtype.name]
    fitting = [span for span in _SPANS if groups == 1 or (width // groups) % span == 0]
    padded = {span: -(-width // (fields * span)) * fields * span for span in fitting}
    if not padded or min(padded.values()) > 1.25 * width:
        return None
    return min(fitting, key=lambda span: (padded[span], -span))


def pack(weight: QuantizedTensor, device: torch.device) -> PackedWeight:
    """Lay a weight out.

    Args:
        weight: one for which `find_span` found a span.
        device: where it goes.
    """
    span = find_span(weight)
    assert span is not None
    bits = _FIELD_BITS[weight.scheme.dtype.name]
    (rows, width), groups = weight.shape, weight.scale.shape[1]
    group = 0 if groups == 1 else width // groups
    block = span * (32 // bits)
    padding = -width % block
    words = torch.empty(rows, (width + padding) * bits // 32, dtype=torch.int32, device=device)
    for start in range(0, rows, _ROWS_AT_ONCE):
        codes = weight.codes[start : start + _ROWS_AT_ONCE].to(device).to(torch.int32) + (1 << (bits - 1))
        words[start : start + _ROWS_AT_ONCE] = _words(functional.pad(codes, (0, padding)), bits, span)
    spare = 0 if group == 0 else -(-(width + padding) // group) - groups
    zero = None
    if weight.zero_point is not None:
        shifted = (weight.zero_point.to(torch.int16) + (1 << (bits - 1))).to(torch.uint8)
        zero = functional.pad(shifted.to(device).t(), (0, 0, 0, spare)).contiguous()
    scale = weight.scale if weight.scale.dtype.itemsize == 2 else weight.scale.float()
    return PackedWeight(
        words=words,
        scale=functional.pad(scale.to(device).t(), (0, 0, 0, spare)).contiguous(),
        zero=zero,
        shape=(rows, width),
        bits=bits,
        span=span,
        group=group,
    )


def _words(fields: Tensor, bits: int, span: int) -> Tensor:
    """(R, K) fields to (R, W) words."""
    parts = fields.view(len(fields), -1, 32 // bits, span)
    words = parts[:, :, 0].clone()
    for index in range(1, 32 // bits):
        words |= parts[:, :, index] << (bits * index)
    return words.view(len(fields), -1)


def natural(codes: Tensor, scale: Tensor) -> PackedWeight:
    """INT8 codes as they are, for a weight that torch multiplies as well; nothing is copied.

    Args:
        codes: (N, K) int8, contiguous; K a multiple of 4.
        scale: (N,) one per output.
    """
    return PackedWeight(
        words=codes.view(torch.int32),
        scale=scale.reshape(1, -1),
        zero=None,
        shape=(codes.shape[0], codes.shape[1]),
        bits=8,
        span=64,
        group=0,
        natural=True,
    )
