"""Search for the number type of each fused group: measure, solve for a budget, write a recipe, verify it.

This file imports nothing, so that `--help` has to import only `options`.
"""
