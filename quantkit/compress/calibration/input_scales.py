"""Calibrate static scales for the inputs of linears: one per input tensor, computed after all linears have codes.

Linears of one module that read the same input (q, k and v; gate and up) share the scale, because engines fuse them. The
runtime computes dynamic scales. `numerics.activation_quant` contains the arithmetic.
"""

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from quantkit.compress.calibration.layer import LayerContext
from quantkit.compress.calibration.observers import spread_rows
from quantkit.errors import DataError
from quantkit.numerics.activation_quant import fake_quantize_inputs, input_scale
from quantkit.numerics.scheme import ActivationScheme

RangeMethod = Literal["absmax", "mse"]

# Number of values to keep of each batch, and in all, for measuring errors. Whole rows are kept, so that every channel
# is in the sample.
_BATCH_VALUES, _VALUES = 1 << 16, 1 << 20
# Fractions of the largest magnitude that are tried, down to 1 / 32.
_FRACTIONS = tuple(2 ** (-i / 6) for i in range(31))


class InputRange:
    """Largest magnitude of a linear's inputs, and a sample of rows spread evenly over each batch.

    Args:
        keep: whether to keep a sample of rows.
    """

    def __init__(self, keep: bool) -> None:
        self._keep = keep
        self._kept: list[Tensor] = []
        self._largest: list[Tensor] = []  # one per batch

    def update(self, inputs: Tensor) -> None:
        """Add inputs (T, K) of any float dtype; they are not modified."""
        if inputs.numel() == 0:
            return
        # Kept as a tensor: converting it to a Python number would wait for the device at every batch.
        self._largest.append(inputs.abs().amax().float())
        if self._keep and sum(map(torch.numel, self._kept)) < _VALUES:
            self._kept.append(spread_rows(inputs, max(1, _BATCH_VALUES // inputs.shape[1])).flatten())

    @property
    def largest(self) -> float:
        """Return the largest magnitude of all inputs; 0 if there were none."""
        return torch.stack(self._largest).amax().item() if self._largest else 0.0

    @property
    def values(self) -> Tensor:
        """Return all values of the sampled rows, (n,) float32."""
        return torch.cat(self._kept)


def calibrate_inputs(layer: LayerContext, method: RangeMethod) -> None:
    """Compute the scale of every input that needs a calibrated one, and store it with the codes of the linears that
    read the input.

    Args:
        layer: a layer whose linears all have codes; modified.
        method: "absmax" covers every observed value; "mse" clips rare large values if that lowers the squared error.
    Raises:
        DataError: an input was always zero, was not finite, or was never computed.
    """
    sets = _inputs(layer)
    if not sets:
        return
    observers = layer.observe({names[0]: InputRange(keep=method == "mse") for names in sets})

    def choose(name: str) -> float:
        scheme = layer.schemes[name].activation
        assert scheme is not None, f"{name} has no activations to quantize"
        largest = _choose(observers[name], scheme, method)
        if not 0 < largest < float("inf"):
            instead = "leave activations out" if scheme.dynamic else "set activations.dynamic=true"
            raise DataError(
                f"{layer.name}.{name}: no scale can be computed, because the largest input on the calibration data is "
                f"{largest}; use other data (calibration.data), or {instead}"
            )
        return largest

    for names, largest in zip(sets, layer.by_owners(list(observers), choose), strict=True):
        for name in names:
            scheme = layer.schemes[name].activation
            assert scheme is not None
            scale = input_scale(torch.tensor(largest, device=layer.device), scheme, layer.scale_dtype[name])
            layer.chosen.quantized[name] = replace(layer.chosen.quantized[name], input_scale=scale)
    layer.stream.forget()  # the stored results were computed with inputs that were not rounded yet


def _inputs(layer: LayerContext) -> list[list[str]]:
    """Return the linears whose inputs still need a calibrated scale; each inner list shares one scale."""
    shared: dict[tuple[int, str], list[str]] = {}
    for number, group in enumerate(layer.sets):
        for name in group.linears:
            activation = layer.schemes[name].activation if name in layer.schemes else None
            kept = name in layer.chosen.quantized and layer.chosen.quantized[name].input_scale is not None
            if activation is not None and activation.is_calibrated and not kept:
                shared.setdefault((number, name.rpartition(".")[0]), []).append(name)
    return list(shared.values())


def _choose(seen: InputRange, scheme: ActivationScheme, method: RangeMethod) -> float:
    """Return the magnitude that the scale must cover: the largest one or, with "mse", the one with the least error."""
    # In a dynamic scheme, the calibrated scale is a global one. Groups get their own scales at run time, so clipping
    # would not help.
    if method == "absmax" or seen.largest == 0 or scheme.dynamic:
        return seen.largest
    values = seen.values
    errors = {}
    for fraction in _FRACTIONS:
        largest = fraction * seen.largest
        scale = input_scale(torch.tensor(largest, device=values.device), scheme, torch.float32)
        errors[largest] = (fake_quantize_inputs(values, scheme, scale) - values).square().mean().item()
    return min(errors, key=lambda largest: errors[largest])
