"""What a user asks for, as a file: YAML in, real step and scheme objects out. Nothing is computed here."""

from quantkit.compress.recipe.load import Recipe, check, load, shipped

__all__ = ["Recipe", "check", "load", "shipped"]
