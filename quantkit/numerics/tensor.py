"""A quantized weight: integer or float codes with their scales, independent of any file format or kernel layout.

Shapes: N outputs, K inputs, G scales per row, g = K / G.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from quantkit.numerics.scheme import WeightScheme


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizedTensor:
    """Codes, scales and zero points of one weight; value = (code - zero_point) * scale.

    Args:
        codes: (N, K) in the number type's storage dtype.
        scale: (N, G), usually in the dtype that is stored on disk (the model's).
        zero_point: (N, G) int8 in the code range, or None when symmetric.
        scheme: number type and granularity.
        group_index: (K,) int64, the group of each input; None = group k // g for input k.
        global_scale: (1,) float32, already included in `scale`; kept to write two-level scales exactly.
        value_dtype: dtype in which loaders compute the values; None = the dtype of the scale.
        input_scale: (1,) calibrated scale of the linear's input, or the input's global scale for types with two levels
            of scales; formats store it beside the weight.
        block_scale: float32, only for ggml types: the scale of each block, (N, B, 1); for types with minimums also the
            factor of the block's minimums, (N, B, 2). `scale` and `zero_point`, which is float32 here, already include
            these numbers.
    """

    codes: Tensor
    scale: Tensor
    zero_point: Tensor | None
    scheme: WeightScheme
    group_index: Tensor | None = None
    global_scale: Tensor | None = None
    value_dtype: torch.dtype | None = None
    input_scale: Tensor | None = None
    block_scale: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Shape (N, K) of the weight."""
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def stored_bytes(self) -> int:
        """Size in bytes of codes, scales and zero points when densely packed."""
        scheme = self.scheme
        if scheme.dtype.block is not None:
            values, size = scheme.dtype.block
            return self.codes.numel() // values * size
        zero_bits = 0 if self.zero_point is None else self.zero_point.numel() * scheme.dtype.bits
        code_bits = self.codes.numel() * scheme.dtype.bits
        scales = scheme.num_scale_rows(self.scale.shape[0]) * self.scale.shape[1]
        # Scales of microscaling types take one byte on disk, whatever their dtype here.
        scale_bytes = scales * (self.scale.element_size() if scheme.dtype.scale == "float" else 1)
        return (code_bits + 7) // 8 + (zero_bits + 7) // 8 + scale_bytes + (0 if self.global_scale is None else 4)

    @property
    def values_dtype(self) -> torch.dtype:
        """Dtype in which loaders compute the values, usually the model's."""
        return self.value_dtype or self.scale.dtype

    def take_rows(self, rows: Tensor | slice) -> "QuantizedTensor":
        """Return the weight with only these outputs, in this order."""
        rows = rows.to(self.codes.device) if isinstance(rows, Tensor) else rows
        return replace(
            self,
            codes=self.codes.view(torch.uint8)[rows].view(self.codes.dtype),  # torch cannot index every 8-bit float
            scale=self.scale[rows],
            zero_point=None if self.zero_point is None else self.zero_point[rows],
            block_scale=None if self.block_scale is None else self.block_scale[rows],
        )

    def decoded(self, rows: slice) -> Tensor:
        """Return the values of some outputs as a loader computes them in the model's dtype."""
        return self.take_rows(rows).dequantize(self.values_dtype)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the values of the codes.

        The product of a code and a 16-bit scale is exact in float32. So a 16-bit `dtype` rounds the product once, just
        as a loader that multiplies in that dtype does.

        Args:
            dtype: dtype of the result.
        Returns:
            (N, K) values.
        """
        # Always a copy, even of float32 codes, because the copy is multiplied in place.
        values = self.codes.to(torch.float32, copy=True)
        index: tuple[Any, ...] = (slice(None), self.group_index)  # expands (N, G) to the shape of the codes
        if self.group_index is None:  # groups in order are broadcast
            values = values.view(len(values), self.scale.shape[1], -1)  # (N, G, g)
            index = (slice(None), slice(None), None)
        if self.zero_point is not None:
            values -= self.zero_point.float()[index]
        return values.mul_(self.scale.float()[index]).view(self.shape).to(dtype)


def join_rows(parts: Sequence[QuantizedTensor]) -> QuantizedTensor:
    """Concatenate weights along the outputs; they must agree in everything but codes, scales and zero points."""
    if len(parts) == 1:
        return parts[0]
    storage = parts[0].codes.dtype
    return replace(
        parts[0],
        codes=torch.cat([part.codes.view(torch.uint8) for part in parts]).view(storage),  # as in `take_rows`
        scale=torch.cat([part.scale for part in parts]),
        zero_point=concatenated([part.zero_point for part in parts]),
        block_scale=concatenated([part.block_scale for part in parts]),
    )


def concatenated(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Concatenate tensors along the first dimension; None if all are None."""
    present = [part for part in parts if part is not None]
    return torch.cat(present) if present else None
