"""SmoothQuant: move outliers from activations, where all channels of a token share one scale, into the weights.

As in the paper, only linears that read the output of a norm are smoothed; inputs of other linears have hardly any
outlier channels.
Source: Xiao et al. 2022, SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language Models.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from quantkit.compress.algorithms._options import Share
from quantkit.compress.algorithms._smoothing import can_fold, fold, shared_by_heads, spread
from quantkit.compress.algorithms.base import Step
from quantkit.compress.calibration.layer import LayerContext
from quantkit.compress.calibration.observers import Magnitude
from quantkit.models.linear_sets import LinearSet


@dataclass(frozen=True, kw_only=True, slots=True)
class SmoothQuantStep(Step):
    """Divide each input channel by max|x|^alpha / max|w|^(1 - alpha), and multiply the channel's weights by this value.

    The division is folded into the norm that computes the input.

    Args:
        alpha: 0 leaves all outliers in the activations, 1 moves all of them into the weights.
    """

    is_for_activations: ClassVar[bool] = True
    moves_scales: ClassVar[bool] = True

    alpha: Share = 0.5

    def apply(self, layer: LayerContext) -> None:
        """Rescale each norm and the weights that read its output; see `Step.apply`."""
        sets = [group for group, _ in layer.pending() if _follows_norm(layer, group) and can_fold(layer, group)]
        names = [group.linears[0] for group in sets]
        observers = {name: Magnitude(layer.weight(name).shape[1], layer.device) for name in names}
        if not observers:
            layer.chosen.notes.append("smoothquant: nothing was smoothed, because no linear reads the output of a norm")
            return
        observers = layer.known(layer.observe(observers))
        for group in sets:
            inputs = shared_by_heads(layer, group, observers[group.linears[0]].largest).clamp_min(1e-5)
            weights = largest_weight(layer, group).clamp_min(1e-5)
            fold(layer, group, spread(inputs**self.alpha / weights ** (1 - self.alpha)))


def largest_weight(layer: LayerContext, group: LinearSet) -> Tensor:
    """Return, for each input, the largest |w| over all linears of the set, (K,)."""
    return torch.stack([layer.weight(name).float().abs().amax(0) for name in group.linears]).amax(0)


def _follows_norm(layer: LayerContext, group: LinearSet) -> bool:
    return group.source is not None and not isinstance(layer.block.get_submodule(group.source), nn.Linear)


STEP = SmoothQuantStep
