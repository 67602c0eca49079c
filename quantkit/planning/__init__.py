"""Estimates for a model before any work: sizes in bytes, what fits on a device, and lower bounds on the time of a step.

The estimates come only from the model's config or shard headers. Torch is not imported unless a recipe is loaded. All
figures are computed; the packages `benchmark` and `evaluate` measure.
"""

from quantkit.engine_rules.data_sheets import DEVICES, Device, find_device, make_device
from quantkit.planning.document import to_document
from quantkit.planning.estimate import Estimate, estimate
from quantkit.planning.shape import ModelShape

__all__ = ["DEVICES", "Device", "Estimate", "ModelShape", "estimate", "find_device", "make_device", "to_document"]
