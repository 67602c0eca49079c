"""Compression from a model directory to a finished checkpoint; `quantize` is the whole of it."""

from quantkit.compress.pipeline.events import SILENT, Listener
from quantkit.compress.pipeline.run import quantize

__all__ = ["SILENT", "Listener", "quantize"]
