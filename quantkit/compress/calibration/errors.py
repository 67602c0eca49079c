"""Quantization errors of a linear's weight, and the record of a quantized linear."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quantkit.errors import SchemeError
from quantkit.numerics import affine
from quantkit.numerics.tensor import QuantizedTensor
from quantkit.results import LinearRecord

# Number of weights whose error is measured at once: their float32 copies must stay small beside the layer.
_ERROR_BLOCK = 1 << 21


def row_blocks(rows: int, width: int) -> Iterator[slice]:
    """Return slices that divide the rows of a weight into blocks whose float32 copies need little memory."""
    step = max(1, _ERROR_BLOCK // width)
    return (slice(start, start + step) for start in range(0, rows, step))


def weight_error(weight: Tensor, decoded: Callable[[slice], Tensor]) -> float:
    """Return ||W - D|| / ||W||, computed a block of rows at a time.

    Args:
        weight: (N, K) W.
        decoded: function that, given a slice, returns these rows of D, the decoded weight.
    """
    wrong = total = 0.0
    for rows in row_blocks(*weight.shape):
        reference = weight[rows].float()
        wrong += (decoded(rows).float() - reference).square().sum().item()
        total += reference.square().sum().item()
    return math.sqrt(wrong / total) if total > 0 else 0.0


def signal_to_noise_db(reference: Tensor, output: Tensor) -> float:
    """Return the signal-to-noise ratio of an output in dB, at most 200 dB."""
    signal = reference.float().square().sum().item()
    noise = (output.float() - reference.float()).square().sum().item()
    return min(200.0, 10 * math.log10(signal / noise)) if noise > 0 and signal > 0 else 200.0


if TYPE_CHECKING:
    from quantkit.compress.calibration.layer import LayerContext


def measured(layer: LayerContext, name: str, weight: QuantizedTensor) -> LinearRecord:
    """Return the record of a linear that is about to get its codes.

    Args:
        layer: the layer, which still has the unquantized weight.
        name: relative name of the linear.
        weight: codes and scales.
    Raises:
        SchemeError: a scale is not finite.
    """
    if not torch.isfinite(weight.scale.float()).all():
        raise SchemeError(
            f"{layer.name}.{name}: a scale is not finite in {str(weight.scale.dtype).removeprefix('torch.')}. "
            "If the weights are not damaged, they are too large for this dtype; set format=compressed-tensors"
        )
    current, has_data = layer.weight(name), layer.stream.store is not None
    return LinearRecord(
        name=name,
        scheme=layer.schemes[name].describe(),
        shape=weight.shape,
        bits_per_weight=8 * weight.stored_bytes / current.numel(),
        # With data, both errors are measured when the layer is finished.
        rounding_error=math.nan if has_data else weight_error(current, plainly_rounded(layer, name, current)),
        error=math.nan if has_data else weight_error(current, weight.decoded),
        measure="weight",
    )


def plainly_rounded(layer: LayerContext, name: str, weight: Tensor) -> Callable[[slice], Tensor]:
    """Return a function that, given a slice, returns these rows of a weight, rounded to nearest in full ranges.

    Args:
        layer: the layer of the linear.
        name: relative name of the linear.
        weight: (N, K), before any scale was folded into its columns.
    """
    grid = layer.grid(name)
    # Folding changes the largest magnitude of the weights.
    if layer.set_key(name) in layer.data.divisors or name in layer.data.output_divisors:
        grid = replace(grid, tensor_largest=None).completed(weight)
    ranges = affine.minmax_parameters(weight, grid)

    def rounded(rows: slice) -> Tensor:
        return affine.round_to_nearest(weight[rows], grid, ranges.rows(rows)).dequantize()

    return rounded
