"""Convert a checkpoint's codes to another on-disk format, layer by layer; the entry point is `convert`."""

from quantkit.compress.convert.run import Conversion, convert

__all__ = ["Conversion", "convert"]
