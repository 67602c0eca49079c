"""The seam of all algorithms: a step rewrites a layer's weights or sets its codes."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, runtime_checkable

from quantkit.architectures import Architecture
from quantkit.calibration.layer import LayerContext
from quantkit.checkpoint.model_reader import ModelReader


class Step(Protocol):
    """One algorithm with its options, as a frozen dataclass called STEP in its own file.

    The fields are the options that a recipe may set; their defaults and the class docstring's `Args:` are
    their documentation. Steps run in the order of the recipe, on one layer after another.

    A step may have a property `needs_original`: true makes the run keep the hidden states of the original model beside
    those of the quantized one, and the layer as it was, as `layer.original_store` and `layer.original`; it costs twice
    the memory. A property `reorders_groups` says that groups are formed in another order than that of the inputs.
    One step of a recipe may also be an `Opener`.
    """

    def apply(self, layer: LayerContext) -> None:
        """Improve one layer.

        Args:
            layer: modified: either its weights (SmoothQuant, AWQ) or, by `layer.commit`, its codes (GPTQ).
        """
        ...


@runtime_checkable
class Opener(Protocol):
    """A step that makes another model of the checkpoint, which computes the same; all steps then work on that one."""

    def open(self, path: Path, architecture: Architecture) -> ModelReader:
        """The checkpoint as that model.

        Args:
            path: of the checkpoint.
            architecture: its family.
        Raises:
            ModelError: it cannot be done with this model; says why.
        """
        ...
