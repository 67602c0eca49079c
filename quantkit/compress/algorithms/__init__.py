"""Algorithms that choose the numbers: one file each, named as in a recipe."""

from quantkit.registry import Registry

__all__ = ["REGISTRY"]

REGISTRY = Registry(package=__name__, attribute="STEP", noun="step")
