"""How well the numbers are chosen: one file per algorithm, named as in a recipe."""

from quantkit.registry import Registry

__all__ = ["REGISTRY"]

REGISTRY = Registry(package=__name__, attribute="STEP", noun="step")
