"""Compression algorithms, which are the steps of a recipe. Each step has its own file, which has the step's name."""

from quantkit.registry import Registry

__all__ = ["REGISTRY"]

REGISTRY = Registry(package=__name__, attribute="STEP", noun="step")
