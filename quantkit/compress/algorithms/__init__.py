"""Compression algorithms, which are the steps of a recipe. Each step is one file with the step's name."""

from quantkit.registry import Registry

__all__ = ["REGISTRY"]

REGISTRY = Registry(package=__name__, attribute="STEP", noun="step")
