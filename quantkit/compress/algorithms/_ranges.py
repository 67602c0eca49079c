"""Ranges of rounding chosen by the error of a linear's outputs, from what its inputs look like.

Shapes: T tokens, N outputs, K inputs, G groups of g inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.compress.calibration.layer import LayerContext
from quantkit.compress.calibration.observers import GroupGram, Magnitude
from quantkit.numerics.affine import Ranges, search_parameters

# Groups wider than this are searched with per-channel importance only: their Gram matrices would cost too much.
_WIDEST_GRAM = 512


class InputStatistics:
    """What one set's inputs look like: sizes per channel, and the Gram matrix of each group if it is narrow enough.

    `divisor` (K,) is what the inputs are divided by since they were seen.

    Args:
        layer: the layer.
        name: a linear of the set, with a scheme.
    """

    def __init__(self, layer: LayerContext, name: str) -> None:
        width = layer.weight(name).shape[1]
        self.group = layer.schemes[name].weight.group_width(width)
        self.magnitude = Magnitude(width, layer.device)
        self._gram = GroupGram(width, self.group, layer.device) if self.group <= _WIDEST_GRAM else None
        self.divisor = torch.ones(width, device=layer.device)

    def update(self, inputs: Tensor) -> None:
        """Add (T, K) inputs."""
        self.magnitude.update(inputs)
        if self._gram is not None:
            self._gram.update(inputs)

    def mean_square(self, divisor: Tensor) -> Tensor:
        """Mean x^2 per input, (K,), of the inputs divided by `divisor`."""
        return self.magnitude.mean_square / divisor.square()

    def gram(self, divisor: Tensor) -> Tensor | None:
        """Mean x x' inside each group, (G, g, g), of the inputs divided by `divisor`."""
        if self._gram is None:
            return None
        by_group = divisor.view(-1, self.group)
        return self._gram.mean / (by_group.unsqueeze(2) * by_group.unsqueeze(1))


def search_range(layer: LayerContext, name: str, seen: InputStatistics) -> Ranges:
    """The ranges of a linear that lose least of its outputs; see `search_parameters`.

    Args:
        layer: the layer; not modified.
        name: relative name of a linear with a scheme.
        seen: of its inputs.
    """
    weight, grid = layer.weight(name), layer.grid(name)
    # The set's statistics are of one group size; a linear of it with another has no use for the Gram matrices.
    gram = seen.gram(seen.divisor) if seen.group == grid.scheme.group_width(weight.shape[1]) else None
    return search_parameters(weight, grid, importance=seen.mean_square(seen.divisor), gram=gram)
