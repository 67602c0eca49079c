"""Search for the best number type of each fused group of linears, and write a recipe with the result.

This file imports nothing, so that `--help` has to import only `options`.
"""
