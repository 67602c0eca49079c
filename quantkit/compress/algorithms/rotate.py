"""Rotate the residual stream without changing the model's outputs, so that no channel of weights or activations stands
out.

`quantkit.compress.rotated_reader` rotates the tensors when it reads them, so the other steps work on the rotated model.
Source: Ashkboos et al. 2024, QuaRot; Liu et al. 2024, SpinQuant.
"""

from dataclasses import dataclass
from typing import ClassVar

from quantkit.checkpoints.model_reader import ModelReader
from quantkit.checkpoints.reader import CheckpointReader
from quantkit.compress.algorithms.base import Step
from quantkit.compress.calibration.layer import LayerContext
from quantkit.compress.rotated_reader import RotatedReader
from quantkit.models.family import Family


@dataclass(frozen=True, kw_only=True, slots=True)
class RotateStep(Step):
    """Fold randomized Hadamard rotations into the weights; the runtime needs no extra operation.

    Args:
        heads: whether to rotate the value heads too.
        seed: seed of the random signs.
    """

    replaces_model: ClassVar[bool] = True

    heads: bool = True
    seed: int = 0

    def open(self, source: CheckpointReader, family: Family) -> ModelReader:
        """Return a reader of the rotated model; see `Step.open`."""
        return RotatedReader(source, family, seed=self.seed, heads=self.heads)

    def apply(self, layer: LayerContext) -> None:
        """Do nothing: the layer was rotated when it was read."""


STEP = RotateStep
