"""Which numbers each fused group should have: measured, solved for a budget, written as a recipe, and verified.

Nothing is imported here: `--help` is answered from `options`.
"""
