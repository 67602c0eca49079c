"""Render results as JSON, an HTML page, a model card, JUnit XML, and comparisons of checkpoints. Torch-free.

This file imports nothing, because `quantkit --help` imports module `table` and must be fast.
"""
