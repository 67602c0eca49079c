"""AWQ: before rounding, scale up the weights that see large inputs; the search minimizes the parent's output error.

The *parent* is the module around a set of linears, e.g. attention. After scaling, a second search chooses the range of
each group that minimizes the output error of the group's linear (clipping). AWQ sets ranges, not codes. A GPTQ step may
follow; without it, rounding to nearest uses the ranges.
Shapes: T tokens, N outputs, K inputs, G groups of g inputs.
Source: Lin et al. 2023, AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from quantkit.compress.algorithms._options import Positive
from quantkit.compress.algorithms._smoothing import can_fold, fold, shared_by_heads, spread
from quantkit.compress.algorithms.base import Step
from quantkit.compress.algorithms.rtn import InputStatistics, search_ranges
from quantkit.compress.calibration.layer import Call, LayerContext
from quantkit.distributed import share_out
from quantkit.huggingface.layer_call import hidden_states
from quantkit.models.linear_sets import LinearSet
from quantkit.numerics.affine import WeightGrid, minmax_parameters, round_to_nearest, search_parameters

_ROUNDED = 1 << 17  # number of weights that are scaled and rounded at once


@dataclass(frozen=True, kw_only=True, slots=True)
class AwqStep(Step):
    """Search activation-aware scales, then the best range of each group.

    Args:
        grid: number of exponents in [0, 1) from which the search chooses. A scale is the channel's mean |x| to the
            power of the exponent.
        duo_scaling: whether to divide each scale by the channel's mean relative |w| to the power of 1 - exponent.
        clip: whether to search the range of each group after scaling; false = use the group's full range.
        max_tokens: number of calibration tokens on which the parent's output error is measured. The search for scales
            uses only every second batch of these tokens.
    """

    moves_scales: ClassVar[bool] = True

    grid: Positive = 20
    duo_scaling: bool = True
    clip: bool = True
    max_tokens: Positive = 2048

    def apply(self, layer: LayerContext) -> None:
        """Rescale weights and the modules that compute their inputs, and store the chosen ranges; see `Step.apply`."""
        sets = layer.pending()
        statistics = {group.linears[0]: InputStatistics(layer, names[0]) for group, names in sets}
        statistics = layer.known(layer.observe(statistics))
        for group, _ in sets:
            if can_fold(layer, group):
                self._scale(layer, group, statistics[group.linears[0]])
        if self.clip:
            keys = {name: group.linears[0] for group, names in sets for name in names}
            search_ranges(layer, {name: statistics[key] for name, key in keys.items()}, known=True)
            return
        for name in (name for _, names in sets for name in names):
            layer.chosen.ranges[name] = minmax_parameters(layer.weight(name), layer.grid(name))

    def _scale(self, layer: LayerContext, group: LinearSet, seen: InputStatistics) -> None:
        """Find the scales of a set. If they lower the output error, fold them into the layer and record them in `seen`.

        For speed, the search rounds in full ranges and measures the error on every second batch. Then a final check,
        with searched ranges if `clip` is set, and on all batches, decides whether the scales are used at all.
        """
        size = shared_by_heads(layer, group, seen.magnitude.mean)
        weights = shared_by_heads(layer, group, relative_weight_size(layer, group))
        calls = layer.capture(group.parent, self.max_tokens)
        reference = [_output(layer, group.parent, call) for call in calls]
        # Linears are rounded in place while scales are tried, so the search must restore their weights at the end.
        originals = {name: layer.weight(name).clone() for name in group.linears}

        def error(scales: Tensor, final: bool = False) -> float:
            for name, original in originals.items():
                self._write_rounded(layer, name, original, scales, seen if final else None)
            measured = slice(None, None, 1 if final else 2)
            return sum(
                (_output(layer, group.parent, call) - output).float().square().sum().item()
                for call, output in zip(calls[measured], reference[measured], strict=True)
            )

        ratio = search_ratio(lambda r: error(self._candidate(size, weights, r)), self.grid)
        scales = self._candidate(size, weights, ratio)
        scaled, plain = share_out((scales, torch.ones_like(scales)), partial(error, final=True))
        for name, original in originals.items():
            layer.weight(name).copy_(original)
        if scaled < plain:
            fold(layer, group, scales)
            seen.divisor = scales

    def _candidate(self, size: Tensor, weights: Tensor, ratio: float) -> Tensor:
        scales = size.clamp_min(1e-6) ** ratio
        if self.duo_scaling:
            scales = scales / (weights ** (1 - ratio) + 1e-4)
        return spread(scales)

    def _write_rounded(
        self, layer: LayerContext, name: str, original: Tensor, scales: Tensor, seen: InputStatistics | None
    ) -> None:
        """Set a linear's weight to `original` after scaling, rounding and scaling back. Rounding uses searched ranges
        if `seen` is given and `clip` is set, otherwise full ranges. An ignored linear, or one with codes, is not
        rounded.
        """
        scheme, weight = layer.schemes.get(name), layer.weight(name)
        if scheme is None or name in layer.chosen.quantized:
            weight.copy_(original)
            return
        grid = WeightGrid(scheme.weight, layer.scale_dtype[name])
        # The search does not use the Gram matrices here: it is faster, and precise enough to compare scales.
        importance = seen.mean_square(scales) if seen is not None and self.clip else None
        # A few rows at a time stay in a CPU's cache; if rows share scales, all rows are rounded together.
        alone = scheme.weight.block_rows == 1 and not scheme.weight.has_tensor_scale
        size = max(1, _ROUNDED // original.shape[1]) if alone else len(original)
        for values, target in zip(torch.split(original, size), torch.split(weight, size), strict=True):
            scaled = values.float() * scales
            ranges = None if importance is None else search_parameters(scaled, grid, importance=importance)
            target.copy_(round_to_nearest(scaled, grid, ranges).dequantize().div_(scales))


def search_ratio(error: Callable[[float], float], grid: int) -> float:
    """Return the ratio i / grid in [0, 1) with the least error. The search first tries about five ratios, then refines
    around the best one.

    Args:
        error: returns the error for a ratio; must be smooth, so that the minimum lies near the best of the first
            ratios.
        grid: number of ratios to choose from.
    """
    step = max(1, grid // 5)
    errors: dict[int, float] = {}

    def measure(points: Iterable[int]) -> None:
        new = [point for point in points if 0 <= point < grid and point not in errors]
        errors.update(zip(new, share_out(new, lambda point: error(point / grid)), strict=True))

    measure(range(0, grid, step))
    while step > 1:
        step //= 2
        best = min(errors, key=errors.__getitem__)
        measure((best - step, best + step))
    return min(errors, key=errors.__getitem__) / grid


def relative_weight_size(layer: LayerContext, group: LinearSet) -> Tensor:
    """Return, for each input, the mean of |w| / (largest |w| in the group of w), (K,), over all rows of all linears of
    the set.
    """
    total = torch.zeros(layer.weight(group.linears[0]).shape[1], device=layer.device)
    rows = 0
    for name in group.linears:
        weight = layer.weight(name).float().abs()
        scheme = layer.schemes.get(name)
        width = weight.shape[1] if scheme is None else scheme.weight.group_width(weight.shape[1])
        groups = weight.view(weight.shape[0], -1, width)
        # The addition prevents a division by zero in groups of zeros.
        total += (groups / (groups.amax(-1, keepdim=True) + 1e-6)).view_as(weight).sum(0)
        rows += weight.shape[0]
    return total / rows


def _output(layer: LayerContext, parent: str, call: Call) -> Tensor:
    return hidden_states(layer.block.get_submodule(parent)(*call[0], **call[1]))


STEP = AwqStep
