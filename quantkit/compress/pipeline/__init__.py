"""Compress a model directory to a finished checkpoint; the entry point is `quantize`."""

from quantkit.compress.pipeline.events import SILENT, Listener
from quantkit.compress.pipeline.run import quantize

__all__ = ["SILENT", "Listener", "quantize"]
