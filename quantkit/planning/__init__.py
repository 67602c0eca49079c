"""Estimates before any work: bytes, what fits, and time limits of a model, from its config or shard headers only.

No torch, unless a recipe is loaded. All figures are computed; `benchmark` and `evaluate` measure.
"""

from quantkit.engine_rules.data_sheets import DEVICES, Device, find_device, make_device
from quantkit.planning.document import to_document
from quantkit.planning.estimate import Estimate, estimate
from quantkit.planning.shape import ModelShape

__all__ = ["DEVICES", "Device", "Estimate", "ModelShape", "estimate", "find_device", "make_device", "to_document"]
