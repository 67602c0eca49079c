"""Which numbers each fused group should have: measured, solved for a budget, written as a recipe, and verified."""

from quantkit.allocation.choose import SearchTarget
from quantkit.allocation.run import SearchOptions, search

__all__ = ["SearchOptions", "SearchTarget", "search"]
