"""Search for the number type of each fused group: measured, solved for a budget, written as a recipe, verified.

Nothing is imported here: `--help` is answered from `options`.
"""
