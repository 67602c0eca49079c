"""Rotate: the same model with a rotated residual stream, so that no channel of weights or activations stands out.

The work is done where tensors are read (`quantkit.compress.rotated_reader`); the other steps see the rotated model.
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
    """Randomised Hadamard rotations folded into the weights; nothing is left to do at run time.

    Args:
        heads: rotate the value heads too.
        seed: of the random signs.
    """

    replaces_model: ClassVar[bool] = True

    heads: bool = True
    seed: int = 0

    def open(self, source: CheckpointReader, family: Family) -> ModelReader:
        """The checkpoint as the rotated model; see `Step`."""
        return RotatedReader(source, family, seed=self.seed, heads=self.heads)

    def apply(self, layer: LayerContext) -> None:
        """Do nothing: the layer was rotated when it was read."""


STEP = RotateStep
