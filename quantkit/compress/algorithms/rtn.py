"""Round to nearest in calibrated ranges, which minimize the error of a linear's outputs, not of its weights.

This is the fastest use of calibration data: no solver, no folding. Without this step, rounding uses the ranges with the
least squared weight error and needs no data. The step chooses ranges, not codes; AWQ chooses ranges in the same way.
Shapes: T tokens, N outputs, K inputs, G groups of g inputs.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.compress.algorithms.base import Step
from quantkit.compress.calibration.layer import LayerContext
from quantkit.compress.calibration.observers import GroupGram, Magnitude
from quantkit.distributed import share_out
from quantkit.numerics.affine import Ranges, search_parameters

# For groups wider than this, the search uses only the importance of each channel: Gram matrices would cost too much.
_WIDEST_GRAM = 512


class InputStatistics:
    """Input statistics of one set of linears: magnitudes per channel, and a Gram matrix per group if groups are narrow.

    In the methods, `divisor` (K,) is the factor by which the inputs have been divided since the statistics were
    collected.

    Args:
        layer: the layer.
        name: a linear of the set; its scheme gives the group size.
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
        """Return the mean square of each channel, (K,), of the inputs divided by `divisor`."""
        return self.magnitude.mean_square / divisor.square()

    def gram(self, divisor: Tensor) -> Tensor | None:
        """Return the mean of x x' inside each group, (G, g, g), for inputs x divided by `divisor`; None if the groups
        are too wide.
        """
        if self._gram is None:
            return None
        # Inputs x / d have the products x x' / (d d').
        by_group = divisor.view(-1, self.group)
        return self._gram.mean / (by_group.unsqueeze(2) * by_group.unsqueeze(1))


def search_ranges(layer: LayerContext, seen: Mapping[str, InputStatistics], *, known: bool = False) -> None:
    """Choose ranges that minimize the output error of linears, and store them in the layer; see `search_parameters`.

    Args:
        layer: the layer of the linears; modified.
        seen: input statistics, keyed by the linear's relative name. The process that owns the linear's set must have
            seen all inputs.
        known: whether the statistics are complete in every process, so that any process may search.
    """

    def search(name: str) -> Ranges:
        weight, grid, inputs = layer.weight(name), layer.grid(name), seen[name]
        # The set's Gram matrices have one group size; a linear with a different group size cannot use them.
        fits = inputs.group == grid.scheme.group_width(weight.shape[1])
        gram = inputs.gram(inputs.divisor) if fits else None
        return search_parameters(weight, grid, importance=inputs.mean_square(inputs.divisor), gram=gram)

    names = list(seen)
    costs = [layer.weight(name).numel() for name in names]
    ranges = share_out(names, search, costs=costs) if known else layer.by_owners(names, search)
    layer.chosen.ranges |= dict(zip(names, ranges, strict=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class RtnStep(Step):
    """Choose for each group the range in which rounding to nearest changes the outputs least.

    The error of a group is computed from the group's block of the inputs' Gram matrix or, if the group has more than
    512 inputs, from the mean square of each input.
    """

    def apply(self, layer: LayerContext) -> None:
        """Choose ranges for all linears that have no codes yet; see `Step.apply`."""
        sets = layer.pending()
        seen = layer.observe({names[0]: InputStatistics(layer, names[0]) for _, names in sets})
        search_ranges(layer, {name: seen[names[0]] for _, names in sets for name in names})


STEP = RtnStep
