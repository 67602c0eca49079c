"""Read recipe files: convert YAML to step and scheme objects. This package computes nothing."""

from quantkit.compress.recipe.load import Recipe, check, load, shipped

__all__ = ["Recipe", "check", "load", "shipped"]
