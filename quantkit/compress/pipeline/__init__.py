"""Compress a model directory to a finished checkpoint; the entry point is `quantize`."""

from quantkit.compress.pipeline.run import quantize
from quantkit.compress.pipeline.state import SILENT, Listener

__all__ = ["SILENT", "Listener", "quantize"]
