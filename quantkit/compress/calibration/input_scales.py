"""Calibrated scales of inputs: one number per tensor, found from the data once the layer has its final weights.

Linears of one module that read the same input (q, k and v; gate and up) share the scale, as engines join them.
Dynamic scales are computed at run time and are not here; the arithmetic is in `numerics.activation_quant`.
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

# Values kept of each batch, and in all, to measure errors on; whole rows, so that no channel is missed.
_BATCH_VALUES, _VALUES = 1 << 16, 1 << 20
# Fractions of the largest magnitude that are tried, down to a 32nd.
_FRACTIONS = tuple(2 ** (-i / 6) for i in range(31))


class InputRange:
    """The largest magnitude of a linear's inputs, and some rows spread evenly over each batch.

    Args:
        keep: whether to keep rows.
    """

    def __init__(self, keep: bool) -> None:
        self._keep = keep
        self._kept: list[Tensor] = []
        self._largest: list[Tensor] = []  # of each batch

    def update(self, inputs: Tensor) -> None:
        """Take in (T, K) inputs of any float dtype; they are not modified."""
        if inputs.numel() == 0:
            return
        # Kept as a tensor: a Python number would wait for the device at every batch.
        self._largest.append(inputs.abs().amax().float())
        if self._keep and sum(map(torch.numel, self._kept)) < _VALUES:
            self._kept.append(spread_rows(inputs, max(1, _BATCH_VALUES // inputs.shape[1])).flatten())

    @property
    def largest(self) -> float:
        """Largest of all inputs; 0 when there were none."""
        return torch.stack(self._largest).amax().item() if self._largest else 0.0

    @property
    def values(self) -> Tensor:
        """(n,) float32, those that were kept."""
        return torch.cat(self._kept)


def calibrate_inputs(layer: LayerContext, method: RangeMethod) -> None:
    """Find the scale of every input that needs one, and put it beside the codes of the linears that read it.

    Args:
        layer: whose linears all have codes, some of them calibrated scales of inputs; modified.
        method: "absmax" holds every value seen; "mse" cuts off what costs the others more than it is worth.
    Raises:
        DataError: an input was zero throughout, or never came.
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
                f"{layer.name}.{name}: the largest input in all calibration data is {largest}, which gives no "
                f"scale; use other data (calibration.data), or {instead}"
            )
        return largest

    for names, largest in zip(sets, layer.by_owners(list(observers), choose), strict=True):
        for name in names:
            scheme = layer.schemes[name].activation
            assert scheme is not None
            scale = input_scale(torch.tensor(largest, device=layer.device), scheme, layer.scale_dtype[name])
            layer.chosen.quantized[name] = replace(layer.chosen.quantized[name], input_scale=scale)
    layer.stream.forget()  # from here on inputs are rounded


def _inputs(layer: LayerContext) -> list[list[str]]:
    """Linears whose input has a calibrated scale, those that share one together."""
    shared: dict[tuple[int, str], list[str]] = {}
    for number, group in enumerate(layer.sets):
        for name in group.linears:
            activation = layer.schemes[name].activation if name in layer.schemes else None
            kept = name in layer.chosen.quantized and layer.chosen.quantized[name].input_scale is not None
            if activation is not None and activation.is_calibrated and not kept:
                shared.setdefault((number, name.rpartition(".")[0]), []).append(name)
    return list(shared.values())


def _choose(seen: InputRange, scheme: ActivationScheme, method: RangeMethod) -> float:
    """The largest magnitude that the scale must cover."""
    # Under a global scale the groups have scales of their own at run time, so there is nothing that clipping helps.
    if method == "absmax" or seen.largest == 0 or scheme.dynamic:
        return seen.largest
    values = seen.values
    errors = {}
    for fraction in _FRACTIONS:
        largest = fraction * seen.largest
        scale = input_scale(torch.tensor(largest, device=values.device), scheme, torch.float32)
        errors[largest] = (fake_quantize_inputs(values, scheme, scale) - values).square().mean().item()
    return min(errors, key=lambda largest: errors[largest])
