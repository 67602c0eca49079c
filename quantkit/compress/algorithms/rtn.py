"""Plain rounding with ranges that calibration has chosen: what a code step costs the linear's outputs, not its weights.

The quickest use of calibration data: no solver, no folding. Without this step plain rounding takes the ranges of least
squared weight error, and needs no data. It leaves ranges behind, not codes.
"""

from __future__ import annotations

from dataclasses import dataclass

from quantkit.compress.algorithms._ranges import InputStatistics, search_range
from quantkit.compress.calibration.layer import LayerContext


@dataclass(frozen=True, kw_only=True, slots=True)
class RtnStep:
    """Round to nearest in the range of each group that changes the outputs least.

    The error of a group is measured with its own block of the inputs' Gram matrix; in groups of more than 512 inputs
    with the mean square of each input.
    """

    def apply(self, layer: LayerContext) -> None:
        """Leave ranges behind; see `Step.apply`."""
        sets = layer.pending()
        seen = {names[0]: InputStatistics(layer, names[0]) for _, names in sets}
        layer.observe(seen)
        for _, names in sets:
            for name in names:
                layer.chosen.ranges[name] = search_range(layer, name, seen[names[0]])


STEP = RtnStep
