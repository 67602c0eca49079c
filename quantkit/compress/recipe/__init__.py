"""Recipe files of a user: YAML in, real step and scheme objects out. This package computes nothing."""

from quantkit.compress.recipe.load import Recipe, check, load, shipped

__all__ = ["Recipe", "check", "load", "shipped"]
