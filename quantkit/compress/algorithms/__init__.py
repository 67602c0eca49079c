"""Compression algorithms, which are the steps of a recipe. Each has its own file, named like the step in a recipe."""

from quantkit.registry import Registry

__all__ = ["REGISTRY"]

REGISTRY = Registry(package=__name__, attribute="STEP", noun="step")
