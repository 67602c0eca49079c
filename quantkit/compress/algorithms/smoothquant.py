"""SmoothQuant: move outliers from activations, where all channels of a token share one scale, into the weights.

As in the paper, only linears that read the output of a norm are smoothed; inputs of other linears have hardly any
outlier channels.
Source: Xiao et al. 2022, SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language Models.
"""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from pydantic import PlainValidator
from torch import Tensor, nn

from quantkit.compress.algorithms._smoothing import can_fold, fold, shared_by_heads, spread
from quantkit.compress.algorithms.awq import search_ratio
from quantkit.compress.algorithms.base import Step
from quantkit.compress.calibration.layer import LayerContext
from quantkit.compress.calibration.observers import Magnitude, spread_rows
from quantkit.models.linear_sets import LinearSet
from quantkit.numerics.activation_quant import fake_quantize_inputs, input_scale
from quantkit.numerics.affine import round_to_nearest
from quantkit.numerics.scheme import LinearScheme
from quantkit.safety.untrusted import shorten

_GRID = 20  # number of values of alpha from which `auto` chooses
# `auto` measures the error on at most `_BATCH_ROWS` tokens per batch and `_ROWS` in all. For large sets it uses fewer
# tokens, but at least `_LEAST_ROWS`, so that each value of alpha costs about `_PRODUCTS` multiplications.
_BATCH_ROWS, _ROWS, _LEAST_ROWS, _PRODUCTS = 16, 1024, 64, 1 << 34


def _alpha(value: Any) -> float | str:
    if value == "auto":
        return "auto"
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1:
        return float(value)
    raise ValueError(f"expected 'auto' or a number from 0 to 1, found {shorten(value)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class SmoothQuantStep(Step):
    """Divide each input channel by max|x|^alpha / max|w|^(1 - alpha), and multiply the channel's weights by this value.

    The division is folded into the norm that computes the input.

    Args:
        alpha: 0 leaves all outliers in the activations, 1 moves all of them into the weights. auto = for each set of
            linears that share an input, the value with the least output error; all tokens count equally.
    """

    is_for_activations: ClassVar[bool] = True
    moves_scales: ClassVar[bool] = True

    alpha: Annotated[float | str, PlainValidator(_alpha)] = "auto"

    def apply(self, layer: LayerContext) -> None:
        """Rescale each norm and the weights that read its output; see `Step.apply`."""
        sets = [group for group, _ in layer.pending() if _follows_norm(layer, group) and can_fold(layer, group)]
        names = [group.linears[0] for group in sets]
        observers = {name: _Inputs(layer.weight(name).shape[1], layer.device, self.alpha == "auto") for name in names}
        if not observers:
            layer.chosen.notes.append("smoothquant: nothing was smoothed, because no linear reads the output of a norm")
            return
        observers = layer.known(layer.observe(observers))
        for group in sets:
            smoothing = _Smoothing(layer, group, observers[group.linears[0]])
            alpha = search_ratio(smoothing.error, _GRID) if self.alpha == "auto" else float(self.alpha)
            fold(layer, group, smoothing.scales(alpha))


class _Inputs(Magnitude):
    """Statistics of a linear's inputs and, if `keep` is set, a sample of the inputs."""

    def __init__(self, width: int, device: torch.device, keep: bool) -> None:
        super().__init__(width, device)
        self._keep = keep
        self.rows: list[Tensor] = []

    def update(self, inputs: Tensor) -> None:
        """Add (T, K) inputs."""
        super().update(inputs)
        if self._keep and len(inputs) and sum(map(len, self.rows)) < _ROWS:
            self.rows.append(spread_rows(inputs, _BATCH_ROWS))


class _Smoothing:
    """Computes, for any alpha, the scales of a set of linears, and the output error with these scales."""

    def __init__(self, layer: LayerContext, group: LinearSet, seen: _Inputs) -> None:
        self._layer = layer
        self._names = [name for name in group.linears if name in layer.schemes]
        self._largest = shared_by_heads(layer, group, seen.largest).clamp_min(1e-5)
        self._largest_weight = largest_weight(layer, group).clamp_min(1e-5)
        rows = torch.cat(seen.rows) if seen.rows else self._largest.new_zeros(1, len(self._largest))
        num_weights = sum(layer.weight(name).numel() for name in self._names)
        self._rows = spread_rows(rows, max(_LEAST_ROWS, _PRODUCTS // max(1, num_weights)))

    def scales(self, alpha: float) -> Tensor:
        return spread(self._largest**alpha / self._largest_weight ** (1 - alpha))

    def error(self, alpha: float) -> float:
        """Return the mean, over the sampled tokens, of the squared output error relative to the squared output."""
        scales = self.scales(alpha)
        wrong, size = self._rows.new_zeros(2, len(self._rows))
        for name in self._names:
            weight = self._layer.weight(name).float()
            outputs = self._rows @ weight.T
            rounded = round_to_nearest(weight * scales, self._layer.grid(name)).dequantize()
            inputs = self._quantized(self._rows / scales, self._layer.schemes[name], scales)
            wrong += (inputs @ rounded.T - outputs).square_().sum(-1)
            size += outputs.square_().sum(-1)
        return float((wrong / size.clamp_min(torch.finfo(size.dtype).tiny)).mean())

    def _quantized(self, inputs: Tensor, scheme: LinearScheme, scales: Tensor) -> Tensor:
        activation = scheme.activation
        if activation is None:
            return inputs
        calibrated = None
        if activation.is_calibrated:
            calibrated = input_scale((self._largest / scales).amax(), activation, torch.float32)
        return fake_quantize_inputs(inputs, activation, calibrated)


def largest_weight(layer: LayerContext, group: LinearSet) -> Tensor:
    """Return, for each input, the largest |w| over all linears of the set, (K,)."""
    return torch.stack([layer.weight(name).float().abs().amax(0) for name in group.linears]).amax(0)


def _follows_norm(layer: LayerContext, group: LinearSet) -> bool:
    return group.source is not None and not isinstance(layer.block.get_submodule(group.source), nn.Linear)


STEP = SmoothQuantStep
