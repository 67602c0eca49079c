"""Conversion of the same codes to another on-disk format, layer by layer; `convert` is the whole of it."""

from quantkit.compress.convert.run import Conversion, convert

__all__ = ["Conversion", "convert"]
