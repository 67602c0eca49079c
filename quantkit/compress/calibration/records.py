"""What the codes of a linear cost, on the rows of its inputs that were kept for that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quantkit.compress.calibration.errors import relative_error
from quantkit.errors import SchemeError
from quantkit.numerics import affine
from quantkit.numerics.affine import Ranges
from quantkit.numerics.tensor import QuantizedTensor
from quantkit.results import LinearRecord

if TYPE_CHECKING:
    from quantkit.compress.calibration.layer import LayerContext


def measured(layer: LayerContext, name: str, weight: QuantizedTensor) -> LinearRecord:
    """The record of a linear that is about to get its codes.

    Args:
        layer: with the weight that they stand for.
        name: relative name.
        weight: codes and scales.
    Raises:
        SchemeError: a scale is not finite.
    """
    if not torch.isfinite(weight.scale.float()).all():
        raise SchemeError(
            f"{layer.name}.{name}: a scale is not finite in {str(weight.scale.dtype).removeprefix('torch.')}; "
            "the weights are broken, or too large for scales of this dtype: set format=compressed-tensors"
        )
    current, sample = layer.weight(name), layer.data.samples.get(layer.set_key(name))
    return LinearRecord(
        name=name,
        scheme=layer.schemes[name].describe(),
        shape=weight.shape,
        bits_per_weight=8 * weight.stored_bytes / current.numel(),
        rounding_error=relative_error(current, _plainly_rounded(layer, name), sample),
        error=relative_error(current, weight.decoded, sample),
        measure="weight" if sample is None else "output",
    )


def _plainly_rounded(layer: LayerContext, name: str) -> Callable[[slice], Tensor]:
    """Rows of a linear, plainly rounded before any scale was folded into its columns, then folded likewise."""
    current, grid, divisor = layer.weight(name), layer.grid(name), layer.data.divisors.get(layer.set_key(name))
    before = current if divisor is None else current / divisor
    if divisor is not None:
        grid = replace(grid, tensor_largest=None).completed(before)  # that of the folded weights is another one
    scale, zero = affine.minmax_parameters(before, grid)

    def rounded(rows: slice) -> Tensor:
        ranges = Ranges(scale[rows], None if zero is None else zero[rows])
        values = affine.round_to_nearest(before[rows], grid, ranges).dequantize()
        return values if divisor is None else values * divisor

    return rounded
