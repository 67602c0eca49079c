"""What a user asks for, as a file: YAML in, real step and scheme objects out. Nothing is computed here."""

from quantkit.compress.recipe.base import Recipe
from quantkit.compress.recipe.load import check, load, shipped

__all__ = ["Recipe", "check", "load", "shipped"]
