"""What the codes of a linear cost, as far as its weights alone tell; `held_out` measures it on data."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quantkit.compress.calibration.errors import weight_error
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
    current, has_data = layer.weight(name), layer.data.store is not None
    return LinearRecord(
        name=name,
        scheme=layer.schemes[name].describe(),
        shape=weight.shape,
        bits_per_weight=8 * weight.stored_bytes / current.numel(),
        # With data these are measured once the layer is finished.
        rounding_error=math.nan if has_data else weight_error(current, plainly_rounded(layer, name, current)),
        error=math.nan if has_data else weight_error(current, weight.decoded),
        measure="weight",
    )


def plainly_rounded(layer: LayerContext, name: str, weight: Tensor) -> Callable[[slice], Tensor]:
    """A function that gives rows of a linear's weight, rounded to its scheme in the covering range.

    Args:
        layer: with the scheme.
        name: relative name.
        weight: (N, K) before a scale was folded into its columns.
    """
    grid = layer.grid(name)
    if layer.set_key(name) in layer.data.divisors:  # that of the folded weights is another one
        grid = replace(grid, tensor_largest=None).completed(weight)
    scale, zero = affine.minmax_parameters(weight, grid)

    def rounded(rows: slice) -> Tensor:
        ranges = Ranges(scale[rows], None if zero is None else zero[rows])
        return affine.round_to_nearest(weight[rows], grid, ranges).dequantize()

    return rounded
