"""The seam of all algorithms: a step rewrites a layer's weights or sets its codes."""

from __future__ import annotations

from typing import Protocol

from quantkit.calibration.layer import LayerContext


class Step(Protocol):
    """One algorithm with its options, as a frozen dataclass called STEP in its own file.

    The fields are the options that a recipe may set; their defaults and the class docstring's `Args:` are
    their documentation. Steps run in the order of the recipe, on one layer after another.
    """

    def apply(self, layer: LayerContext) -> None:
        """Improve one layer.

        Args:
            layer: modified: either its weights (SmoothQuant, AWQ) or, by `layer.commit`, its codes (GPTQ).
        """
        ...
