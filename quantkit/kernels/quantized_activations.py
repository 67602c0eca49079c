"""Inputs of a linear that are rounded already, handed from what produces them to what multiplies them.

A linear with an attribute `rounds` takes them in place of a tensor; who may hand them over is decided when a model is
loaded. Shapes: T tokens, K inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Rounding:
    """How rows are rounded to 8 bits.

    Args:
        name: int8 or fp8.
        step: the scale of all of them, found by calibration; None = each row its own, so that its largest value fits.
    """

    name: str
    step: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundedRows:
    """Codes of 8 bits with a scale per row.

    Args:
        codes: at least (T, K), contiguous; int8, or uint8 that hold e4m3. Rows past T mean nothing.
        scale: (T, 1) float32; NaN for a row whose outputs are NaN.
        dtype: of what they were, and of the outputs.
    """

    codes: Tensor
    scale: Tensor
    dtype: torch.dtype

    def __len__(self) -> int:
        """T."""
        return len(self.scale)
